"""Core. The files of a schedule segment. All integers little-endian.

`NAME.records`, messages in the order of the log, so numbers ascend; blocks of one size, so any row is found:

    0     u32  CRC-32 of the rest of the block
    4     u32  magic "QDR1"
    8     u64  begin of the segment, ms since 1970 UTC
    16    u64  row of the block's first record
    24    24 zeros
    48    64 records of 48 bytes (delayserver.schedule.record)

`NAME.marks`, what became of them; blocks of any size, read as a whole:

    0     u32  CRC-32 of the rest of the block
    4     u32  count n
    8     n x  u64: bits 0 to 55 the row, bits 56 to 63 the state (sent, cancelled, moved)

Both are derived from the log, only grow, and count up to where the checkpoint says: what a crash left behind that is
never read, and written over.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.delayserver.schedule.record import RECORD, RECORD_BYTES, Numbers, Records
from qmq.errors import LogError

BLOCK_ROWS = 64
"""A look-up of one message reads one block, 3 KiB; what does not fill one stays in memory and in the checkpoint."""
BLOCK_BYTES = (BLOCK_ROWS + 1) * RECORD_BYTES
_MAGIC = int.from_bytes(b"QDR1", "little")
_HEAD = np.dtype([("crc", "<u4"), ("magic", "<u4"), ("begin_ms", "<u8"), ("row", "<u8"), ("zeros", "V24")])
_MARKS_HEAD = struct.Struct("<II")
_STATE_SHIFT = 56
STATE_SHIFT = np.uint64(_STATE_SHIFT)
_ROW_MASK = np.uint64((1 << 56) - 1)


class DamagedSchedule(LogError):
    """A file of the schedule is not as it was written. Discard the schedule and make it again from the log."""


def encode_blocks(begin_ms: int, row: int, records: Records) -> bytearray:
    """Pack whole blocks of records, the first of which has row `row`."""
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
    """Unpack whole blocks, which have these positions in their file; raises DamagedSchedule."""
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
    """Return the size of a block of marks; none has no block."""
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
    """Return the rows, and the states."""
    return marks & _ROW_MASK, marks >> STATE_SHIFT
