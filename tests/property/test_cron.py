"""Core. The next time of a cron expression equals a search of the wall clock minute by minute."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.delayserver.templates import Cron
from qmq.errors import InvalidRequest
from tests.support.effort import examples

MINUTE_MS = 60_000
CHANGES = {
    "Europe/Berlin": [datetime(2026, 3, 29, 1), datetime(2026, 10, 25, 1)],
    "America/New_York": [datetime(2026, 3, 8, 7), datetime(2026, 11, 1, 6)],
    "America/Havana": [datetime(2026, 3, 8, 5), datetime(2026, 11, 1, 5)],
    "Australia/Lord_Howe": [datetime(2026, 4, 4, 15), datetime(2026, 10, 3, 15, 30)],
    "Africa/Casablanca": [datetime(2026, 2, 15, 2), datetime(2026, 3, 22, 2)],
    "Asia/Kolkata": [datetime(2026, 6, 1)],
    "UTC": [datetime(2026, 1, 1)],
}
"""Times (UTC) near clock changes: by an hour at night or at midnight, and by half an hour."""


def items(first, last):
    value = st.integers(first, last)
    some = st.lists(value, min_size=1, max_size=3).map(lambda found: ",".join(map(str, found)))
    return st.one_of(st.just("*"), some, st.sampled_from([2, 3, 5, 15, 30]).map("*/{}".format))


EXPRESSIONS = st.tuples(items(0, 59), items(0, 4), st.just("*"), st.just("*"), st.just("*")).map(" ".join)
PLACES = st.sampled_from([(zone, change) for zone, changes in CHANGES.items() for change in changes])


def shown(expression, zone, begin_ms, minutes):
    """Return the minutes at which the clock shows a matching time, by the rules of fixed and of repeated ones."""
    cron, tz = expression.split(), ZoneInfo(zone)
    is_fixed = not (cron[0].startswith("*") or cron[1].startswith("*"))
    found, seen, last_wall = [], set(), None
    for i in range(-1440, minutes):
        at_ms = begin_ms + i * MINUTE_MS
        wall = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone(tz).replace(tzinfo=None, fold=0)
        walls = [wall]
        if is_fixed and last_wall is not None and wall - last_wall > timedelta(minutes=1):  # skipped minutes
            gap = (wall - last_wall) // timedelta(minutes=1)
            walls = [last_wall + timedelta(minutes=step) for step in range(1, gap + 1)]
        matching = [wall for wall in walls if matches(expression, wall)]
        if is_fixed:
            matching = [minute for minute in matching if minute not in seen]
        seen.update(matching)
        if matching and i >= 0:
            found.append(at_ms)
        last_wall = wall
    return found


def matches(expression, wall):
    return next(CronSim(expression, wall - timedelta(seconds=1))) == wall


@settings(max_examples=examples(60), deadline=None)
@given(EXPRESSIONS, PLACES, st.integers(0, 300))
def test_next_times_over_a_clock_change(expression, place, before):
    zone, change = place
    begin_ms = int(change.replace(tzinfo=UTC).timestamp() * 1000) - before * MINUTE_MS
    cron, found, at_ms, end_ms = Cron(expression, zone), [], begin_ms - 1, begin_ms + 600 * MINUTE_MS
    while (at_ms := cron.next_ms(at_ms)) < end_ms:
        found.append(at_ms)
    assert found == shown(expression, zone, begin_ms, 600)


@settings(max_examples=examples(60), deadline=None)
@given(EXPRESSIONS, PLACES, st.integers(0, 3_000), st.integers(0, 3_000))
def test_latest_missed_occurrence(expression, place, before, minutes):
    zone, change = place
    cron = Cron(expression, zone)
    due_ms = cron.next_ms(int(change.replace(tzinfo=UTC).timestamp() * 1000) - before * MINUTE_MS)
    now_ms, missed = due_ms + minutes * MINUTE_MS + 1, [due_ms]
    while (at_ms := cron.next_ms(missed[-1])) <= now_ms:
        missed.append(at_ms)
    assert cron.latest(due_ms, now_ms) == (missed[-1], min(len(missed) - 1, 1000))


def test_long_absence_takes_few_steps():
    cron = Cron("* * * * SUN", "Europe/Berlin")
    now_ms = int(datetime(2026, 6, 9, tzinfo=UTC).timestamp() * 1000)  # a Tuesday
    assert cron.latest(0, now_ms) == (int(datetime(2026, 6, 7, 21, 59, tzinfo=UTC).timestamp() * 1000), 1000)


@pytest.mark.parametrize(
    "expression, after, expected",
    [
        pytest.param("30 2 * * *", "2026-03-28T12:00+01:00", ["2026-03-29T03:00+02:00"], id="skipped: after the gap"),
        pytest.param(
            "30 2 * * *",
            "2026-10-24T12:00+02:00",
            ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"],
            id="shown twice: the first",
        ),
        pytest.param(
            "*/30 2 * * *", "2026-03-28T12:00+01:00", ["2026-03-30T02:00+02:00"], id="repeated: none in the gap"
        ),
        pytest.param(
            "*/30 2 * * *",
            "2026-10-24T12:00+02:00",
            ["2026-10-25T02:00+02:00", "2026-10-25T02:30+02:00", "2026-10-25T02:00+01:00", "2026-10-25T02:30+01:00"],
            id="repeated: again in the second hour",
        ),
        pytest.param("0 12 31 * *", "2026-04-30T00:00+02:00", ["2026-05-31T12:00+02:00"], id="months without a 31st"),
        pytest.param("0 9 * * MON#1", "2026-01-01T00:00+01:00", ["2026-01-05T09:00+01:00"], id="first Monday"),
    ],
)
def test_summer_time_and_calendar(expression, after, expected):
    cron, at_ms, found = Cron(expression, "Europe/Berlin"), ms(after), []
    for _ in expected:
        at_ms = cron.next_ms(at_ms)
        found.append(at_ms)
    assert found == [ms(time) for time in expected]


def ms(text):
    return int(datetime.fromisoformat(text).timestamp() * 1000)


@given(st.text(max_size=30), st.text(max_size=15))
def test_any_text_is_a_schedule_or_refused(expression, zone):
    for arguments in ((expression, "UTC"), ("0 0 * * *", zone)):
        try:
            Cron(*arguments).next_ms(0)
        except InvalidRequest as error:
            assert "cron expression" in str(error) or "time zone" in str(error)


@given(st.lists(st.text("0123456789*/-,L#W", min_size=1, max_size=5), min_size=5, max_size=5).map(" ".join))
def test_cron_like_text_is_a_schedule_or_refused(expression):
    try:
        assert Cron(expression, "UTC").next_ms(0) > 0
    except InvalidRequest as error:
        assert "cron expression" in str(error)
