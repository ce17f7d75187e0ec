"""Core. A log becomes whole without damage that no copy can repair; nothing is deleted."""

from __future__ import annotations

import pytest

from qmq.log.frame import FrameKind
from qmq.log.repair import give_up, plan
from qmq.log.segments import log_name, snapshot_name
from tests.unit.log.logs import Copy


def test_whole_log_gives_up_nothing():
    assert plan(Copy.filled(60, tail_bytes=0).log) is None


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_giving_up_drops_segments_through_the_damage(how):
    copy = Copy.filled(60, tail_bytes=0)
    first, second, third, *_ = copy.log.bases
    if how == "gone":
        copy.disk.remove(log_name(second))
    else:
        copy.disk.flip(log_name(second), 8 * 150)
    log = copy.reopen()
    state, kept = log.state, log.first_kept("s0", third)
    what = plan(log)
    assert (what.start, what.cut) == (third, None) and what.subjects["s0"] == (0, kept)
    give_up(log, what)
    assert plan(log) is None and log.damage is None and log.start == third and log.state == state
    assert copy.reopen().bases[0] == third and copy.log.state == state
    names = {name for folder in ("quarantine",) for name in copy.disk.all_names() if name.startswith(folder)}
    assert any(log_name(first).partition("/")[2] in name for name in names), "nothing is deleted"


def test_giving_up_continues_at_a_whole_snapshot():
    copy = Copy.filled(60, tail_bytes=0)
    _, second, third, fourth, *_ = copy.log.bases
    copy.disk.flip(log_name(second), 8 * 150)
    copy.disk.flip(snapshot_name(third), 100)
    log = copy.reopen()
    give_up(log, plan(log))
    assert log.start == fourth == log.stored.seed_start()[0]


def test_giving_up_without_snapshot_drops_all():
    copy = Copy.filled(60, tail_bytes=0)
    copy.disk.flip(log_name(copy.log.bases[-2]), 8 * 150)
    copy.disk.flip(snapshot_name(copy.log.bases[-1]), 100)
    log = copy.log
    give_up(log, plan(log))
    assert log.bases == [] and log.is_tail_cut


def test_giving_up_cuts_unreplayed_damage():
    copy = Copy.filled(60, tail_bytes=0)
    newest = copy.log.bases[-1]
    copy.disk.flip(log_name(newest), 8 * 150)
    log = copy.reopen()
    assert log.health.is_unreplayed
    what = plan(log)
    assert what.cut == log.damage.begin
    give_up(log, what)
    assert plan(log) is None and log.end == what.cut and log.is_tail_cut, "it waits for other copies"


@pytest.mark.parametrize("is_whole", [True, False], ids=["from its begin", "from its second segment on"])
@pytest.mark.parametrize("all_goes", [True, False])
def test_plan_counts_lost_and_unconsumed_messages(all_goes, is_whole):
    copy = Copy.filled(60, tail_bytes=0)
    if not is_whole:
        copy.drop_oldest_segment()
    bases = list(copy.log.bases)
    copy.messages("n", subject="new")
    consumed = {"s0": 2, "s1": 12, "s2": 0, "new": 0}
    for subject, taken, acked in (("s0", 3, 2), ("s1", 12, 12), ("s2", 0, 0), ("new", 0, 0)):
        copy.progress(FrameKind.POSITION, "", (0, 0, 0), subject=subject)
        if taken:
            copy.progress(FrameKind.PULL, "c", (0, 0, taken), subject=subject)
            copy.progress(FrameKind.ACK, "c", (0, acked, 0), subject=subject)
    copy.fill(3)
    bad = copy.log.bases[-2] if all_goes else bases[1]
    copy.disk.flip(log_name(bad), 8 * 150)
    if all_goes:
        copy.disk.flip(snapshot_name(copy.log.bases[-1]), 100)
    what, start = plan(copy.log), bases[2]
    ends = copy.log.state.next_sequence
    kept = {subject: ends[subject] if all_goes else copy.log.first_kept(subject, start) for subject in sorted(ends)}
    assert what.start == (copy.log.end if all_goes else start) and len(what.problems) == 1
    first = {subject: copy.log.first_kept(subject, copy.log.start) for subject in kept}
    assert any(first.values()) == (not is_whole)
    assert what.subjects == {subject: (first[subject], end) for subject, end in kept.items() if end > first[subject]}
    assert ("new" in what.subjects) == all_goes
    unconsumed = {(subject, "g"): kept[subject] - max(first[subject], consumed[subject]) for subject in consumed}
    assert what.unconsumed == {key: messages for key, messages in unconsumed.items() if messages > 0}
