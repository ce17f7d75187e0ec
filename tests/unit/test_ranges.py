"""Core. The algebra of ranges equals sets of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq import ranges
from qmq.ranges import Range

some = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8
)


def numbers(found: list[Range]) -> set[int]:
    return {number for begin, end in found for number in range(begin, end)}


def is_normal(found: list[Range]) -> bool:
    return all(before[1] < after[0] for before, after in zip(found, found[1:])) and all(b < e for b, e in found)


@given(some)
def test_union_merges_all_ranges(given):
    joined = ranges.union(given)
    assert numbers(joined) == numbers(given) and is_normal(joined)
    assert ranges.size(joined) == len(numbers(given))


@given(some, some)
def test_difference_removes_all_others(given, others):
    given = ranges.union(given)
    left = ranges.difference(given, others)
    assert numbers(left) == numbers(given) - numbers(others) and is_normal(left)


@given(some)
def test_ranges_added_in_order_are_normal(given):
    found: list[Range] = []
    for begin, end in ranges.union(given):
        for at in range(begin, end):
            ranges.add(found, at, at + 1)
    assert found == ranges.union(given)
