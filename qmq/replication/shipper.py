"""Core. Shipper: sends one copy's frames to another, from master to slave, or back if a master lost some.

New frames come from the log's tail, without a disk. For a receiver that is further behind, frames are read from disk,
at a bounded rate, until the tail has the rest. Unconfirmed bytes are bounded by the receiver's memory.

Keeps I4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from qmq.codec import Buffer
from qmq.errors import CorruptFrame, Diverged, LogError
from qmq.log import MessageLog
from qmq.log.segments import Chunk
from qmq.remoting.commands import Command, offset_header
from qmq.replication.ports import Link

PACKET_BYTES = 1 << 20
WINDOW_BYTES = 64 << 20
"""Sent and unconfirmed bytes that a receiver may hold in memory."""


Read = Callable[[Callable[[], Any], Callable[[Any | LogError], None]], None]


class Shipper:
    """Frames from `begin` on to one link, as the log grows. Made after a handshake; ends with the link."""

    def __init__(
        self,
        log: MessageLog,
        link: Link,
        read: Read,
        *,
        begin: int,
        chain: int,
        bytes_per_s: int,
        found_damage: Callable[[CorruptFrame], None],
    ) -> None:
        self._log = log
        self.link = link
        self._read = read
        self.position = begin
        self.confirmed_end = begin
        self._sent: deque[tuple[int, int]] = deque([(begin, chain)])
        self._reading = False
        self._bytes_per_s = bytes_per_s
        self._found_damage = found_damage
        self._allowance = bytes_per_s // 10

    def seed(self) -> None:
        """Send the oldest snapshot first: the receiver begins a new copy there."""
        base, _, snapshot = self._log.stored.seed_start()
        self.link.push(Command.SNAPSHOT, offset_header(base), snapshot)

    def ship(self) -> None:
        """Send frames as far as link, window and rate allow."""
        log, link = self._log, self.link
        while self.position < log.state.end and link.is_open and link.writable and not self._reading:
            if self.position - self.confirmed_end > WINDOW_BYTES:
                return
            found = log.tail_frames(self.position, PACKET_BYTES)
            if found is not None:
                buffers, end, chain = found
                self._send(buffers, end, chain)
            elif self._allowance > 0:
                self._reading = True
                begin, end = self.position, log.flushed_end
                self._read(partial(log.stored.read, begin, end, PACKET_BYTES), self._was_read)
            else:
                return

    def allow(self, elapsed_ms: int) -> None:
        """Allow further reads from disk for this time. At most a tenth of a second is saved up."""
        self._allowance = min(self._allowance + self._bytes_per_s * elapsed_ms // 1000, self._bytes_per_s // 10)

    def confirm(self, end: int, chain: int) -> None:
        """Record that the receiver's disk has everything before `end`, with this chain.

        Raises:
            Diverged: no frames ending at `end` were sent, or the chain differs, so the copies differ.
        """
        while self._sent and self._sent[0][0] < end:
            self._sent.popleft()
        if not self._sent or self._sent[0] != (end, chain):
            raise Diverged(f"offset {end} was confirmed with chain {chain:016x}, which this log does not have")
        self.confirmed_end = end

    def _was_read(self, chunk: Chunk | LogError) -> None:
        self._reading = False
        if isinstance(chunk, CorruptFrame):
            self._found_damage(chunk)
        if isinstance(chunk, LogError):
            self.link.close(str(chunk))
            return
        self._allowance -= len(chunk.data)
        self._send([chunk.data], chunk.end, chunk.chain)
        self.ship()

    def _send(self, buffers: list[Buffer], end: int, chain: int) -> None:
        self.link.push(Command.FRAMES, offset_header(self.position), *buffers)
        self._sent.append((end, chain))
        self.position = end
