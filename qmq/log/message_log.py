"""Core. The message log of a broker group: appended here, written and fsynced by whoever owns it, read by everybody.

Life of a frame: `append` (or `append_frames`, on a slave) folds it into the state and keeps it in the tail;
`take_commit` takes everything that is not on disk yet; `perform` writes and fsyncs it, on any thread, one at a
time; `flushed` takes note. Reading from the tail needs no disk.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from qmq.codec import Buffer, decode_labels, labels_bytes
from qmq.errors import BrokenInvariant, CorruptFrame, DiskFailed, Diverged, ForeignSegment, require
from qmq.log import manifest, quarantine, segments
from qmq.log.disk import BLOCK_BYTES, Disk
from qmq.log.fold import State, apply, decode_snapshot, encode_snapshot
from qmq.log.frame import (
    FLAG_LABELLED,
    FRAME_BYTES_MAX,
    NO_CHAIN,
    Frame,
    FrameKind,
    check_body,
    decode_frames,
    decode_header,
    encode_header,
    subject_field,
)
from qmq.log.health import HealthEvent, LogLife
from qmq.log.index import ConsumeLog, FrameRef
from qmq.log.manifest import encode_manifest, write_manifest
from qmq.log.recovery import Damage, missing, recover, set_aside
from qmq.log.segments import Chunk, index_name, log_name, read_chunk, read_raw, segment_at, snapshot_name
from qmq.types import Epoch


class _Write(NamedTuple):
    base: int
    offset: int
    buffers: list[Buffer]


class _Roll(NamedTuple):
    """Close the segment at `base`, which ends at `end`; open the next one there."""

    base: int
    end: int
    index_file: bytes
    snapshot: bytes
    manifest: bytes


class _Drop(NamedTuple):
    """Delete the segment at `base`."""

    base: int
    manifest: bytes


@dataclass(slots=True)
class Commit:
    """What `perform` has to make durable, in this order; afterwards everything before `end` is. `chain`: at `end`, also
    of one that only deletes: copies compare it."""

    end: int
    chain: int
    bytes: int = 0
    steps: list[_Write | _Roll | _Drop] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether this is a write and its fsync, and nothing that takes several of them."""
        return all(isinstance(step, _Write) for step in self.steps)


DAMAGED_KEPT = 100
TAIL_ENTRY_BYTES = 2048
"""What a frame in the tail counts for beside its bytes: its objects take 700, and each of them is looked at when
Python collects cycles. A tail of 100,000 tiny frames stopped the broker for 130 ms at a time."""


class _TailEntry(NamedTuple):
    frame: Frame
    parts: tuple[Buffer, ...]
    """(header, body) as the master has them, or both in one."""

    def body(self) -> Buffer:
        return self.parts[1] if len(self.parts) == 2 else memoryview(self.parts[0])[self.frame.body_at :]


class MessageLog:
    """One copy of a group's log. Made by the process's main; everything but `perform` and `read` on its loop."""

    def __init__(self, disk: Disk, *, segment_bytes: int, tail_bytes: int) -> None:
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._tail_bytes_max = tail_bytes
        self.health = LogLife()
        self.damaged: deque[Damage] = deque(maxlen=DAMAGED_KEPT)
        """All that readers found since this object was made, the newest last, mended by now or not."""
        self.torn_bytes = 0
        self._reload()

    def _reload(self) -> None:
        """Start from what the disk holds."""
        recovered = recover(self._disk)
        self.state, self.damage = recovered.state, recovered.damage
        if self.damage is None:
            self.health.on(HealthEvent.RECOVERED_SHORT if self.is_tail_cut else HealthEvent.RECOVERED_WHOLE)
        else:
            stopped = self.damage.begin == self.state.end
            self.health.on(HealthEvent.REPLAY_STOPPED if stopped else HealthEvent.RECOVERED_DAMAGED)
        self.torn_bytes += recovered.torn_bytes
        self._bases = recovered.bases
        self._consume_log = ConsumeLog(self._disk, self._bases, recovered.newest)
        self._tail: dict[int, _TailEntry] = {}
        self._tail_bytes = 0
        self._pending = Commit(self.state.end, self.state.chain)
        self._writing: Commit | None = None
        self._rolls_next = False
        self.flushed_end = self.state.end

    # Where it stands.

    @property
    def start(self) -> int:
        """Offset of the oldest frame kept."""
        return self._bases[0] if self._bases else self.state.end

    @property
    def end(self) -> int:
        return self.state.end

    @property
    def chain(self) -> int:
        return self.state.chain

    @property
    def bases(self) -> list[int]:
        """Base offsets of the segments, ascending; do not change it."""
        return self._bases

    @property
    def is_empty(self) -> bool:
        return not self.state.epochs

    @property
    def is_tail_cut(self) -> bool:
        """Whether bytes are missing at the end that may have been acknowledged; known across restarts."""
        return self._disk.has(segments.TAIL_CUT)

    def tail_is_whole(self) -> None:
        """Take note that this log has all that the other copy has, so nothing is missing."""
        self._disk.remove(segments.TAIL_CUT)
        if self.health.may(HealthEvent.MATCHED):
            self.health.on(HealthEvent.MATCHED)

    # Appending.

    def append(
        self,
        kind: FrameKind,
        subject: str,
        body: Buffer,
        *,
        body_crc: int,
        epoch: Epoch,
        high_watermark: int,
        timestamp_ms: int,
        flags: int = 0,
        count: int = 0,
        first_sequence: int = 0,
        producer: int = 0,
        batch: int = 0,
    ) -> Frame:
        """Write a frame behind the last one, as master."""
        if len(body) > FRAME_BYTES_MAX:  # whoever reads it would take it for damage, on every copy
            raise BrokenInvariant(f"a frame of {len(body)} bytes is more than {FRAME_BYTES_MAX} bytes")
        name = subject_field(subject)
        header, frame = encode_header(
            kind=kind,
            flags=flags,
            subject=subject,
            field=name,
            count=count,
            body_bytes=len(body),
            body_crc=body_crc,
            epoch=epoch,
            offset=self.state.end,
            high_watermark=high_watermark,
            timestamp_ms=timestamp_ms,
            first_sequence=first_sequence,
            producer=producer,
            batch=batch,
            previous_chain=self.state.chain,
        )
        self._take(frame, (header, body), body)
        return frame

    def append_frames(self, offset: int, data: memoryview) -> None:
        """Take frames from the other copy, byte by byte as they are.

        Raises:
            CorruptFrame: they do not continue this log. Those before the first bad one were taken.
        """
        if offset != self.state.end:
            raise CorruptFrame(offset, f"this log ends at {self.state.end}")
        for frame, body in decode_frames(data, offset, self.state.chain):
            self._take(frame, (data[frame.offset - offset : frame.end - offset],), body)

    def _take(self, frame: Frame, parts: tuple[Buffer, ...], body: Buffer) -> None:
        if self.damage is not None and self.damage.end > self.state.end:
            raise BrokenInvariant("nothing is appended behind damage")
        size = frame.end - frame.offset
        if not self._bases:
            self._open_first()
        elif (self._rolls_next or frame.end - self._bases[-1] > self._segment_bytes) and frame.offset > self._bases[-1]:
            self._roll()
        apply(self.state, frame, body)
        if frame.kind == FrameKind.MESSAGES:
            self._consume_log.newest.add(frame)
        self._tail[frame.offset] = _TailEntry(frame, parts)
        self._tail_bytes += size + TAIL_ENTRY_BYTES
        pending = self._pending
        if pending.steps and isinstance(last := pending.steps[-1], _Write):
            last.buffers.extend(parts)
        else:
            pending.steps.append(_Write(self._bases[-1], frame.offset, list(parts)))
        pending.end, pending.chain = frame.end, frame.chain
        pending.bytes += size

    def _open_first(self) -> None:
        """Make the first segment at once: happens once in a copy's life."""
        base = self.state.end
        self._bases.append(base)
        self._disk.create(log_name(base), self._segment_bytes)
        self._disk.put(snapshot_name(base), encode_snapshot(self.state))
        write_manifest(self._disk, self._bases)

    def _roll(self) -> None:
        self._rolls_next = False
        base, end = self._bases[-1], self.state.end
        index_file = self._consume_log.roll(base, end)
        self._bases.append(end)
        roll = _Roll(base, end, index_file, encode_snapshot(self.state), encode_manifest(self._bases))
        self._pending.steps.append(roll)

    # Making it durable.

    def take_commit(self) -> Commit | None:
        """Return what is to be written now, or None: there is nothing, or the last commit is not `flushed` yet."""
        if self._writing is not None or not self._pending.steps:
            return None
        self._writing, self._pending = self._pending, Commit(self.state.end, self.state.chain)
        return self._writing

    @property
    def is_idle(self) -> bool:
        """Whether everything appended is on disk."""
        return self._writing is None and not self._pending.steps

    @property
    def is_deleting(self) -> bool:
        """Whether a segment was forgotten whose files are not yet deleted."""
        commits = (self._pending, self._writing)
        return any(isinstance(step, _Drop) for commit in commits if commit is not None for step in commit.steps)

    def perform(self, commit: Commit) -> None:
        """Write and fsync. Blocks; touches the disk only, so it may run on a thread.

        Raises:
            DiskFailed: nobody knows what the files hold now; the process must end.
        """
        written = -1
        for step in commit.steps:
            match step:
                case _Write(base, offset, buffers):
                    self._disk.write(log_name(base), offset - base, buffers)
                    written = base
                case _Roll():
                    self._close(step)
                case _Drop(base, listed):
                    self._disk.put(manifest.NAME, listed)
                    self._remove_files(base)
        if written >= 0:
            self._disk.sync(log_name(written))

    def _close(self, roll: _Roll) -> None:
        self._disk.sync(log_name(roll.base))
        self._disk.truncate(log_name(roll.base), roll.end - roll.base)
        self._disk.put(index_name(roll.base), roll.index_file)
        self._disk.create(log_name(roll.end), self._segment_bytes)
        self._disk.put(snapshot_name(roll.end), roll.snapshot)
        self._disk.put(manifest.NAME, roll.manifest)

    def flushed(self, commit: Commit) -> None:
        """Take note that `perform` returned."""
        if self._writing is not commit:
            raise BrokenInvariant("commits are performed one at a time")
        self._writing = None
        self.flushed_end = commit.end
        for step in commit.steps:
            if isinstance(step, _Roll):
                self._consume_log.rolled(step.base)
        self._shrink_tail()

    def _shrink_tail(self) -> None:
        while self._tail_bytes > self._tail_bytes_max:
            offset, entry = next(iter(self._tail.items()))
            if entry.frame.end > self.flushed_end:
                return
            del self._tail[offset]
            self._tail_bytes -= entry.frame.end - offset + TAIL_ENTRY_BYTES

    # Reading.

    def tail_frames(self, begin: int, bytes_max: int) -> tuple[list[Buffer], int, int] | None:
        """Return buffers of whole frames from `begin`, end and chain of the last; None if the tail lacks them."""
        entry = self._tail.get(begin)
        if entry is None:
            return None
        buffers: list[Buffer] = []
        frame = entry.frame
        while entry is not None and entry.frame.end - begin <= bytes_max or not buffers:
            assert entry is not None
            buffers.extend(entry.parts)
            frame = entry.frame
            entry = self._tail.get(frame.end)
        return buffers, frame.end, frame.chain

    def tail_body(self, offset: int) -> tuple[Frame, Buffer] | None:
        """Return the frame at `offset` and its body, if the tail has it."""
        entry = self._tail.get(offset)
        return (entry.frame, entry.body()) if entry else None

    def read(self, begin: int, end: int, bytes_max: int) -> Chunk:
        """Read whole frames from disk; everything in them is checked. Blocks; may run on a thread.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        return read_chunk(self._disk, list(self._bases), begin, min(end, self.flushed_end), bytes_max)

    def read_intact(self, begin: int, end: int, bytes_max: int) -> bytes:
        """As `read`, for bytes that are passed on (`segments.read_intact`). Blocks; may run on a thread.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        return segments.read_intact(self._disk, list(self._bases), begin, min(end, self.flushed_end), bytes_max)

    def look_again(self, begin: int) -> None:
        """Let the segment that `begin` is in be read from the file of its name, which may be another one by now.

        Not the one that is written (`check_newest`). Blocks; may run on a thread.

        Raises:
            CorruptFrame: its file is gone.
        """
        bases = list(self._bases)
        if bases and (base := segment_at(bases, begin)) in bases[:-1]:
            self._disk.look_again(log_name(base))
            if not self._disk.has(log_name(base)):
                raise CorruptFrame(base, "its file is gone")

    def check_newest(self) -> None:
        """See that the file that is written has its name. Blocks; may run on a thread.

        Raises:
            DiskFailed: what is fsynced there would be gone when this process ends.
        """
        if self._bases and self._disk.is_lost(name := log_name(self._bases[-1])):
            raise DiskFailed(f"{name}: its file was taken away or exchanged while it was written")

    def verify(self, base: int, at: int, chain: int | None, bytes_max: int) -> tuple[int, int, bool]:
        """Read frames of the closed segment at `base` again, from `at`, by the name of its file. Blocks; on any thread.

        The snapshots at its begin and behind its end say which chain it has to have there. So, where the chain at the
        log's end is the other copy's, equal chains mean that both have the same bytes in each segment that is whole.

        Args:
            chain: before `at`; None at the segment's begin, where its snapshot may tell.

        Returns:
            Where to go on, the chain there, and whether that is the segment's end.

        Raises:
            CorruptFrame: this copy is damaged there. ForeignSegment: all of the segment is another log's.
        """
        bases = list(self._bases)
        if base not in bases[:-1]:
            raise CorruptFrame(at, "its segment went meanwhile")
        end = bases[bisect_right(bases, base)]
        if at == base:
            self._disk.look_again(log_name(base))
            chain = self._chain_by_snapshot(base)
        chunk = read_chunk(self._disk, bases, at, end, bytes_max)
        try:
            decode_header(chunk.data, 0, at, chain)
        except CorruptFrame:
            if at > base:
                raise  # it was repaired, or cut, since the frames before were read
            raise ForeignSegment(base, end) from None
        is_whole = chunk.end == end
        if is_whole and self._chain_by_snapshot(end) not in (None, chunk.chain):
            raise ForeignSegment(base, end)
        return chunk.end, chunk.chain, is_whole

    def _chain_by_snapshot(self, base: int) -> int | None:
        """Return the chain right before the segment at `base`; None: its snapshot is damaged, or not written yet."""
        try:
            return self._snapshot(base)[1] if base else NO_CHAIN
        except CorruptFrame:
            return None

    # Snapshots that were damaged: whoever restarts, or is filled, begins at one.

    def state_before_lost_snapshot(self, base: int) -> tuple[State, int] | None:
        """Return the state at the begin of the closed segment at `base`, and its end, if the snapshot there is damaged
        and can be made again (`fold_on`, `put_snapshot`). Blocks; on any thread."""
        bases = list(self._bases)
        if base not in bases[:-1]:
            return None
        end = bases[bisect_right(bases, base)]
        if end >= self.flushed_end or self._chain_by_snapshot(end) is not None:
            return None  # it is still to be written, or whole
        try:
            return decode_snapshot(self._snapshot(base)[0]) if base else State(), end
        except CorruptFrame:
            return None

    def fold_on(self, state: State, end: int, bytes_max: int) -> None:
        """Fold the next frames before `end` into a state of its own. Blocks; on any thread.

        Raises:
            CorruptFrame: they do not continue it; it is of no more use.
        """
        chunk = read_chunk(self._disk, list(self._bases), state.end, end, bytes_max)
        try:
            for frame, body in decode_frames(chunk.data, state.end, state.chain):
                apply(state, frame, body)
        except ValueError as problem:
            raise CorruptFrame(state.end, str(problem)) from None

    def put_snapshot(self, base: int, chain: int, snapshot: Buffer) -> None:
        """Store the snapshot of the state at `base`, where the chain is `chain`, if a segment still begins there."""
        if base in self._bases and self.chain_is(base, chain):
            self._disk.put(snapshot_name(base), snapshot)

    def whole_snapshot_behind(self, base: int) -> int:
        """Return the base of the first segment behind that at `base` which has a whole snapshot; the log's end if none
        has one. Blocks."""
        return next((at for at in self._bases if at > base and self._chain_by_snapshot(at) is not None), self.end)

    def roll_if_no_snapshot(self) -> bool:
        """See whether the only segment's snapshot is damaged, which nothing makes again; then the next frame begins a
        segment with a whole one. Blocks."""
        base = self.start
        self._rolls_next = len(self._bases) == 1 and self.flushed_end > base and self._chain_by_snapshot(base) is None
        return self._rolls_next

    def frames(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        """Return up to `most` frames of `subject` from the one that holds `sequence`; retention may have taken some."""
        refs, kept_from = self._consume_log.frames(subject, sequence, most), self.state.kept.start
        if refs and refs[0].offset < kept_from:  # deleting them is decided on, even if their file is still there
            first = self.first_kept(subject, segment_at(self._bases, kept_from))
            refs = self._consume_log.frames(subject, max(sequence, first), most)
        while refs and refs[0].offset < kept_from:  # a segment that another one's file went into
            kept = [ref for ref in refs if ref.offset >= kept_from]
            refs = kept or self._consume_log.frames(subject, refs[-1].end, most)
        return refs

    def first_kept(self, subject: str, base: int) -> int:
        """Return the subject's first sequence in the segment at `base` or behind; its next one if there is none.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        first = self._consume_log.first_sequence(subject, base)
        return self.state.next_sequence.get(subject, 0) if first is None else first

    def chain_is(self, offset: int, chain: int) -> bool:
        """Return whether this log's chain right before `offset` is `chain`: the frame there was linked to it."""
        if offset == self.state.end:
            return chain == self.state.chain
        entry = self._tail.get(offset)
        if entry is not None:
            data = bytes(entry.parts[0])[: entry.frame.body_at]
        else:
            base = segment_at(self._bases, offset)
            data = self._disk.read(log_name(base), offset - base, 4096)
        try:
            decode_header(data, 0, offset, None)
        except CorruptFrame:
            with contextlib.suppress(CorruptFrame):
                return self._chain_before(offset) == chain
            return False
        try:
            decode_header(data, 0, offset, chain)
        except CorruptFrame:
            return False
        return True

    def _chain_before(self, offset: int) -> int:
        """Return the chain right before `offset`, where no frame can be read, from the frames before it: those of an
        earlier segment, if the snapshot of this one is damaged as well.

        Raises:
            CorruptFrame: where they cannot be read.
        """
        problem = CorruptFrame(offset, "the log begins behind it")
        for base in reversed(self._bases[: bisect_right(self._bases, offset)]):
            try:
                at, chain = base, self._snapshot(base)[1] if base else NO_CHAIN
                while at < offset:
                    chunk = read_chunk(self._disk, self._bases, at, offset)
                    at, chain = chunk.end, chunk.chain
                return chain
            except CorruptFrame as found:
                problem = found
        raise problem

    def check_readable(self, offset: int) -> None:
        """Read the segment up to and with the frame at `offset`, before another copy is accused of being different.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        at = segment_at(self._bases, max(offset, self.start)) if self._bases else offset
        while at <= offset and at < self.flushed_end:
            at = read_chunk(self._disk, self._bases, at, self.flushed_end).end

    # Cutting, seeding, repair, retention: rare, so they block.

    def cut(self, to: int, why: str) -> str | None:
        """Move everything from `to` on into quarantine, durably, and start again from what is left.

        Returns:
            Name of the quarantined file, None if there was nothing to cut.
        """
        require(self._writing is None, "nothing is being written while the log is cut")
        if self.damage is None and to >= self.state.end:
            return None
        self.flush()
        if self.damage is not None:
            self._disk.put(segments.TAIL_CUT, b"damage")
        name = quarantine.keep_bytes(self._disk, to, read_raw(self._disk, self._bases, to, segments.NO_END), why)
        kept = [base for base in self._bases if base < to] or self._bases[:1]
        write_manifest(self._disk, kept)
        for base in reversed(self._bases[len(kept) :]):
            self._remove_files(base)
        base = kept[-1]
        self._disk.remove(index_name(base))
        self._disk.truncate(log_name(base), to - base)
        self._reload()
        return name

    def flush(self) -> None:
        """Make durable what is not on disk yet; nothing is being written meanwhile. Blocks."""
        if (commit := self.take_commit()) is not None:
            self.perform(commit)
            self.flushed(commit)

    def set_aside(self, why: str) -> None:
        """Move this whole copy into quarantine and begin with nothing: the other copy fills it."""
        require(self._writing is None, "nothing is being written while the log is set aside")
        self.flush()
        set_aside(self._disk, self.start, self.end, why)
        self._reload()

    def seed(self, base: int, snapshot: Buffer, why: str, *, start: int | None = None) -> None:
        """Set this whole copy aside and begin a new one at `base`, from the master's snapshot of the state there.

        Args:
            start: where the other copy's log begins. What is before `base`, of which it has no whole snapshot, counts
                as damage here: this copy is whole once it has that, too.

        Raises:
            CorruptFrame: that is no snapshot of the state at `base`. Nothing was changed.
        """
        require(self._writing is None, "nothing is being written while the log is replaced")
        _check_snapshot(snapshot, base)
        self.flush()
        set_aside(self._disk, self.start, self.end, why)
        self._disk.put(snapshot_name(base), snapshot)
        write_manifest(self._disk, [base] if start is None or start >= base else [start, base])
        self._disk.create(log_name(base), self._segment_bytes)
        self._reload()

    def read_bodies(self, refs: list[FrameRef]) -> list[tuple[Frame, Buffer]]:
        """Read whole messages frames from disk, neighbours at one go. Blocks; may run on a thread.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        bases, at = list(self._bases), 0
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
        """Read the labels of messages frames from disk; empty ones where a frame has none. Blocks; on any thread.

        Only the end of a frame is read, if that is a label section by its own CRC.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        bases = list(self._bases)
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
            self.read_bodies([ref])  # labels that do not match their CRC in a body that does: they came so
        return array("Q")

    def next_frame(self, begin: int) -> int | None:
        """Return the offset of the first frame that begins at or after `begin`. Blocks; may run on a thread."""
        return segments.next_frame(self._disk, list(self._bases), begin)

    def read_bytes(self, begin: int, end: int) -> bytes:
        """Return what stands in `[begin, end)`, as it is: whoever asks checks it. Blocks; may run on a thread."""
        bases, end = list(self._bases), min(end, self.flushed_end)
        base, stop = segments.within(bases, begin, end)
        if stop == end:
            return self._disk.read(log_name(base), begin - base, max(0, end - begin))
        return read_raw(self._disk, bases, begin, end)

    def read_damaged(self, begin: int) -> bytes:
        """Return the bytes from `begin`, where no frame is, up to the next frame. Blocks; may run on a thread."""
        bases = list(self._bases)
        end = segments.frame_behind(self._disk, bases, begin)
        return read_raw(self._disk, bases, begin, self.flushed_end if end is None else end)

    def may_be_acknowledged(self, damage: Damage) -> bool:
        """Return whether the damage lies below a high watermark that this log knows, so that both copies had it.

        Any frame behind it may say so: the next ones were written before it was safe.
        """
        disk, bases = self._disk, self._bases
        end = bases[-1] + disk.used(log_name(bases[-1]))
        high = self.state.high_watermark
        at: int | None = damage.end
        while at is not None and high <= damage.begin:
            try:
                chunk = read_chunk(disk, bases, at, end)
                at, high = chunk.end, max(frame.high_watermark for frame in chunk.frames)
            except CorruptFrame:  # the end, or more damage
                at = segments.frame_behind(disk, bases, at)
        return damage.begin < high

    def timestamp_at(self, offset: int) -> int:
        """Return the timestamp of the frame at `offset`, in ms since 1970.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        if offset == self.state.end:
            return self.state.timestamp_ms
        if (entry := self._tail.get(offset)) is not None:
            return entry.frame.timestamp_ms
        base = segment_at(self._bases, offset)
        return decode_header(self._disk.read(log_name(base), offset - base, 4096), 0, offset, None).timestamp_ms

    def start_chain(self) -> int | None:
        """Return the chain right before the oldest frame; None if nothing tells. Blocks; may run on a thread."""
        bases = list(self._bases)  # if the snapshot is damaged, the frames may be whole: they mend another copy
        return self._chain_by_snapshot(bases[0]) if bases else NO_CHAIN

    def seed_start(self) -> tuple[int, int, bytes]:
        """Return base, chain and snapshot of the oldest segment whose snapshot is whole: a new copy begins there."""
        for base in self._bases:
            try:
                snapshot, chain = self._snapshot(base)
            except CorruptFrame:
                continue
            return base, chain, snapshot
        raise CorruptFrame(self.start, "no snapshot of this log is whole")

    def _snapshot(self, base: int) -> tuple[bytes, int]:
        """Return the snapshot of the state at `base`, and the chain there."""
        data = self._disk.read(snapshot_name(base), 0, self._disk.size(snapshot_name(base)))
        return data, _check_snapshot(data, base)

    def derived_files(self, base: int, *, index_only: bool = False) -> tuple[bytes, bytes]:
        """Return index and snapshot beside the segment at `base` as they are stored, empty where there is none, or none
        is asked for. Blocks; may run on a thread."""
        disk, names = self._disk, [index_name(base)] if index_only else [index_name(base), snapshot_name(base)]
        index, *snapshot = (disk.read(name, 0, disk.size(name)) for name in names)
        return index, b"".join(snapshot)

    def is_damaged(self, problem: CorruptFrame) -> bool:
        """Return whether what a reader met is so now.

        Whoever could not read a frame may have done so before a repair, or while retention or a cut took it.
        """
        offset = problem.offset
        if isinstance(problem, ForeignSegment):
            return (offset, problem.end) in pairwise(self._bases)
        if not self.start <= offset < self.flushed_end:
            return False
        try:
            self.read(offset, self.flushed_end, 1)
        except CorruptFrame:
            return True
        return False

    def damaged_at(self, problem: CorruptFrame) -> None:
        """Take note that a frame, folded long ago, cannot be read any more, or that a segment is not this log's."""
        begin = problem.offset
        if isinstance(problem, ForeignSegment):
            end: int | None = problem.end
        else:
            end = segments.frame_behind(self._disk, self._bases, begin)
        found = Damage(begin, min(self.state.end, end or self.state.end), problem.reason)
        if self.damage is None or found not in self.damaged:  # several readers may meet it
            self.damaged.append(found)
        self.damage = self.damage or found
        self.health.on(HealthEvent.FOUND_DAMAGE)

    def _not_damaged(self) -> None:
        """The damage is gone."""
        self.damage = None
        self.health.on(HealthEvent.REPAIRED_SHORT if self.is_tail_cut else HealthEvent.REPAIRED)

    def repair(self, data: bytes) -> None:
        """Replace the damaged range by the other copy's frames, from its first byte on.

        If they end within it, the rest of it stays damaged: the other copy has no more, or parts from this one there.
        Where this log was replayed, the epochs of its frames tell where they part.

        Raises:
            Diverged: the frames do not join what is whole on both sides of the damage.
            CorruptFrame: they are no frames.
        """
        damage = self.damage
        require(damage is not None, "only a damaged log is repaired")
        assert damage is not None
        in_recovery = self.health.is_unreplayed
        end, chain = damage.begin, self.state.chain if in_recovery else None
        for frame, _ in decode_frames(data, damage.begin, chain):
            if in_recovery and segment_at(self._bases, frame.end - 1) != segment_at(self._bases, frame.offset):
                break  # no frame of ours lies in two segments: from here on, that is another history
            if not in_recovery and frame.epoch != self.state.epoch_at(frame.offset):
                break  # and here as well: who compares both logs cuts ours there, once what is before it can be read
            end, chain = frame.end, frame.chain
            if end >= damage.end:
                break
        joins = end > damage.begin
        if joins and not in_recovery:
            assert chain is not None
            joins = self._joins(data, damage, end, chain)
        if not joins:
            raise Diverged(f"the other copy's frames from {damage.begin} to {end} do not join this log at {damage.end}")
        if damaged := read_raw(self._disk, self._bases, damage.begin, end):
            quarantine.keep_bytes(self._disk, damage.begin, damaged, "damaged")
        at = damage.begin
        while at < end:
            base = segment_at(self._bases, at)
            later = [other for other in self._bases if other > base]
            stop = min(end, later[0]) if later else end
            piece = data[at - damage.begin : stop - damage.begin]
            if stop == end:
                piece += self._rest_of_block(base, end, damage.end)
            self._overwrite(base, at, piece, is_last=stop in later)
            at = stop
        if in_recovery:
            self._reload()
            return
        self.damage = Damage(end, damage.end, damage.reason) if end < damage.end else missing(self._disk, self._bases)
        if self.damage is None:
            self._not_damaged()

    def _joins(self, data: bytes, damage: Damage, end: int, chain: int) -> bool:
        """Return whether frames, the last of which ends at `end`, fit between what is whole on both sides."""
        if end < damage.end:
            return self._continues_with(data, damage)
        is_all = damage.begin == self.start  # nothing is before it, and its own chain stands where it ends
        return self.chain_is(end, chain) and (is_all or self._continues_with(data, damage))

    def _rest_of_block(self, base: int, begin: int, damage_end: int) -> bytes:
        """Return what is read behind `begin`, up to its block's end: a bad block is written whole, or not at all."""
        end = min(begin + (base - begin) % BLOCK_BYTES, damage_end)
        return self._disk.read(log_name(base), begin - base, end - begin)

    def _overwrite(self, base: int, at: int, data: bytes, *, is_last: bool) -> None:
        """Write over damage in the segment at `base`; `is_last`: the segment is closed and ends there.

        A block that cannot be read is made good by being written as a whole, also where the file ends within it.
        """
        if not self._disk.has(log_name(base)):
            self._disk.create(log_name(base), 0)
        end = at - base + len(data)
        padding = bytes(-end % BLOCK_BYTES if is_last else 0)
        self._disk.write(log_name(base), at - base, [data, padding])
        self._disk.sync(log_name(base))
        if padding:
            self._disk.truncate(log_name(base), end)

    def _continues_with(self, data: bytes, damage: Damage) -> bool:
        """Return whether the frame that `data` begins with continues this log's history where the damage begins.

        If the frames before it cannot be read either, the damage begins earlier than its reader met it.
        """
        try:
            chain = self._chain_before(damage.begin)
        except CorruptFrame as problem:
            self.damage = Damage(problem.offset, damage.end, problem.reason)
            return False
        try:
            decode_header(data, 0, damage.begin, chain)
        except CorruptFrame:
            return False
        return True

    @property
    def oldest_may_go(self) -> bool:
        """Whether the copies agreed to delete the oldest segment."""
        kept, bases = self.state.kept, self._bases
        return len(bases) > 1 and bases[1] <= kept.agreed_start(self.state.high_watermark)

    def drop_oldest_segment(self) -> None:
        """Forget the oldest segment, never the one that is being written; the next commit deletes its files. Whoever
        calls this knows that it may go."""
        base = self._bases.pop(0)
        self._consume_log.drop(base)
        # As a part of the stream of commits: the list of segments that a roll writes meanwhile may not come after it.
        # But before what is written last, which stays one write: of two, a crash may keep the second alone, and what it
        # tore would count as damage.
        steps = self._pending.steps
        at = len(steps) - (bool(steps) and isinstance(steps[-1], _Write))
        steps.insert(at, _Drop(base, encode_manifest(self._bases)))
        if self.damage is not None and self.damage.begin < self.start:
            self._not_damaged()  # it went with its segment

    def set_aside_oldest_segment(self, why: str) -> None:
        """Move the oldest segment's file into quarantine, never that of the one that is being written."""
        require(len(self._bases) > 1, "the newest segment stays")
        base, end = self._bases[:2]
        if self._disk.has(log_name(base)):
            quarantine.keep_files(self._disk, [log_name(base)], base, end, why)
        self.drop_oldest_segment()

    def _remove_files(self, base: int) -> None:
        # The index and snapshot go first: a segment without them is whole, they without it are rubbish.
        self._disk.remove(index_name(base))
        self._disk.remove(snapshot_name(base))
        self._disk.remove(log_name(base))


def _check_snapshot(data: Buffer, base: int) -> int:
    """Return the chain at `base` if `data` is a whole snapshot of the state there; raises CorruptFrame."""
    try:
        state = decode_snapshot(data)
    except ValueError as problem:
        raise CorruptFrame(base, str(problem)) from None
    if state.end != base:
        raise CorruptFrame(base, f"this is a snapshot of the state at {state.end}")
    return state.chain
