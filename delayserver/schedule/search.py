"""Core. Questions that read many records. Each is made on the loop and called on a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from qmq.delayserver.schedule.blocks import BLOCK_ROWS, DamagedSchedule, split_marks
from qmq.delayserver.schedule.index import Indexes
from qmq.delayserver.schedule.record import Numbers, Records, State, join, no_records, order_of
from qmq.delayserver.schedule.segment import READ_ROWS, Marked, Rows, Segment, States

T = TypeVar("T")
Hashes = NDArray[np.uint32]


class Candidate(NamedTuple):
    """A message whose id or key has the hash that was looked for: read it to see whether it is the one."""

    by_key: bool
    position: int
    record: np.void
    state: State


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment at one moment. The states go on changing; they are read when they are needed."""

    end_ms: int
    rows: Rows
    marked: Marked
    states: States | None
    """None: they have to be read."""
    gone: set[str]
    """Segments that were deleted since then."""

    def look(self, into: Callable[[SegmentView], T], nothing: T) -> T:
        """Return what `into` finds; nothing in a segment that is deleted meanwhile: there everything was over."""
        try:
            return into(self)
        except DamagedSchedule:
            if self.rows.name in self.gone:
                return nothing
            raise

    def states_of(self, rows: NDArray[np.uint32]) -> States:
        states = self.states
        if states is None:
            marked, reasons = split_marks(self.marked.read())
            states = np.zeros(len(self.rows), np.uint8)
            states[marked] = reasons
        found = np.zeros(len(rows), np.uint8)
        known = rows < len(states)
        found[known] = states[rows[known]]
        return found

    def parts(self) -> Iterator[Records]:
        """Read all rows, some at a time."""
        for at in range(0, len(self.rows), READ_ROWS):
            yield self.rows.read(at, min(at + READ_ROWS, len(self.rows)))


def view_of(segment: Segment, gone: set[str]) -> SegmentView:
    """Return what is to be seen of a segment; the same until it changes, as there may be many."""
    if segment.view is None:
        segment.view = SegmentView(segment.end_ms, segment.rows, segment.marked, segment.known_states(), gone)
    view: SegmentView = segment.view
    return view


class Wanted:
    """Hashes that are looked for. Most records are told apart by a table of 65,536 bits; the rest by search."""

    def __init__(self, hashes: Sequence[int]) -> None:
        self._hashes = np.array(hashes, np.uint32)
        self._order = np.argsort(self._hashes, kind="stable")
        self._sorted = self._hashes[self._order]
        self._table = np.zeros(65_536, np.bool_)
        self._table[self._hashes & 0xFFFF] = True

    def __len__(self) -> int:
        return len(self._hashes)

    def matches(self, hashes: Hashes) -> Iterator[tuple[int, int]]:
        """Yield (position in `hashes`, position among those looked for)."""
        maybe = np.flatnonzero(self._table[hashes & 0xFFFF])
        first = np.searchsorted(self._sorted, hashes[maybe], "left")
        last = np.searchsorted(self._sorted, hashes[maybe], "right")
        for at in np.flatnonzero(first < last).tolist():
            for place in range(first[at], last[at]):
                yield int(maybe[at]), int(self._order[place])


Found = list[tuple[bool, int, np.void]]
"""(is it by key, position among those looked for, record)"""


@dataclass(frozen=True, slots=True)
class Find:
    """Look for messages by the hashes of their ids and keys: `near` their supposed due time, then where that is not.

    Two ids may have the same hash, and a message may have moved: whoever does not find near what it wants looks far.
    A few are found by an index, in time that does not grow with the segment; so many that most blocks have one are not.
    """

    views: list[SegmentView]
    dues_ms: Numbers
    subject: int | None
    ids: Sequence[int]
    keys: Sequence[int]
    indexes: Indexes

    def __call__(self) -> list[Candidate]:
        """Look everywhere; raises DamagedSchedule."""
        return self.near() + self.far()

    def near(self) -> list[Candidate]:
        """Look into the segments of the due times; raises DamagedSchedule."""
        return self._look([view for view in self.views if self._is_near(view)], replaces=True)

    def far(self) -> list[Candidate]:
        """Look into all others; raises DamagedSchedule."""
        return self._look([view for view in self.views if not self._is_near(view)], replaces=False)

    def _is_near(self, view: SegmentView) -> bool:
        return bool(((self.dues_ms >= view.rows.begin_ms) & (self.dues_ms < view.end_ms)).any())

    def _look(self, views: list[SegmentView], *, replaces: bool) -> list[Candidate]:
        def into(view: SegmentView) -> list[Candidate]:
            return self._in_segment(view, replaces)

        return [one for view in views for one in view.look(into, list[Candidate]())]

    def _in_segment(self, view: SegmentView, replaces: bool) -> list[Candidate]:
        found = None
        if BLOCK_ROWS * (len(self.ids) + len(self.keys)) <= len(view.rows):
            found = self._by_index(view, replaces)
        if found is None:
            found = self._by_reading(view)
        if not found:
            return []
        states = view.states_of(np.array([record["row"] for _, _, record in found], np.uint32))
        return [Candidate(*one, State(state)) for one, state in zip(found, states.tolist(), strict=True)]

    def _by_index(self, view: SegmentView, replaces: bool) -> Found | None:
        rows = self.indexes.find(view.rows, self.ids, self.keys, replaces=replaces)
        if rows is None:
            return None
        found = [(by_key, index, view.rows.read(row, row + 1)[0].copy()) for by_key, index, row in rows]
        return [one for one in found if self.subject is None or one[2]["subject"] == self.subject]

    def _by_reading(self, view: SegmentView) -> Found:
        found: Found = []
        looked_for = [(False, Wanted(self.ids), "id_hash"), (True, Wanted(self.keys), "key_hash")]
        for records in view.parts():
            for by_key, wanted, column in looked_for:
                if len(wanted):
                    for at, index in wanted.matches(np.ascontiguousarray(records[column])):
                        if self.subject is None or records["subject"][at] == self.subject:
                            found.append((by_key, index, records[at].copy()))
        return found


Matching = Callable[[Records], NDArray[np.bool_]]


def _earliest(views: list[SegmentView], most: int, matching: Matching, below: State) -> Records:
    """Return the first `most` records, by (due, number), that match and whose state is lower than `below`."""
    parts, count = [no_records()], 0
    for view in views:
        parts.append(view.look(lambda one: _earliest_in(one, most, matching, below), no_records()))
        count += len(parts[-1])
        if count >= most:
            break
    return join(parts)[:most]


def _earliest_in(view: SegmentView, most: int, matching: Matching, below: State) -> Records:
    kept, count = [no_records()], 0
    for records in view.parts():
        more = records[matching(records)]
        kept.append(more[view.states_of(more["row"]) < below])
        count += len(kept[-1])
        if count >= 2 * most:
            kept = [_first(kept, most)]
            count = len(kept[0])
    return _first(kept, most)


def _first(parts: list[Records], most: int) -> Records:
    found = join(parts)
    return found.take(order_of(found["due"], found["number"])[:most])


@dataclass(frozen=True, slots=True)
class Listing:
    """Messages that are not done, by (due, number)."""

    views: list[SegmentView]
    begin_ms: int
    end_ms: int
    subject: int | None
    most: int
    after: tuple[int, int] | None

    def __call__(self) -> Records:
        """Raises DamagedSchedule."""
        return _earliest(self.views, self.most, self._matching, State.SENT)

    def _matching(self, records: Records) -> NDArray[np.bool_]:
        due, number = records["due"], records["number"]
        matching: NDArray[np.bool_] = (due >= self.begin_ms) & (due < self.end_ms)
        if self.subject is not None:
            matching &= records["subject"] == self.subject
        if self.after is not None:
            after_due, after_number = self.after
            matching &= (due > after_due) | ((due == after_due) & (number > after_number))
        return matching


@dataclass(frozen=True, slots=True)
class PendingOf:
    """The first `most` messages that pend and are due before `end_ms`, by (due, number), of some subjects.

    `dues` and `numbers` say from which place on, by the subject's position; of others, from `end_ms` on.
    """

    views: list[SegmentView]
    dues: Numbers
    numbers: Numbers
    end_ms: int
    most: int

    def __call__(self) -> Records:
        """Raises DamagedSchedule."""
        return _earliest(self.views, self.most, self._matching, State.IN_FLIGHT)  # PENDING alone is lower

    def _matching(self, records: Records) -> NDArray[np.bool_]:
        due, begins = records["due"], self.dues[records["subject"]]
        behind = (due == begins) & (records["number"] >= self.numbers[records["subject"]])
        matching: NDArray[np.bool_] = ((due > begins) | behind) & (due < self.end_ms)
        return matching


@dataclass(frozen=True, slots=True)
class PendingBelow:
    """Messages that pend and lie before an offset of the log, by number."""

    views: list[SegmentView]
    offset: int

    def __call__(self) -> Records:
        """Raises DamagedSchedule."""
        found = join([view.look(self._in_segment, no_records()) for view in self.views])
        return found.take(np.argsort(found["number"]))

    def _in_segment(self, view: SegmentView) -> Records:
        kept = []
        for records in view.parts():
            old = records[: np.searchsorted(records["number"], np.uint64(self.offset))]
            kept.append(old[view.states_of(old["row"]) == State.PENDING])
            if len(old) < len(records):
                break
        return join(kept)


@dataclass(frozen=True, slots=True)
class PendingLabelled:
    """Messages of a subject, None: of all, that pend and have exactly this label, in no order."""

    views: list[SegmentView]
    subject: int | None
    label: int

    def __call__(self) -> Records:
        """Raises DamagedSchedule."""
        return join([view.look(self._in_segment, no_records()) for view in self.views])

    def _in_segment(self, view: SegmentView) -> Records:
        kept = []
        for records in view.parts():
            found = records[records["label"] == self.label]
            if self.subject is not None:
                found = found[found["subject"] == self.subject]
            kept.append(found[view.states_of(found["row"]) == State.PENDING])
        return join(kept)
