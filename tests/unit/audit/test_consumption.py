"""Core. The judge of consumption: no finding in any history of brokers, from any frame on; findings for invalid
frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.audit.consumption import CONSERVED, ConsumptionJudge
from qmq.audit.findings import MOVED, FindingKind
from qmq.log.frame import FrameKind, decode_frames
from qmq.log.progress_frame import DEFERRED, PASSED, encode_progress
from tests.unit.log.logs import Copy, a_frame

READ = FrameKind.PULL, FrameKind.ACK, FrameKind.NACK, FrameKind.POSITION


def facts(copy: Copy, subject: str = "s", start: int = 0) -> Iterator[dict[str, Any]]:
    """Return the facts for a subject's judge, of a log read from `start` on."""
    for frame, body in decode_frames(copy.whole(), 0, 0):
        if frame.offset < start or frame.subject != subject:
            continue
        if frame.kind == FrameKind.MESSAGES:
            yield {"kind": "run", "first": frame.first_sequence, "last": frame.first_sequence + frame.count}
        elif frame.kind in READ:
            yield {"kind": "progress", "frame": frame, "body": bytes(body), "last": None}


def subjects(copy: Copy) -> list[str]:
    return sorted({frame.subject for frame, _ in decode_frames(copy.whole(), 0, 0)} - {""})


def findings(copy: Copy, start: int = 0) -> list[str]:
    """Return findings. This history passes messages over without reason, and its groups are moved."""
    copy.flush()
    found = []
    for subject in subjects(copy):
        judge = ConsumptionJudge(subject, start)
        found += [found for fact in facts(copy, subject, start) for found in judge.judge(fact)]
    return [row["text"] for row in found if row["what"] not in (FindingKind.PASSED, CONSERVED, MOVED)]


@given(st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_legal_history_has_no_findings_from_any_frame(seed):
    rng, copy = Random(seed), Copy(segment_bytes=1 << 20)
    copy.begin_epoch()
    starts = [0] + [a_frame(copy, rng).end for _ in range(120)]
    assert findings(copy) == []
    for start in rng.sample(starts, 12):
        assert findings(copy, start) == [], f"from {start} on"


def forged(copy: Copy, kind: FrameKind, consumer: str, entries: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Return the fact of an invalid frame after the log's end."""
    *_, (last, _) = decode_frames(copy.whole(), 0, 0)
    frame = last._replace(kind=kind, subject="s", count=0, offset=copy.log.end, producer=0, batch=0)
    return {"kind": "progress", "frame": frame, "body": encode_progress("g", consumer, entries), "last": None}


def a_history() -> tuple[Copy, int]:
    """Make c1 hold messages 0 to 3; return their first pull sequence."""
    copy = Copy.begun(segment_bytes=1 << 20)
    copy.progress(FrameKind.POSITION, "", (0, 0, 0), subject="s")
    copy.messages(*"abcdef", subject="s", size=0)
    first = copy.log.state.next_pull(copy.log.state.groups["s", "g"], "c1")
    copy.progress(FrameKind.PULL, "c1", (first, 0, 4), subject="s")
    return copy, first


@pytest.mark.parametrize(
    "kind, consumer, entries, why",
    [
        (FrameKind.PULL, "c2", [(1 << 60, 1, 1)], "a message that another consumer has"),
        (FrameKind.PULL, "c2", [(1 << 60, 5, 1)], "a hole before what is new"),
        (FrameKind.PULL, "c2", [(1 << 60, 4, 9)], "more than there is"),
        (FrameKind.PULL, "c2", [(PASSED, 2, 1)], "what somebody has is passed over"),
        (FrameKind.PULL, "c2", [(DEFERRED, 2, 1)], "what somebody has is put off"),
        (FrameKind.NACK, "c1", [(1 << 60, (1 << 60) + 1, 0)], "a nack of what was not delivered"),
        (FrameKind.ACK, "c1", [(1 << 60, (1 << 60) + 1, 0)], "an ack of what was not delivered"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_inconsistent_frame_is_a_finding(kind, consumer, entries, why):
    copy, _ = a_history()
    copy.flush()
    judge = ConsumptionJudge("s", 0)
    assert not [found for fact in facts(copy) for found in judge.judge(fact)]
    assert list(judge.judge(forged(copy, kind, consumer, entries))), why


def test_deliveries_within_a_later_log_are_judged():
    copy, first = a_history()
    start = copy.log.end
    copy.messages("g", "h", subject="s", size=0)
    copy.progress(FrameKind.PULL, "c2", (first, 4, 4), subject="s")
    copy.flush()
    judge = ConsumptionJudge("s", start)
    assert not [found for fact in facts(copy, "s", start) for found in judge.judge(fact)]
    assert list(judge.judge(forged(copy, FrameKind.PULL, "c3", [(1 << 60, 6, 1)]))), "message 6 is with c2"


@pytest.mark.parametrize("new, found", [((), []), ((4,), [FindingKind.PASSED])], ids=["a dead letter", "a new message"])
def test_redeliveries_do_not_reveal_a_filter(new, found):
    """The next pull gets messages with too many deliveries, to make dead letters of them, with any filter."""
    copy, first = a_history()
    copy.progress(FrameKind.NACK, "c1", (first, first + 4, 0), subject="s")
    copy.flush()
    judge = ConsumptionJudge("s", 0)
    assert not [found for fact in facts(copy) for found in judge.judge(fact)]
    number = copy.log.state.next_pull(copy.log.state.groups["s", "g"], "c2")
    delivered = [(number, 0, 4), *((number + sequence, sequence, 1) for sequence in new)]
    entries = [*delivered, (PASSED, 4 + len(new), 6 - 4 - len(new))]
    assert [row["what"] for row in judge.judge(forged(copy, FrameKind.PULL, "c2", entries))] == found


def changed_back(copy: Copy, *, says: str) -> list[dict[str, Any]]:
    """A consumer gets messages, passes such ones over, and gets such ones again; `says`: frames in between."""
    copy.begin_epoch()
    copy.messages("a", "b", "c", subject="s", size=0)
    copy.progress(FrameKind.POSITION, "", (0, 0, 0), subject="s")
    number = copy.log.state.next_pull(copy.log.state.groups["s", "g"], "c1")
    copy.progress(FrameKind.PULL, "c1", (number, 0, 1), subject="s")
    if says == "changed":
        copy.progress(FrameKind.PULL, "c1", subject="s")
    if says == "left":
        copy.progress(FrameKind.POSITION, "c1", (0, 0, 0), subject="s")
    if says == "another changed":
        copy.progress(FrameKind.PULL, "c2", subject="s")
    copy.progress(FrameKind.PULL, "c1", (PASSED, 1, 1), subject="s")
    copy.progress(FrameKind.PULL, "c1", (number + 1, 2, 1), subject="s")
    copy.flush()
    judge = ConsumptionJudge("s", 0)
    return [found for fact in facts(copy) for found in judge.judge(fact)]


@pytest.mark.parametrize(
    "says, found",
    [("nothing", [FindingKind.PASSED]), ("changed", []), ("left", []), ("another changed", [FindingKind.PASSED])],
)
def test_announced_filter_change_may_pass_messages_over(says, found):
    assert [row["what"] for row in changed_back(Copy(segment_bytes=1 << 20), says=says)] == found
