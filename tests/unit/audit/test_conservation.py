"""Core. Each message of a consumer group is in one state for any history of brokers; violations are found."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.audit.conservation import STATES, Range, broken_at, per_hour
from qmq.audit.consumption import CONSERVED, ConsumptionJudge
from qmq.audit.findings import FindingKind
from qmq.log.frame import FrameKind
from qmq.log.progress_frame import DEAD, EXPIRED, OVERFLOWED
from tests.unit.audit.test_consumption import a_history, facts, subjects
from tests.unit.log.logs import Copy, a_frame


def judged(copy: Copy, start: int = 0):
    copy.flush()
    found = []
    for subject in subjects(copy):
        judge = ConsumptionJudge(subject, start)
        found += [row for fact in facts(copy, subject, start) for row in judge.judge(fact)] + list(judge.finish())
    accounts = [json.loads(row["text"]) | {"subject": row["subject"]} for row in found if row["what"] == CONSERVED]
    return accounts, [row for row in found if row["what"] == FindingKind.CONSERVATION]


@given(st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_equation_holds_from_any_frame_of_any_history(seed):
    rng, copy = Random(seed), Copy(segment_bytes=1 << 20)
    copy.begin_epoch()
    starts = [0] + [a_frame(copy, rng).end for _ in range(120)]
    for start in [0, *rng.sample(starts, 6)]:
        accounts, broken = judged(copy, start)
        assert broken == [], f"from {start} on"
        for row in accounts:
            assert row["stored"] == sum(row[state] for state in STATES)


def test_each_state_is_counted():
    copy, first = a_history()
    copy.progress(FrameKind.ACK, "c1", (first, first + 1, 0), subject="s")
    copy.progress(FrameKind.NACK, "c1", (first + 1, first + 2, 77), subject="s")
    accounts, broken = judged(copy)
    (account,) = accounts
    assert {name: account[name] for name in ("stored", *STATES, "nacked")} == {
        "stored": 6,
        "acked": 1,
        "dead": 0,
        "in_flight": 2,
        "requeued": 1,
        "passed": 0,
        "expired": 0,
        "overflowed": 0,
        "never": 2,
        "nacked": 1,
    }
    assert broken == []


def test_dead_letters_are_counted_as_dead():
    copy, first = a_history()
    copy.progress(FrameKind.ACK, "c1", (first, first + 2, DEAD), (first + 2, first + 3, 0), subject="s")
    (account,), broken = judged(copy)
    assert [account[state] for state in ("stored", "acked", "dead", "never")] == [6, 1, 2, 2]
    assert broken == []


def test_expired_messages_are_counted_as_expired():
    copy, first = a_history()
    copy.progress(FrameKind.ACK, "c1", (first, first + 1, EXPIRED), subject="s")
    copy.progress(FrameKind.PULL, "/pruned", (EXPIRED, 4, 1), (OVERFLOWED, 5, 1), subject="s")
    (account,), broken = judged(copy)
    assert [account[state] for state in ("stored", "acked", "expired", "overflowed", "never")] == [6, 0, 2, 1, 0]
    assert broken == []


@pytest.mark.parametrize(
    "ranges, why",
    [
        ([Range(0, 4, "acked"), Range(5, 9, "never")], (4, "in no state")),
        ([Range(0, 5, "acked"), Range(4, 9, "never")], (4, "never and something else")),
        ([Range(0, 5, "acked")], (5, "in no state")),
        ([Range(0, 5, "acked"), Range(5, 9, "never")], None),
    ],
)
def test_first_message_that_breaks_the_equation_is_named(ranges, why):
    assert broken_at(ranges, 0, 9) == why


def test_hours_are_those_in_which_messages_were_stored():
    ranges = [Range(0, 5, "acked"), Range(5, 9, "never")]
    found = list(per_hour(ranges, 0, 9, [(0, 100), (4, 101), (6, 100)]))
    assert [(row["hour"], row["stored"], row["acked"], row["never"]) for row in found] == [
        (100, 7, 4, 3),
        (101, 2, 1, 1),
    ]


HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    "position, began_ms, lost",
    [
        (3, 100 * HOUR_MS, 2),
        (3, 0, None),  # moved by an operator, or written by an older version
        (3, 101 * HOUR_MS, None),  # messages of its first hour decide nothing
        (2, 100 * HOUR_MS, None),
        (0, 100 * HOUR_MS, None),
    ],
)
def test_group_that_skips_later_messages_is_a_finding(position, began_ms, lost):
    """A broker group that joins writes its position at the end of its stored messages."""
    copy = Copy.begun(segment_bytes=1 << 20)
    copy.messages(*"abc", subject="s")
    copy.progress(FrameKind.POSITION, "", (position, 0, began_ms), subject="s")
    copy.flush()
    judge = ConsumptionJudge("s", 0)
    for hour, first in ((100, 0), (101, 2)):
        judge.hour(hour, first)
    found = [row for fact in facts(copy) for row in judge.judge(fact)] + list(judge.finish())
    assert [row["sequence"] for row in found if row["what"] == FindingKind.CONSERVATION] == (
        [] if lost is None else [lost]
    )
