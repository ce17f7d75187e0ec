"""Core. Segments that are due, and the master's retention decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.log.frame import FrameKind
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.replication.retention import AGE, HOUR_MS, SIZE, Due, decide, old_segments
from tests.unit.broker.world import SETTINGS
from tests.unit.log.logs import Copy

SAID_MS = 1_000_000
ENOUGH = replace(SETTINGS, retention_bytes=1 << 40, retention_hours=2)


def a_log(*, states_the_time: bool = True) -> Copy:
    copy = Copy.filled(60)
    assert len(copy.log.bases) > 3
    if states_the_time:
        state_the_time(copy)
    return copy


def state_the_time(copy: Copy, start: int = 0) -> None:
    body = encode_retention(RetentionDecision(start, SIZE if start else "", {}, {}))
    copy.append(FrameKind.RETENTION, "", body, timestamp_ms=SAID_MS)
    copy.flush()


def test_closed_segment_is_due_by_age():
    copy = a_log()
    bases, old_ms = copy.log.bases, SAID_MS + 2 * HOUR_MS
    assert list(old_segments(copy.log, ENOUGH, old_ms)) == []
    closed = [(begin, end, AGE) for begin, end in zip(bases, bases[1:], strict=False)]
    assert list(old_segments(copy.log, ENOUGH, old_ms + 1)) == closed
    state_the_time(copy, bases[1])
    assert list(old_segments(copy.log, ENOUGH, old_ms + 1)) == closed[1:], "the first segment is decided already"


def test_closed_segment_is_due_by_size():
    copy = a_log(states_the_time=False)
    bases, end = copy.log.bases, copy.log.end
    for kept, much in ((end, 0), (end - 1, 1), (end - bases[1], 1), (end - bases[1] - 1, 2)):
        settings = replace(ENOUGH, retention_bytes=kept)
        found = list(old_segments(copy.log, settings, SAID_MS + 9 * HOUR_MS))
        assert found == [(bases[at], bases[at + 1], SIZE) for at in range(much)], kept


class Keeper:
    def __init__(self, due: Due | None) -> None:
        self.is_due, self.asked_ms = due, -1

    def due(self, message_log, now_ms):
        self.asked_ms = now_ms
        return self.is_due


def decided(copy: Copy, due: Due | None = None, *, high_watermark: int = 0) -> RetentionDecision | None:
    return decide(copy.log, Keeper(due), now_ms=7, ahead_ms={"slave": 3}, high_watermark=high_watermark)


def test_decision_records_clocks_and_positions():
    due = Due(8, AGE, {("s", "g"): 5})
    assert decided(a_log(), due) == RetentionDecision(8, AGE, {"slave": 3}, {("s", "g"): 5})


def test_each_closed_segment_gets_its_time():
    copy, states_the_time = a_log(states_the_time=False), RetentionDecision(0, "", {"slave": 3}, {})
    assert decided(copy) == states_the_time
    state_the_time(copy)
    assert decided(copy) is None
    closed = len(copy.log.bases)
    while len(copy.log.bases) == closed:
        copy.fill(1)
    assert decided(copy) == states_the_time


@pytest.mark.parametrize("segments, is_stated", [(1, False), (2, True)])
def test_time_is_stated_after_a_segment_closes(segments, is_stated):
    copy = Copy.begun()
    while len(copy.log.bases) < segments:
        copy.fill(1)
    assert (decided(copy) is not None) is is_stated


@pytest.mark.parametrize("behind", [0, 1])
def test_next_decision_waits_for_the_acknowledged_one(behind):
    copy = a_log()
    start = copy.log.bases[1]
    state_the_time(copy, start)
    kept, due = copy.log.state.kept, Due(copy.log.bases[2], AGE, {})
    copy.log.state.high_watermark = kept.decided_end - behind
    if not behind:
        assert decided(copy, due) == RetentionDecision(due.start, AGE, {"slave": 3}, {})
    else:
        assert decided(copy, due, high_watermark=kept.decided_end - 1) is None
        says_so = RetentionDecision(start, "", {"slave": 3}, {})
        assert decided(copy, due, high_watermark=kept.decided_end) == says_so
