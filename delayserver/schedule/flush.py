"""Core. What goes to the disk at once: full blocks of segments, marks, and now and then a checkpoint.

Blocks and marks are only written; a checkpoint comes after the fsync of every file that it counts on, and before the
files of segments are deleted that it knows no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq.codec import Buffer
from qmq.delayserver.schedule.blocks import BLOCK_BYTES, BLOCK_ROWS, encode_blocks, encode_marks, marks_bytes
from qmq.delayserver.schedule.checkpoint import NAME, Checkpoint
from qmq.delayserver.schedule.record import Numbers, Records
from qmq.delayserver.schedule.segment import Segment, marks_name, records_name
from qmq.log.disk import Disk


@dataclass(frozen=True, slots=True)
class SegmentWrite:
    """What is appended to the files of a segment: to its records from row `row`, to its marks from byte `marks_at`."""

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
    """Made by `Schedule.take_flush`; `perform` runs on a thread, then the schedule is told (`flushed`)."""

    disk: Disk
    writes: list[SegmentWrite]
    checkpoint: Checkpoint | None
    unsynced: set[str]
    """Files that were written since the last checkpoint; this flush's own are added."""
    gone: list[str]
    """Segments to delete after the checkpoint."""

    def perform(self) -> None:
        """Raises DiskFailed: end the process, as for the log."""
        for write in self.writes:
            self._write(write)
        if self.checkpoint is None:
            return
        for name in sorted(self.unsynced):
            self.disk.sync(name)
        self.disk.put(NAME, self.checkpoint.encode())
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
            self.disk.create(name, 0, lasting=False)  # with 700 segments, 5 s less for the first flush
        self.disk.write(name, at, [data])
        self.unsynced.add(name)
