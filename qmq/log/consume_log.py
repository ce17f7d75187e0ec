"""Core. The consume log: where in the message log each sequence of each subject lies.

It is the indexes of all segments (qmq.log.index) as one: that of the newest segment in memory, those of closed ones in
files. Made anew by the message log whenever that starts from what the disk holds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from qmq.log.disk import Disk
from qmq.log.frame import FrameKind
from qmq.log.index import Chapters, ClosedIndex, FrameRef, SegmentIndex
from qmq.log.segments import index_name, read_chunk

CHAPTERS_MAX = 1024
"""Subjects that somebody reads far behind at the same time; more are looked up again."""


class ConsumeLog:
    """`bases` is the message log's own list of segments, which it changes before it calls us."""

    def __init__(self, disk: Disk, bases: list[int], newest: SegmentIndex) -> None:
        self._disk, self._bases = disk, bases
        self.newest = newest
        self._closed: dict[int, ClosedIndex] = {}
        self._chapters: dict[str, Chapters] = {}

    def roll(self, base: int, end: int) -> bytes:
        """Close the newest segment, which begins at `base`, and begin the next at `end`; return its index file.

        Until it is written (`rolled`), the closed index is served from these bytes.
        """
        index_file = self.newest.encode(end)
        self._closed[base] = ClosedIndex(index_file, base)
        self.newest = SegmentIndex(end)
        self._chapters.clear()
        return index_file

    def rolled(self, base: int) -> None:
        """The index file of the segment at `base` is on disk: let go of the bytes."""
        self._closed.pop(base, None)

    def drop(self, base: int) -> None:
        """The segment at `base` is gone."""
        self._closed.pop(base, None)
        self._chapters.clear()

    def frames(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        """Return up to `most` frames of `subject` from the one that holds `sequence`; retention may have taken some."""
        newest = self.newest.first_sequence(subject)
        if newest is not None and newest <= sequence:
            return self.newest.frames(subject, sequence, most)
        refs: list[FrameRef] = []
        for base in self._chapters_of(subject).from_sequence(sequence):
            refs += self._closed_index(base).frames(subject, sequence, most - len(refs))
            if len(refs) >= most:
                return refs
        return refs + self.newest.frames(subject, sequence, most - len(refs))

    def first_sequence(self, subject: str, base: int) -> int | None:
        """Return the subject's first sequence in the segments from the one at `base` on; None: it has none there."""
        for other in self._bases[bisect_left(self._bases, base) : -1]:
            if (first := self._closed_index(other).first_sequence(subject)) is not None:
                return first
        return self.newest.first_sequence(subject)

    def _chapters_of(self, subject: str) -> Chapters:
        chapters = self._chapters.get(subject)
        if chapters is None:
            if len(self._chapters) >= CHAPTERS_MAX:
                self._chapters.clear()
            found = [(self._closed_index(base).first_sequence(subject), base) for base in self._bases[:-1]]
            known = [(first, base) for first, base in found if first is not None]
            chapters = self._chapters[subject] = Chapters([first for first, _ in known], [base for _, base in known])
        return chapters

    def _closed_index(self, base: int) -> ClosedIndex:
        index = self._closed.get(base)
        if index is None:
            try:
                index = ClosedIndex(self._disk.map(index_name(base)), base)
            except ValueError:
                index = self._make_again(base)
            if index.end != self._end(base):  # the file of a segment between them was gone, and is part of this one
                index = self._make_again(base)
            self._closed[base] = index
        return index

    def _make_again(self, base: int) -> ClosedIndex:
        """An index file that is missing or damaged follows from its segment; raises CorruptFrame if that is damaged."""
        made, at, end = SegmentIndex(base), base, self._end(base)
        while at < end:
            chunk = read_chunk(self._disk, self._bases, at, end)
            for frame in chunk.frames:
                if frame.kind == FrameKind.MESSAGES:
                    made.add(frame)
            at = chunk.end
        data = made.encode(end)
        self._disk.put(index_name(base), data)
        return ClosedIndex(data, base)

    def _end(self, base: int) -> int:
        return self._bases[bisect_right(self._bases, base)]
