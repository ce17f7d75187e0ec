"""Shell. Client port of an in-memory copy: accepts any token; a test may refuse produces and close connections."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any

from qmq.descriptors import close_server
from qmq.errors import AccessError, InvalidRequest, QmqError
from qmq.remoting.commands import Command, decode_json, encode_json
from qmq.remoting.connection import Connection
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.replication.settings import CopySettings
from qmq.testing.copies import Copy


class Acceptor:
    """Client port of one process, with its connections. Made with the copy; ends with it.

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
        self._let_in: set[Connection] = set()
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
        """Close all client connections, and wait until the core has noticed."""
        guests = list(self._guests)
        for guest in guests:
            guest.close(reason)
        while not self._guests.isdisjoint(guests):
            await asyncio.sleep(0)

    def renew_leases(self) -> None:
        """Renew the lease of every connected consumer."""
        for guest in self._let_in:
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
        elif connection not in self._let_in:
            connection.refuse(packet, AccessError("send AUTHENTICATE with an API token first"))
        elif packet.code not in self._commands:
            connection.refuse(packet, InvalidRequest(f"command {packet.code} is not served on this port"))
        elif packet.code == Command.PRODUCE and self._refusals:
            connection.refuse(packet, self._refusals.popleft())
        else:
            self._copy.guarded(partial(self._copy.node.packet_received, connection, self.read(packet)))

    def read(self, packet: Packet) -> Packet:
        """Return the request for the core that a packet carries."""
        return packet

    def _authenticate(self, connection: Connection, packet: Packet) -> None:
        settings = self._settings
        try:
            decode_json(packet.body, token=str, app=str)
        except QmqError as error:
            connection.refuse(packet, error)
            return
        self._let_in.add(connection)
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
        self._let_in.discard(connection)
        self._copy.guarded(partial(self._copy.node.link_lost, connection))

    def writable_again(self, connection: Connection) -> None:
        self._copy.guarded(partial(self._copy.node.writable_again, connection))
