"""Core. What the schedule knows: segments, counts, subjects, what is in flight, up to where the log is filed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qmq.delayserver.schedule.counting import Counts
from qmq.delayserver.schedule.record import RECORD, Numbers, Records, State, join
from qmq.delayserver.schedule.segment import Loading, Segment
from qmq.delayserver.schedule.timeline import Timeline
from qmq.log.disk import Disk

NEVER_MS = 1 << 63
SETTLE_ROWS = 8_192
"""So many new messages are put into their segments at once: with 720 segments that takes 4 ms, 0.5 µs a message."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A dispatch whose outcome is not known: exactly this batch is repeated to this group. `records` in its order."""

    producer: int
    batch: int
    group: str
    subject: str
    records: Records
    parts: list[tuple[Segment, Records]] = field(repr=False, compare=False)
    """The records by segment."""


@dataclass(slots=True)
class Located:
    """Messages that were looked up, in the order asked for; what was not found has zeros."""

    records: Records
    found: NDArray[np.bool_]
    states: NDArray[np.uint8]

    @property
    def pending(self) -> NDArray[np.bool_]:
        pending: NDArray[np.bool_] = self.found & (self.states == State.PENDING)
        return pending


@dataclass(slots=True)
class Book:
    """Made by Schedule, changed on its loop. New messages wait in `fresh` until `settle` puts them into segments."""

    disk: Disk
    segment_ms: int
    filed_end: int
    filed_chain: int
    subjects: list[str] = field(default_factory=list)
    in_flight: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    timeline: Timeline = field(init=False)
    loaded_until_ms: int = 0
    """Segments that begin before this are on the wheel, or come by pieces: also those that are still to be made."""
    open_until_ms: int = 0
    """Where the last of them ends."""
    horizon_ms: int = NEVER_MS
    """What is due from here on is on no wheel, although its segment is open: there was no room for it."""
    unsaved: int = 0
    """Messages filed since the last checkpoint."""
    _fresh: list[Records] = field(default_factory=list)
    _fresh_rows: int = 0
    _fresh_from: int = NEVER_MS
    """Nothing fresh is due before."""
    gone: set[str] = field(default_factory=set)
    """Names of segments that were deleted, or soon will be."""
    planned: dict[tuple[int, int], Records] = field(default_factory=dict)
    """Messages of dispatches that were written here and are not filed yet."""
    _positions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.segment_ms, self._new_segment)
        self._positions = {subject: position for position, subject in enumerate(self.subjects)}

    def _new_segment(self, begin_ms: int, end_ms: int) -> Segment:
        # A segment of the same time may have been deleted shortly before, and its files be there still.
        name = f"{begin_ms:016d}-{end_ms:016d}-{self.filed_end:016x}"
        segment = Segment(self.disk, begin_ms=begin_ms, end_ms=end_ms, name=name)
        if begin_ms < self.loaded_until_ms:
            self.open(segment)
        return segment

    def open(self, segment: Segment, from_ms: int = 0) -> None:
        """From now on, new messages of the segment go to the wheel; those it has are still to be read, if they are due
        at `from_ms` or later."""
        count = len(segment)
        segment.loading = Loading(0 if segment.undone else count, count, from_ms)
        self.open_until_ms = max(self.open_until_ms, segment.end_ms)

    def open_for(self, records: Records) -> None:
        """Make the segments of messages that are due soon at once: are they on the wheel, with these messages?"""
        dues = records["due"]
        soon = dues[dues < self.loaded_until_ms + self.segment_ms]
        if len(soon):
            self.timeline.make(soon)

    def position(self, subject: str) -> int:
        """Return the number that stands for the subject in records."""
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
        """File new messages of segments that are open at once, and return those for the wheel, with their rows.

        Those segments get no messages in any other way, so their numbers still ascend.
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
        """Put what is fresh into its segments. Whoever looks into segments or counts does this first."""
        if not self._fresh:
            return
        records = join(self._fresh)
        self._fresh, self._fresh_rows, self._fresh_from = [], 0, NEVER_MS
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
        """Note what became of messages that were not over; they are in segments."""
        if not len(records):
            return
        self.change_parts(records, list(self.timeline.split(records)), state)

    def change_parts(self, records: Records, parts: list[tuple[Segment, Records]], state: State) -> None:
        """Do the same with messages whose segments are known."""
        for segment, part in parts:
            segment.change(part["row"], state)
        if state >= State.SENT:
            self.counts.remove(records)
            self.unsaved += len(records)

    def count_all(self) -> Counts:
        """Return the counts, with everything counted."""
        self.settle()
        self.counts.settle()
        return self.counts
