"""Core. What may be acknowledged, and when (P1, P3, I6)."""

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
        assert not self.answers, "an answer is given once"
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
def test_nothing_is_acknowledged_before_both_disks_have_it(ours, theirs, safe, ours_first):
    gate, stored, progress = followed(), Waiter(), Waiter()
    gate.stored(8, stored)
    gate.progress(8, 0, progress)
    for step in ("ours", "theirs") if ours_first else ("theirs", "ours"):
        if step == "ours":
            gate.flushed(ours, 0)
        else:
            gate.confirmed(theirs, 0)
    assert stored.is_safe == progress.is_safe == safe


def test_high_watermark_never_decreases_and_stays_within_both_disks():
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


def test_repeated_batch_is_answered_at_once_if_it_was_safe_long_ago_whoever_waits():
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


def test_alone_nothing_new_is_acknowledged_but_progress_below_the_high_watermark_goes_on():
    gate, stored, below, above = followed(), Waiter(), Waiter(), Waiter()
    gate.flushed(100, 0)
    gate.confirmed(100, 0)
    gate.stored(120, stored)
    gate.slave_gone()
    gate.progress(130, 100, below)
    gate.progress(140, 110, above)
    gate.flushed(125, 0)
    assert not below.answers, "our own disk has to have it"
    gate.flushed(150, 0)
    assert (below.is_safe, above.answers, stored.answers) == (True, [], [])
    gate.slave_matched(100, 0)
    assert not stored.answers and not above.answers
    gate.confirmed(150, 0)
    assert stored.is_safe and above.is_safe


def test_matched_end_of_a_lost_slave_proves_nothing_about_the_next_one():
    gate, stored = followed(), Waiter()
    gate.flushed(50, 0)
    gate.confirmed(50, 0)
    gate.slave_gone()
    gate.stored(80, stored)
    gate.flushed(80, 0)
    gate.slave_matched(40, 0)
    assert (gate.matched_end, gate.high_watermark, stored.answers) == (40, 50, [])


def test_whoever_waits_when_the_mastership_ends_hears_what_to_do():
    gate, stored, progress = followed(), Waiter(), Waiter()
    gate.stored(10, stored)
    gate.progress(20, 0, progress)
    unknown, another = OutcomeUnknown("repeat"), NotMaster("ask")
    gate.abandon(stored=unknown, progress=another)
    gate.flushed(30, 0)
    gate.confirmed(30, 0)
    assert stored.answers == [unknown] and progress.answers == [another] and not gate.waiting
