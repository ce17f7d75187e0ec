"""Core. Requeued ranges agree with a dictionary of messages, and cost a pull what it gets, not what waits."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.log import requeued as module
from qmq.log.requeued import Requeued, RequeuedRange
from tests.support.effort import examples

Plain = dict[int, tuple[int, int, int]]
"""sequence -> attempts, due_ms, suspected"""


def messages(found: Requeued | list[RequeuedRange]) -> Plain:
    return {sequence: tuple(one[2:]) for one in found for sequence in range(one.first, one.end)}


def check(requeued: Requeued, plain: Plain, now_ms: int) -> None:
    rows = list(requeued)
    assert messages(rows) == plain and requeued.messages == len(plain)
    assert all(before.end <= after.first for before, after in zip(rows, rows[1:])), "ascending and disjoint"
    assert requeued.first == min(plain, default=None)
    due = requeued.due(now_ms, 1_000)
    assert messages(due) == {s: one for s, one in plain.items() if one[1] <= now_ms}
    assert due == sorted(due) and requeued.due(now_ms, 2) == due[:2], "in order, and the same when asked again"
    later = [one[1] for one in plain.values() if one[1] > now_ms]
    assert (wakes := requeued.next_due_ms(now_ms)) is not None or not later
    assert wakes is None or now_ms < wakes and (not later or wakes <= min(later))


@given(st.integers(0, 1 << 32), st.sampled_from([0, 5, 1_000]))
@settings(max_examples=examples(150))
def test_ranges_agree_with_single_messages(seed, stale_min):
    rng, requeued, plain, now_ms = Random(seed), Requeued(), {}, 0
    was, module.STALE_MIN = module.STALE_MIN, stale_min
    try:
        for _ in range(60):
            match rng.choice(["add", "add", "take", "time"]):
                case "add":
                    first, due = rng.randrange(200), rng.choice([0, now_ms + rng.randrange(5_000)])
                    end = min([s for s in plain if s >= first] + [first + rng.randint(1, 5)])
                    if first < end:
                        one = RequeuedRange(first, end - first, rng.randrange(2), due, rng.randrange(2))
                        requeued.add(one)
                        plain |= messages([one])
                case "take" if plain:
                    one = rng.choice(list(requeued))
                    begin = rng.randrange(one.first, one.end)
                    end = rng.randint(begin + 1, one.end)
                    assert requeued.take(begin, end - begin) == one.part(begin, end)
                    for sequence in range(begin, end):
                        del plain[sequence]
                case "time":
                    now_ms += rng.randrange(4_000)
            if rng.random() < 0.7:
                check(requeued, plain, now_ms)
    finally:
        module.STALE_MIN = was
    check(requeued, plain, now_ms)
    assert Requeued(list(requeued)) == requeued


@pytest.mark.parametrize("first, count", [(0, 1), (10, 6), (12, 4), (15, 1), (30, 1)])
def test_what_does_not_wait_in_one_range_is_not_taken(first, count):
    requeued = Requeued([RequeuedRange(10, 5, 1, 0), RequeuedRange(20, 5, 2, 0)])
    assert requeued.take(first, count) is None and requeued.messages == 10


def test_a_slave_that_never_asks_keeps_no_schedule():
    requeued = Requeued()
    for sequence in range(100):
        requeued.add(RequeuedRange(2 * sequence, 1, 1, 5_000))
    assert requeued._schedule is None


def test_a_schedule_of_ranges_that_are_gone_is_made_anew():
    requeued = Requeued()
    requeued.due(0, 1)
    for sequence in range(3 * module.STALE_MIN):
        requeued.add(RequeuedRange(sequence, 1, 1, 5_000 + sequence))
        requeued.take(sequence, 1)
    assert len(requeued._schedule or ()) <= module.STALE_MIN
