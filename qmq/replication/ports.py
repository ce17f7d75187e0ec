"""Core. What a broker's core needs of the world around it: connections, the clock, the disk's threads.

The asyncio shell (qmq.server.service) and the simulator implement these; the core knows no other world.
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
"""How seldom the core is called while nothing is due there."""


class Link(Protocol):
    """One connection; `qmq.remoting.connection.Connection` is the real one."""

    peer: str
    writable: bool
    unacked_bytes: int
    """Bytes of batches that came on it and wait for both disks; kept by `qmq.server.producing`."""
    owed_bytes: int
    """Bytes of messages that were delivered to it and not sent yet; kept by `broker.delivery`."""

    sends_on: bool
    """What comes on it was taken by another process of the installation before, which cannot refuse it any more."""
    ration: Ration
    """What the token that opened it may still have written."""

    @property
    def is_open(self) -> bool: ...

    def answer(self, request: Packet, *parts: Buffer, code: int = 0) -> None: ...

    def refuse(self, request: Packet, error: QmqError) -> None: ...

    def push(self, command: Command, *parts: Buffer) -> None: ...

    def close(self, reason: str = "") -> None: ...


class Host(Protocol):
    """What surrounds the core of one broker."""

    def now_ms(self) -> int:
        """Return wall clock time, for timestamps in frames only."""

    def monotonic_ms(self) -> int:
        """Return time that never jumps, for leases and deadlines."""

    def pass_soon(self) -> None:
        """See to it that `Node.end_of_pass` is called once everything received by now was handled."""

    def commit(self, commit: Commit) -> None:
        """Perform it, then call `Node.committed`. A failure ends the process as fenced."""

    def read(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        """Run a blocking read elsewhere, then call `done` with its result or its LogError."""

    def write(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        """Run a blocking write of a small file elsewhere, then call `done` as `read` does."""

    def hello(self, body: bytes) -> None:
        """Send HELLO on the slave's connection; the answer comes to `Slave.agreed`."""

    def role_changed(self) -> None:
        """The node's role or its master changed: connect, or stop doing so."""
