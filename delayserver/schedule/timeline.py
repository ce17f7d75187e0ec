"""Core. The segments in the order of time: which one a due time belongs to.

They never overlap. A new one begins at a multiple of its length in UTC and fills at most the gap that older ones leave:
those keep their length when the setting changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from qmq.delayserver.schedule.record import Numbers, Records
from qmq.delayserver.schedule.segment import Segment

NewSegment = Callable[[int, int], Segment]
"""(begin_ms, end_ms) -> segment"""


FEW = 200
"""So many are looked up faster without numpy."""


class Timeline:
    def __init__(self, segment_ms: int, new: NewSegment) -> None:
        self.segments: list[Segment] = []
        self._segment_ms, self._new = segment_ms, new
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
        """Return the position of each due time's segment; -1: there is none."""
        if not self.segments:
            return np.full(len(dues), -1)
        at = np.searchsorted(self._begins, dues, "right") - 1
        at[(at >= 0) & (dues >= self._ends[at])] = -1
        return at

    def make(self, dues: Numbers) -> None:
        """Make the segments that are missing for `dues`."""
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
        """Yield each segment with its part of `records`, in their order; drop those that have no segment."""
        if len(records) == 0:
            return
        if (only := self.only(records["due"])) is not None:
            yield only, records
            return
        at = self.index(records["due"])
        # Numpy sorts 16-bit integers fifteen times as fast; `take` copies records ten times as fast as indexing does.
        order = np.argsort(at.astype(np.int16) if len(self.segments) < 1 << 15 else at, kind="stable")
        at, records = at[order], records.take(order)
        bounds = [*(np.flatnonzero(at[1:] != at[:-1]) + 1).tolist(), len(at)]
        begin = 0
        for end in bounds:
            if begin < end and at[begin] >= 0:
                yield self.segments[at[begin]], records[begin:end]
            begin = end

    def only(self, dues: Numbers) -> Segment | None:
        """Return the segment of all these, if they are few and it is one: as of what is due now it mostly is."""
        if not 0 < len(dues) <= FEW:
            return None
        few = dues.tolist()
        at = bisect_right(self._begin_list, min(few)) - 1
        return self.segments[at] if at >= 0 and max(few) < self.segments[at].end_ms else None

    def between(self, begin_ms: int, end_ms: int) -> list[Segment]:
        """Return the segments that share some time with `[begin_ms, end_ms)`."""
        return [segment for segment in self.segments if segment.begin_ms < end_ms and begin_ms < segment.end_ms]
