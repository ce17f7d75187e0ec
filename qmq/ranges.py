"""Core. Half-open ranges `[begin, end)` of numbers: one algebra for fold, delivery, scan and client.

A list of ranges ascends, and its ranges neither overlap nor touch, unless a function accepts others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter

Range = tuple[int, int]
"""(begin, end)"""

_END = itemgetter(1)


def add(ranges: list[Range], begin: int, end: int) -> None:
    """Append `[begin, end)` to `ranges`, none of which ends after `begin`; it merges with the last one if they
    touch.
    """
    if ranges and ranges[-1][1] == begin:
        ranges[-1] = ranges[-1][0], end
    else:
        ranges.append((begin, end))


def union(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of `ranges`, which may be in any order, overlap and touch."""
    joined: list[Range] = []
    for begin, end in sorted(ranges):
        if joined and joined[-1][1] >= begin:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def difference(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Return the numbers of `ranges`, range by range, that are in none of `others`, which may be in any order."""
    left: list[Range] = []
    taken = union(others)
    for begin, end in ranges:
        at = bisect_right(taken, begin, key=_END)
        while begin < end and at < len(taken) and taken[at][0] < end:
            if begin < taken[at][0]:
                left.append((begin, taken[at][0]))
            begin = taken[at][1]
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def size(ranges: Iterable[Range]) -> int:
    """Return the count of numbers in `ranges`, which do not overlap."""
    return sum(end - begin for begin, end in ranges)
