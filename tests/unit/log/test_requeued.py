"""Core. Requeued ranges equal a dictionary of messages; the cost of a pull follows its messages, not the backlog."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.log import requeued as blocks
from qmq.log.requeued import Requeued, RequeuedRange
from tests.support.effort import examples

Plain = dict[int, tuple[int, int, int]]
"""sequence -> attempts, due_ms, suspected"""


def messages(found: Requeued | list[RequeuedRange]) -> Plain:
    return {sequence: tuple(range_[2:]) for range_ in found for sequence in range(range_.first, range_.end)}


def check(requeued: Requeued, plain: Plain, now_ms: int) -> None:
    rows = list(requeued)
    assert len(rows) == len(requeued)
    assert messages(rows) == plain and requeued.messages == len(plain)
    assert all(before.end <= after.first for before, after in zip(rows, rows[1:])), "ascending and disjoint"
    assert requeued.first == min(plain, default=None)
    for begin, end in ((0, 250), (now_ms % 200, now_ms % 200 + 5), (100, 101)):
        within = [row.part(begin, end) for row in rows if row.end > begin and row.first < end]
        assert [requeued.overlapping(begin, end, most) for most in (1, 2, 300)] == [within[:1], within[:2], within]
        below = [row.part(0, end) for row in rows if row.first < end]
        assert [requeued.before(end, most) for most in (1, 2, 300)] == [below[:1], below[:2], below]
        assert requeued.messages_before(end) == sum(range_.count for range_ in below)
    due = requeued.due(now_ms, 1_000)
    assert due == [row for row in rows if row.due_ms <= now_ms], "each once, and in order"
    assert requeued.due(now_ms, 2) == due[:2], "and the same when asked again"
    later = [message[1] for message in plain.values() if message[1] > now_ms]
    assert (wakes := requeued.next_due_ms(now_ms)) is not None or not later
    assert wakes is None or now_ms < wakes and (not later or wakes <= min(later))
    schedule = requeued._schedule
    assert schedule is not None
    assert len(schedule) == len(schedule._soon) + len(schedule._ready) + sum(map(len, schedule._buckets.values()))


@given(st.integers(0, 1 << 32), st.sampled_from([0, 5, 1_000]), st.sampled_from([1, 2, 5, 1_024]))
@settings(max_examples=examples(150))
def test_requeued_ranges_equal_single_messages(seed, stale_min, block):
    rng, requeued, plain, now_ms = Random(seed), Requeued(), {}, 0
    with mock.patch.object(blocks, "STALE_MIN", stale_min), mock.patch.object(blocks, "BLOCK", block):
        for _ in range(60):
            match rng.choice(["add", "add", "take", "time"]):
                case "add":
                    first, due = rng.randrange(200), rng.choice([0, now_ms + rng.randrange(5_000)])
                    end = min([s for s in plain if s >= first] + [first + rng.randint(1, 5)])
                    if first < end:
                        range_ = RequeuedRange(first, end - first, rng.randrange(2), due, rng.randrange(2))
                        requeued.add(range_)
                        plain |= messages([range_])
                case "take" if plain:
                    range_ = rng.choice(list(requeued))
                    begin = rng.randrange(range_.first, range_.end)
                    end = rng.randint(begin + 1, range_.end)
                    assert requeued.take(begin, end - begin) == range_.part(begin, end)
                    for sequence in range(begin, end):
                        del plain[sequence]
                case "time":
                    now_ms += rng.randrange(4_000)
            if rng.random() < 0.7:
                check(requeued, plain, now_ms)
        check(requeued, plain, now_ms)
        assert Requeued(list(requeued)) == requeued
        again = Requeued.from_plain(requeued.plain())
        assert again == requeued
        check(again, plain, now_ms)


@pytest.mark.parametrize("first, count", [(0, 1), (10, 6), (12, 4), (15, 1), (30, 1)])
def test_take_outside_one_range_returns_none(first, count):
    requeued = Requeued([RequeuedRange(10, 5, 1, 0), RequeuedRange(20, 5, 2, 0)])
    assert requeued.take(first, count) is None and requeued.messages == 10


def test_equal_ranges_join_within_the_count_limit():
    longest = RequeuedRange(10, blocks.COUNT_MAX, 1, 7)
    for begin in (RequeuedRange(10, blocks.COUNT_MAX - 1, 1, 7), longest):
        requeued = Requeued([begin])
        requeued.add(RequeuedRange(begin.end, 1, 1, 7))
        assert list(requeued) == ([longest] if begin is not longest else [longest, RequeuedRange(longest.end, 1, 1, 7)])
        assert requeued.messages == begin.count + 1


@pytest.mark.parametrize("far", [[], [RequeuedRange(100, 5, 1, 7)]], ids=["the last ones", "before another"])
@pytest.mark.parametrize("other", [(1, 2, 7), (1, 1, 8), (1, 1, 7, 1)])
def test_unequal_ranges_stay_apart(other, far):
    before, new, behind = RequeuedRange(10, 5, 1, 7), RequeuedRange(15, *other), RequeuedRange(16, 5, 1, 7)
    requeued = Requeued([before, behind, *far])
    requeued.add(new)
    assert list(requeued) == [before, new, behind, *far]
    requeued.take(15, 1)
    requeued.add(RequeuedRange(15, 1, 1, 7))
    assert list(requeued) == [RequeuedRange(10, 11, 1, 7), *far]


def test_changes_counts_every_change():
    requeued = Requeued()
    seen = [requeued.changes]
    requeued.add(RequeuedRange(10, 5, 1, 0))
    seen.append(requeued.changes)
    requeued.take(12, 1)
    seen.append(requeued.changes)
    assert seen == sorted(set(seen))
    assert requeued.take(12, 1) is None and requeued.due(0, 9) and requeued.changes == seen[-1]


def test_next_due_time_is_a_lower_bound():
    requeued = Requeued()
    assert requeued.next_due_ms(0) is None
    for first, due_ms in ((10, 0), (20, 5_000), (30, 5_100), (40, 9_000)):
        requeued.add(RequeuedRange(first, 1, 1, due_ms))
    assert [requeued.next_due_ms(now_ms) for now_ms in (0, 4_999, 5_000, 5_100, 9_000)] == [
        4_096,
        5_000,
        5_100,
        8_192,
        None,
    ]
    assert requeued.due(9_000, 9) == list(requeued)


def test_clock_that_went_back_finds_due_ranges():
    """A broker is master again and its clock was put back: ranges that were due have to wait."""
    requeued = Requeued([RequeuedRange(10, 1, 1, 5_000), RequeuedRange(20, 1, 1, 5_100)])
    assert requeued.due(6_000, 1) == [RequeuedRange(10, 1, 1, 5_000)]
    assert requeued.next_due_ms(0) == 4_096
    assert requeued.due(5_050, 9) == [RequeuedRange(10, 1, 1, 5_000)] and requeued.next_due_ms(5_050) == 5_100


def test_schedule_is_made_on_demand():
    requeued = Requeued()
    for sequence in range(100):
        requeued.add(RequeuedRange(2 * sequence, 1, 1, 5_000))
    assert requeued._schedule is None


def test_stale_schedule_is_rebuilt():
    requeued = Requeued()
    requeued.due(0, 1)
    for sequence in range(3 * blocks.STALE_MIN):
        requeued.add(RequeuedRange(sequence, 1, 1, 5_000 + sequence))
        requeued.take(sequence, 1)
    assert len(requeued._schedule or ()) <= blocks.STALE_MIN


def test_schedule_lasts_with_few_stale_entries(monkeypatch):
    monkeypatch.setattr(blocks, "STALE_MIN", 10)
    requeued = Requeued([RequeuedRange(10 * at, 1, 1, 5_000) for at in range(3)])
    requeued.due(0, 1)
    lasts = []
    for _ in range(16):
        requeued.add(RequeuedRange(100, 1, 1, 5_000))
        lasts.append(requeued._schedule is not None)
        requeued.take(100, 1)
    assert lasts == [True] * 15 + [False], "3 and 15 are in the schedule, 4 wait"


def test_schedule_is_made_once():
    requeued = Requeued([RequeuedRange(10 * at, 1, 1, 5_000 + at) for at in range(3)])
    requeued.due(5_000, 9)
    made = requeued._schedule
    for now_ms in (5_000, 5_001, 9_000):
        requeued.due(now_ms, 9)
        requeued.add(RequeuedRange(now_ms, 1, 1, 9_000))
        assert requeued._schedule is made


@pytest.mark.parametrize("ranges", [[], [(10, 5, 1, 7)], [(10, 5, 1, 7), (20, 1, 2, 0, 3)]])
def test_requeued_survives_both_snapshot_forms(ranges):
    requeued = Requeued([RequeuedRange(*range_) for range_ in ranges])
    for plain in (requeued.plain(), [list(range_) for range_ in ranges]):
        again = Requeued.from_plain(plain)
        assert (again, again.messages) == (requeued, requeued.messages)


def test_blocks_stay_within_their_bounds(monkeypatch):
    """Each change moves a whole block, and each search visits empty blocks."""
    monkeypatch.setattr(blocks, "BLOCK", 4)
    requeued, rng = Requeued(), Random(1)
    firsts = [2 * at for at in range(100)]
    rng.shuffle(firsts)
    for first in firsts:
        requeued.add(RequeuedRange(first, 1, 1, 5_000))
    sizes = [len(block.firsts) for block in requeued._ranges._blocks]
    assert sum(sizes) == 100 and min(sizes) >= 4 and max(sizes) <= 8
    rng.shuffle(firsts)
    for first in firsts:
        assert all(block.firsts for block in requeued._ranges._blocks)
        requeued.take(first, 1)
    assert (len(requeued), requeued.messages, requeued._ranges._blocks) == (0, 0, [])


def test_requeued_equality():
    assert Requeued() == Requeued() != []
    assert Requeued() != Requeued([RequeuedRange(10, 1, 1, 0)])
