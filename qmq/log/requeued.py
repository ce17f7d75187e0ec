"""Core. Messages of a group that were given back and wait for their next delivery: ranges, and when they are due.

    first, count         the messages, by sequence; ascending and disjoint
    attempts             deliveries that count towards the limit
    suspected            deliveries to a consumer that vanished, which nobody can say to have begun with them
    due_ms               not to be delivered before that

A group that asks for its messages again in an hour has a hundred thousand of these, one message each. So they are kept
in arrays, of 28 bytes a range, beside a schedule of 8 to 16 more: a pull costs what it gets, not what waits.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

BUCKET_BITS = 10
"""Due times are gathered by the second; only those of the current one are sorted."""
STALE_MIN = 1_000
"""A schedule that names so many more ranges than wait, and twice as many, is made anew."""
COUNT_MAX = (1 << 32) - 1


class RequeuedRange(NamedTuple):
    first: int
    count: int  # type: ignore[assignment]  # shadows tuple.count
    attempts: int
    due_ms: int
    suspected: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def deliveries(self) -> int:
        """How often they were delivered, whatever counts."""
        return self.attempts + self.suspected

    def part(self, begin: int, end: int) -> RequeuedRange:
        """Return what lies in `[begin, end)`, which overlaps it."""
        first = max(self.first, begin)
        return self._replace(first=first, count=min(self.end, end) - first)


class Requeued:
    """What waits of one group; made with it."""

    __slots__ = ("_firsts", "_counts", "_attempts", "_dues", "_suspected", "messages", "changes", "_schedule")

    def __init__(self, ranges: list[RequeuedRange] | None = None) -> None:
        self._firsts, self._dues = array("q"), array("Q")
        self._counts, self._attempts, self._suspected = array("I"), array("I"), array("I")
        self.messages = 0
        """How many all ranges have together."""
        self.changes = 0
        """Grows whenever other messages wait than before."""
        self._schedule: _Schedule | None = None
        """Made when somebody asks what is due, as a master does and a slave never."""
        for one in ranges or ():
            self._insert(len(self._firsts), one)

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Requeued:
        """Read what a snapshot holds: `plain()`, or one list for each range, as it was before there were columns."""
        if not plain or not isinstance(plain[0], str):
            return cls([RequeuedRange(*one) for one in plain])
        self = cls()
        for column, text in zip(self._columns, plain, strict=True):
            column.frombytes(b64decode(text))
        self.messages = sum(self._counts)
        return self

    def plain(self) -> list[str]:
        """Return the columns for a snapshot: little-endian numbers in base64, a twentieth of the time of JSON's."""
        return [b64encode(column.tobytes()).decode() for column in self._columns]

    @property
    def _columns(self) -> tuple[array[int], ...]:
        return self._firsts, self._counts, self._attempts, self._dues, self._suspected

    def __len__(self) -> int:
        """Return how many ranges there are."""
        return len(self._firsts)

    def __getitem__(self, at: int) -> RequeuedRange:
        return RequeuedRange(
            self._firsts[at], self._counts[at], self._attempts[at], self._dues[at], self._suspected[at]
        )

    def __iter__(self) -> Iterator[RequeuedRange]:
        return map(RequeuedRange._make, zip(*self._columns, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Requeued) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Requeued({list(self)})"

    @property
    def first(self) -> int | None:
        """The first sequence of all; None if nothing waits."""
        return self._firsts[0] if self._firsts else None

    def before(self, end: int, most: int) -> list[RequeuedRange]:
        """Return what waits before `end`, due or not: up to `most` ranges, in order."""
        return [self[at].part(0, end) for at in range(min(most, bisect_left(self._firsts, end)))]

    def messages_before(self, end: int) -> int:
        """Return how many wait before `end`, due or not."""
        if not (at := bisect_left(self._firsts, end)):
            return 0
        return sum(self._counts[:at]) - max(self[at - 1].end - end, 0)

    def overlapping(self, begin: int, end: int, most: int = COUNT_MAX) -> list[RequeuedRange]:
        """Return what waits of `[begin, end)`: up to `most` ranges, in order."""
        at = max(bisect_right(self._firsts, begin) - 1, 0)
        parts: list[RequeuedRange] = []
        while at < len(self) and self._firsts[at] < end and len(parts) < most:
            if self._firsts[at] + self._counts[at] > begin:
                parts.append(self[at].part(begin, end))
            at += 1
        return parts

    def add(self, new: RequeuedRange) -> None:
        """Let these wait, one range with its neighbours if they wait alike."""
        self.changes += 1
        at = bisect_right(self._firsts, new.first)
        if at and self._touch(self[at - 1], new):
            self._counts[at - 1] += new.count
            self.messages += new.count
            at -= 1
        else:
            self._insert(at, new)
        if at + 1 < len(self) and self._touch(self[at], self[at + 1]):
            count = self._counts[at + 1]
            self._delete(at + 1)
            self._counts[at] += count
            self.messages += count

    @staticmethod
    def _touch(one: RequeuedRange, after: RequeuedRange) -> bool:
        return one.end == after.first and one[2:] == after[2:] and one.count + after.count <= COUNT_MAX

    def take(self, first: int, count: int) -> RequeuedRange | None:
        """Take messages out of one range, and return them; None: they do not wait there."""
        at = bisect_right(self._firsts, first) - 1
        if at < 0 or (known := self[at]).end < first + count:
            return None
        self.changes += 1
        self._delete(at)
        for part in (
            known._replace(first=first + count, count=known.end - first - count),
            known._replace(count=first - known.first),
        ):
            if part.count:
                self._insert(at, part)
        return known._replace(first=first, count=count)

    def due(self, now_ms: int, most: int) -> list[RequeuedRange]:
        """Return up to `most` of the ranges that are due, in order."""
        schedule = self._scheduled(now_ms)
        found: list[RequeuedRange] = []
        ready: list[int] = []
        while len(found) < most and (first := schedule.pop_ready()) is not None:
            if (at := self._at(first)) is None or ready[-1:] == [first]:
                continue
            if self._dues[at] <= now_ms:  # else it was given back anew, and is named for later, too
                ready.append(first)
                found.append(self[at])
        schedule.put_back(ready)
        return found

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return a moment after `now_ms` before which nothing more becomes due; None: nothing waits for its time."""
        return self._scheduled(now_ms).next_ms

    def _scheduled(self, now_ms: int) -> _Schedule:
        schedule = self._schedule
        if schedule is None or now_ms < schedule.now_ms:  # another mastership's clock is behind the last one's
            schedule = self._schedule = _Schedule()
            for first, due_ms in zip(self._firsts, self._dues, strict=True):
                schedule.add(first, due_ms)
        schedule.advance(now_ms, self._due_of)
        return schedule

    def _due_of(self, first: int) -> int | None:
        at = self._at(first)
        return None if at is None else self._dues[at]

    def _at(self, first: int) -> int | None:
        at = bisect_left(self._firsts, first)
        return at if at < len(self._firsts) and self._firsts[at] == first else None

    def _insert(self, at: int, one: RequeuedRange) -> None:
        for column, value in zip(self._columns, one, strict=True):
            column.insert(at, value)
        self.messages += one.count
        if self._schedule is not None:
            self._schedule.add(one.first, one.due_ms)
            if len(self._schedule) > STALE_MIN + 2 * len(self):
                self._schedule = None

    def _delete(self, at: int) -> None:
        self.messages -= self._counts[at]
        for column in self._columns:
            del column[at]


class _Schedule:
    """Which ranges are due when, by their first sequence. It may name ranges that are gone or changed: whoever asks
    looks them up. Later ones lie in a bucket for each second, those of this second in a heap, ready ones in another."""

    __slots__ = ("_buckets", "_order", "_soon", "_ready", "_size", "now_ms")

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._order: list[int] = []
        """Heap of the buckets' numbers."""
        self._soon: list[tuple[int, int]] = []
        self._ready: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        """Return how many ranges it names, those that are gone included."""
        return self._size

    @property
    def next_ms(self) -> int | None:
        if self._soon:
            return self._soon[0][0]
        return self._order[0] << BUCKET_BITS if self._order else None

    def add(self, first: int, due_ms: int) -> None:
        self._size += 1
        number = due_ms >> BUCKET_BITS
        if (bucket := self._buckets.get(number)) is None:
            bucket = self._buckets[number] = array("q")
            heappush(self._order, number)
        bucket.append(first)

    def advance(self, now_ms: int, due_of: Callable[[int], int | None]) -> None:
        """Make ready what is due by now; `due_of` says when the range that begins there is."""
        self.now_ms = now_ms
        while self._order and self._order[0] << BUCKET_BITS <= now_ms:
            number = heappop(self._order)
            bucket = self._buckets.pop(number)
            dues = [(due_ms, first) for first in bucket if (due_ms := due_of(first)) is not None]
            current = [one for one in dues if one[0] >> BUCKET_BITS == number]  # others are named elsewhere too
            self._size -= len(bucket) - len(current)
            for one in current:
                heappush(self._soon, one)
        while self._soon and self._soon[0][0] <= now_ms:
            heappush(self._ready, heappop(self._soon)[1])

    def pop_ready(self) -> int | None:
        if not self._ready:
            return None
        self._size -= 1
        return heappop(self._ready)

    def put_back(self, firsts: list[int]) -> None:
        self._size += len(firsts)
        for first in firsts:
            heappush(self._ready, first)
