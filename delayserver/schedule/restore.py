"""Core. How the schedule begins: from its checkpoint, or empty, to be filed again from the log's start."""

from __future__ import annotations

from qmq.delayserver.schedule.blocks import BLOCK_BYTES, BLOCK_ROWS, DamagedSchedule
from qmq.delayserver.schedule.book import Book, InFlight
from qmq.delayserver.schedule.checkpoint import FOLDER, NAME, Checkpoint, SavedSegment, decode_checkpoint
from qmq.delayserver.schedule.growing import Growing
from qmq.delayserver.schedule.record import State
from qmq.delayserver.schedule.segment import Segment, marks_name, records_name
from qmq.log.disk import Disk
from qmq.log.frame import NO_CHAIN


def restore(disk: Disk, *, segment_ms: int, log_start: int) -> tuple[Book, str]:
    """Return the schedule as its checkpoint has it, or an empty one and why."""
    try:
        return _from_checkpoint(disk, segment_ms, log_start), ""
    except (ValueError, KeyError, DamagedSchedule) as error:
        discard(disk)
        return Book(disk, segment_ms, log_start, NO_CHAIN), str(error)


def discard(disk: Disk) -> None:
    """Forget the schedule: the next one is made from the log's start."""
    disk.remove(NAME)
    for name in disk.names(FOLDER):
        disk.remove(f"{FOLDER}/{name}")


def _from_checkpoint(disk: Disk, segment_ms: int, log_start: int) -> Book:
    if not (size := disk.size(NAME)):
        raise DamagedSchedule("there is no checkpoint")
    saved = decode_checkpoint(disk.read(NAME, 0, size))
    if saved.filed_end < log_start:
        raise DamagedSchedule(f"the checkpoint ends at {saved.filed_end}, the log begins at {log_start}")
    book = Book(disk, segment_ms, saved.filed_end, saved.filed_chain, saved.subjects, counts=saved.counts)
    _check_files(disk, saved)
    book.timeline.put([_segment(disk, one) for one in saved.segments])
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
    """Delete files that the checkpoint does not know. What stands behind the bytes it counts is written over."""
    sizes = {records_name(one.name): one.written // BLOCK_ROWS * BLOCK_BYTES for one in saved.segments}
    sizes |= {marks_name(one.name): one.marks_bytes for one in saved.segments}
    for name, size in sizes.items():
        if (there := disk.size(name)) < size:
            raise DamagedSchedule(f"{name} has {there} bytes, not {size}")
    for name in disk.names(FOLDER):
        if (path := f"{FOLDER}/{name}") != NAME and not sizes.get(path):
            disk.remove(path)
