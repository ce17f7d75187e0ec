"""Core. Stored part of a log: checked reads of frames, bytes and snapshots from disk.

All reads block and touch only the disk, so they may run on any thread.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from qmq.codec import Buffer, decode_labels, labels_bytes
from qmq.errors import CorruptFrame, DiskFailed, ForeignSegment
from qmq.log import segments
from qmq.log.disk import Disk
from qmq.log.fold import State, apply, decode_snapshot
from qmq.log.frame import FLAG_LABELLED, NO_CHAIN, Frame, check_body, decode_frames, decode_header
from qmq.log.index import FrameRef
from qmq.log.recovery import Damage
from qmq.log.segments import Chunk, index_name, log_name, read_chunk, read_raw, segment_at, snapshot_name


class StoredLog:
    """The segments of one copy on disk. Made and updated by its `MessageLog`; read on any thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.bases: list[int] = []
        """Base offsets of the segments, ascending. Only the `MessageLog` changes it."""
        self.flushed_end = 0
        """Frames before it are fsynced."""

    @property
    def start(self) -> int:
        """Offset of the oldest frame kept."""
        return self.bases[0] if self.bases else self.flushed_end

    def read(self, begin: int, end: int, bytes_max: int) -> Chunk:
        """Read whole frames from disk, all checked.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        return read_chunk(self._disk, list(self.bases), begin, min(end, self.flushed_end), bytes_max)

    def read_intact(self, begin: int, end: int, bytes_max: int) -> bytes:
        """Read as `read` does, for bytes that are passed on (`segments.read_intact`).

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        return segments.read_intact(self._disk, list(self.bases), begin, min(end, self.flushed_end), bytes_max)

    def read_bodies(self, refs: list[FrameRef]) -> list[tuple[Frame, Buffer]]:
        """Read whole messages frames, neighbours in one read.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        bases, at = list(self.bases), 0
        bodies: list[tuple[Frame, Buffer]] = []
        while at < len(refs):
            last = at
            while last + 1 < len(refs) and refs[last].offset + refs[last].length == refs[last + 1].offset:
                last += 1
            begin, end = refs[at].offset, refs[last].offset + refs[last].length
            data = memoryview(read_raw(self._disk, bases, begin, end))
            for ref in refs[at : last + 1]:
                frame = decode_header(data, ref.offset - begin, ref.offset, None)
                body = data[ref.offset - begin + frame.body_at : frame.end - begin]
                check_body(frame, body)
                bodies.append((frame, body))
            at = last + 1
        return bodies

    def read_labels(self, refs: Sequence[FrameRef]) -> list[array[int]]:
        """Read the labels of messages frames; empty for a frame without labels.

        Reads only the end of a frame, if its own CRC shows that it is a section of labels.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        bases = list(self.bases)
        return [self._read_labels(bases, ref) for ref in refs]

    def _read_labels(self, bases: list[int], ref: FrameRef) -> array[int]:
        count = ref.end - ref.begin
        base, size = segment_at(bases, ref.offset), labels_bytes(count)
        data = self._disk.read(log_name(base), ref.offset + ref.length - size - base, size)
        try:
            return decode_labels(data, count)
        except ValueError:
            header = self._disk.read(log_name(base), ref.offset - base, 4096)
        if decode_header(header, 0, ref.offset, None).flags & FLAG_LABELLED:
            self.read_bodies([ref])  # raises for a damaged body; otherwise the producer sent wrong labels
        return array("Q")

    def next_frame(self, begin: int) -> int | None:
        """Return the offset of the first frame that begins at or after `begin`."""
        return segments.next_frame(self._disk, list(self.bases), begin)

    def read_bytes(self, begin: int, end: int) -> bytes:
        """Return the raw bytes `[begin, end)`, unchecked."""
        bases, end = list(self.bases), min(end, self.flushed_end)
        base, stop = segments.within(bases, begin, end)
        if stop == end:
            return self._disk.read(log_name(base), begin - base, max(0, end - begin))
        return read_raw(self._disk, bases, begin, end)

    def read_damaged(self, begin: int) -> bytes:
        """Return the bytes from `begin`, where no frame begins, up to the next frame."""
        bases = list(self.bases)
        end = segments.frame_behind(self._disk, bases, begin)
        return read_raw(self._disk, bases, begin, self.flushed_end if end is None else end)

    def look_again(self, begin: int) -> None:
        """Let the next read of the segment that holds `begin` open its file by name, which may be another file by now.

        Not for the newest segment, which is still written (`check_newest`).

        Raises:
            CorruptFrame: its file is gone.
        """
        bases = list(self.bases)
        if bases and (base := segment_at(bases, begin)) in bases[:-1]:
            self._disk.look_again(log_name(base))
            if not self._disk.has(log_name(base)):
                raise CorruptFrame(base, "its file is gone")

    def check_newest(self) -> None:
        """Check that the newest segment's file still has its name.

        Raises:
            DiskFailed: fsynced bytes would be lost when this process ends.
        """
        if self.bases and self._disk.is_lost(name := log_name(self.bases[-1])):
            raise DiskFailed(f"{name}: its file was taken away or exchanged while it was written")

    def verify(self, base: int, at: int, chain: int | None, bytes_max: int) -> tuple[int, int, bool]:
        """Read frames of the closed segment at `base` again, from `at`, by the name of its file.

        The snapshots at its begin and behind its end contain its chains. If the chain at the log's end equals the other
        copy's, both copies have the same bytes in each whole segment.

        Args:
            chain: chain before `at`; None at the segment's begin, where its snapshot may contain it.

        Returns:
            Offset to continue at, the chain there, and whether that is the segment's end.

        Raises:
            CorruptFrame: this copy is damaged there. ForeignSegment: the whole segment is another log's.
        """
        bases = list(self.bases)
        if base not in bases[:-1]:
            raise CorruptFrame(at, "its segment went meanwhile")
        end = bases[bisect_right(bases, base)]
        if at == base:
            self._disk.look_again(log_name(base))
            chain = self.chain_by_snapshot(base)
        chunk = read_chunk(self._disk, bases, at, end, bytes_max)
        try:
            decode_header(chunk.data, 0, at, chain)
        except CorruptFrame:
            if at > base:
                raise  # a repair or cut came after the frames before were read
            raise ForeignSegment(base, end) from None
        is_whole = chunk.end == end
        if is_whole and self.chain_by_snapshot(end) not in (None, chunk.chain):
            raise ForeignSegment(base, end)
        return chunk.end, chunk.chain, is_whole

    def check_readable(self, offset: int) -> None:
        """Read the segment up to the end of the frame at `offset`, before another copy is reported as different.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        at = segment_at(self.bases, max(offset, self.start)) if self.bases else offset
        while at <= offset and at < self.flushed_end:
            at = read_chunk(self._disk, self.bases, at, self.flushed_end).end

    def is_damaged(self, problem: CorruptFrame) -> bool:
        """Return whether the damage that a reader found still exists.

        It may have been read before a repair, or while retention or a cut removed it.
        """
        offset = problem.offset
        if isinstance(problem, ForeignSegment):
            return (offset, problem.end) in pairwise(self.bases)
        if not self.start <= offset < self.flushed_end:
            return False
        try:
            self.read(offset, self.flushed_end, 1)
        except CorruptFrame:
            return True
        return False

    def may_be_acknowledged(self, damage: Damage, high_watermark: int) -> bool:
        """Return whether the damaged range lies below a known high watermark, so that both copies had it.

        Any later frame may state that watermark, because the frames right behind the range were written before it was
        safe.
        """
        disk, bases = self._disk, self.bases
        end = bases[-1] + disk.used(log_name(bases[-1]))
        high = high_watermark
        at: int | None = damage.end
        while at is not None and high <= damage.begin:
            try:
                chunk = read_chunk(disk, bases, at, end)
                at, high = chunk.end, max(frame.high_watermark for frame in chunk.frames)
            except CorruptFrame:  # the end, or more damage
                at = segments.frame_behind(disk, bases, at)
        return damage.begin < high

    def chain_by_snapshot(self, base: int) -> int | None:
        """Return the chain right before the segment at `base`, or None if its snapshot is damaged or not there yet."""
        try:
            return self.snapshot(base)[1] if base else NO_CHAIN
        except CorruptFrame:
            return None

    def chain_before(self, offset: int) -> int:
        """Return the chain right before `offset`, where no frame is readable, from the frames before it. If the
        segment's snapshot is damaged, too, replay begins at an earlier segment.

        Raises:
            CorruptFrame: these frames are unreadable.
        """
        problem = CorruptFrame(offset, "the log begins behind it")
        for base in reversed(self.bases[: bisect_right(self.bases, offset)]):
            try:
                at, chain = base, self.snapshot(base)[1] if base else NO_CHAIN
                while at < offset:
                    chunk = read_chunk(self._disk, self.bases, at, offset)
                    at, chain = chunk.end, chunk.chain
                return chain
            except CorruptFrame as found:
                problem = found
        raise problem

    def snapshot(self, base: int) -> tuple[bytes, int]:
        """Return the snapshot of the state at `base`, and the chain there."""
        data = self._disk.read(snapshot_name(base), 0, self._disk.size(snapshot_name(base)))
        return data, check_snapshot(data, base)

    def start_chain(self) -> int | None:
        """Return the chain right before the oldest frame; None if it is unknown."""
        bases = list(self.bases)  # the frames behind a damaged snapshot may be whole and repair another copy
        return self.chain_by_snapshot(bases[0]) if bases else NO_CHAIN

    def seed_start(self) -> tuple[int, int, bytes]:
        """Return base, chain and snapshot of the oldest segment with a whole snapshot: a new copy begins there."""
        for base in self.bases:
            try:
                snapshot, chain = self.snapshot(base)
            except CorruptFrame:
                continue
            return base, chain, snapshot
        raise CorruptFrame(self.start, "no snapshot of this log is whole")

    def derived_files(self, base: int, *, index_only: bool = False) -> tuple[bytes, bytes]:
        """Return the stored index and snapshot of the segment at `base`; empty if missing or not requested."""
        disk, names = self._disk, [index_name(base)] if index_only else [index_name(base), snapshot_name(base)]
        index, *snapshot = (disk.read(name, 0, disk.size(name)) for name in names)
        return index, b"".join(snapshot)

    def state_before_lost_snapshot(self, base: int) -> tuple[State, int] | None:
        """Return the state at the begin of the closed segment at `base`, and its end, if the snapshot there is damaged
        and can be made again (`fold_on`, `put_snapshot`).
        """
        bases = list(self.bases)
        if base not in bases[:-1]:
            return None
        end = bases[bisect_right(bases, base)]
        if end >= self.flushed_end or self.chain_by_snapshot(end) is not None:
            return None  # not written yet, or whole
        try:
            return decode_snapshot(self.snapshot(base)[0]) if base else State(), end
        except CorruptFrame:
            return None

    def fold_on(self, state: State, end: int, bytes_max: int) -> None:
        """Fold the next frames before `end` into a separate state.

        Raises:
            CorruptFrame: the frames do not continue `state`; discard it.
        """
        chunk = read_chunk(self._disk, list(self.bases), state.end, end, bytes_max)
        try:
            for frame, body in decode_frames(chunk.data, state.end, state.chain):
                apply(state, frame, body)
        except ValueError as problem:
            raise CorruptFrame(state.end, str(problem)) from None

    def whole_snapshot_behind(self, base: int) -> int | None:
        """Return the base of the first later segment with a whole snapshot; None if there is none."""
        return next((at for at in self.bases if at > base and self.chain_by_snapshot(at) is not None), None)


def check_snapshot(data: Buffer, base: int) -> int:
    """Return the chain at `base` if `data` is a whole snapshot of the state there; raises CorruptFrame."""
    try:
        state = decode_snapshot(data)
    except ValueError as problem:
        raise CorruptFrame(base, str(problem)) from None
    if state.end != base:
        raise CorruptFrame(base, f"this is a snapshot of the state at {state.end}")
    return state.chain
