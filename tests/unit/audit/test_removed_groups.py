"""Core. A consumer group that is removed and begins anew: brokers' own frames are no finding, whatever is left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qmq.audit.consumption import CONSERVED, ConsumptionJudge
from qmq.audit.findings import MOVED
from qmq.broker.positions import To
from qmq.subjects import dead_letter_subject, retry_subject
from tests.unit.audit.test_consumption import facts
from tests.unit.audit.test_messages import judged
from tests.unit.broker.world import Group

MAILBOX, DEAD = retry_subject("s", "g"), dead_letter_subject("s", "g")


def consume(group: Group, subject: str, count: int) -> None:
    """Let a consumer ack, requeue, give up and keep one of the first messages each, then vanish."""
    client = group.subscribed("c1", subject=subject, begins=True, broadcast=False)
    ids = client.take(most=count)
    client.acked(ids[0])
    client.nacked(ids[1], delay_ms=60_000)
    client.nacked(ids[2], dead=True, reason="no such order")
    client.lost()
    group.wait(1_000, times=40)  # its lease ends


def remove(group: Group) -> None:
    group.a.master._delivery.move_group("s", "g", To.REMOVED, 0, dry_run=False, answer=lambda error: None)
    group.settle()


def written(group: Group, data: Path) -> Path:
    """Write the log of the master to a directory, as a broker has it."""
    (data / "log").mkdir(exist_ok=True)
    bases = [*group.a.log.bases, group.a.log.end]
    for begin, end in zip(bases, bases[1:], strict=False):
        (data / "log" / f"{begin:020d}.log").write_bytes(group.a.log.stored.read_bytes(begin, end))
    return data


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("has_mailbox", [False, True])
def test_removed_and_recreated_group_is_no_finding(tmp_path: Path, times: int, has_mailbox: bool) -> None:
    group = Group.made().start()
    for _ in range(times):
        group.client().store("m0", "m1", "m2", "m3", "m4")
        if has_mailbox:
            group.client().store("r0", "r1", "r2", "r3", subject=MAILBOX)
            consume(group, MAILBOX, 4)
        consume(group, "s", 5)
        remove(group)
        group.client().store("later")
    consume(group, "s", 5)
    assert group.a.log.state.next_sequence[DEAD] == (times + 1) + times * has_mailbox, "the first message again"
    assert judged(written(group, tmp_path)) == set()
    assert found_from_any_frame(group) == []


def test_group_removed_with_unfinished_dead_letters_is_no_finding(tmp_path: Path) -> None:
    """The copy was stored, and its original not acked: the next group's dead letter is a new one."""
    group = Group.made().start()
    group.client().store("m0", "m1", "m2")
    letters = group.a.master._delivery.serving.dead_letters
    settle, letters._settle = letters._settle, lambda job, *_: job.ranges.clear()
    client = group.subscribed("c1", begins=True)
    client.take()
    client.nacked("m2", dead=True)
    letters._settle = settle
    client.lost()
    group.wait(1_000, times=40)
    remove(group)
    consume(group, "s", 3)
    assert group.a.log.state.next_sequence[DEAD] == 2
    assert judged(written(group, tmp_path)) == set()


def found_from_any_frame(group: Group) -> list[str]:
    """Return the findings of judges that begin at each frame, as in a log after its retention."""
    data = group.a.log.stored.read_bytes(0, group.a.log.end)
    copy: Any = SimpleNamespace(whole=lambda: data)
    found = []
    for subject in ("s", MAILBOX):
        for start in [fact["frame"].offset for fact in facts(copy, subject) if "frame" in fact]:
            judge = ConsumptionJudge(subject, start)
            rows = [row for fact in facts(copy, subject, start) for row in judge.judge(fact)] + [*judge.finish()]
            found += [
                f"from {start}: {row['text']}" for row in rows if row["what"] not in (CONSERVED, MOVED, "dead_missing")
            ]
    return found
