"""Core. Consume log: the place in the message log of each sequence of each subject, derived from messages frames.

It joins the indexes of all segments. The index of the newest segment is in memory. The index of a closed segment is a
file beside it, so a backlog without readers costs no memory. An index file (little-endian):

    0    4   magic "QMI1" (its last byte is the version)
    4    4   CRC-32 of everything behind this field
    8    8   base: offset at which the segment begins
    16   8   end: offset at which it ends
    24   4   subjects n
    28   4   frames m
    32   16n per subject, by name: u32 offset of its name, u32 its bytes, u32 its first entry, u32 its frames
         8 x (m + n)   sequences: per subject, the first sequence of each frame, then the end sequence
         8 x m         offsets of the frames
         4 x m         their lengths, headers included
         names, UTF-8

A file that does not match its CRC is made again from the segment.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.log.disk import Disk
from qmq.log.frame import Frame, FrameKind
from qmq.log.segments import index_name, read_chunk

MAGIC = int.from_bytes(b"QMI1", "little")
_HEAD = struct.Struct("<IIQQII")
_SUBJECT = struct.Struct("<IIII")


class FrameRef(NamedTuple):
    """A messages frame of one subject: sequences `[begin, end)`, at `offset`, `length` bytes with its header."""

    begin: int
    end: int
    offset: int
    length: int


class _Entries:
    """Frames of one subject. The last entry of `sequences` is the end of the last frame."""

    __slots__ = ("sequences", "offsets", "lengths")

    def __init__(self, begin: int) -> None:
        self.sequences = array("Q", [begin])
        self.offsets = array("Q")
        self.lengths = array("I")


def _refs(
    sequences: array[int] | memoryview,
    offsets: array[int] | memoryview,
    lengths: array[int] | memoryview,
    sequence: int,
    most: int,
) -> list[FrameRef]:
    """Return up to `most` frames in order, from the one that holds `sequence` on."""
    first = max(bisect_right(sequences, sequence) - 1, 0)
    last = first + most
    columns = sequences[first:last], sequences[first + 1 : last + 1], offsets[first:last], lengths[first:last]
    return list(map(FrameRef, *columns))


class SegmentIndex:
    """Index of the segment that is being written."""

    def __init__(self, base: int) -> None:
        self.base = base
        self._subjects: dict[str, _Entries] = {}

    def add(self, frame: Frame) -> None:
        """Add a messages frame, which continues its subject."""
        entries = self._subjects.get(frame.subject)
        if entries is None:
            entries = self._subjects[frame.subject] = _Entries(frame.first_sequence)
        entries.sequences.append(frame.first_sequence + frame.count)
        entries.offsets.append(frame.offset)
        entries.lengths.append(frame.end - frame.offset)

    def first_sequence(self, subject: str) -> int | None:
        entries = self._subjects.get(subject)
        return entries.sequences[0] if entries else None

    def frames(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        """Return up to `most` frames of `subject` in order, from the one that holds `sequence` on."""
        entries = self._subjects.get(subject)
        return _refs(entries.sequences, entries.offsets, entries.lengths, sequence, most) if entries else []

    def lengths(self, subject: str) -> Sequence[int]:
        """Return the lengths of all frames of `subject`, for use on a thread."""
        entries = self._subjects.get(subject)
        return entries.lengths[:] if entries else ()

    def encode(self, end: int) -> bytes:
        """Pack the index of a segment that is complete and ends at `end`."""
        names = sorted(self._subjects, key=str.encode)
        table, blob = bytearray(), bytearray()
        sequences, offsets, lengths = array("Q"), array("Q"), array("I")
        for name in names:
            entries, data = self._subjects[name], name.encode()
            table += _SUBJECT.pack(len(blob), len(data), len(offsets), len(entries.offsets))
            blob += data
            sequences += entries.sequences
            offsets += entries.offsets
            lengths += entries.lengths
        rest = b"".join((table, sequences.tobytes(), offsets.tobytes(), lengths.tobytes(), blob))
        head = _HEAD.pack(MAGIC, 0, self.base, end, len(names), len(offsets))
        return head[:4] + crc32(rest, crc32(head[8:])).to_bytes(4, "little") + head[8:] + rest


class ClosedIndex:
    """Index of a closed segment, read in place; the operating system caches the used parts."""

    def __init__(self, data: Buffer, base: int) -> None:
        """Raise ValueError if `data` is not the index of the segment at `base`."""
        view = memoryview(data)
        if len(view) < _HEAD.size:
            raise ValueError("index is too short")
        magic, crc, self.base, self.end, self._count, frames = _HEAD.unpack_from(view)
        if magic != MAGIC or crc32(view[8:]) != crc or self.base != base:
            raise ValueError("index does not match its CRC, or belongs elsewhere")
        at = _HEAD.size + _SUBJECT.size * self._count
        self._view = view
        self._sequences = view[at : at + 8 * (frames + self._count)].cast("Q")
        at += 8 * (frames + self._count)
        self._offsets = view[at : at + 8 * frames].cast("Q")
        self._lengths = view[at + 8 * frames : at + 12 * frames].cast("I")
        self._names = view[at + 12 * frames :]

    def _subject(self, position: int) -> tuple[bytes, int, int]:
        """Return (name, first entry, frames) of a subject."""
        at, size, first, frames = _SUBJECT.unpack_from(self._view, _HEAD.size + _SUBJECT.size * position)
        return bytes(self._names[at : at + size]), first, frames

    def _find(self, subject: str) -> tuple[int, int, int] | None:
        """Return (position among the subjects, first entry, frames) of `subject`."""
        wanted = subject.encode()
        position = bisect_left(range(self._count), wanted, key=lambda position: self._subject(position)[0])
        if position == self._count:
            return None
        name, first, frames = self._subject(position)
        return (position, first, frames) if name == wanted else None

    def first_sequence(self, subject: str) -> int | None:
        found = self._find(subject)
        return self._sequences[found[1] + found[0]] if found else None

    def frames(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        """Return up to `most` frames of `subject` in order, from the one that holds `sequence` on."""
        found = self._find(subject)
        if found is None:
            return []
        position, entry, count = found
        begin = entry + position  # each earlier subject has one more sequence than frames
        sequences = self._sequences[begin : begin + count + 1]
        return _refs(
            sequences, self._offsets[entry : entry + count], self._lengths[entry : entry + count], sequence, most
        )

    def lengths(self, subject: str) -> Sequence[int]:
        """Return the lengths of all frames of `subject`."""
        found = self._find(subject)
        return () if found is None else self._lengths[found[1] : found[1] + found[2]]


class Chapters:
    """Segments in which one subject occurs, oldest first. Made by a read far behind, dropped at a roll."""

    def __init__(self, firsts: list[int], bases: list[int]) -> None:
        self._firsts = firsts
        self._bases = bases

    def from_sequence(self, sequence: int) -> list[int]:
        """Return the bases of the segments that may hold `sequence` or later ones."""
        return self._bases[max(bisect_right(self._firsts, sequence) - 1, 0) :]


CHAPTERS_MAX = 1024
"""Number of remembered subjects with readers far behind. Other subjects are looked up again."""


class ConsumeLog:
    """Consume log of one copy. `bases` is the message log's own list of segments, which the log changes before its
    calls.
    """

    def __init__(self, disk: Disk, bases: list[int], newest: SegmentIndex) -> None:
        self._disk = disk
        self._bases = bases
        self.newest = newest
        self._closed: dict[int, ClosedIndex] = {}
        self._chapters: dict[str, Chapters] = {}

    def roll(self, base: int, end: int) -> bytes:
        """Close the newest segment, which begins at `base`, and begin the next at `end`; return its index file.

        Until the file is written (`rolled`), reads of the closed index use these bytes.
        """
        index_file = self.newest.encode(end)
        self._closed[base] = ClosedIndex(index_file, base)
        self.newest = SegmentIndex(end)
        self._chapters.clear()
        return index_file

    def rolled(self, base: int) -> None:
        """Release the bytes: the index file of the segment at `base` is on disk."""
        self._closed.pop(base, None)

    def drop(self, base: int) -> None:
        """Forget the segment at `base`."""
        self._closed.pop(base, None)
        self._chapters.clear()

    def frames(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        """Return up to `most` frames of `subject` from the one with `sequence` on; retention may have deleted some."""
        newest = self.newest.first_sequence(subject)
        if newest is not None and newest <= sequence:
            return self.newest.frames(subject, sequence, most)
        refs: list[FrameRef] = []
        for base in self._chapters_of(subject).from_sequence(sequence):
            refs += self._closed_index(base).frames(subject, sequence, most - len(refs))
            if len(refs) >= most:
                return refs
        return refs + self.newest.frames(subject, sequence, most - len(refs))

    def lengths(self, subject: str, base: int) -> list[Sequence[int]]:
        """Return the lengths of all frames of `subject` in each segment from `base` on."""
        closed = self._bases[bisect_left(self._bases, base) : -1]
        return [*(self._closed_index(other).lengths(subject) for other in closed), self.newest.lengths(subject)]

    def first_sequence(self, subject: str, base: int) -> int | None:
        """Return the subject's first sequence in the segment at `base` or later ones; None if there is none."""
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
            if index.end != self._end(base):  # the next segment lost its file, so its offsets count as part of this one
                index = self._make_again(base)
            self._closed[base] = index
        return index

    def _make_again(self, base: int) -> ClosedIndex:
        """Make a missing or damaged index file from its segment; raises CorruptFrame if that is damaged."""
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
