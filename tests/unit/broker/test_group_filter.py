"""Core. Filter state of one group: idle checks, and ready ranges."""

from __future__ import annotations

import pytest

from qmq.broker.group_filter import FAILED_MS, GroupFilter, Keys
from qmq.broker.labels import TagRule
from qmq.log.group import Group
from qmq.log.requeued import Requeued, RequeuedRange

RULE, OTHER = TagRule.of(["pay"], is_all=False), TagRule.of(["cancel"], is_all=False)


def test_failed_reading_is_repeated_later():
    group_filter, until_ms = GroupFilter("s", "g"), 5_000 + FAILED_MS
    assert not group_filter.will_be_overdue and not group_filter.rests(5_000)
    group_filter.has_failed = True
    assert group_filter.will_be_overdue
    assert [group_filter.rests(now_ms) for now_ms in (5_000, until_ms - 1)] == [True, True]
    assert [group_filter.is_overdue(now_ms) for now_ms in (until_ms - 1, until_ms)] == [False, True]
    assert group_filter.will_be_overdue
    assert not group_filter.rests(until_ms)
    assert not group_filter.will_be_overdue and not group_filter.is_overdue(until_ms)


def test_empty_scan_is_idle_until_a_change():
    group_filter = GroupFilter("s", "g")
    assert not group_filter.is_idle(RULE, 88, 77, 0)
    group_filter.idle_at = RULE, 88, 77
    assert group_filter.is_idle(RULE, 88, 77, 0)
    assert not group_filter.is_idle(OTHER, 88, 77, 0), "another consumer asks for something else"
    assert not group_filter.is_idle(RULE, 89, 77, 0), "the log has more"
    assert not group_filter.is_idle(RULE, 88, 78, 0), "more of it may leave"
    group_filter.note(3, 4, 1_000)
    assert [group_filter.is_idle(RULE, 88, 77, now_ms) for now_ms in (999, 1_000)] == [True, False]
    assert group_filter.pop_ready(1_000) == (3, 4)
    group_filter.seen_ms = 5
    assert not group_filter.is_idle(RULE, 88, 77, 0), "what was passed over has to be written down"
    assert group_filter.will_be_overdue


def test_requeued_ranges_are_ready_in_order_once_due():
    group_filter = GroupFilter("s", "g")
    for begin, due_ms in ((7, 0), (1, 2_000), (5, 0), (3, 1_000)):
        group_filter.note(begin, begin + 1, due_ms)
    assert group_filter.soon_ready(9) == [(5, 6), (7, 8)] and group_filter.soon_ready(1) == [(5, 6)]
    assert [group_filter.pop_ready(999), group_filter.pop_ready(1_000), group_filter.pop_ready(1_000)] == [
        (5, 6),
        (3, 4),
        (7, 8),
    ]
    assert [group_filter.pop_ready(now_ms) for now_ms in (1_999, 2_000, 2_000)] == [None, (1, 2), None]


def keyed(*ranges: RequeuedRange, holders: dict[int, int], behind: list[tuple[int, int]]) -> tuple[GroupFilter, Group]:
    """Return a filter with these holders of keys and deferred messages; `ranges` are requeued in the group."""
    group_filter, keys = GroupFilter("s", "g"), Keys()
    for key, sequence in holders.items():
        keys.hold(key, sequence)
    for key, sequence in behind:
        keys.defer(key, sequence)
    group_filter.keys = keys
    return group_filter, Group(20, requeued=Requeued(list(ranges)))


def ready(group_filter: GroupFilter) -> list[tuple[int, int]]:
    found = []
    while (ready_range := group_filter.pop_ready(0)) is not None:
        found.append(ready_range)
    return found


def test_changed_ranges_wait_or_free_their_keys():
    waiting = RequeuedRange(4, 2, 1, 0), RequeuedRange(8, 1, 1, 5_000)
    group_filter, group = keyed(
        *waiting,
        *(RequeuedRange(sequence, 1, 0, 0) for sequence in (11, 12, 13, 14)),
        holders={1: 3, 2: 4, 3: 7, 4: 9},
        behind=[(1, 11), (2, 12), (3, 13), (4, 14)],
    )
    group_filter.changing = [(3, 10)]
    group_filter.catch_up(group)
    assert ready(group_filter) == [(4, 6), (11, 12), (13, 14), (14, 15)]
    assert group_filter.pop_ready(5_000) == (8, 9)
    assert [group_filter.keys.is_busy(key) for key in (1, 2, 3, 4)] == [True] * 4
    assert group_filter.keys.deferred == 1 and not group_filter.changing


@pytest.mark.parametrize(("waiting", "expected"), [([6], [(6, 7)]), ([5, 6], [(5, 6)]), ([], [])])
def test_settled_message_behind_a_key_is_skipped(waiting, expected):
    group_filter, group = keyed(
        *(RequeuedRange(sequence, 1, 0, 0) for sequence in waiting), holders={1: 3}, behind=[(1, 5), (1, 6)]
    )
    group_filter.settle(group, 3, 4)
    assert ready(group_filter) == expected and group_filter.keys.is_busy(1) == bool(expected)
    assert group_filter.keys.deferred == len(waiting) // 2


def test_changes_before_key_restore_are_applied_later():
    group_filter, group = GroupFilter("s", "g"), Group(9, requeued=Requeued([RequeuedRange(2, 3, 1, 0)]))
    group_filter.changing = [(0, 9)]
    group_filter.catch_up(group)
    assert group_filter.pop_ready(0) is None and not group_filter.changing
    group_filter.keys, group_filter.changing = Keys(), [(0, 9)]
    group_filter.catch_up(group)
    assert group_filter.pop_ready(0) == (2, 5)


def test_passed_messages_are_overdue_after_a_second():
    group_filter = GroupFilter("s", "g")
    assert not group_filter.is_overdue(10_000)
    group_filter.seen_ms = 10_000
    assert [group_filter.is_overdue(now_ms) for now_ms in (9_999, 10_000, 10_999, 11_000)] == [True, False, False, True]
