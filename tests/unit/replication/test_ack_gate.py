"""Core. Rules of acknowledgement (P1, P3, I6)."""

from __future__ import annotations

from random import Random

import pytest

from qmq.errors import NotMaster, OutcomeUnknown
from qmq.replication.ack_gate import AckGate
from qmq.types import Epoch


class Waiter:
    def __init__(self) -> None:
        self.answers: list[object] = []

    def __call__(self, error: object) -> None:
        assert not self.answers, "answered twice"
        self.answers.append(error)

    @property
    def is_safe(self) -> bool:
        return self.answers == [None]


def followed(end: int = 0) -> AckGate:
    gate = AckGate(Epoch(1, 1))
    gate.slave_matched(end, 0)
    return gate


@pytest.mark.parametrize(
    "ours, theirs, safe", [(8, 0, False), (0, 8, False), (7, 8, False), (8, 7, False), (8, 8, True)]
)
@pytest.mark.parametrize("ours_first", [True, False])
def test_acknowledged_only_when_both_disks_have_it(ours, theirs, safe, ours_first):
    gate, stored, progress = followed(), Waiter(), Waiter()
    gate.stored(8, stored)
    gate.progress(8, 0, progress)
    for step in ("ours", "theirs") if ours_first else ("theirs", "ours"):
        if step == "ours":
            gate.flushed(ours, 0)
        else:
            gate.confirmed(theirs, 0)
    assert stored.is_safe == progress.is_safe == safe


def test_high_watermark_grows_within_both_disks():
    for seed in range(200):
        rng, gate, ours, theirs, was = Random(seed), AckGate(Epoch(1, 1)), 0, 0, 0
        known_safe = 0
        for _ in range(60):
            match rng.choice(["flush", "confirm", "gone", "matched"]):
                case "flush":
                    ours += rng.randrange(20)
                    gate.flushed(ours, 0)
                case "confirm" if not gate.too_few_in_sync:
                    theirs = min(theirs + rng.randrange(20), ours + 10)
                    gate.confirmed(theirs, 0)
                case "gone":
                    theirs = 0
                    gate.slave_gone()
                case "matched" if gate.too_few_in_sync:
                    theirs = rng.randrange(ours + 1)
                    gate.slave_matched(theirs, 0)
            known_safe = max(known_safe, min(ours, theirs))
            assert was <= gate.high_watermark == known_safe
            was = gate.high_watermark


def test_repeated_safe_batch_is_answered_at_once():
    gate, early, late, again = followed(), Waiter(), Waiter(), Waiter()
    gate.flushed(100, 0)
    gate.confirmed(50, 0)
    gate.stored(40, early)
    assert early.is_safe
    gate.stored(60, late)
    gate.stored(40, again)
    assert again.is_safe and not late.answers
    gate.confirmed(60, 0)
    assert late.is_safe


def test_without_slave_only_safe_progress_is_answered():
    gate, stored, below, above = followed(), Waiter(), Waiter(), Waiter()
    gate.flushed(100, 0)
    gate.confirmed(100, 0)
    gate.stored(120, stored)
    gate.slave_gone()
    gate.progress(130, 100, below)
    gate.progress(140, 110, above)
    gate.flushed(125, 0)
    assert not below.answers, "the own disk lacks it"
    gate.flushed(150, 0)
    assert (below.is_safe, above.answers, stored.answers) == (True, [], [])
    gate.slave_matched(100, 0)
    assert not stored.answers and not above.answers
    gate.confirmed(150, 0)
    assert stored.is_safe and above.is_safe


def test_matched_end_of_a_lost_slave_is_forgotten():
    gate, stored = followed(), Waiter()
    gate.flushed(50, 0)
    gate.confirmed(50, 0)
    gate.slave_gone()
    gate.stored(80, stored)
    gate.flushed(80, 0)
    gate.slave_matched(40, 0)
    assert (gate.matched_end, gate.high_watermark, stored.answers) == (40, 50, [])


def test_waiting_requests_are_refused_when_mastership_ends():
    gate, stored, progress = followed(), Waiter(), Waiter()
    gate.stored(10, stored)
    gate.progress(20, 0, progress)
    assert gate.waiting == 2
    unknown, another = OutcomeUnknown("repeat"), NotMaster("ask")
    gate.abandon(stored=unknown, progress=another)
    gate.flushed(30, 0)
    gate.confirmed(30, 0)
    assert stored.answers == [unknown] and progress.answers == [another] and not gate.waiting


def test_progress_is_answered_in_order_without_slave():
    gate, first, second = AckGate(Epoch(1, 1)), Waiter(), Waiter()
    gate.progress(200, 0, first)
    gate.progress(150, 0, second)
    assert gate.waiting == 2
    gate.flushed(150, 0)
    assert not first.answers and not second.answers
    gate.flushed(200, 0)
    assert first.is_safe and second.is_safe and not gate.waiting


def test_older_flush_or_confirmation_changes_nothing():
    gate = followed()
    gate.flushed(100, 0)
    gate.confirmed(80, 0)
    gate.confirmed(60, 0)
    gate.flushed(50, 0)
    assert (gate.flushed_end, gate.matched_end, gate.high_watermark) == (100, 80, 80)


def test_chain_of_the_flushed_end_is_stored():
    gate = AckGate(Epoch(1, 1), flushed_end=100, flushed_chain=None)
    gate.flushed(100, 7)
    assert gate.flushed_chain == 7


@pytest.mark.parametrize("ours, theirs, chain", [((8, 1), (10, 2), 1), ((10, 1), (8, 2), 2)])
def test_acknowledged_point_has_its_copys_chain(ours, theirs, chain):
    gate = followed()
    gate.flushed(*ours)
    gate.confirmed(*theirs)
    assert gate.point is not None and (gate.point.end, gate.point.chain) == (8, chain)


def test_earlier_acknowledged_point_is_not_its_own():
    gate = AckGate(Epoch(2, 1), high_watermark=8, flushed_end=8, flushed_chain=5)
    gate.slave_matched(8, 5)
    assert gate.point is None


def test_nothing_counts_before_the_epoch_frame_ends():
    gate, stored = AckGate(Epoch(2, 1), counts_from=8), Waiter()
    gate.slave_matched(0, 0)
    gate.stored(6, stored)
    gate.flushed(7, 0)
    gate.confirmed(7, 0)
    assert gate.high_watermark == 0 and not stored.answers
    gate.flushed(8, 0)
    gate.confirmed(8, 0)
    assert gate.high_watermark == 8 and stored.is_safe


def test_unsafe_pulls_are_refused_without_slave():
    gate, missing, safe, unsafe = followed(), NotMaster("ask"), Waiter(), Waiter()
    gate.flushed(50, 0)
    gate.confirmed(50, 0)
    gate.progress(70, 50, safe)
    gate.progress(80, 51, unsafe)
    gate.slave_gone()
    gate.refuse_unsafe(missing)
    assert unsafe.answers == [missing] and not safe.answers and gate.waiting == 1
    gate.flushed(70, 0)
    assert safe.is_safe and unsafe.answers == [missing]


@pytest.mark.parametrize("is_alone", [False, True])
def test_safe_progress_is_answered_at_once(is_alone):
    """No later flush or confirmation may come that would answer it."""
    gate, again, below, above = followed(), Waiter(), Waiter(), Waiter()
    gate.flushed(100, 0)
    gate.confirmed(80, 0)
    if is_alone:
        gate.slave_gone()
    gate.progress(80, 80, again)
    gate.progress(100, 80, below)
    gate.progress(100, 81, above)
    assert again.is_safe and below.is_safe == is_alone and not above.answers
