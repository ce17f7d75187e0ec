"""Core. Figures from repetitions, and bench.json."""

from __future__ import annotations

import pytest

from benchmarks.figures import REQUIRED, Figure, percentile, result, table
from benchmarks.rabbitmq import ratios
from benchmarks.rabbitmq_client import Publisher


@pytest.mark.parametrize(
    "part, expected", [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)], ids=["least", "median", "p99", "greatest"]
)
def test_percentile_is_a_value_that_was_measured(part, expected):
    assert percentile(range(1, 101), part) == expected


@pytest.mark.parametrize("more_is_better, best, worst", [(True, 9.0, 1.0), (False, 1.0, 9.0)], ids=["a rate", "a time"])
def test_best_repetition_is_the_fast_one(more_is_better, best, worst):
    figure = Figure("f", [5.0, 1.0, 9.0], more_is_better=more_is_better)
    assert (figure.value, figure.best, figure.worst) == (5.0, best, worst)


def test_result_has_every_required_key():
    written = result({"restart_s": Figure("restart_s", [2.0, 4.0, 3.0])}, {"quick": True})
    assert set(REQUIRED) <= set(written)
    assert written["restart_s"] == 3.0
    assert written["produce_1k_per_s"] is None
    assert written["details"]["restart_s"]["repetitions"] == 3


def test_table_marks_missed_goals():
    figures = {name: Figure(name, [value]) for name, value in [("produce_1k_per_s", 299_999.0), ("restart_s", 4.9)]}
    produce, restart = table(figures).splitlines()[1:]
    assert "≥ 300,000 MISSED" in produce
    assert "≤ 5 met" in restart


def test_ratio_is_above_one_where_we_are_faster():
    figures = [
        Figure("produce_1k_per_s", [300.0]),
        Figure("rabbitmq_produce_1k_per_s", [100.0]),
        Figure("send_one_p50_ms", [0.2], more_is_better=False),
        Figure("rabbitmq_send_one_p50_ms", [0.8], more_is_better=False),
        Figure("rabbitmq_only", [1.0]),
    ]
    found = ratios({figure.name: figure for figure in figures})
    assert found == {"ratio_produce_1k_per_s": 3.0, "ratio_send_one_p50_ms": 4.0}


def test_confirmations_are_counted_once_in_any_order():
    publisher = Publisher()
    counts = []
    for tag, multiple in [(2, False), (1, False), (5, False), (4, True), (4, True), (7, True)]:
        publisher._acked(tag, multiple)
        counts.append(publisher.confirmed)
    assert counts == [1, 2, 3, 5, 5, 7]
