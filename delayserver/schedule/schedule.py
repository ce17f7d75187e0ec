"""Core. Schedule: index, by due time, of a log's delayed messages that are not done. It follows the log's frames.

Each copy makes its own schedule, from frames below the high watermark. Those are never cut, so the schedule never goes
back. After a crash it continues from the last checkpoint; a damaged one is rebuilt from the log's start. So no part of
the log with pending messages may be deleted (`pending_below`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qmq.codec import Buffer
from qmq.delayserver.schedule.checkpoint import (
    Checkpoint,
    Flush,
    SavedDispatch,
    SavedSegment,
    SegmentWrite,
    discard,
    restore,
)
from qmq.delayserver.schedule.record import DUE_MAX_MS, Records, State, join
from qmq.delayserver.schedule.search import (
    Find,
    Indexes,
    Listing,
    PendingBelow,
    PendingLabelled,
    PendingOf,
    SegmentView,
    view_of,
)
from qmq.delayserver.schedule.segment import READ_ROWS, Rows, Segment
from qmq.delayserver.schedule.state import NEVER_MS, Filed, InFlight, file_frame
from qmq.errors import require
from qmq.log.disk import Disk
from qmq.log.frame import Frame

__all__ = ["Filed", "InFlight", "Piece", "Schedule", "discard"]

Names = list[str]
Views = tuple[list[SegmentView], int | None]

FLUSH_ROWS = 65_536
MARKS_LEAST = 256
"""Fewer marks of a segment stay in memory and in the checkpoint."""
PLANNED_MAX = 10_000
CHECKPOINT_MS = 30_000
CHECKPOINT_MESSAGES = 1_000_000
"""After a restart about so many messages are filed again, in two to three seconds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Range of rows of a segment that is being loaded."""

    segment: Segment
    rows: Rows
    begin: int
    end: int

    def read(self) -> Records:
        """Read the rows on a thread, then pass them to `Schedule.handed`; raises DamagedSchedule."""
        return self.rows.read(self.begin, self.end)


class Schedule:
    """Index of one copy's delayed messages. Made by `ScheduleFiler`, used on its loop; `perform`, `read` and questions
    run on threads.
    """

    def __init__(self, disk: Disk, *, segment_ms: int, log_start: int, keep_ms: int = 0) -> None:
        """Start from the checkpoint on the disk, else empty at `log_start`. `rebuilt` holds the reason for an empty
        start, or is empty.

        Args:
            segment_ms: length of new segments.
            keep_ms: how long a finished segment is kept after its end, to answer for its messages.
        """
        self._disk = disk
        self._keep_ms = keep_ms
        self._book, self.rebuilt = restore(disk, segment_ms=segment_ms, log_start=log_start)
        self._flush: Flush | None = None
        self._unsynced: set[str] = set()
        self._unflushed_from = 0
        self._checkpoint_ms = 0
        self._checkpoint_end = self._book.filed_end
        self._piece: Piece | None = None
        self._indexes = Indexes()

    @property
    def filed_end(self) -> int:
        """Offset up to which the log's frames are filed."""
        return self._book.filed_end

    @property
    def filed_chain(self) -> int:
        return self._book.filed_chain

    @property
    def subjects(self) -> Names:
        """Subject names; records hold positions in this list."""
        return self._book.subjects

    @property
    def in_flight(self) -> dict[tuple[int, int], InFlight]:
        """(producer id, batch number) -> dispatch without outcome."""
        return self._book.in_flight

    @property
    def pending_messages(self) -> int:
        """Messages that are not done: pending or in flight."""
        return self._book.count_all().messages

    @property
    def pending_bytes(self) -> int:
        return self._book.count_all().bytes

    @property
    def segments(self) -> int:
        self._book.settle()
        return len(self._book.timeline.segments)

    def file(self, frame: Frame, body: Buffer) -> Filed:
        """File the frame at `filed_end`, which lies below the high watermark; raises DamagedSchedule."""
        return file_frame(self._book, frame, body)

    def planned(self, producer: int, batch: int, records: Records) -> None:
        """Announce the records of a written dispatch, so that filing it skips the look-up, which is most of its time.
        The result is the same without.
        """
        if len(self._book.planned) >= PLANNED_MAX:
            self._book.planned.clear()
        self._book.planned[producer, batch] = records

    def decided(self, frame: Frame, records: Records) -> None:
        """Announce the records of a frame that cancels or moves these pending messages."""
        self.planned(0, frame.offset, records)  # no batch has producer 0

    # -- loading

    def forget_loads(self) -> None:
        """Start loading from the beginning: the wheel is empty."""
        self._book.loaded_until_ms = self._book.open_until_ms = 0
        self._book.horizon_ms = NEVER_MS
        self._piece = None
        for segment in self._book.timeline.segments:
            segment.loading = None

    @property
    def loaded_until_ms(self) -> int:
        """All pending messages due before this are or were on the wheel."""
        book = self._book
        until_ms = min(book.loaded_until_ms, book.horizon_ms)
        for segment in book.timeline.segments:
            if segment.begin_ms >= until_ms:
                break
            loading = segment.loading
            if loading is not None and loading.handed < loading.end:
                until_ms = min(until_ms, max(segment.begin_ms, loading.from_ms))
        return until_ms

    def leave(self, horizon_ms: int) -> None:
        """Leave out messages due at `horizon_ms` or later: the wheel dropped them and has no room."""
        self._book.horizon_ms = min(self._book.horizon_ms, horizon_ms)

    def go_further(self) -> bool:
        """Load the messages left out, once all pieces were handed; return whether there are any."""
        book, horizon_ms = self._book, self._book.horizon_ms
        if horizon_ms == NEVER_MS:
            return False
        book.settle()
        book.horizon_ms = NEVER_MS
        for segment in book.timeline.segments:
            if segment.loading is not None and segment.end_ms > horizon_ms:
                book.open(segment, horizon_ms)
        return True

    def next_piece(self, until_ms: int) -> Piece | None:
        """Return the next piece to read, of segments that begin before `until_ms`; None: there is none, or one is being
        read.

        From here on `file` returns messages added to these segments, so none is missed between the two.
        """
        book = self._book
        book.settle()
        book.loaded_until_ms = max(book.loaded_until_ms, min(until_ms, book.horizon_ms))
        if self._piece is not None:
            return None
        for segment in book.timeline.segments:
            if segment.begin_ms >= book.loaded_until_ms:
                break
            if segment.loading is None:
                book.open(segment)
        for segment in book.timeline.segments:
            if segment.begin_ms >= book.loaded_until_ms:
                break
            loading = segment.loading
            if loading is not None and loading.handed < loading.end:
                end = min(loading.handed + READ_ROWS, loading.end)
                self._piece = Piece(segment, segment.rows, loading.handed, end)
                return self._piece
        return None

    def handed(self, piece: Piece, records: Records) -> Records:
        """Return the records of a piece that belong on the wheel; empty if loading was restarted meanwhile."""
        if piece is not self._piece or piece.segment.loading is None:
            return records[:0]
        self._piece = None
        wanted = ~piece.segment.loading.has(records) & (piece.segment.states_of(records["row"]) == State.PENDING)
        piece.segment.loading.handed = piece.end
        return self._book.before_horizon(records[wanted])

    # -- disk

    def take_flush(self, now_ms: int, *, stop: bool = False) -> Flush | None:
        """Return a flush if enough has changed; with `stop`, one of everything, with a checkpoint. None: too little has
        changed, or a flush is running.
        """
        book = self._book
        if self._flush is not None:
            return None
        is_late = book.unsaved >= CHECKPOINT_MESSAGES or abs(now_ms - self._checkpoint_ms) >= CHECKPOINT_MS
        checkpoints = book.filed_end > self._checkpoint_end and (stop or is_late)
        if not checkpoints and book.unsaved - self._unflushed_from < FLUSH_ROWS:
            return None
        book.settle()
        gone = self._forget_old(now_ms) if checkpoints else []
        writes = [write for segment in book.timeline.segments if (write := _take_write(segment)) is not None]
        checkpoint = self._checkpoint(writes) if checkpoints else None
        self._unflushed_from = book.unsaved
        if checkpoint is not None:
            self._checkpoint_ms = now_ms
            self._checkpoint_end = book.filed_end
            self._unflushed_from = book.unsaved = 0
        self._flush = Flush(self._disk, writes, checkpoint, self._unsynced, gone)
        return self._flush

    def flushed(self, flush: Flush) -> None:
        """Note that a flush was performed."""
        require(flush is self._flush, "the performed flush is not the current one")
        for write in flush.writes:
            segment = write.segment
            segment.wrote_blocks()
            segment.wrote_marks(len(write.marks), write.marks_end)
        if flush.checkpoint is not None:
            self._unsynced = set()
        self._flush = None

    def _forget_old(self, now_ms: int) -> Names:
        """Drop finished segments, except one that is being read; return their names."""
        book, kept, gone = self._book, list[Segment](), Names()
        read = None if self._piece is None else self._piece.segment
        for segment in book.timeline.segments:
            if segment.undone or segment.end_ms + self._keep_ms > now_ms or segment is read:
                kept.append(segment)
            else:
                gone.append(segment.name)
        if gone:
            book.timeline.put(kept)
            book.gone.update(gone)
            self._indexes.drop(gone)
        return gone

    def _checkpoint(self, writes: Sequence[SegmentWrite]) -> Checkpoint:
        """Return the state as it will be when `writes` are on disk."""
        book, by_name = self._book, {write.segment.name: write for write in writes}
        return Checkpoint(
            book.filed_end,
            book.filed_chain,
            list(book.subjects),
            [_save(segment, by_name.get(segment.name)) for segment in book.timeline.segments],
            [
                SavedDispatch(batch.producer, batch.batch, batch.group, batch.subject, batch.records)
                for batch in book.in_flight.values()
            ],
            book.counts.copy(),
        )

    # -- questions

    def counts(self, begin_ms: int, end_ms: int, subject: str | None = None) -> dict[int, int]:
        """Return the number of messages not done, by begin of the hour in ms, of hours that overlap the range."""
        position = self._book.known_position(subject) if subject is not None else None
        if subject is not None and position is None:
            return {}
        return self._book.count_all().by_hour(begin_ms, end_ms, position)

    def find(
        self, subject: str | None, id_hashes: Sequence[int], key_hashes: Sequence[int], dues_ms: Sequence[int] = ()
    ) -> Find:
        """Return a question for a thread: the messages with these hashes (`id_hash`, `key_hash`).

        With due times as hints, `near` searches those segments first.
        """
        views, position = self._views(0, DUE_MAX_MS + 1, subject)
        dues = np.array([min(due_ms, DUE_MAX_MS) for due_ms in dues_ms], np.uint64)
        return Find(views, dues, position, id_hashes, key_hashes, self._indexes)

    def position(self, subject: str) -> int | None:
        """Return the number of a subject in records, or None."""
        return self._book.known_position(subject)

    def list(
        self, begin_ms: int, end_ms: int, subject: str | None, most: int, after: tuple[int, int] | None = None
    ) -> Listing:
        """Return a question for a thread: the first `most` messages not done, by (due, number), after the position
        `after`.
        """
        begin_ms = max(begin_ms, after[0] if after else 0, 0)
        views, position = self._views(begin_ms, max(end_ms, 0), subject)
        return Listing(views, begin_ms, max(end_ms, 0), position, most, after)

    def pending_of(self, begins: Mapping[int, tuple[int, int]], end_ms: int, most: int) -> PendingOf:
        """Return a question for a thread: the first `most` pending messages due before `end_ms`, by (due, number), from
        the given position of each subject on (position in `subjects` -> (due, number)).
        """
        dues, numbers = np.full(len(self.subjects), end_ms, np.uint64), np.zeros(len(self.subjects), np.uint64)
        for position, begin in begins.items():
            dues[position], numbers[position] = begin
        views, _ = self._views(min(due for due, _ in begins.values()), end_ms, None)
        return PendingOf(views, dues, numbers, end_ms, most)

    def pending_among(self, records: Records) -> Records:
        """Return the pending ones of `records`, in their order if that is by due time; none of a deleted segment.

        Raises DamagedSchedule.
        """
        self._book.settle()
        parts = self._book.timeline.split(records)
        return join([part[segment.states_of(part["row"]) == State.PENDING] for segment, part in parts])

    def pending_below(self, offset: int) -> PendingBelow:
        """Return a question for a thread: the pending messages before `offset` of the log, not in flight."""
        self._book.settle()
        segments = [
            segment for segment in self._book.timeline.segments if segment.undone and segment.first_number < offset
        ]
        return PendingBelow([view_of(segment, self._book.gone) for segment in segments], offset)

    def pending_labelled(self, subject: str | None, label: int) -> PendingLabelled:
        """Return a question for a thread: the pending messages with this label, of one subject or (None) of all."""
        self._book.settle()
        position = self._book.known_position(subject) if subject is not None else None
        is_known = subject is None or position is not None
        segments = [segment for segment in self._book.timeline.segments if segment.undone] if is_known else []
        return PendingLabelled([view_of(segment, self._book.gone) for segment in segments], position, label)

    def pending_from(self) -> int:
        """Return an offset of the log below which every message is done; up to 4 MiB too low."""
        lowest = self._book.count_all().lowest()
        return self.filed_end if lowest is None else min(lowest, self.filed_end)

    def states_of(self, records: Records) -> dict[int, State]:
        """Return the current state by number; messages of deleted segments, which were all done, are missing.

        Raises DamagedSchedule.
        """
        self._book.settle()
        states = dict[int, State]()
        for segment, part in self._book.timeline.split(records):
            states |= zip(part["number"].tolist(), map(State, segment.states_of(part["row"]).tolist()), strict=True)
        return states

    def _views(self, begin_ms: int, end_ms: int, subject: str | None) -> Views:
        self._book.settle()
        position = self._book.known_position(subject) if subject is not None else None
        if subject is not None and position is None:
            return [], None
        segments = self._book.timeline.between(begin_ms, end_ms)
        return [view_of(segment, self._book.gone) for segment in segments], position


def _take_write(segment: Segment) -> SegmentWrite | None:
    row, records = segment.written, segment.take_blocks()
    marks = segment.marks.view if len(segment.marks) >= MARKS_LEAST else segment.marks.view[:0]
    if not len(records) and not len(marks):
        return None
    return SegmentWrite(segment, row, records, segment.marks_bytes, marks)


def _save(segment: Segment, write: SegmentWrite | None) -> SavedSegment:
    written, marks_bytes, marks = segment.written, segment.marks_bytes, segment.marks.view
    if write is not None:
        written, marks_bytes = written + len(write.records), write.marks_end
        marks = marks[len(write.marks) :]
    return SavedSegment(
        segment.begin_ms,
        segment.end_ms,
        segment.name,
        written,
        marks_bytes,
        segment.undone,
        segment.firsts.view,
        segment.tail.view,
        marks,
    )
