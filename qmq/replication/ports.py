"""Core. Ports of a broker's core: connections, the clock, the disk's threads.

The asyncio shell (qmq.server.service) and the simulator implement these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from qmq.codec import Buffer
from qmq.errors import LogError, QmqError
from qmq.log import Commit
from qmq.rations import Ration
from qmq.remoting.commands import Command
from qmq.remoting.packet import Packet

QUIET_MS = 1_000
"""Interval of calls into the core while nothing is due there."""


class Link(Protocol):
    """Connection; the shipped one is `qmq.remoting.connection.Connection`."""

    peer: str
    writable: bool
    unacked_bytes: int
    """Bytes of the connection's batches that wait for enough disks; kept by `qmq.server.producing`."""
    owed_bytes: int
    """Bytes of messages delivered to the connection and not sent yet; kept by `broker.delivery`."""

    sends_on: bool
    """Whether it sends messages on that another process of the installation accepted and cannot refuse any more."""
    produced: dict[str, int]
    """Number of messages stored over the connection, by subject; kept by `qmq.server.producing`."""
    ration: Ration
    """Remaining allowance of the connection's token for writes."""

    @property
    def is_open(self) -> bool: ...

    def answer(self, request: Packet, *parts: Buffer, code: int = 0) -> None: ...

    def refuse(self, request: Packet, error: QmqError) -> None: ...

    def push(self, command: Command, *parts: Buffer) -> None: ...

    def close(self, reason: str = "") -> None: ...


class Host(Protocol):
    """Process around the core of one broker."""

    def now_ms(self) -> int:
        """Return wall clock time, for timestamps in frames only."""

    def monotonic_ms(self) -> int:
        """Return time that never jumps, for leases and deadlines."""

    def pass_soon(self) -> None:
        """Call `Node.end_of_pass` once all packets received by now are handled."""

    def commit(self, commit: Commit) -> None:
        """Perform a commit, then call `Node.committed`. A failure ends the process as fenced."""

    def read(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        """Run a blocking read elsewhere, then call `done` with its result or its LogError."""

    def write(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        """Run a blocking write of a small file elsewhere, then call `done` as `read` does."""

    def hello(self, body: bytes) -> None:
        """Send HELLO on the slave's connection; the answer goes to `Node.agreed`."""

    def role_changed(self) -> None:
        """Connect to the master, or disconnect, after the node's role or its master changed."""
