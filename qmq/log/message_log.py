"""Core. Message log of a broker group: frames are appended here, made durable in commits, and read from the tail.

Life of a frame: `append` (on a slave: `append_frames`) folds it into the state and keeps it in the tail. `take_commit`
returns all that is not on disk. `perform` writes and fsyncs it, on any thread, one commit at a time; `flushed` records
the result. Reads of older frames go to disk (`qmq.log.stored`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.codec import Buffer
from qmq.errors import BrokenInvariant, CorruptFrame, ForeignSegment, require
from qmq.log import manifest, quarantine, segments
from qmq.log.disk import Disk
from qmq.log.fold import apply, encode_snapshot
from qmq.log.frame import (
    Frame,
    FrameKind,
    decode_frames,
    decode_header,
    encode_header,
    subject_field,
)
from qmq.log.index import ConsumeLog, FrameRef
from qmq.log.manifest import encode_manifest, write_manifest
from qmq.log.recovery import Damage, HealthEvent, LogLife, recover, set_aside
from qmq.log.segments import index_name, log_name, read_raw, segment_at, snapshot_name
from qmq.log.stored import StoredLog, check_snapshot
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.types import Epoch


class _Write(NamedTuple):
    base: int
    offset: int
    buffers: list[Buffer]


class _Roll(NamedTuple):
    """Step of a commit: close the segment at `base`, which ends at `end`, and open the next one there."""

    base: int
    end: int
    index_file: bytes
    snapshot: bytes
    manifest: bytes


class _Drop(NamedTuple):
    """Step of a commit: delete the segment at `base`."""

    base: int
    manifest: bytes


@dataclass(slots=True)
class Commit:
    """Steps of one `perform`, in order. Afterwards everything before `end` is durable. `chain` is the chain at `end`,
    also of a commit that only deletes: copies compare it.
    """

    end: int
    chain: int
    bytes: int = 0
    steps: list[_Write | _Roll | _Drop] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether the commit is a single write and its fsync."""
        return all(isinstance(step, _Write) for step in self.steps)


DAMAGED_KEPT = 100
TAIL_ENTRY_BYTES = 2048
"""Memory of a frame in the tail besides its bytes. Its objects take 700 bytes, and Python's garbage collector visits
each: a tail of 100,000 tiny frames stopped the broker for 130 ms at a time.
"""


class _TailEntry(NamedTuple):
    frame: Frame
    parts: tuple[Buffer, ...]
    """(header, body) on a master; one buffer of both on a slave."""

    def body(self) -> Buffer:
        return self.parts[1] if len(self.parts) == 2 else memoryview(self.parts[0])[self.frame.body_at :]


class MessageLog:
    """One copy of a group's log. Made by the process's main; used on its loop, except `perform` and `stored`."""

    def __init__(self, disk: Disk, *, segment_bytes: int, tail_bytes: int) -> None:
        self.disk = disk
        self.stored = StoredLog(disk)
        self._segment_bytes = segment_bytes
        self._tail_bytes_max = tail_bytes
        self.health = LogLife()
        self.damaged: deque[Damage] = deque(maxlen=DAMAGED_KEPT)
        """Damage that readers found since the start, repaired or not, newest last."""
        self.damages = 0
        """Number of damages since the start, found by readers and by recoveries."""
        self.damage: Damage | None = None
        self.torn_bytes = 0
        self.reload()

    def reload(self) -> None:
        """Read the copy back from disk."""
        recovered = recover(self.disk)
        self.state = recovered.state
        self.damages += recovered.damage is not None and recovered.damage != self.damage
        self.damage = recovered.damage
        if self.damage is None:
            self.health.on(HealthEvent.RECOVERED_SHORT if self.is_tail_cut else HealthEvent.RECOVERED_WHOLE)
        else:
            stopped = self.damage.begin == self.state.end
            self.health.on(HealthEvent.REPLAY_STOPPED if stopped else HealthEvent.RECOVERED_DAMAGED)
        self.torn_bytes += recovered.torn_bytes
        self.stored.bases = recovered.bases
        self._consume_log = ConsumeLog(self.disk, recovered.bases, recovered.newest)
        self._tail: dict[int, _TailEntry] = {}
        self._tail_bytes = 0
        self._pending = Commit(self.state.end, self.state.chain)
        self._writing: Commit | None = None
        self._rolls_next = False
        self.stored.flushed_end = self.state.end

    @property
    def start(self) -> int:
        """Offset of the oldest frame kept."""
        return self.stored.bases[0] if self.stored.bases else self.state.end

    @property
    def end(self) -> int:
        return self.state.end

    @property
    def chain(self) -> int:
        return self.state.chain

    @property
    def flushed_end(self) -> int:
        return self.stored.flushed_end

    @property
    def bases(self) -> list[int]:
        """Base offsets of the segments, ascending. Read-only."""
        return self.stored.bases

    @property
    def is_empty(self) -> bool:
        return not self.state.epochs

    @property
    def is_tail_cut(self) -> bool:
        """Whether bytes that may have been acknowledged are missing at the end. Survives restarts."""
        return self.disk.has(segments.TAIL_CUT)

    def tail_is_whole(self) -> None:
        """Record that no frame is missing at the end, because this log has all frames of the other copy."""
        self.disk.remove(segments.TAIL_CUT)
        if self.health.may(HealthEvent.MATCHED):
            self.health.on(HealthEvent.MATCHED)

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
        """Append a frame, as master, and return it."""
        if len(body) > FRAME_BYTES_MAX:  # every copy would treat it as damage
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
        """Append frames of the other copy, byte for byte.

        Raises:
            CorruptFrame: the frames do not continue this log. Frames before the first bad one were appended.
        """
        if offset != self.state.end:
            raise CorruptFrame(offset, f"this log ends at {self.state.end}")
        for frame, body in decode_frames(data, offset, self.state.chain):
            self._take(frame, (data[frame.offset - offset : frame.end - offset],), body)

    def _take(self, frame: Frame, parts: tuple[Buffer, ...], body: Buffer) -> None:
        if self.damage is not None and self.damage.end > self.state.end:
            raise BrokenInvariant("nothing is appended behind damage")
        size = frame.end - frame.offset
        if not self.stored.bases:
            self._open_first()
        elif (
            self._rolls_next or frame.end - self.stored.bases[-1] > self._segment_bytes
        ) and frame.offset > self.stored.bases[-1]:
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
            pending.steps.append(_Write(self.stored.bases[-1], frame.offset, list(parts)))
        pending.end, pending.chain = frame.end, frame.chain
        pending.bytes += size

    def _open_first(self) -> None:
        """Make the first segment at once, which happens once for each copy."""
        base = self.state.end
        self.stored.bases.append(base)
        self.disk.create(log_name(base), self._segment_bytes)
        self.disk.put(snapshot_name(base), encode_snapshot(self.state))
        write_manifest(self.disk, self.stored.bases)

    def _roll(self) -> None:
        self._rolls_next = False
        base, end = self.stored.bases[-1], self.state.end
        index_file = self._consume_log.roll(base, end)
        self.stored.bases.append(end)
        roll = _Roll(base, end, index_file, encode_snapshot(self.state), encode_manifest(self.stored.bases))
        self._pending.steps.append(roll)

    def take_commit(self) -> Commit | None:
        """Return the next commit, or None if all is on disk, or if the last commit is not `flushed` yet."""
        if self._writing is not None or not self._pending.steps:
            return None
        self._writing, self._pending = self._pending, Commit(self.state.end, self.state.chain)
        return self._writing

    @property
    def is_idle(self) -> bool:
        """Whether all frames are on disk."""
        return self._writing is None and not self._pending.steps

    @property
    def is_deleting(self) -> bool:
        """Whether files of a dropped segment are still to be deleted."""
        commits = (self._pending, self._writing)
        return any(isinstance(step, _Drop) for commit in commits if commit is not None for step in commit.steps)

    def perform(self, commit: Commit) -> None:
        """Write and fsync a commit. Blocks; touches only the disk, so it may run on a thread.

        Raises:
            DiskFailed: the files' contents are undefined; the process must exit.
        """
        written = -1
        for step in commit.steps:
            match step:
                case _Write(base, offset, buffers):
                    self.disk.write(log_name(base), offset - base, buffers)
                    written = base
                case _Roll():
                    self._close(step)
                case _Drop(base, listed):
                    self.disk.put(manifest.NAME, listed)
                    self._remove_files(base)
        if written >= 0:
            self.disk.sync(log_name(written))

    def _close(self, roll: _Roll) -> None:
        self.disk.sync(log_name(roll.base))
        self.disk.truncate(log_name(roll.base), roll.end - roll.base)
        self.disk.put(index_name(roll.base), roll.index_file)
        self.disk.create(log_name(roll.end), self._segment_bytes)
        self.disk.put(snapshot_name(roll.end), roll.snapshot)
        self.disk.put(manifest.NAME, roll.manifest)

    def flushed(self, commit: Commit) -> bool:
        """Record that `perform` returned; return whether newer frames are not on disk yet."""
        if self._writing is not commit:
            raise BrokenInvariant("commits are performed one at a time")
        self._writing = None
        self.stored.flushed_end = commit.end
        for step in commit.steps:
            if isinstance(step, _Roll):
                self._consume_log.rolled(step.base)
        self._shrink_tail()
        return bool(self._pending.steps)

    def _shrink_tail(self) -> None:
        while self._tail_bytes > self._tail_bytes_max:
            offset, entry = next(iter(self._tail.items()))
            if entry.frame.end > self.stored.flushed_end:
                return
            del self._tail[offset]
            self._tail_bytes -= entry.frame.end - offset + TAIL_ENTRY_BYTES

    def tail_frames(self, begin: int, bytes_max: int) -> tuple[list[Buffer], int, int] | None:
        """Return buffers of whole frames from `begin`, with end and chain of the last; None if the tail lacks them."""
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

    # Snapshots are made again, because restarts and new copies begin at one.

    def put_snapshot(self, base: int, chain: int, snapshot: Buffer) -> None:
        """Store the snapshot of the state at `base`, where the chain is `chain`, if a segment still begins there."""
        if base in self.stored.bases and self.chain_is(base, chain):
            self.disk.put(snapshot_name(base), snapshot)

    def roll_if_no_snapshot(self) -> bool:
        """Return whether the only segment's snapshot is damaged. Then the next frame begins a segment with a whole one,
        because nothing can make the damaged one again. Blocks.
        """
        base = self.start
        self._rolls_next = (
            len(self.stored.bases) == 1
            and self.stored.flushed_end > base
            and self.stored.chain_by_snapshot(base) is None
        )
        return self._rolls_next

    def frames(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        """Return up to `most` frames of `subject` from the one that holds `sequence`; retention may have deleted
        some.
        """
        refs, kept_from = self._consume_log.frames(subject, sequence, most), self.state.kept.start
        if refs and refs[0].offset < kept_from:  # their deletion is decided, even if the file still exists
            first = self.first_kept(subject, segment_at(self.stored.bases, kept_from))
            refs = self._consume_log.frames(subject, max(sequence, first), most)
        while refs and refs[0].offset < kept_from:  # a segment with an exchanged file
            kept = [ref for ref in refs if ref.offset >= kept_from]
            refs = kept or self._consume_log.frames(subject, refs[-1].end, most)
        return refs

    def lengths(self, subject: str) -> list[Sequence[int]]:
        """Return the lengths of the subject's frames in each segment, to be summed on a thread.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        bases = self.stored.bases
        return self._consume_log.lengths(subject, segment_at(bases, max(self.state.kept.start, bases[0])))

    def first_kept(self, subject: str, base: int) -> int:
        """Return the subject's first sequence in the segment at `base` or behind; its next one if there is none.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        first = self._consume_log.first_sequence(subject, base)
        return self.state.next_sequence.get(subject, 0) if first is None else first

    def chain_is(self, offset: int, chain: int) -> bool:
        """Return whether this log's chain right before `offset` is `chain`."""
        if offset == self.state.end:
            return chain == self.state.chain
        entry = self._tail.get(offset)
        if entry is not None:
            data = bytes(entry.parts[0])[: entry.frame.body_at]
        else:
            base = segment_at(self.stored.bases, offset)
            data = self.disk.read(log_name(base), offset - base, 4096)
        try:
            decode_header(data, 0, offset, None)
        except CorruptFrame:
            with contextlib.suppress(CorruptFrame):
                return self.stored.chain_before(offset) == chain
            return False
        try:
            decode_header(data, 0, offset, chain)
        except CorruptFrame:
            return False
        return True

    def cut(self, to: int, why: str) -> str | None:
        """Move everything from `to` on to quarantine, durably, and read back the rest.

        Returns:
            Name of the quarantined file; None if there was nothing to cut.
        """
        require(self._writing is None, "nothing is being written while the log is cut")
        if self.damage is None and to >= self.state.end:
            return None
        self.flush()
        if self.damage is not None:
            self.disk.put(segments.TAIL_CUT, b"damage")
        name = quarantine.keep_bytes(self.disk, to, read_raw(self.disk, self.stored.bases, to, segments.NO_END), why)
        kept = [base for base in self.stored.bases if base < to] or self.stored.bases[:1]
        write_manifest(self.disk, kept)
        for base in reversed(self.stored.bases[len(kept) :]):
            self._remove_files(base)
        base = kept[-1]
        self.disk.remove(index_name(base))
        self.disk.truncate(log_name(base), to - base)
        self.reload()
        return name

    def flush(self) -> None:
        """Make all frames durable, while no commit is being written. Blocks."""
        if (commit := self.take_commit()) is not None:
            self.perform(commit)
            self.flushed(commit)

    def set_aside(self, why: str) -> None:
        """Move this whole copy to quarantine and begin with an empty one, which the other copy fills."""
        require(self._writing is None, "nothing is being written while the log is set aside")
        self.flush()
        set_aside(self.disk, self.start, self.end, why)
        self.reload()

    def seed(self, base: int, snapshot: Buffer, why: str, *, start: int | None = None) -> None:
        """Set this whole copy aside and begin a new one at `base`, from the master's snapshot of the state there.

        Args:
            start: begin of the other copy's log, which lacks a whole snapshot of the part before `base`. That part
                counts as damage of this copy until it is fetched.

        Raises:
            CorruptFrame: `snapshot` is no snapshot of the state at `base`. Nothing was changed.
        """
        require(self._writing is None, "nothing is being written while the log is replaced")
        check_snapshot(snapshot, base)
        self.flush()
        set_aside(self.disk, self.start, self.end, why)
        self.disk.put(snapshot_name(base), snapshot)
        write_manifest(self.disk, [base] if start is None or start >= base else [start, base])
        self.disk.create(log_name(base), self._segment_bytes)
        self.reload()

    def timestamp_at(self, offset: int) -> int:
        """Return the timestamp of the frame at `offset`, in ms since 1970.

        Raises:
            CorruptFrame: this copy is damaged there.
        """
        if offset == self.state.end:
            return self.state.timestamp_ms
        if (entry := self._tail.get(offset)) is not None:
            return entry.frame.timestamp_ms
        base = segment_at(self.stored.bases, offset)
        return decode_header(self.disk.read(log_name(base), offset - base, 4096), 0, offset, None).timestamp_ms

    def damaged_at(self, problem: CorruptFrame) -> None:
        """Record damage: a frame that was folded once and is unreadable now, or a segment of another log."""
        begin = problem.offset
        if isinstance(problem, ForeignSegment):
            end: int | None = problem.end
        else:
            end = segments.frame_behind(self.disk, self.stored.bases, begin)
        found = Damage(begin, min(self.state.end, end or self.state.end), problem.reason)
        if self.damage is None or found not in self.damaged:  # several readers may find the same damage
            self.damaged.append(found)
            self.damages += 1
        self.damage = self.damage or found
        self.health.on(HealthEvent.FOUND_DAMAGE)

    def damage_is_gone(self) -> None:
        """Record that no damage is left."""
        self.damage = None
        self.health.on(HealthEvent.REPAIRED_SHORT if self.is_tail_cut else HealthEvent.REPAIRED)

    @property
    def oldest_may_go(self) -> bool:
        """Whether the copies agreed to delete the oldest segment."""
        kept, bases = self.state.kept, self.stored.bases
        return len(bases) > 1 and bases[1] <= kept.agreed_start(self.state.high_watermark)

    def drop_oldest_segment(self) -> None:
        """Drop the oldest of several segments; the next commit deletes its files. The copies agreed."""
        base = self.stored.bases.pop(0)
        self._consume_log.drop(base)
        # The drop is a step of a commit, so a manifest written by a roll meanwhile cannot undo it. It comes before the
        # last write, which stays a single one: of two writes a crash may keep only the second, and the gap would count
        # as damage.
        steps = self._pending.steps
        at = len(steps) - (bool(steps) and isinstance(steps[-1], _Write))
        steps.insert(at, _Drop(base, encode_manifest(self.stored.bases)))
        if self.damage is not None and self.damage.begin < self.start:
            self.damage_is_gone()  # the damage went with its segment

    def set_aside_oldest_segment(self, why: str) -> None:
        """Move the file of the oldest of several segments to quarantine."""
        require(len(self.stored.bases) > 1, "the newest segment stays")
        base, end = self.stored.bases[:2]
        if self.disk.has(log_name(base)):
            quarantine.keep_files(self.disk, [log_name(base)], base, end, why)
        self.drop_oldest_segment()

    def _remove_files(self, base: int) -> None:
        # Index and snapshot are removed first: a segment without them is whole, and they are useless without it.
        self.disk.remove(index_name(base))
        self.disk.remove(snapshot_name(base))
        self.disk.remove(log_name(base))
