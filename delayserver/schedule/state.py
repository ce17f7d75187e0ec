"""Core. State of the schedule in memory, and how each frame of the log changes it.

The timeline holds the segments in the order of time. They never overlap. A new one begins at a multiple of its length
in UTC and fills at most the gap between older ones. Existing segments keep their length when the setting changes.

Counts cover messages that are not done: pending or in flight. A message is done when it was stored at a broker,
cancelled, or moved. Frames about messages that do not pend are ignored. After a rebuild from a later start of the log,
frames may name messages before that start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.ma  # np.unique imports it on its first call: 0.2 s in which the loop serves nothing
from numpy.typing import NDArray

from qmq.codec import Buffer
from qmq.delayserver.schedule.record import DUE_MAX_MS, RECORD, Numbers, Records, State, join, no_records, read_batch
from qmq.delayserver.schedule.segment import Segment, SegmentLoad
from qmq.log.delay_frames import PLACE_BYTES, Outcome, batch_begin, decode_dispatch, decode_settled
from qmq.log.disk import Disk
from qmq.log.frame import Frame, FrameKind

NewSegment = Callable[[int, int], Segment]
"""(begin_ms, end_ms) -> segment"""


FEW_DUES = 200
"""Up to so many due times are looked up faster without numpy."""


class Timeline:
    """Segments of the schedule, in the order of time."""

    def __init__(self, segment_ms: int, new: NewSegment) -> None:
        self.segments: list[Segment] = []
        self._segment_ms = segment_ms
        self._new = new
        self._begin_list: list[int] = []
        self._begins: Numbers = np.empty(0, np.uint64)
        self._ends: Numbers = np.empty(0, np.uint64)

    def put(self, segments: list[Segment]) -> None:
        """Replace all segments; they ascend."""
        self.segments = segments
        self._begin_list = [segment.begin_ms for segment in segments]
        self._begins = np.array(self._begin_list, np.uint64)
        self._ends = np.array([segment.end_ms for segment in segments], np.uint64)

    def index(self, dues: Numbers) -> NDArray[np.int64]:
        """Return the position of each due time's segment; -1 without one."""
        if not self.segments:
            return np.full(len(dues), -1)
        at = np.searchsorted(self._begins, dues, "right") - 1
        at[(at >= 0) & (dues >= self._ends[at])] = -1
        return at

    def make(self, dues: Numbers) -> None:
        """Make the missing segments for `dues`."""
        while len(dues := dues[self.index(dues) < 0]):
            begins = dues // np.uint64(self._segment_ms)
            some = dues[
                np.unique(begins, return_index=True)[1]
            ]  # older, shorter segments may leave several gaps in one
            for due in some.tolist():
                self._make_for(due)
            self.put(self.segments)

    def _make_for(self, due: int) -> None:
        segments = self.segments
        at = bisect_right(segments, due, key=lambda segment: segment.begin_ms)
        begin = due - due % self._segment_ms
        end = begin + self._segment_ms
        if at:
            begin = max(begin, segments[at - 1].end_ms)
        if at < len(segments):
            end = min(end, segments[at].begin_ms)
        segments.insert(at, self._new(begin, end))

    def split(self, records: Records) -> Iterator[tuple[Segment, Records]]:
        """Yield each segment with its part of `records`, in their order; records without a segment are dropped."""
        if len(records) == 0:
            return
        if (only := self.only(records["due"])) is not None:
            yield only, records
            return
        at = self.index(records["due"])
        # Numpy sorts 16-bit integers fifteen times as fast; `take` copies records ten times as fast as indexing.
        order = np.argsort(at.astype(np.int16) if len(self.segments) < 1 << 15 else at, kind="stable")
        at, records = at[order], records.take(order)
        bounds = [*(np.flatnonzero(at[1:] != at[:-1]) + 1).tolist(), len(at)]
        begin = 0
        for end in bounds:
            if begin < end and at[begin] >= 0:
                yield self.segments[at[begin]], records[begin:end]
            begin = end

    def only(self, dues: Numbers) -> Segment | None:
        """Return the segment of a few due times if they share one, as newly due messages mostly do."""
        if not 0 < len(dues) <= FEW_DUES:
            return None
        few = dues.tolist()
        at = bisect_right(self._begin_list, min(few)) - 1
        return self.segments[at] if at >= 0 and max(few) < self.segments[at].end_ms else None

    def between(self, begin_ms: int, end_ms: int) -> list[Segment]:
        """Return the segments that overlap `[begin_ms, end_ms)`."""
        return [segment for segment in self.segments if segment.begin_ms < end_ms and begin_ms < segment.end_ms]


HOUR_MS = 3_600_000
STRETCH_BITS = 22
"""4 MiB: resolution of `lowest`. A TiB of log has 262,144 stretches."""
_HOUR_BITS = 42


LATER_ROWS = 4096
"""Rows counted together: counting takes 30 µs however few there are. Call `settle` before reading counts."""


class Counts:
    """Numbers of messages that are not done, by hour and by stretch of the log."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        self.hours: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """hour since 1970 -> subject -> messages"""
        self.stretches: dict[int, int] = {}
        """stretch of the log -> messages in it"""
        self._added: list[Records] = []
        self._removed: list[Records] = []
        self._later = 0

    def add(self, records: Records) -> None:
        self._added.append(records)
        self._note(len(records))

    def remove(self, records: Records) -> None:
        self._removed.append(records)
        self._note(len(records))

    def _note(self, rows: int) -> None:
        self._later += rows
        if self._later >= LATER_ROWS:
            self.settle()

    def settle(self) -> None:
        """Count noted records."""
        if self._added:
            self._count(join(self._added), 1)
        if self._removed:
            self._count(join(self._removed), -1)
        self._added = []
        self._removed = []
        self._later = 0

    def copy(self) -> Counts:
        """Return a copy for a thread."""
        self.settle()
        copy = Counts()
        copy.messages, copy.bytes, copy.stretches = self.messages, self.bytes, self.stretches.copy()
        copy.hours.update((hour, subjects.copy()) for hour, subjects in self.hours.items())
        return copy

    def _count(self, records: Records, sign: int) -> None:
        self.messages += sign * len(records)
        self.bytes += sign * int(records["size"].sum(dtype=np.int64))
        hours = (records["due"] // np.uint64(HOUR_MS)).astype(np.int64)
        keys, counts = np.unique(records["subject"].astype(np.int64) << _HOUR_BITS | hours, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            subject, hour = key >> _HOUR_BITS, key & (1 << _HOUR_BITS) - 1
            _change(self.hours[hour], subject, sign * count)
            if not self.hours[hour]:
                del self.hours[hour]
        stretches, counts = np.unique(records["number"] >> np.uint64(STRETCH_BITS), return_counts=True)
        for stretch, count in zip(stretches.tolist(), counts.tolist(), strict=True):
            _change(self.stretches, stretch, sign * count)

    def lowest(self) -> int | None:
        """Return an offset of the log below which every message is done, at most 4 MiB too low; None if all are
        done.
        """
        return min(self.stretches) << STRETCH_BITS if self.stretches else None

    def by_hour(self, begin_ms: int, end_ms: int, subject: int | None) -> dict[int, int]:
        """Return messages per hour, by its begin in ms, of hours that overlap the range."""
        found = {}
        for hour in sorted(self.hours):
            if hour * HOUR_MS < end_ms and begin_ms < (hour + 1) * HOUR_MS:
                subjects = self.hours[hour]
                count = sum(subjects.values()) if subject is None else subjects.get(subject, 0)
                if count:
                    found[hour * HOUR_MS] = count
        return found


def _change(counts: dict[int, int], key: int, by: int) -> None:
    count = counts.get(key, 0) + by
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)


NEVER_MS = 1 << 63
SETTLE_ROWS = 8_192
"""New messages put into their segments at once: with 720 segments that takes 4 ms, 0.5 µs a message."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Dispatch of unknown outcome: exactly this batch is repeated to this group. `records` are in its order."""

    producer: int
    batch: int
    group: str
    subject: str
    records: Records
    parts: list[tuple[Segment, Records]] = field(repr=False, compare=False)
    """The records by segment."""


@dataclass(slots=True)
class Located:
    """Result of a look-up, in the requested order; zeros where nothing was found."""

    records: Records
    found: NDArray[np.bool_]
    states: NDArray[np.uint8]

    @property
    def pending(self) -> NDArray[np.bool_]:
        pending: NDArray[np.bool_] = self.found & (self.states == State.PENDING)
        return pending


@dataclass(slots=True)
class Book:
    """State of the schedule. Made by Schedule, changed on its loop. New messages wait in `fresh` until `settle` puts
    them into segments.
    """

    disk: Disk
    segment_ms: int
    filed_end: int
    filed_chain: int
    subjects: list[str] = field(default_factory=list)
    in_flight: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    timeline: Timeline = field(init=False)
    loaded_until_ms: int = 0
    """Segments that begin before this are loaded or being loaded, also those still to be made."""
    open_until_ms: int = 0
    """End of the last of them."""
    horizon_ms: int = NEVER_MS
    """Messages due from here on are not on the wheel even if their segment is open: there was no room."""
    unsaved: int = 0
    """Messages filed since the last checkpoint."""
    _fresh: list[Records] = field(default_factory=list)
    _fresh_rows: int = 0
    _fresh_from: int = NEVER_MS
    """No fresh message is due before."""
    gone: set[str] = field(default_factory=set)
    """Names of segments that were deleted, or soon will be."""
    planned: dict[tuple[int, int], Records] = field(default_factory=dict)
    """Records of written dispatches that are not filed yet."""
    _positions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.segment_ms, self._new_segment)
        self._positions = {subject: position for position, subject in enumerate(self.subjects)}

    def _new_segment(self, begin_ms: int, end_ms: int) -> Segment:
        # A deleted segment of the same time may have left its files.
        name = f"{begin_ms:016d}-{end_ms:016d}-{self.filed_end:016x}"
        segment = Segment(self.disk, begin_ms=begin_ms, end_ms=end_ms, name=name)
        if begin_ms < self.loaded_until_ms:
            self.open(segment)
        return segment

    def open(self, segment: Segment, from_ms: int = 0) -> None:
        """Load the segment: new messages go to the wheel at once, existing ones due at `from_ms` or later are still to
        be read.
        """
        count = len(segment)
        segment.loading = SegmentLoad(0 if segment.undone else count, count, from_ms)
        self.open_until_ms = max(self.open_until_ms, segment.end_ms)

    def open_for(self, records: Records) -> None:
        """Make the segments of messages that are due soon at once, so it is certain whether they are on the wheel."""
        dues = records["due"]
        soon = dues[dues < self.loaded_until_ms + self.segment_ms]
        if len(soon):
            self.timeline.make(soon)

    def position(self, subject: str) -> int:
        """Return the number of the subject in records."""
        position = self._positions.get(subject)
        if position is None:
            position = self._positions[subject] = len(self.subjects)
            self.subjects.append(subject)
        return position

    def known_position(self, subject: str) -> int | None:
        return self._positions.get(subject)

    def add(self, records: Records) -> None:
        """File new messages, in the order of the log."""
        self._fresh.append(records)
        self._fresh_rows += len(records)
        self._fresh_from = min(self._fresh_from, int(records["due"].min()))
        self.unsaved += len(records)
        if self._fresh_rows >= SETTLE_ROWS:
            self.settle()

    def place(self, records: Records) -> Records:
        """File new messages of open segments at once; return those for the wheel, with their rows.

        Open segments get messages only this way, so their numbers still ascend.
        """
        self.unsaved += len(records)
        self.counts.add(records)
        placed = []
        for segment, part in self.timeline.split(records):
            segment.add(part)
            placed.append(part)
        return self.before_horizon(join(placed))

    def before_horizon(self, records: Records) -> Records:
        return records if self.horizon_ms == NEVER_MS else records[records["due"] < self.horizon_ms]

    def settle(self) -> None:
        """Put fresh messages into their segments. Call it before reading segments or counts."""
        if not self._fresh:
            return
        records = join(self._fresh)
        self._fresh = []
        self._fresh_rows = 0
        self._fresh_from = NEVER_MS
        self.counts.add(records)
        self.timeline.make(records["due"])
        for segment, part in self.timeline.split(records):
            segment.add(part)

    def locate(self, numbers: Numbers, dues: Numbers) -> Located:
        """Look up messages by number and due time; raises DamagedSchedule."""
        count = len(numbers)
        if self._fresh and count and int(dues.max()) >= self._fresh_from:
            self.settle()
        if (only := self.timeline.only(dues)) is not None:
            records, found = only.locate(numbers)
            return Located(records, found, only.states_of(records["row"]))
        located = Located(np.zeros(count, RECORD), np.zeros(count, np.bool_), np.zeros(count, np.uint8))
        positions = self.timeline.index(dues)
        for position in np.unique(positions[positions >= 0]).tolist():
            segment, mine = self.timeline.segments[position], np.flatnonzero(positions == position)
            records, found = segment.locate(numbers[mine])
            located.records[mine], located.found[mine] = records, found
            located.states[mine] = segment.states_of(records["row"])
        return located

    def change(self, records: Records, state: State) -> None:
        """Set the state of messages that are in segments and not done."""
        if not len(records):
            return
        self.change_parts(records, list(self.timeline.split(records)), state)

    def change_parts(self, records: Records, parts: list[tuple[Segment, Records]], state: State) -> None:
        """Set the state of messages with known segments."""
        for segment, part in parts:
            segment.change(part["row"], state)
        if state >= State.SENT:
            self.counts.remove(records)
            self.unsaved += len(records)

    def count_all(self) -> Counts:
        """Return the complete counts."""
        self.settle()
        self.counts.settle()
        return self.counts


@dataclass(slots=True)
class Filed:
    """Changes of a frame that concern the wheel.

    `added`: messages of loaded segments; others come when their segment is loaded. `done`: cancelled or moved.
    `settled`: finished dispatches.
    """

    added: Records = field(default_factory=no_records)
    done: Records = field(default_factory=no_records)
    settled: list[tuple[InFlight, Outcome]] = field(default_factory=list)


def file_frame(book: Book, frame: Frame, body: Buffer) -> Filed:
    """File the frame at `filed_end`.

    Raises:
        ValueError: the body is invalid; in a checked log it never is.
        DamagedSchedule: a file that had to be read.
    """
    if frame.offset != book.filed_end:
        raise ValueError(f"the frame at {frame.offset} does not continue a schedule that ends at {book.filed_end}")
    file = _CHANGES.get(frame.kind)
    filed = file(book, frame, body) if file else Filed()
    book.filed_end, book.filed_chain = frame.end, frame.chain
    return filed


def _messages(book: Book, frame: Frame, body: Buffer) -> Filed:
    return Filed(added=_add(book, read_batch(frame, body, 0, book.position(frame.subject))))


def _carry(book: Book, frame: Frame, body: Buffer) -> Filed:
    """Replace messages by later copies, except those that were dispatched or cancelled meanwhile."""
    records = read_batch(frame, body, batch_begin(frame.count, True), book.position(frame.subject))
    if (planned := _planned(book, (0, frame.offset), body, frame.count, 0)) is not None:
        book.change_parts(*planned, State.MOVED)
        return Filed(added=_add(book, records), done=planned.records)
    old = book.locate(*_places(body, frame.count, 0))
    moved, is_over = old.records[old.pending], old.found & ~old.pending
    book.change(moved, State.MOVED)
    return Filed(added=_add(book, records[~is_over]), done=moved)


def _add(book: Book, records: Records) -> Records:
    """File messages; return those that belong on the wheel at once."""
    if not book.loaded_until_ms:
        book.add(records)
        return no_records()
    book.open_for(records)
    soon = records["due"] < book.open_until_ms
    if soon.all():
        return book.place(records)
    placed = book.place(records[soon])
    book.add(records[~soon])
    return placed


def _dispatch(book: Book, frame: Frame, body: Buffer) -> Filed:
    key = (frame.producer, frame.batch)
    group, _ = decode_dispatch(body, 0)
    records, parts = _pending(book, key, body, frame.count, len(body) - PLACE_BYTES * frame.count)
    if not len(records):
        return Filed()  # nothing of it pends, so nothing waits for its outcome
    book.change_parts(records, parts, State.IN_FLIGHT)
    book.in_flight[key] = InFlight(*key, group, frame.subject, records, parts)
    return Filed()


class _Pending(NamedTuple):
    """Pending messages, and the same by segment."""

    records: Records
    parts: list[tuple[Segment, Records]]


def _pending(book: Book, key: tuple[int, int], body: Buffer, count: int, at: int) -> _Pending:
    """Return the pending ones of the messages named at `body[at:]`, without a look-up if the writer announced them."""
    if (planned := _planned(book, key, body, count, at)) is not None:
        return planned
    located = book.locate(*_places(body, count, at))
    records = located.records[located.pending]
    return _Pending(records, list(book.timeline.split(records)))


def _planned(book: Book, key: tuple[int, int], body: Buffer, count: int, at: int) -> _Pending | None:
    """Return the announced records of this frame if all of them still pend, else None."""
    records = book.planned.pop(key, None)
    if records is None or len(records) != count:
        return None
    numbers = np.frombuffer(body, "<u8", 2 * count, at)[::2].tolist()
    if records["number"].tolist() != numbers or len(set(numbers)) < count:
        return None
    parts = list(book.timeline.split(records))
    return _Pending(records, parts) if all(segment.all_pend(part["row"]) for segment, part in parts) else None


def _settled(book: Book, frame: Frame, body: Buffer) -> Filed:
    filed, added = Filed(), list[Records]()
    for producer, batch, outcome in decode_settled(body, frame.count):
        dispatch = book.in_flight.pop((producer, batch), None)
        if dispatch is None:
            continue
        filed.settled.append((dispatch, Outcome(outcome)))
        if outcome == Outcome.STORED:
            book.change_parts(dispatch.records, dispatch.parts, State.SENT)
        else:
            book.change_parts(dispatch.records, dispatch.parts, State.PENDING)
            added += _on_wheel(dispatch.parts)
    filed.added = book.before_horizon(join(added))
    return filed


def _on_wheel(dispatched: list[tuple[Segment, Records]]) -> list[Records]:
    """Return the records that no later piece contains."""
    parts = []
    for segment, part in dispatched:
        if (loading := segment.loading) is not None:
            parts.append(part[loading.has(part)])
    return parts


def _cancel(book: Book, frame: Frame, body: Buffer) -> Filed:
    records, parts = _pending(book, (0, frame.offset), body, frame.count, 0)
    book.change_parts(records, parts, State.CANCELLED)
    return Filed(done=records)


def _places(body: Buffer, count: int, at: int) -> tuple[Numbers, Numbers]:
    """Return numbers and due times. A number named twice becomes 0 the second time, which no message has.

    The layout is that of qmq.log.delay_frames; its decoder would build a list of pairs. Raises ValueError: too short.
    """
    both = np.frombuffer(body, "<u8", 2 * count, at).reshape(-1, 2)
    numbers, dues = both[:, 0].copy(), np.minimum(both[:, 1], np.uint64(DUE_MAX_MS))
    if len(set(numbers.tolist())) < len(numbers):
        first = np.zeros(len(numbers), np.bool_)
        first[np.unique(numbers, return_index=True)[1]] = True
        numbers[~first] = 0
    return numbers, dues


_CHANGES: dict[int, Callable[[Book, Frame, Buffer], Filed]] = {
    FrameKind.MESSAGES: _messages,
    FrameKind.CARRY: _carry,
    FrameKind.DISPATCH: _dispatch,
    FrameKind.SETTLED: _settled,
    FrameKind.CANCEL: _cancel,
}
