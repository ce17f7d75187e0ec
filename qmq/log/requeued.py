"""Core. Messages of a group that wait for another delivery: ranges with their due times, ordered by first sequence.

    first, count         the messages, by sequence; ascending and disjoint
    attempts             deliveries that count towards the limit
    suspected            deliveries to consumers that vanished, of which it is unknown whether a handler began
    due_ms               time before which there is no delivery

A group that requeues its messages for an hour has a hundred thousand ranges, one message each. So each field is a
column of numbers, 28 bytes a range in all, and columns are cut into blocks. In one piece, each range taken or added
moved 50 us of memory, and a pull of 300 stopped all groups of the broker for 15 ms. A schedule of 8 to 16 bytes a range
finds the due ranges, so the cost of a pull grows with its deliveries, not with the backlog.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import Any, NamedTuple

BLOCK = 1_024
"""Number of ranges in a block after a split: half of its maximum."""


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
        """Number of deliveries, counted or not."""
        return self.attempts + self.suspected

    def part(self, begin: int, end: int) -> RequeuedRange:
        """Return the part of this range in `[begin, end)`, which overlaps it."""
        first = max(self.first, begin)
        return self._replace(first=first, count=min(self.end, end) - first)


class RangeBlocks:
    """Ranges of one group. Callers keep them disjoint."""

    __slots__ = ("_blocks", "_begins", "_size", "messages")

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._begins: list[int] = []
        """The first sequence of each block."""
        self._size = self.messages = 0
        """Number of messages in all ranges together."""

    @classmethod
    def from_columns(cls, texts: list[str]) -> RangeBlocks:
        """Read the result of `columns`."""
        whole = _Block()
        for column, text in zip(whole.columns, texts, strict=True):
            column.frombytes(b64decode(text))
        self = cls()
        self._size = len(whole.firsts)
        self.messages = sum(whole.counts)
        self._blocks = [whole.slice(at, at + BLOCK) for at in range(0, self._size, BLOCK)]
        self._begins = [block.firsts[0] for block in self._blocks]
        return self

    def columns(self) -> list[str]:
        """Return the columns for a snapshot: little-endian numbers in base64, made in a twentieth of JSON's time."""
        columns = zip(*(block.columns for block in self._blocks or [_Block()]), strict=True)
        return [b64encode(b"".join(part.tobytes() for part in parts)).decode() for parts in columns]

    def __len__(self) -> int:
        """Return the number of ranges."""
        return self._size

    @property
    def first(self) -> int | None:
        """First sequence of all ranges, or None without a range."""
        return self._begins[0] if self._begins else None

    def __iter__(self) -> Iterator[RequeuedRange]:
        for block in self._blocks:
            yield from block.since(0)

    def get(self, first: int) -> RequeuedRange | None:
        """Return the range that begins at sequence `first`, or None."""
        found = self.until(first)
        return found if found is not None and found.first == first else None

    def until(self, first: int) -> RequeuedRange | None:
        """Return the last range that begins at or before `first`, or None."""
        number = bisect_right(self._begins, first) - 1
        if number < 0:
            return None
        block = self._blocks[number]
        return block[bisect_right(block.firsts, first) - 1]

    def since(self, begin: int) -> Iterator[RequeuedRange]:
        """Yield the ranges in order, from the last one that begins at or before `begin`, if any."""
        number = max(bisect_right(self._begins, begin) - 1, 0)
        for block in islice(self._blocks, number, None):
            yield from block.since(max(bisect_right(block.firsts, begin) - 1, 0))

    def messages_before(self, end: int) -> int:
        """Return the number of messages before `end`."""
        found = 0
        for block in self._blocks[: bisect_left(self._begins, end)]:
            at = bisect_left(block.firsts, end)
            found += sum(block.counts[:at]) - max(block[at - 1].end - end, 0)
        return found

    def put(self, span: RequeuedRange) -> bool:
        """Add a range, or replace the one with the same first message; return whether it is a new one."""
        if not self._blocks:
            self._blocks.append(_Block())
            self._begins.append(span.first)
        number = max(bisect_right(self._begins, span.first) - 1, 0)
        block = self._blocks[number]
        at = bisect_left(block.firsts, span.first)
        if is_new := block.firsts[at : at + 1] != array("q", [span.first]):
            block.insert(at, span)
            self._size += 1
        else:
            self.messages -= block.counts[at]
            block.replace(at, span)
        self.messages += span.count
        self._begins[number] = block.firsts[0]
        if len(block.firsts) > 2 * BLOCK:
            self._blocks[number : number + 1] = halves = block.slice(0, BLOCK), block.slice(BLOCK, None)
            self._begins.insert(number + 1, halves[1].firsts[0])
        return is_new

    def remove(self, span: RequeuedRange) -> None:
        """Remove a range that exists."""
        number = bisect_right(self._begins, span.first) - 1
        block = self._blocks[number]
        block.delete(bisect_left(block.firsts, span.first))
        self._size -= 1
        self.messages -= span.count
        if block.firsts:
            self._begins[number] = block.firsts[0]
        else:
            del self._blocks[number], self._begins[number]


class _Block:
    """Consecutive ranges."""

    __slots__ = ("firsts", "counts", "columns")

    def __init__(self) -> None:
        self.firsts = array("q")
        self.counts = array("I")
        self.columns = (self.firsts, self.counts, array("I"), array("Q"), array("I"))

    def __getitem__(self, at: int) -> RequeuedRange:
        firsts, counts, attempts, dues, suspected = self.columns
        return RequeuedRange(firsts[at], counts[at], attempts[at], dues[at], suspected[at])

    def since(self, at: int) -> Iterator[RequeuedRange]:
        return map(self.__getitem__, range(at, len(self.firsts)))

    def slice(self, begin: int, end: int | None) -> _Block:
        part = _Block()
        for column, own in zip(part.columns, self.columns, strict=True):
            column.extend(own[begin:end])
        return part

    def insert(self, at: int, span: RequeuedRange) -> None:
        for column, value in zip(self.columns, span, strict=True):
            column.insert(at, value)

    def replace(self, at: int, span: RequeuedRange) -> None:
        for column, value in zip(self.columns, span, strict=True):
            column[at] = value

    def delete(self, at: int) -> None:
        for column in self.columns:
            del column[at]


BUCKET_BITS = 10
"""Width of a bucket of due times; only times of the current second are sorted."""
STALE_MIN = 1_000
"""A schedule is made again when it has this many more entries than there are ranges, and at least twice as many."""
COUNT_MAX = (1 << 32) - 1


class Requeued:
    """Requeued messages of one group; made with the group."""

    __slots__ = ("_ranges", "changes", "_schedule")

    def __init__(self, ranges: Iterable[RequeuedRange] = ()) -> None:
        self._ranges = RangeBlocks()
        self.changes = 0
        """Count of changes."""
        self._schedule: _Schedule | None = None
        """Made at a master's first search for due messages; None on a slave."""
        for range_ in ranges:
            self._put(range_)

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Requeued:
        """Read the part of a snapshot: the result of `plain()`, or, from an older version, one list per range."""
        if not plain or not isinstance(plain[0], str):
            return cls(RequeuedRange(*span) for span in plain)
        self = cls()
        self._ranges = RangeBlocks.from_columns(plain)
        return self

    def plain(self) -> list[str]:
        """Return these ranges as a part of a snapshot."""
        return self._ranges.columns()

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._ranges)

    def __iter__(self) -> Iterator[RequeuedRange]:
        return iter(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Requeued) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Requeued({list(self)})"

    @property
    def messages(self) -> int:
        """Number of messages in all ranges."""
        return self._ranges.messages

    @property
    def first(self) -> int | None:
        """First sequence of all ranges, or None if no message waits."""
        return self._ranges.first

    def before(self, end: int, most: int) -> list[RequeuedRange]:
        """Return up to `most` ranges before `end`, due or not, in order."""
        below = takewhile(lambda run: run.first < end, self._ranges)
        return [span.part(0, end) for span in islice(below, most)]

    def messages_before(self, end: int) -> int:
        """Return the number of messages before `end`, due or not."""
        return self._ranges.messages_before(end)

    def overlapping(self, begin: int, end: int, most: int = COUNT_MAX) -> list[RequeuedRange]:
        """Return up to `most` ranges in `[begin, end)`, in order."""
        parts: list[RequeuedRange] = []
        for span in self._ranges.since(begin):
            if span.first >= end or len(parts) == most:
                break
            if span.end > begin:
                parts.append(span.part(begin, end))
        return parts

    def add(self, new: RequeuedRange) -> None:
        """Requeue messages. Neighbours with equal fields become one range."""
        self.changes += 1
        before, after = self._ranges.until(new.first), self._ranges.get(new.end)
        if before is not None and _touch(before, new):
            new = before._replace(count=before.count + new.count)
        if after is not None and _touch(new, after):
            self._ranges.remove(after)
            new = new._replace(count=new.count + after.count)
        self._put(new)

    def take(self, first: int, count: int) -> RequeuedRange | None:
        """Remove messages from one range and return them, or None if they do not wait."""
        known, end = self._ranges.until(first), first + count
        if known is None or known.end < end:
            return None
        self.changes += 1
        if known.first < first:
            self._put(known.part(known.first, first))
        else:
            self._ranges.remove(known)
        if end < known.end:
            self._put(known.part(end, known.end))
        return known.part(first, end)

    def due(self, now_ms: int, most: int) -> list[RequeuedRange]:
        """Return up to `most` due ranges, in order."""
        schedule = self._scheduled(now_ms)
        found: list[RequeuedRange] = []
        ready: list[int] = []
        while len(found) < most and (first := schedule.pop_ready()) is not None:
            if (span := self._ranges.get(first)) is None or ready[-1:] == [first]:
                continue
            if span.due_ms <= now_ms:  # otherwise it was requeued for later and has another entry
                ready.append(first)
                found.append(span)
        schedule.put_back(ready)
        return found

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return a time after `now_ms` before which no further range becomes due, or None without due times."""
        return self._scheduled(now_ms).next_ms

    def _scheduled(self, now_ms: int) -> _Schedule:
        schedule = self._schedule
        if schedule is None or now_ms < schedule.now_ms:  # the clock of a new mastership is behind the last one's
            schedule = self._schedule = _Schedule()
            for range_ in self._ranges:
                schedule.add(range_.first, range_.due_ms)
        schedule.advance(now_ms, self._due_of)
        return schedule

    def _due_of(self, first: int) -> int | None:
        span = self._ranges.get(first)
        return None if span is None else span.due_ms

    def _put(self, span: RequeuedRange) -> None:
        if self._ranges.put(span) and self._schedule is not None:
            self._schedule.add(span.first, span.due_ms)
            if len(self._schedule) > STALE_MIN + 2 * len(self):
                self._schedule = None


def _touch(span: RequeuedRange, after: RequeuedRange) -> bool:
    return span.end == after.first and span[2:] == after[2:] and span.count + after.count <= COUNT_MAX


class _Schedule:
    """Due times of ranges by first sequence. Entries may be outdated, so callers look the range up. Later entries are
    in one bucket per second, those of the present second in a heap, and due ones in another heap.
    """

    __slots__ = ("_buckets", "_order", "_soon", "_ready", "_size", "now_ms")

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._order: list[int] = []
        """Heap of the buckets' numbers."""
        self._soon: list[tuple[int, int]] = []
        self._ready: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        """Return the number of entries, outdated ones included."""
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
        """Make due ranges ready; `due_of` returns the due time of the range that begins at a sequence."""
        self.now_ms = now_ms
        while self._order and self._order[0] << BUCKET_BITS <= now_ms:
            number = heappop(self._order)
            bucket = self._buckets.pop(number)
            dues = [(due_ms, first) for first in bucket if (due_ms := due_of(first)) is not None]
            current = [due for due in dues if due[0] >> BUCKET_BITS == number]  # others have another entry
            self._size -= len(bucket) - len(current)
            for span in current:
                heappush(self._soon, span)
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
