"""Core. Questions to the schedule: made on its loop, answered on threads from views that do not change.

Messages are found by the hash of their id or key, listed by due time, or selected by place, subject or label. An index
of a segment's hashes is made at the first question and grows with the segment: sorted pieces of 64-bit entries, the
hash in the upper bits and the row in the lower ones. A piece is merged with the one before once it is half as long as
that. All indexes together are bounded: a question with a due time replaces the least recently used index, a search
through everything uses free room only. A segment without an index is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from qmq.delayserver.schedule.record import Numbers, Records, State, join, no_records, order_of
from qmq.delayserver.schedule.segment import (
    BLOCK_ROWS,
    READ_ROWS,
    DamagedSchedule,
    Marked,
    Rows,
    Segment,
    States,
    split_marks,
)

ROW_BYTES = 16
"""Index bytes of a message with a key; half of it without one."""
INDEX_BYTES_MAX = 128 << 20
"""Bytes of all indexes together: eight million messages."""
INDEXED_LEAST = 2048
"""Fewer rows are read as fast as searched."""
_ROW_BITS = np.uint64(32)
_ROWS = np.uint64(0xFFFFFFFF)


class Hashes:
    """Hashes of one kind, in sorted pieces, the longest first."""

    def __init__(self) -> None:
        self._pieces: list[Numbers] = []

    @property
    def bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def add(self, hashes: NDArray[np.uint32], rows: NDArray[np.uint32]) -> None:
        if not len(hashes):
            return
        self._pieces.append(np.sort(hashes.astype(np.uint64) << _ROW_BITS | rows))
        while len(self._pieces) > 1 and 2 * len(self._pieces[-1]) >= len(self._pieces[-2]):
            last = self._pieces.pop()
            self._pieces[-1] = np.sort(np.concatenate((self._pieces[-1], last)), kind="stable")  # merges

    def rows(self, hashes: NDArray[np.uint32]) -> Iterator[tuple[int, int]]:
        """Yield (position in `hashes`, row)."""
        least = hashes.astype(np.uint64) << _ROW_BITS
        for piece in self._pieces:
            begins, ends = piece.searchsorted(least), piece.searchsorted(least | _ROWS, "right")
            for at in np.flatnonzero(begins < ends).tolist():
                for row in (piece[begins[at] : ends[at]] & _ROWS).tolist():
                    yield at, row


class SegmentIndex:
    """Index of the rows before `end`."""

    def __init__(self) -> None:
        self.end = 0
        self.ids = Hashes()
        self.keys = Hashes()

    @property
    def bytes(self) -> int:
        return self.ids.bytes + self.keys.bytes

    def extend(self, rows: Rows) -> None:
        """Extend the index to all of these rows; raises DamagedSchedule and stays unchanged."""
        borders = [*range(self.end, len(rows), READ_ROWS), len(rows)]
        parts = [_hashes(rows.read(begin, end)) for begin, end in pairwise(borders)]
        if not parts:
            return
        numbers, ids, keys = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        self.ids.add(ids, numbers)
        self.keys.add(keys[keys != 0], numbers[keys != 0])
        self.end = len(rows)


def _hashes(records: Records) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return rows, id hashes and key hashes as copies, so the records do not stay in memory."""
    return records["row"].copy(), records["id_hash"].copy(), records["key_hash"].copy()


class Indexes:
    """Indexes of all segments. Made by the schedule; used by questions on a thread, one at a time
    (delayserver.cancellation).
    """

    def __init__(self, bytes_max: int = INDEX_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._indexes: dict[str, SegmentIndex] = {}
        """By the segment's name, least recently used first."""
        self._dropped = deque[str]()

    @property
    def bytes(self) -> int:
        return sum(index.bytes for index in self._indexes.values())

    def drop(self, names: Iterable[str]) -> None:
        """Drop the indexes of deleted segments, with the next question: one may be running."""
        self._dropped.extend(names)

    def find(
        self, rows: Rows, ids: Sequence[int], keys: Sequence[int], *, replaces: bool
    ) -> list[tuple[bool, int, int]] | None:
        """Return (by key, position in the question, row), or None if the segment has no index.

        Args:
            replaces: whether another segment's index is dropped if there is no room.

        Raises:
            DamagedSchedule: a file that had to be read.
        """
        if len(rows) < INDEXED_LEAST:
            return None
        while self._dropped:
            self._indexes.pop(self._dropped.popleft(), None)
        index = self._indexes.get(rows.name) or SegmentIndex()
        if not self._make_room(ROW_BYTES * max(0, len(rows) - index.end), replaces):
            return None
        index.extend(rows)
        self._indexes.pop(rows.name, None)
        self._indexes[rows.name] = index
        found = [(False, *row) for row in index.ids.rows(np.array(ids, np.uint32))]
        found += [(True, *row) for row in index.keys.rows(np.array(keys, np.uint32))]
        return [candidate for candidate in found if candidate[2] < len(rows)]

    def _make_room(self, wanted: int, replaces: bool) -> bool:
        while self._indexes and self.bytes + wanted > self._bytes_max and replaces:
            del self._indexes[next(iter(self._indexes))]
        return self.bytes + wanted <= self._bytes_max


T = TypeVar("T")
HashColumn = NDArray[np.uint32]


class Candidate(NamedTuple):
    """Message with a requested hash; its id or key must still be compared."""

    by_key: bool
    position: int
    record: np.void
    state: State


@dataclass(frozen=True, slots=True)
class SegmentView:
    """Segment at one moment. States continue to change; they are read when needed."""

    end_ms: int
    rows: Rows
    marked: Marked
    states: States | None
    """None: they have to be read."""
    gone: set[str]
    """Segments deleted since then."""

    def look(self, into: Callable[[SegmentView], T], nothing: T) -> T:
        """Return the result of `into`, or `nothing` if the segment was deleted meanwhile: all its messages were
        done.
        """
        try:
            return into(self)
        except DamagedSchedule:
            if self.rows.name in self.gone:
                return nothing
            raise

    def states_of(self, rows: NDArray[np.uint32]) -> States:
        states = self.states
        if states is None:
            marked, reasons = split_marks(self.marked.read())
            states = np.zeros(len(self.rows), np.uint8)
            states[marked] = reasons
        found = np.zeros(len(rows), np.uint8)
        known = rows < len(states)
        found[known] = states[rows[known]]
        return found

    def parts(self) -> Iterator[Records]:
        """Yield all rows, some at a time."""
        for at in range(0, len(self.rows), READ_ROWS):
            yield self.rows.read(at, min(at + READ_ROWS, len(self.rows)))


def view_of(segment: Segment, gone: set[str]) -> SegmentView:
    """Return the view of a segment, which is reused until the segment changes."""
    if segment.view is None:
        segment.view = SegmentView(segment.end_ms, segment.rows, segment.marked, segment.known_states(), gone)
    view: SegmentView = segment.view
    return view


class HashTable:
    """Requested hashes. A table of 65,536 bits rejects most records; binary search decides about the rest."""

    def __init__(self, hashes: Sequence[int]) -> None:
        self._hashes = np.array(hashes, np.uint32)
        self._order = np.argsort(self._hashes, kind="stable")
        self._sorted = self._hashes[self._order]
        self._table = np.zeros(65_536, np.bool_)
        self._table[self._hashes & 0xFFFF] = True

    def __len__(self) -> int:
        return len(self._hashes)

    def matches(self, hashes: HashColumn) -> Iterator[tuple[int, int]]:
        """Yield (position in `hashes`, position in the question)."""
        maybe = np.flatnonzero(self._table[hashes & 0xFFFF])
        first = np.searchsorted(self._sorted, hashes[maybe], "left")
        last = np.searchsorted(self._sorted, hashes[maybe], "right")
        for at in np.flatnonzero(first < last).tolist():
            for place in range(first[at], last[at]):
                yield int(maybe[at]), int(self._order[place])


Found = list[tuple[bool, int, np.void]]
"""(by key, position in the question, record)"""


@dataclass(frozen=True, slots=True)
class Find:
    """Search for hashes of ids and keys: `near` the expected due times, then `far`.

    Two ids may have the same hash, and a message may have moved, so a caller that misses something searches far. An
    index finds a few in time independent of the segment's size. For many, reading all blocks is as fast.
    """

    views: list[SegmentView]
    dues_ms: Numbers
    subject: int | None
    ids: Sequence[int]
    keys: Sequence[int]
    indexes: Indexes

    def __call__(self) -> list[Candidate]:
        """Search everywhere; raises DamagedSchedule."""
        return self.near() + self.far()

    def near(self) -> list[Candidate]:
        """Search the segments of the due times; raises DamagedSchedule."""
        return self._look([view for view in self.views if self._is_near(view)], replaces=True)

    def far(self) -> list[Candidate]:
        """Search all other segments; raises DamagedSchedule."""
        return self._look([view for view in self.views if not self._is_near(view)], replaces=False)

    def _is_near(self, view: SegmentView) -> bool:
        return bool(((self.dues_ms >= view.rows.begin_ms) & (self.dues_ms < view.end_ms)).any())

    def _look(self, views: list[SegmentView], *, replaces: bool) -> list[Candidate]:
        def into(view: SegmentView) -> list[Candidate]:
            return self._in_segment(view, replaces)

        return [candidate for view in views for candidate in view.look(into, list[Candidate]())]

    def _in_segment(self, view: SegmentView, replaces: bool) -> list[Candidate]:
        found = None
        if BLOCK_ROWS * (len(self.ids) + len(self.keys)) <= len(view.rows):
            found = self._by_index(view, replaces)
        if found is None:
            found = self._by_reading(view)
        if not found:
            return []
        states = view.states_of(np.array([record["row"] for _, _, record in found], np.uint32))
        return [Candidate(*candidate, State(state)) for candidate, state in zip(found, states.tolist(), strict=True)]

    def _by_index(self, view: SegmentView, replaces: bool) -> Found | None:
        rows = self.indexes.find(view.rows, self.ids, self.keys, replaces=replaces)
        if rows is None:
            return None
        found = [(by_key, index, view.rows.read(row, row + 1)[0].copy()) for by_key, index, row in rows]
        return [candidate for candidate in found if self.subject is None or candidate[2]["subject"] == self.subject]

    def _by_reading(self, view: SegmentView) -> Found:
        found: Found = []
        looked_for = [(False, HashTable(self.ids), "id_hash"), (True, HashTable(self.keys), "key_hash")]
        for records in view.parts():
            for by_key, wanted, column in looked_for:
                if len(wanted):
                    for at, index in wanted.matches(np.ascontiguousarray(records[column])):
                        if self.subject is None or records["subject"][at] == self.subject:
                            found.append((by_key, index, records[at].copy()))
        return found


Matching = Callable[[Records], NDArray[np.bool_]]


def _earliest(views: list[SegmentView], most: int, matching: Matching, below: State) -> Records:
    """Return the first `most` matching records by (due, number) with a state lower than `below`."""
    parts, count = [no_records()], 0
    for view in views:
        parts.append(view.look(lambda segment: _earliest_in(segment, most, matching, below), no_records()))
        count += len(parts[-1])
        if count >= most:
            break
    return join(parts)[:most]


def _earliest_in(view: SegmentView, most: int, matching: Matching, below: State) -> Records:
    kept, count = [no_records()], 0
    for records in view.parts():
        more = records[matching(records)]
        kept.append(more[view.states_of(more["row"]) < below])
        count += len(kept[-1])
        if count >= 2 * most:
            kept = [_first(kept, most)]
            count = len(kept[0])
    return _first(kept, most)


def _first(parts: list[Records], most: int) -> Records:
    found = join(parts)
    return found.take(order_of(found["due"], found["number"])[:most])


@dataclass(frozen=True, slots=True)
class Listing:
    """Question: messages not done, by (due, number)."""

    views: list[SegmentView]
    begin_ms: int
    end_ms: int
    subject: int | None
    most: int
    after: tuple[int, int] | None

    def __call__(self) -> Records:
        """Run on a thread; raises DamagedSchedule."""
        return _earliest(self.views, self.most, self._matching, State.SENT)

    def _matching(self, records: Records) -> NDArray[np.bool_]:
        due, number = records["due"], records["number"]
        matching: NDArray[np.bool_] = (due >= self.begin_ms) & (due < self.end_ms)
        if self.subject is not None:
            matching &= records["subject"] == self.subject
        if self.after is not None:
            after_due, after_number = self.after
            matching &= (due > after_due) | ((due == after_due) & (number > after_number))
        return matching


@dataclass(frozen=True, slots=True)
class PendingOf:
    """Question: the first `most` pending messages due before `end_ms`, by (due, number), of some subjects.

    `dues` and `numbers` hold the first position by subject; subjects not asked for have `end_ms`.
    """

    views: list[SegmentView]
    dues: Numbers
    numbers: Numbers
    end_ms: int
    most: int

    def __call__(self) -> Records:
        """Run on a thread; raises DamagedSchedule."""
        return _earliest(self.views, self.most, self._matching, State.IN_FLIGHT)  # only PENDING is lower

    def _matching(self, records: Records) -> NDArray[np.bool_]:
        due, begins = records["due"], self.dues[records["subject"]]
        behind = (due == begins) & (records["number"] >= self.numbers[records["subject"]])
        matching: NDArray[np.bool_] = ((due > begins) | behind) & (due < self.end_ms)
        return matching


@dataclass(frozen=True, slots=True)
class PendingBelow:
    """Question: pending messages before an offset of the log, by number."""

    views: list[SegmentView]
    offset: int

    def __call__(self) -> Records:
        """Run on a thread; raises DamagedSchedule."""
        found = join([view.look(self._in_segment, no_records()) for view in self.views])
        return found.take(np.argsort(found["number"]))

    def _in_segment(self, view: SegmentView) -> Records:
        kept = []
        for records in view.parts():
            old = records[: np.searchsorted(records["number"], np.uint64(self.offset))]
            kept.append(old[view.states_of(old["row"]) == State.PENDING])
            if len(old) < len(records):
                break
        return join(kept)


@dataclass(frozen=True, slots=True)
class PendingLabelled:
    """Question: pending messages with exactly this label, of one subject or (None) of all, in no order."""

    views: list[SegmentView]
    subject: int | None
    label: int

    def __call__(self) -> Records:
        """Run on a thread; raises DamagedSchedule."""
        return join([view.look(self._in_segment, no_records()) for view in self.views])

    def _in_segment(self, view: SegmentView) -> Records:
        kept = []
        for records in view.parts():
            found = records[records["label"] == self.label]
            if self.subject is not None:
                found = found[found["subject"] == self.subject]
            kept.append(found[view.states_of(found["row"]) == State.PENDING])
        return join(kept)
