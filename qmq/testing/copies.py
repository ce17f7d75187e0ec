"""Shell. In-memory broker group: the real cores of master and slave, a lossless connection between them, client ports.

All events run on one event loop, in causal order. There is no disk to wait for, so a message is acknowledged once both
cores have it. The cores decide as in production.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from qmq.codec import Buffer
from qmq.descriptors import close_server
from qmq.errors import AccessError, InvalidRequest, LogError, NotServed, QmqError, from_code
from qmq.log import Commit, MessageLog
from qmq.log.memory_disk import MemoryDisk
from qmq.rations import Ration
from qmq.remoting.commands import Command, decode_json, encode_json
from qmq.remoting.connection import Connection
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.replication.assignment import Address, Assignment
from qmq.replication.identity import IdentityFile
from qmq.replication.master import Master, Promotion
from qmq.replication.node import Node
from qmq.replication.settings import CopySettings
from qmq.types import Role

M = TypeVar("M", bound=Master)

WIRE_REQUEST = 1
"""Opaque number of a slave's hello, the only request between the two."""


class Clock:
    """Clock of the computer plus the time that a test has skipped."""

    def __init__(self) -> None:
        self.skipped_ms = 0

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.skipped_ms

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000 + self.skipped_ms


class Copy(Generic[M]):
    """One process of the group: its core, and the core's `qmq.replication.ports.Host`.

    `happened` is called after each step of the core, `failed` with errors that the core must never raise, `promote`
    when a mastership begins.
    """

    def __init__(
        self,
        name: str,
        *,
        settings: CopySettings,
        clock: Clock,
        happened: Callable[[], None],
        failed: Callable[[Exception], None],
        promote: Callable[[Promotion], M],
    ) -> None:
        disk = MemoryDisk()
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._happened = happened
        self._failed = failed
        self._pass_is_due = False
        self.wire: Wire | None = None
        """This end of the connection to the other copy."""
        self.node: Node[M] = Node(
            message_log=MessageLog(disk, segment_bytes=settings.segment_bytes, tail_bytes=settings.tail_bytes),
            host=self,
            identity=IdentityFile(disk, new_incarnation=name),
            settings=settings,
            promote=promote,
        )

    def guarded(self, call: Callable[[], object]) -> None:
        """Run a call into the core. Refusals are answers; other errors are bugs, which the test must report."""
        try:
            call()
        except Exception as error:
            self._failed(error)
        self._happened()

    def tick(self) -> None:
        """Pass a tick of the clock to the core."""
        self.node.tick()

    def soon(self, call: Callable[[], object]) -> None:
        self._loop.call_soon(self.guarded, call)

    # The core's Host.

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def pass_soon(self) -> None:
        if not self._pass_is_due:
            self._pass_is_due = True
            self.soon(self._turn)

    def _turn(self) -> None:
        self._pass_is_due = False
        self.node.end_of_pass()

    def commit(self, commit: Commit) -> None:
        self.soon(partial(self._perform, commit))

    def _perform(self, commit: Commit) -> None:
        self.node.log.perform(commit)
        self.node.committed(commit)

    def read(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        self.soon(lambda: done(job()))

    def write(self, job: Callable[[], Any], done: Callable[[Any | LogError], None]) -> None:
        self.read(job, done)

    def hello(self, body: bytes) -> None:
        if self.wire is not None:
            self.wire.ask(Command.HELLO, body)

    def role_changed(self) -> None:
        """Do nothing, because `Copies` connects the two."""


class Wire:
    """One end of the connection between the copies, a `Link`; writes arrive at the other end."""

    def __init__(self, copy: Copy[Any], peer: str) -> None:
        self._copy = copy
        self.peer = peer
        self.writable = True
        self.is_open = True
        self.unacked_bytes = self.owed_bytes = 0
        self.sends_on = False
        self.produced: dict[str, int] = {}
        self.ration: Ration = Ration()
        self.other: Wire

    def push(self, command: Command, *parts: Buffer) -> None:
        self._send(Packet(command, 0, ONE_WAY, command, memoryview(b"".join(parts))))

    def ask(self, command: Command, body: bytes) -> None:
        self._send(Packet(command, WIRE_REQUEST, 0, command, memoryview(body)))

    def _send(self, packet: Packet) -> None:
        if self.is_open:
            self.other._copy.soon(partial(self.other._arrived, packet))

    def _arrived(self, packet: Packet) -> None:
        if self.is_open:
            self._copy.node.packet_received(self, packet)

    def answer(self, request: Packet, *parts: Buffer, code: int = 0) -> None:
        if self.is_open and not request.flag & ONE_WAY:
            body = memoryview(b"".join(parts))
            self.other._copy.soon(partial(self.other._answered, from_code(code, str(body, "utf-8")) if code else body))

    def _answered(self, answer: memoryview | QmqError) -> None:
        if self.is_open:
            self._copy.node.agreed(self, answer)

    def refuse(self, request: Packet, error: QmqError) -> None:
        self.answer(request, str(error).encode(), code=error.code)

    def close(self, reason: str = "") -> None:
        for end in (self, self.other):
            if end.is_open:
                end.is_open = False
                end._copy.soon(partial(end._copy.node.link_lost, end))


class Copies(Generic[M]):
    """Both processes of a group. Made on the loop that runs the group; ends with the loop.

    Args:
        make: makes a copy of a given name.
    """

    def __init__(self, group: str, make: Callable[[str], Copy[M]]) -> None:
        self.group = group
        self.term: int = 0
        self.copies: list[Copy[M]] = [make("first"), make("second")]
        """The master, then the slave."""
        self._readonly_subjects: frozenset[str] = frozenset()

    @property
    def master(self) -> M:
        """The current mastership.

        Raises:
            NotServed: the mastership has not begun, or has no slave yet.
        """
        master = self.copies[0].node.master
        if master is None or not master.has_begun or master.gate.too_few_in_sync:
            raise NotServed("the slave is not in sync yet")
        return master

    async def ready(self) -> None:
        """Wait until the mastership has begun and has its slave."""
        while not self.is_ready:
            await asyncio.sleep(0)

    @property
    def is_ready(self) -> bool:
        try:
            return self.master.has_begun
        except NotServed:
            return False

    @property
    def log(self) -> MessageLog:
        return self.copies[0].node.log

    def begin_mastership(self) -> None:
        """Assign both roles in a new term, and connect the copies."""
        self.term += 1
        for copy in self.copies:
            if copy.wire is not None:
                copy.wire.close("the roles changed")
        master, slave = self.copies
        for copy in self.copies:
            self._assign(copy)
        at_master, at_slave = Wire(master, "slave"), Wire(slave, "master")
        at_master.other, at_slave.other = at_slave, at_master
        master.wire, slave.wire = at_master, at_slave
        assert slave.node.slave is not None
        slave.node.slave.connected(at_slave)

    def swap(self) -> None:
        """Promote the slave, as after a crash of its master. Requests in flight must be repeated."""
        self.copies.reverse()
        self.begin_mastership()

    def takes(self, subject: str) -> bool:
        """Return whether no test has marked the subject readonly."""
        return self._readonly_subjects.isdisjoint({subject, "*"})

    def mark_readonly(self, subjects: frozenset[str]) -> None:
        """Reject new messages of these subjects, as an operator's mark does; `*` stands for all."""
        self._readonly_subjects = subjects
        for copy in self.copies:
            self._assign(copy)

    def _assign(self, copy: Copy[M]) -> None:
        role = Role.MASTER if copy is self.copies[0] else Role.SLAVE
        nowhere = Address("127.0.0.1", 0, 0, 0)
        copy.node.assign(
            Assignment(self.group, self.term, role, nowhere, (nowhere,), tuple(sorted(self._readonly_subjects)))
        )

    def tick(self) -> None:
        for copy in self.copies:
            copy.guarded(copy.tick)


class Acceptor:
    """Client port of one process, with its connections: accepts any token; a test may refuse produces and close
    connections. Made with the copy; ends with it.

    Args:
        commands: allowed commands of clients.
        refusals: errors for the next produces, in turn; set by tests.
    """

    def __init__(
        self,
        copy: Copy[Any],
        *,
        group: str,
        settings: CopySettings,
        commands: frozenset[Command],
        refusals: deque[QmqError],
    ) -> None:
        self._copy = copy
        self._group = group
        self._settings = settings
        self._refusals = refusals
        self._commands = commands
        self._guests: set[Connection] = set()
        self._authenticated: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.port: int = 0

    async def open(self, port: int = 0) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            await close_server(self._server)
        await self.drop_all("the broker is closed")

    async def drop_all(self, reason: str) -> None:
        """Close all client connections, and wait until the core has been notified."""
        guests = list(self._guests)
        for guest in guests:
            guest.close(reason)
        while not self._guests.isdisjoint(guests):
            await asyncio.sleep(0)

    def renew_leases(self) -> None:
        """Renew the lease of every connected consumer."""
        for guest in self._authenticated:
            beat = Packet(Command.HEARTBEAT, 0, ONE_WAY, Command.HEARTBEAT, memoryview(b""))
            self._copy.guarded(partial(self._copy.node.packet_received, guest, beat))

    def _accept(self) -> Connection:
        guest = Connection(self, self._settings.packet_bytes_max)
        self._guests.add(guest)
        return guest

    # Owner of all connections.

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        if packet.code == Command.AUTHENTICATE:
            self._authenticate(connection, packet)
        elif connection not in self._authenticated:
            connection.refuse(packet, AccessError("send AUTHENTICATE with an API token first"))
        elif packet.code not in self._commands:
            connection.refuse(packet, InvalidRequest(f"command {packet.code} is not served on this port"))
        elif packet.code == Command.PRODUCE and self._refusals:
            connection.refuse(packet, self._refusals.popleft())
        else:
            self._copy.guarded(partial(self._copy.node.packet_received, connection, self.read(packet)))

    def read(self, packet: Packet) -> Packet:
        """Return the request for the core in a packet; a subclass may change it."""
        return packet

    def _authenticate(self, connection: Connection, packet: Packet) -> None:
        settings = self._settings
        try:
            decode_json(packet.body, token=str, app=str)
        except QmqError as error:
            connection.refuse(packet, error)
            return
        self._authenticated.add(connection)
        connection.answer(
            packet,
            encode_json(
                broker_group=self._group,
                packet_bytes_max=settings.packet_bytes_max,
                message_bytes_max=settings.message_bytes_max,
                window_bytes=settings.window_bytes,
            ),
        )

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self._guests.discard(connection)
        self._authenticated.discard(connection)
        self._copy.guarded(partial(self._copy.node.link_lost, connection))

    def writable_again(self, connection: Connection) -> None:
        self._copy.guarded(partial(self._copy.node.writable_again, connection))
