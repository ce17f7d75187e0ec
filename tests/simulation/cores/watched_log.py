"""The shipped message log, with reports to the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmq.audit.walk import Derived
from qmq.codec import Buffer
from qmq.errors import CorruptFrame
from qmq.log import Commit, MessageLog
from qmq.log.disk import Disk
from qmq.log.frame import Frame, FrameKind, decode_header
from qmq.log.progress_frame import decode_progress
from qmq.log.segments import log_name, read_chunk, segment_at
from tests.simulation.disk import SimulatedDisk

if TYPE_CHECKING:
    from tests.simulation.cores.oracle import Oracle


class WatchedLog(MessageLog):
    """Log that reports each frame, commit and cut to the oracle. Made with each process."""

    def __init__(self, disk: SimulatedDisk, *, owner: str, oracle: Oracle, segment_bytes: int, tail_bytes: int) -> None:
        self.owner = owner
        self._oracle = oracle
        self.simulated_disk = disk
        self.chains: dict[int, int] = {}
        """End of a frame -> chain there, for frames of this process."""
        self.frame_bytes: dict[int, bytes] = {}
        """Offset -> bytes, for the same frames."""
        self.last_taken = 0
        super().__init__(disk, segment_bytes=segment_bytes, tail_bytes=tail_bytes)

    def reload(self) -> None:
        super().reload()
        self.chains.clear()
        self.frame_bytes.clear()
        self.chains[self.end] = self.chain

    def _take(self, frame: Frame, parts: tuple[Buffer, ...], body: Buffer) -> None:
        self._oracle.check_frame(self, frame, body)
        super()._take(frame, parts, body)
        self.chains[frame.end] = frame.chain
        self.frame_bytes[frame.offset] = b"".join(parts)

    def append(self, kind: FrameKind, subject: str, body: Buffer, **fields: Any) -> Frame:
        if kind == FrameKind.EPOCH:
            self._oracle.beginning(self, fields["epoch"])
        if kind == FrameKind.POSITION and not (progress := decode_progress(body)).consumer and progress.entries:
            self._oracle.group_begins(self, fields["epoch"], subject, progress.group, progress.entries[0][0])
        self._oracle.writing(self)
        frame = super().append(kind, subject, body, **fields)
        self.last_taken = frame.offset
        return frame

    def flushed(self, commit: Commit) -> bool:
        self._oracle.flushed(self, commit)
        return super().flushed(commit)

    def cut(self, to: int, why: str) -> str | None:
        if self.damage is None:
            self._oracle.cutting(self, to)
        return super().cut(to, why)

    def chain_at(self, end: int) -> int | None:
        """Return the chain right before `end`; None if no frame of this log ends there."""
        if (chain := self.chains.get(end)) is not None:
            return chain
        try:
            at = self.start
            while at < end:
                chunk = read_chunk(self.disk, self.bases, at, end)
                at = chunk.end
            return chunk.chain if at == end else None
        except (CorruptFrame, UnboundLocalError):
            return None

    def hides(self, end: int) -> bool:
        """Whether flipped bits may hide the end of a frame there.

        Not behind this log's end, nor within a frame that this process has in memory.
        """
        is_within = any(at < end < at + len(data) for at, data in self.frame_bytes.items())
        return bool(self.simulated_disk.flipped) and end <= self.end and not is_within

    def frame_at(self, offset: int) -> Frame | None:
        """Return the header of the frame at `offset`, from memory or disk."""
        if (data := self.frame_bytes.get(offset)) is None:
            return frame_on_disk(self.disk, self.bases, offset)
        return decode_header(data, 0, offset, None)


def frame_on_disk(disk: Disk, bases: list[int], offset: int) -> Frame | None:
    """Return the header of the frame at `offset`; None if there is none."""
    if not bases or offset < bases[0]:
        return None
    base = segment_at(bases, offset)
    try:
        return decode_header(disk.read(log_name(base), offset - base, 4096), 0, offset, None)
    except CorruptFrame:
        return None


class BesideLog:
    """Log as `audit.derived` reads it."""

    def __init__(self, log: WatchedLog) -> None:
        self._log = log

    def window(self, offset: int, size: int) -> bytes:
        return bytes(self._log.stored.read(offset, self._log.flushed_end, size).data)

    def derived(self, base: int) -> Derived:
        return Derived(*self._log.stored.derived_files(base))
