"""Core. Checkpoint of the schedule: written by flushes, read at start.

A checkpoint is one file, replaced whole, after the fsync of every file whose lengths it states. A flush appends full
blocks and marks to the files of segments. Some flushes also write a checkpoint, and then delete the files of dropped
segments. After a restart the frames from `filed_end` on are filed again. All integers little-endian:

    0     u32  CRC-32 of the rest
    4     u32  magic "QDC1"
    8     u32  bytes j
    12    j    JSON: filed_end, filed_chain, subjects, a list per segment, a list per dispatch in flight, lengths
    12+j       u64 first numbers of all blocks, records of all tails, u64 marks of all tails, records in flight,
               counts per (u64 hour, u64 subject, u64 messages), counts per (u64 stretch, u64 messages)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.delayserver.schedule.record import RECORD, Numbers, Records, State
from qmq.delayserver.schedule.segment import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    FOLDER,
    DamagedSchedule,
    Growing,
    Segment,
    encode_blocks,
    encode_marks,
    marks_bytes,
    marks_name,
    records_name,
)
from qmq.delayserver.schedule.state import Book, Counts, InFlight
from qmq.log.disk import Disk
from qmq.log.frame import NO_CHAIN

_MAGIC = b"QDC1"
CHECKPOINT = f"{FOLDER}/checkpoint"
"""In the same folder as the files with the stated lengths: an fsync of the folder covers their names too."""


@dataclass(frozen=True, slots=True)
class SavedSegment:
    """Segment in a checkpoint: the lengths of its files, and its parts that are in no file."""

    begin_ms: int
    end_ms: int
    name: str
    written: int
    marks_bytes: int
    undone: int
    firsts: Numbers
    tail: Records
    marks: Numbers


@dataclass(frozen=True, slots=True)
class SavedDispatch:
    """Dispatch without an outcome, in a checkpoint."""

    producer: int
    batch: int
    group: str
    subject: str
    records: Records


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Contents of a checkpoint; the module's docstring draws the file."""

    filed_end: int
    filed_chain: int
    subjects: list[str]
    segments: list[SavedSegment]
    in_flight: list[SavedDispatch]
    counts: Counts

    def encode(self) -> bytes:
        hours = [(hour, *entry) for hour, subjects in self.counts.hours.items() for entry in subjects.items()]
        head = {
            "filed_end": self.filed_end,
            "filed_chain": self.filed_chain,
            "subjects": self.subjects,
            "messages": self.counts.messages,
            "bytes": self.counts.bytes,
            "hours": len(hours),
            "stretches": len(self.counts.stretches),
            "segments": [
                [
                    s.begin_ms,
                    s.end_ms,
                    s.name,
                    s.written,
                    s.marks_bytes,
                    s.undone,
                    len(s.firsts),
                    len(s.tail),
                    len(s.marks),
                ]
                for s in self.segments
            ],
            "in_flight": [[d.producer, d.batch, d.group, d.subject, len(d.records)] for d in self.in_flight],
        }
        text = json.dumps(head).encode()
        rest = b"".join(
            (
                _MAGIC,
                len(text).to_bytes(4, "little"),
                text,
                _joined((s.firsts for s in self.segments), np.uint64),
                _joined((s.tail for s in self.segments), RECORD),
                _joined((s.marks for s in self.segments), np.uint64),
                _joined((d.records for d in self.in_flight), RECORD),
                np.array(hours, np.uint64).tobytes(),
                np.array(list(self.counts.stretches.items()), np.uint64).tobytes(),
            )
        )
        return crc32(rest).to_bytes(4, "little") + rest


def _joined(arrays: Iterable[NDArray[Any]], dtype: Any) -> bytes:
    return np.concatenate([np.empty(0, dtype), *arrays]).tobytes()


class _Reader:
    """Reader of consecutive arrays."""

    def __init__(self, data: Buffer, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, count: int, dtype: Any) -> NDArray[Any]:
        array: NDArray[Any] = np.frombuffer(self._data, dtype, count, self._at).copy()
        self._at += array.nbytes
        return array

    def split(self, counts: Sequence[int], dtype: Any) -> list[NDArray[Any]]:
        """Return copies, so that none keeps the whole checkpoint in memory."""
        return [self.take(count, dtype) for count in counts]


def decode_checkpoint(data: Buffer) -> Checkpoint:
    """Decode a checkpoint; raises ValueError if it is damaged: the schedule is then rebuilt from the log."""
    if len(data) < 12 or crc32(memoryview(data)[4:]) != int.from_bytes(data[:4], "little") or data[4:8] != _MAGIC:
        raise ValueError("the checkpoint does not match its CRC")
    begin = 12 + int.from_bytes(data[8:12], "little")
    head = json.loads(bytes(data[12:begin]))
    reader, rows = _Reader(data, begin), head["segments"]
    firsts = reader.split([row[6] for row in rows], np.uint64)
    tails = reader.split([row[7] for row in rows], RECORD)
    marks = reader.split([row[8] for row in rows], np.uint64)
    flying = reader.split([row[4] for row in head["in_flight"]], RECORD)
    counts = Counts()
    counts.messages, counts.bytes = head["messages"], head["bytes"]
    for hour, subject, messages in reader.take(3 * head["hours"], np.uint64).reshape(-1, 3).tolist():
        counts.hours[hour][subject] = messages
    counts.stretches = dict(reader.take(2 * head["stretches"], np.uint64).reshape(-1, 2).tolist())
    dispatches = zip(head["in_flight"], flying, strict=True)
    return Checkpoint(
        head["filed_end"],
        head["filed_chain"],
        head["subjects"],
        [SavedSegment(*row[:6], *arrays) for row, *arrays in zip(rows, firsts, tails, marks, strict=True)],
        [SavedDispatch(producer, batch, group, subject, r) for (producer, batch, group, subject, _), r in dispatches],
        counts,
    )


@dataclass(frozen=True, slots=True)
class SegmentWrite:
    """Data to append to the files of a segment: records from row `row`, marks from byte `marks_at`."""

    segment: Segment
    row: int
    records: Records
    marks_at: int
    marks: Numbers

    @property
    def marks_end(self) -> int:
        return self.marks_at + marks_bytes(len(self.marks))


@dataclass(frozen=True, slots=True)
class Flush:
    """One write of the schedule to disk. Made by `Schedule.take_flush`; `perform` runs on a thread, then call
    `Schedule.flushed`.
    """

    disk: Disk
    writes: list[SegmentWrite]
    checkpoint: Checkpoint | None
    unsynced: set[str]
    """Files written since the last checkpoint; this flush adds its own."""
    gone: list[str]
    """Segments to delete after the checkpoint."""

    def perform(self) -> None:
        """Write, and fsync before a checkpoint. Raises DiskFailed: the process must exit, as for the log."""
        for write in self.writes:
            self._write(write)
        if self.checkpoint is None:
            return
        for name in sorted(self.unsynced):
            self.disk.sync(name)
        self.disk.put(CHECKPOINT, self.checkpoint.encode())
        for name in self.gone:
            self.disk.remove(records_name(name))
            self.disk.remove(marks_name(name))

    def _write(self, write: SegmentWrite) -> None:
        segment = write.segment
        if len(write.records):
            data = encode_blocks(segment.begin_ms, write.row, write.records)
            self._append(records_name(segment.name), write.row // BLOCK_ROWS * BLOCK_BYTES, data)
        if len(write.marks):
            self._append(marks_name(segment.name), write.marks_at, encode_marks(write.marks))

    def _append(self, name: str, at: int, data: Buffer) -> None:
        if at == 0:
            self.disk.create(name, 0, lasting=False)  # with 700 segments, this saves 5 s of the first flush
        self.disk.write(name, at, [data])
        self.unsynced.add(name)


def restore(disk: Disk, *, segment_ms: int, log_start: int) -> tuple[Book, str]:
    """Return the schedule of the checkpoint and "", or an empty schedule and the reason."""
    try:
        return _from_checkpoint(disk, segment_ms, log_start), ""
    except (ValueError, DamagedSchedule) as error:
        reason = str(error)
    except (LookupError, TypeError) as error:  # its CRC is right: another version wrote it
        reason = f"the checkpoint has an unknown structure: {error!r}"
    discard(disk)
    return Book(disk, segment_ms, log_start, NO_CHAIN), reason


def discard(disk: Disk) -> None:
    """Delete all files of the schedule."""
    disk.remove(CHECKPOINT)
    for name in disk.names(FOLDER):
        disk.remove(f"{FOLDER}/{name}")


def _from_checkpoint(disk: Disk, segment_ms: int, log_start: int) -> Book:
    if not (size := disk.size(CHECKPOINT)):
        raise DamagedSchedule("there is no checkpoint")
    saved = decode_checkpoint(disk.read(CHECKPOINT, 0, size))
    if saved.filed_end < log_start:
        raise DamagedSchedule(f"the checkpoint ends at {saved.filed_end}, the log begins at {log_start}")
    book = Book(disk, segment_ms, saved.filed_end, saved.filed_chain, saved.subjects, counts=saved.counts)
    _check_files(disk, saved)
    book.timeline.put([_segment(disk, segment) for segment in saved.segments])
    for dispatch in saved.in_flight:
        key = (dispatch.producer, dispatch.batch)
        parts = list(book.timeline.split(dispatch.records))
        book.in_flight[key] = InFlight(*key, dispatch.group, dispatch.subject, dispatch.records, parts)
        book.change_parts(dispatch.records, parts, State.IN_FLIGHT)
    return book


def _segment(disk: Disk, saved: SavedSegment) -> Segment:
    segment = Segment(disk, begin_ms=saved.begin_ms, end_ms=saved.end_ms, name=saved.name)
    segment.written, segment.marks_bytes, segment.undone = saved.written, saved.marks_bytes, saved.undone
    segment.firsts, segment.tail, segment.marks = Growing(saved.firsts), Growing(saved.tail), Growing(saved.marks)
    if segment.undone:
        segment.states()
    return segment


def _check_files(disk: Disk, saved: Checkpoint) -> None:
    """Check the lengths that the checkpoint states, and delete other files. Bytes behind a stated length are written
    over.
    """
    sizes = {records_name(segment.name): segment.written // BLOCK_ROWS * BLOCK_BYTES for segment in saved.segments}
    sizes |= {marks_name(segment.name): segment.marks_bytes for segment in saved.segments}
    for name, size in sizes.items():
        if (there := disk.size(name)) < size:
            raise DamagedSchedule(f"{name} has {there} bytes, not {size}")
    for name in disk.names(FOLDER):
        if (path := f"{FOLDER}/{name}") != CHECKPOINT and not sizes.get(path):
            disk.remove(path)
