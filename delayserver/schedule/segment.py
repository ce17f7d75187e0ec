"""Core. One segment of the schedule: the messages that are due in one stretch of time, and its two files.

Most rows lie in the records file, the newest in memory. States take one byte a row, allocated when the first message is
dispatched or cancelled; a segment without changes has none. All integers little-endian.

`NAME.records`, messages in the order of the log, so numbers ascend; blocks of one size, so any row is found:

    0     u32  CRC-32 of the rest of the block
    4     u32  magic "QDR1"
    8     u64  begin of the segment, ms since 1970 UTC
    16    u64  row of the block's first record
    24    24 zeros
    48    64 records of 48 bytes (delayserver.schedule.record)

`NAME.marks`, their outcomes; blocks of any size, read as a whole:

    0     u32  CRC-32 of the rest of the block
    4     u32  count n
    8     n x  u64: bits 0 to 55 the row, bits 56 to 63 the state (sent, cancelled, moved)

Both are derived from the log and only grow. They are valid up to the lengths in the checkpoint. Bytes behind those are
left from a crash, never read, and written over.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.delayserver.schedule.record import RECORD, RECORD_BYTES, Numbers, Records, State, join, no_records
from qmq.errors import LogError
from qmq.log.disk import Disk

_LEAST = 8
_STEP = 65_536


class Growing:
    """Array that grows at its end. A `view` stays valid on another thread while it grows.

    Records are copied as bytes: by fields, numpy takes ten times as long.
    """

    __slots__ = ("_dtype", "_room", "_count")

    def __init__(self, elements: NDArray[Any] | None = None, *, dtype: DTypeLike | None = None) -> None:
        room = np.empty(0, dtype) if elements is None else elements
        self._dtype = room.dtype
        self._room = _plain(room)
        self._count = len(room)

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> NDArray[Any]:
        room = self._room[: self._count]
        return room if room.dtype is self._dtype else room.view(self._dtype)

    def item(self, at: int) -> int:
        """Return one number; much faster than through a view."""
        if at >= self._count:
            raise IndexError(at)
        number: int = self._room.item(at)
        return number

    def put(self, at: int, number: int) -> None:
        """Replace an existing number; much faster than through a view."""
        if at >= self._count:
            raise IndexError(at)
        self._room[at] = number

    def append_one(self, number: int) -> None:
        """Append one number; much faster than an array of one."""
        if self._count == len(self._room):
            self.append(np.array([number], self._dtype))
            return
        self._room[self._count] = number
        self._count += 1

    def append(self, more: NDArray[Any]) -> None:
        """Append an array of the same type."""
        end = self._count + len(more)
        if end > len(self._room):
            room = np.empty(max(_LEAST, end, min(2 * len(self._room), end + max(_STEP, end // 4))), self._room.dtype)
            room[: self._count] = self._room[: self._count]
            self._room = room
        self._room[self._count : end] = _plain(more)
        self._count = end


def _plain(elements: NDArray[Any]) -> NDArray[Any]:
    return elements if elements.dtype.fields is None else elements.view((np.void, elements.dtype.itemsize))


BLOCK_ROWS = 64
"""Rows of a block. Looking up a message reads one block, 3 KiB; an unfinished block stays in memory and the
checkpoint.
"""
BLOCK_BYTES = (BLOCK_ROWS + 1) * RECORD_BYTES
_MAGIC = int.from_bytes(b"QDR1", "little")
_HEAD = np.dtype([("crc", "<u4"), ("magic", "<u4"), ("begin_ms", "<u8"), ("row", "<u8"), ("zeros", "V24")])
_MARKS_HEAD = struct.Struct("<II")
_STATE_SHIFT = 56
STATE_SHIFT = np.uint64(_STATE_SHIFT)
_ROW_MASK = np.uint64((1 << 56) - 1)


class DamagedSchedule(LogError):
    """A file of the schedule is damaged. Discard the schedule and rebuild it from the log."""


def encode_blocks(begin_ms: int, row: int, records: Records) -> bytearray:
    """Pack whole blocks of records, from row `row` on."""
    count = len(records) // BLOCK_ROWS
    rows = np.zeros((count, BLOCK_ROWS + 1), RECORD)
    rows[:, 1:] = records.reshape(count, BLOCK_ROWS)
    heads = rows[:, 0].view(_HEAD)
    heads["magic"], heads["begin_ms"] = _MAGIC, begin_ms
    heads["row"] = np.arange(row, row + len(records), BLOCK_ROWS)
    data = bytearray(rows.tobytes())
    view = memoryview(data)
    for at in range(0, len(data), BLOCK_BYTES):
        struct.pack_into("<I", data, at, crc32(view[at + 4 : at + BLOCK_BYTES]))
    return data


def decode_blocks(name: str, begin_ms: int, blocks: NDArray[np.int64], data: Buffer) -> Records:
    """Unpack whole blocks at these positions of their file; raises DamagedSchedule."""
    if len(data) != len(blocks) * BLOCK_BYTES:
        raise DamagedSchedule(f"{name} ends within a block")
    view = memoryview(data)
    rows: Records = np.frombuffer(data, RECORD).reshape(-1, BLOCK_ROWS + 1)
    heads = rows[:, 0].view(_HEAD)
    crcs = [crc32(view[at + 4 : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    right = (heads["crc"] == crcs) & (heads["row"] == blocks * BLOCK_ROWS)
    right &= (heads["magic"] == _MAGIC) & (heads["begin_ms"] == begin_ms)
    if not right.all():
        raise DamagedSchedule(f"{name}: block {blocks[int(np.argmin(right))]} does not match its CRC")
    return rows[:, 1:].ravel()


def marks_bytes(count: int) -> int:
    """Return the size of a block of marks; 0 without marks."""
    return _MARKS_HEAD.size + 8 * count if count else 0


def encode_marks(marks: Numbers) -> bytes:
    rest = len(marks).to_bytes(4, "little") + marks.tobytes()
    return crc32(rest).to_bytes(4, "little") + rest


def decode_marks(name: str, data: Buffer) -> Numbers:
    """Unpack all marks of a segment; raises DamagedSchedule."""
    view, at, parts = memoryview(data), 0, [np.empty(0, np.uint64)]
    while at < len(view):
        if len(view) - at < _MARKS_HEAD.size:
            raise DamagedSchedule(f"{name} ends within a block")
        crc, count = _MARKS_HEAD.unpack_from(view, at)
        end = at + _MARKS_HEAD.size + 8 * count
        if end > len(view) or crc32(view[at + 4 : end]) != crc:
            raise DamagedSchedule(f"{name}: marks at {at} do not match their CRC")
        parts.append(np.frombuffer(view, "<u8", count, at + _MARKS_HEAD.size))
        at = end
    return np.concatenate(parts)


def make_marks(rows: Numbers, state: int) -> Numbers:
    return rows | (np.uint64(state) << STATE_SHIFT)


def make_mark(row: int, state: int) -> int:
    return row | state << _STATE_SHIFT


def split_marks(marks: Numbers) -> tuple[Numbers, Numbers]:
    """Return rows and states."""
    return marks & _ROW_MASK, marks >> STATE_SHIFT


FOLDER = "segments"

States = NDArray[np.uint8]
NO_NUMBER = (1 << 64) - 1
READ_BLOCKS = 512
"""Blocks read at once: 32,768 rows, 1.5 MiB; putting them on a wheel takes about 2 ms."""
READ_ROWS = READ_BLOCKS * BLOCK_ROWS


@dataclass(slots=True)
class SegmentLoad:
    """Loading of a segment onto the wheel. Messages due before `from_ms`, rows below `handed`, and rows from `end` on
    are loaded, as far as the schedule's horizon allows. The others are still to be read.
    """

    handed: int
    end: int
    from_ms: int = 0

    def has(self, records: Records) -> NDArray[np.bool_]:
        """Return which of these records no later piece contains."""
        rows = records["row"]
        has: NDArray[np.bool_] = (rows < self.handed) | (rows >= self.end) | (records["due"] < self.from_ms)
        return has


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of a segment at one moment, for a thread: some in the file, the others in `memory`."""

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
    """States of a segment's messages at one moment: marks in the file and in memory."""

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
        self.begin_ms = begin_ms
        self.end_ms = end_ms
        self.name = name
        self.written = 0  # rows in the file
        self.marks_bytes = 0
        self.undone = 0  # messages that pend or are in flight
        self.loading: SegmentLoad | None = None
        self.tail = Growing(dtype=RECORD)
        self.flushing = no_records()
        self.firsts = Growing(dtype=np.uint64)  # number of the first record of each block
        self.marks = Growing(dtype=np.uint64)  # not in the file yet
        self.view: Any = None
        """View for questions (search.SegmentView), until the segment changes."""
        self._disk = disk
        self._states: Growing | None = None

    def __len__(self) -> int:
        return self.written + len(self.flushing) + len(self.tail)

    @property
    def first_number(self) -> int:
        """The lowest number of its messages. The segment must not be empty."""
        for numbers in (self.firsts.view, self.flushing["number"], self.tail.view["number"]):
            if len(numbers):
                return int(numbers[0])
        return NO_NUMBER

    @property
    def rows(self) -> Rows:
        return Rows(self._disk, self.name, self.begin_ms, self.written, (self.flushing, self.tail.view))

    def add(self, records: Records) -> None:
        """Add messages in the order of the log, and assign their rows."""
        records["row"] = np.arange(len(self), len(self) + len(records))
        self.tail.append(records)
        self.undone += len(records)
        self.view = None

    def known_states(self) -> States | None:
        """Return the states if they need not be read, else None."""
        return None if self._states is None and (self.marks_bytes or len(self.marks)) else self.states()

    def states(self) -> States:
        """Return the state of each row; rows past the end of the result pend. Raises DamagedSchedule."""
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
        except IndexError:  # some of them have no state yet
            pass
        found = np.zeros(len(rows), np.uint8)
        known = rows < len(states)
        found[known] = states[rows[known]]
        return found

    def all_pend(self, rows: NDArray[np.uint32]) -> bool:
        """Return whether all of these rows pend. Raises DamagedSchedule."""
        if len(rows) == 1 and self._states is not None and (row := rows.item(0)) < len(self._states):
            return not self._states.item(row)  # the usual cancel
        return not self.states_of(rows).any()

    def change(self, rows: NDArray[np.uint32], state: State) -> None:
        """Set the state of rows that were not done."""
        if self._states is None:
            self.states()
        if len(rows) == 1 and self._states is not None and (row := rows.item(0)) < len(self._states):
            self._states.put(row, state)  # the usual cancel
            if state >= State.SENT:
                self.marks.append_one(make_mark(row, state))
        else:
            self._set(rows, state)
            if state >= State.SENT:
                self.marks.append(make_marks(rows.astype(np.uint64), state))
        if state >= State.SENT:
            self.undone -= len(rows)

    def _set(self, rows: NDArray[np.uint32] | Numbers, states: States | int) -> None:
        """Set states in place: views see them."""
        if self._states is None:
            self._states = Growing(np.zeros(len(self), np.uint8))
            self.view = None
        try:
            self._states.view[rows] = states
        except IndexError:  # some of them have no state yet
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
        """Read scattered blocks of the file, neighbours together."""
        data, at = [], 0
        while at < len(blocks):
            end = at + 1
            while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
                end += 1
            data.append(read_blocks(self._disk, self.name, blocks[at], blocks[end - 1] + 1))
            at = end
        return decode_blocks(self.name, self.begin_ms, np.array(blocks), b"".join(data))

    def take_blocks(self) -> Records:
        """Move whole blocks from the tail to `flushing`, until they are written."""
        full = len(self.tail) // BLOCK_ROWS * BLOCK_ROWS
        if full:
            self.view = None
            self.flushing, self.tail = self.tail.view[:full], Growing(self.tail.view[full:].copy())
            self.firsts.append(self.flushing["number"][::BLOCK_ROWS])
        return self.flushing

    def wrote_marks(self, count: int, end: int) -> None:
        """Note that the first `count` marks are in the file, which has `end` bytes."""
        self.marks_bytes, self.marks = end, Growing(self.marks.view[count:].copy())
        self.view = None

    def wrote_blocks(self) -> None:
        self.written += len(self.flushing)
        self.flushing = no_records()
        self.view = None


def _pick(part: Records, numbers: Numbers, records: Records, found: NDArray[np.bool_]) -> None:
    """Copy the records of `numbers` from `part`, in ascending order of numbers."""
    if not len(part):
        return
    known = part["number"]
    at = np.minimum(known.searchsorted(numbers), len(part) - 1)
    hits = known[at] == numbers
    records[hits] = part.take(at[hits])
    found |= hits
