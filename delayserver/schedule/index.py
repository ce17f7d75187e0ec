"""Core. Which rows of a segment have an id or a key with this hash: found by search, not by reading all of them.

An index is made when somebody first asks for a segment, and grows with it: rows are only added, and never change. It
is sorted pieces of 64 bits a row, the hash above the row's number. A piece is merged with the one before once it is
half as long, so there are few. All indexes together have a bound: what is asked for by due time replaces what was asked
for longest ago, a search through everything takes only what is free. What has no index is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qmq.delayserver.schedule.record import Numbers, Records
from qmq.delayserver.schedule.segment import READ_ROWS, Rows

ROW_BYTES = 16
"""Of a message with a key; one without has half."""
INDEX_BYTES_MAX = 128 << 20
"""Of all indexes together: eight million messages."""
INDEXED_LEAST = 2048
"""Fewer rows are read as fast as searched."""
_ROW_BITS = np.uint64(32)
_ROWS = np.uint64(0xFFFFFFFF)


class Hashes:
    """Hashes of one kind: sorted pieces, the longest first."""

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
    """Covers the rows before `end`."""

    def __init__(self) -> None:
        self.end = 0
        self.ids, self.keys = Hashes(), Hashes()

    @property
    def bytes(self) -> int:
        return self.ids.bytes + self.keys.bytes

    def extend(self, rows: Rows) -> None:
        """Cover all of these rows; raises DamagedSchedule, and is as it was."""
        borders = [*range(self.end, len(rows), READ_ROWS), len(rows)]
        parts = [_hashes(rows.read(begin, end)) for begin, end in pairwise(borders)]
        if not parts:
            return
        numbers, ids, keys = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        self.ids.add(ids, numbers)
        self.keys.add(keys[keys != 0], numbers[keys != 0])
        self.end = len(rows)


def _hashes(records: Records) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Copies: whoever keeps them does not keep the records."""
    return records["row"].copy(), records["id_hash"].copy(), records["key_hash"].copy()


class Indexes:
    """Made by the schedule; used by questions on a thread, one at a time (delayserver.cancelling)."""

    def __init__(self, bytes_max: int = INDEX_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._indexes: dict[str, SegmentIndex] = {}
        """By the segment's name; what was asked for longest ago comes first."""
        self._dropped = deque[str]()

    @property
    def bytes(self) -> int:
        return sum(index.bytes for index in self._indexes.values())

    def drop(self, names: Iterable[str]) -> None:
        """These segments were deleted. The next question forgets them: one may be under way."""
        self._dropped.extend(names)

    def find(
        self, rows: Rows, ids: Sequence[int], keys: Sequence[int], *, replaces: bool
    ) -> list[tuple[bool, int, int]] | None:
        """Return (is it by key, position among those looked for, row), or None if the segment has no index.

        Args:
            replaces: whether another segment's index goes if there is no room.

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
        found = [(False, *one) for one in index.ids.rows(np.array(ids, np.uint32))]
        found += [(True, *one) for one in index.keys.rows(np.array(keys, np.uint32))]
        return [one for one in found if one[2] < len(rows)]

    def _make_room(self, wanted: int, replaces: bool) -> bool:
        while self._indexes and self.bytes + wanted > self._bytes_max and replaces:
            del self._indexes[next(iter(self._indexes))]
        return self.bytes + wanted <= self._bytes_max
