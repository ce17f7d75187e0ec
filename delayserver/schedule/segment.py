"""Core. One segment of the schedule: the messages that are due in one stretch of time.

Most rows lie in its file, the newest in memory. What became of them is a byte a row, made when the first of them is
dispatched or cancelled; a segment that only waits has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmq.delayserver.schedule.blocks import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    DamagedSchedule,
    decode_blocks,
    decode_marks,
    make_mark,
    make_marks,
    split_marks,
)
from qmq.delayserver.schedule.checkpoint import FOLDER
from qmq.delayserver.schedule.growing import Growing
from qmq.delayserver.schedule.record import RECORD, Numbers, Records, State, join, no_records
from qmq.log.disk import Disk

States = NDArray[np.uint8]
NO_NUMBER = (1 << 64) - 1
READ_BLOCKS = 512
"""32,768 rows, 1.5 MiB: what is read of a file at once; to put them on a wheel takes about 2 ms."""
READ_ROWS = READ_BLOCKS * BLOCK_ROWS


@dataclass(slots=True)
class Loading:
    """How far the segment is on the wheel: what is due before `from_ms`, rows below `handed` and from `end` on; the
    others are still to be read. What is due from the schedule's horizon on is on no wheel."""

    handed: int
    end: int
    from_ms: int = 0

    def has(self, records: Records) -> NDArray[np.bool_]:
        """Return which of these no piece will bring any more."""
        rows = records["row"]
        has: NDArray[np.bool_] = (rows < self.handed) | (rows >= self.end) | (records["due"] < self.from_ms)
        return has


@dataclass(frozen=True, slots=True)
class Rows:
    """The records of a segment at one moment, for a thread: some are in the file, the others in `memory`."""

    disk: Disk
    name: str
    begin_ms: int
    written: int
    memory: tuple[Records, ...]

    def __len__(self) -> int:
        return self.written + sum(map(len, self.memory))

    def read(self, begin: int, end: int) -> Records:
        """Read rows `[begin, end)`, maybe none; raises DamagedSchedule."""
        parts, at = [], self.written
        if begin < at:
            parts.append(self._from_file(begin, min(end, at)))
        for part in self.memory:
            parts.append(part[max(begin - at, 0) : max(end - at, 0)])
            at += len(part)
        return join(parts)

    def _from_file(self, begin: int, end: int) -> Records:
        first, last = begin // BLOCK_ROWS, -(-end // BLOCK_ROWS)
        data = read_blocks(self.disk, self.name, first, last)
        rows = decode_blocks(self.name, self.begin_ms, np.arange(first, last), data)
        return rows[begin - first * BLOCK_ROWS : end - first * BLOCK_ROWS]


@dataclass(frozen=True, slots=True)
class Marked:
    """What became of a segment's messages, by a moment: in the file, and in memory."""

    disk: Disk
    name: str
    file_bytes: int
    memory: Numbers

    def read(self) -> Numbers:
        """Return all marks; raises DamagedSchedule."""
        data = self.disk.read(marks_name(self.name), 0, self.file_bytes)
        if len(data) < self.file_bytes:
            raise DamagedSchedule(f"marks of {self.name} end at {len(data)} bytes, not at {self.file_bytes}")
        return np.concatenate((decode_marks(self.name, data), self.memory))


def read_blocks(disk: Disk, name: str, first: int, last: int) -> bytes:
    """Read blocks `[first, last)`; raises DamagedSchedule if the file is too short."""
    data = disk.read(records_name(name), first * BLOCK_BYTES, (last - first) * BLOCK_BYTES)
    if len(data) < (last - first) * BLOCK_BYTES:
        raise DamagedSchedule(f"{name} ends before block {last}")
    return data


def records_name(name: str) -> str:
    return f"{FOLDER}/{name}.records"


def marks_name(name: str) -> str:
    return f"{FOLDER}/{name}.marks"


class Segment:
    """Messages due in `[begin_ms, end_ms)`. Made and changed by the schedule, on its loop."""

    __slots__ = (
        "begin_ms",
        "end_ms",
        "name",
        "written",
        "marks_bytes",
        "undone",
        "loading",
        "tail",
        "flushing",
        "firsts",
        "marks",
        "view",
        "_disk",
        "_states",
    )

    def __init__(self, disk: Disk, *, begin_ms: int, end_ms: int, name: str) -> None:
        self.begin_ms, self.end_ms, self.name = begin_ms, end_ms, name
        self.written = 0  # rows in the file
        self.marks_bytes = 0
        self.undone = 0  # messages that pend or are in flight
        self.loading: Loading | None = None
        self.tail, self.flushing = Growing(dtype=RECORD), no_records()
        self.firsts = Growing(dtype=np.uint64)  # number of the first record of each block
        self.marks = Growing(dtype=np.uint64)  # not in the file yet
        self.view: Any = None
        """What questions see of it (search.SegmentView), until it changes."""
        self._disk = disk
        self._states: Growing | None = None

    def __len__(self) -> int:
        return self.written + len(self.flushing) + len(self.tail)

    @property
    def first_number(self) -> int:
        """The lowest number of all its messages; it has some."""
        for numbers in (self.firsts.view, self.flushing["number"], self.tail.view["number"]):
            if len(numbers):
                return int(numbers[0])
        return NO_NUMBER

    @property
    def rows(self) -> Rows:
        return Rows(self._disk, self.name, self.begin_ms, self.written, (self.flushing, self.tail.view))

    def add(self, records: Records) -> None:
        """File messages, in the order of the log; gives them their rows."""
        records["row"] = np.arange(len(self), len(self) + len(records))
        self.tail.append(records)
        self.undone += len(records)
        self.view = None

    def known_states(self) -> States | None:
        """Return what became of each row, as `states` does, if it does not have to be read."""
        return None if self._states is None and (self.marks_bytes or len(self.marks)) else self.states()

    def states(self) -> States:
        """Return what became of each row; those past the end of the answer pend. Raises DamagedSchedule."""
        if self._states is None:
            if not self.marks_bytes and not len(self.marks):
                return np.empty(0, np.uint8)
            rows, states = split_marks(self.marked.read())
            self._set(rows, states.astype(np.uint8))
        return self._states.view if self._states is not None else np.empty(0, np.uint8)

    @property
    def marked(self) -> Marked:
        return Marked(self._disk, self.name, self.marks_bytes, self.marks.view)

    def states_of(self, rows: NDArray[np.uint32]) -> States:
        states = self.states()
        try:
            return states[rows]
        except IndexError:  # nothing became of some of them
            pass
        found = np.zeros(len(rows), np.uint8)
        known = rows < len(states)
        found[known] = states[rows[known]]
        return found

    def all_pend(self, rows: NDArray[np.uint32]) -> bool:
        """Return whether nothing became of these. Raises DamagedSchedule."""
        if len(rows) == 1 and self._states is not None and (row := rows.item(0)) < len(self._states):
            return not self._states.item(row)  # as most cancels ask
        return not self.states_of(rows).any()

    def change(self, rows: NDArray[np.uint32], state: State) -> None:
        """Note what became of rows, which were not over before."""
        if self._states is None:
            self.states()
        if len(rows) == 1 and self._states is not None and (row := rows.item(0)) < len(self._states):
            self._states.put(row, state)  # as most cancels do
            if state >= State.SENT:
                self.marks.append_one(make_mark(row, state))
        else:
            self._set(rows, state)
            if state >= State.SENT:
                self.marks.append(make_marks(rows.astype(np.uint64), state))
        if state >= State.SENT:
            self.undone -= len(rows)

    def _set(self, rows: NDArray[np.uint32] | Numbers, states: States | int) -> None:
        """Note states. A view sees them, as long as they lie where they lay."""
        if self._states is None:
            self._states, self.view = Growing(np.zeros(len(self), np.uint8)), None
        try:
            self._states.view[rows] = states
        except IndexError:  # nothing became of some of them
            missing = max(int(rows.max()) + 1, len(self)) - len(self._states)
            self._states.append(np.zeros(missing, np.uint8))
            self._states.view[rows] = states
            self.view = None

    def locate(self, numbers: Numbers) -> tuple[Records, NDArray[np.bool_]]:
        """Look up messages by number; return their records, and which were found. Raises DamagedSchedule."""
        records, found = np.zeros(len(numbers), RECORD), np.zeros(len(numbers), np.bool_)
        for part in (self.flushing, self.tail.view):
            _pick(part, numbers, records, found)
        if self.written and not found.all():
            in_file = self.firsts.view[: self.written // BLOCK_ROWS]
            blocks = sorted({*(in_file.searchsorted(numbers[~found], "right") - 1).tolist()} - {-1})
            if blocks:
                _pick(self._read_blocks(blocks), numbers, records, found)
        return records, found

    def _read_blocks(self, blocks: list[int]) -> Records:
        """Read blocks here and there in the file, neighbours at once."""
        data, at = [], 0
        while at < len(blocks):
            end = at + 1
            while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
                end += 1
            data.append(read_blocks(self._disk, self.name, blocks[at], blocks[end - 1] + 1))
            at = end
        return decode_blocks(self.name, self.begin_ms, np.array(blocks), b"".join(data))

    def take_blocks(self) -> Records:
        """Take what fills whole blocks out of the tail; it is `flushing` until it was written."""
        full = len(self.tail) // BLOCK_ROWS * BLOCK_ROWS
        if full:
            self.view = None
            self.flushing, self.tail = self.tail.view[:full], Growing(self.tail.view[full:].copy())
            self.firsts.append(self.flushing["number"][::BLOCK_ROWS])
        return self.flushing

    def wrote_marks(self, count: int, end: int) -> None:
        """The first `count` marks are in the file, which has `end` bytes."""
        self.marks_bytes, self.marks = end, Growing(self.marks.view[count:].copy())
        self.view = None

    def wrote_blocks(self) -> None:
        self.written += len(self.flushing)
        self.flushing = no_records()
        self.view = None


def _pick(part: Records, numbers: Numbers, records: Records, found: NDArray[np.bool_]) -> None:
    """Take from `part`, whose numbers ascend, the records of `numbers`."""
    if not len(part):
        return
    known = part["number"]
    at = np.minimum(known.searchsorted(numbers), len(part) - 1)
    hits = known[at] == numbers
    records[hits] = part.take(at[hits])
    found |= hits
