"""Core. Rates and charts of the console: messages per second from counters, with bounded memory."""

from __future__ import annotations

import pytest

from qmq.metaserver.console.display import (
    HEIGHT,
    HOUR_MS,
    KEPT_MAX,
    KEPT_MS,
    SUBJECTS_MAX,
    WIDTH,
    Rates,
    Reading,
    Readings,
    bars_of,
    chart_of,
    per_second,
    round_up,
)


def test_counters_become_rates():
    readings = [
        Reading(0, {"in": 10, "out": 0}),
        Reading(5_000, {"in": 60, "out": 5}),
        Reading(7_000, {"in": 60, "out": 6}),
    ]
    assert per_second(readings) == [Rates(5_000, {"in": 10.0, "out": 1.0}), Rates(7_000, {"in": 0.0, "out": 0.5})]
    assert per_second([]) == per_second(readings[:1]) == []


def test_restarted_counter_has_no_rate():
    readings = [
        Reading(0, {"in": 1000, "out": 7}),
        Reading(5_000, {"in": 5, "out": 17}),
        Reading(10_000, {"in": 15, "out": 17}),
    ]
    assert per_second(readings) == [Rates(5_000, {"out": 2.0}), Rates(10_000, {"in": 2.0, "out": 0.0})]
    assert per_second([Reading(0, {}), Reading(5_000, {"new": 9})]) == [Rates(5_000, {})]


def test_nearly_simultaneous_looks_count_once():
    readings = [Reading(0, {"in": 0}), Reading(10, {"in": 5}), Reading(5_000, {"in": 50})]
    assert per_second(readings) == [Rates(5_000, {"in": 10.0})]


def test_looks_are_bounded_by_age_number_and_subjects():
    readings = Readings()
    for number in range(KEPT_MAX * 3):
        kept = readings.note("s", Reading(number * 1_000, {}))
    assert len(kept) == KEPT_MAX
    assert readings.note("s", Reading(kept[-1].at_ms + KEPT_MS, {}))[0] == kept[-1]
    assert len(readings.note("s", Reading(kept[-1].at_ms + 2 * KEPT_MS + 1, {}))) == 1
    for number in range(SUBJECTS_MAX):
        readings.note(f"other {number}", Reading(0, {}))
    assert len(readings.note("s", Reading(kept[-1].at_ms + 2 * KEPT_MS + 2_000, {}))) == 1, (
        "the oldest subject is forgotten"
    )


@pytest.mark.parametrize("value, edge", [(0, 1), (0.3, 1), (1.1, 2), (3, 5), (7, 10), (10, 10), (11, 20), (4321, 5000)])
def test_chart_edge_is_a_round_number(value, edge):
    assert round_up(value) == edge


def test_chart_draws_the_last_ten_minutes():
    rates = [Rates(0, {"in": 99.0}), Rates(KEPT_MS, {"in": 5.0}), Rates(2 * KEPT_MS - 1, {"in": 10.0, "out": 0.0})]
    chart = chart_of(rates, 2 * KEPT_MS - 1)
    assert (chart["most"], chart["seconds"]) == (10, 599)
    assert chart["series"] == [
        {"name": "in", "points": f"0,{HEIGHT / 2} {WIDTH},0.0", "now": 10.0},
        {"name": "out", "points": f"{WIDTH},{HEIGHT:.1f}", "now": 0.0},
    ]
    gone = chart_of([Rates(1, {"in": 1.0, "out": 1.0}), Rates(2, {"in": 1.0})], 2)
    assert [series["now"] for series in gone["series"]] == [1.0, None]
    assert chart_of([], 5)["series"] == []


def test_bars_are_placed_by_hour():
    now_ms = 100 * HOUR_MS + 1_234
    hours = [(100, 4), (102, 1), (117, 2), (99, 9), (124, 9)]
    drawn = bars_of([{"begin": hour * HOUR_MS, "messages": messages} for hour, messages in hours], now_ms)
    assert [(bar["x"], bar["y"], bar["height"]) for bar in drawn["bars"]] == [(0, 0, 100), (40, 75, 25), (340, 50, 50)]
    assert drawn["most"] == 4 and [mark["begin"] // HOUR_MS for mark in drawn["marks"]] == [100, 106, 112, 118]
    assert bars_of([], now_ms)["most"] == 0
