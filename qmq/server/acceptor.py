"""Shell. Accepted connection: requests before AUTHENTICATE, or outside the rights of its token, are rejected."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qmq.codec import Buffer
from qmq.errors import (
    AccessError,
    ErrorCode,
    InvalidMessage,
    InvalidName,
    InvalidRequest,
    MissingRight,
    NotServed,
    Overloaded,
    QmqError,
)
from qmq.message_sizes import SYNC_PACKET_BYTES_MAX
from qmq.rations import TokenRation
from qmq.remoting import commands
from qmq.remoting.commands import Command, decode_json, encode_json
from qmq.remoting.connection import Connection
from qmq.remoting.packet import Packet
from qmq.replication.settings import CopySettings
from qmq.rights import Caller, TokenRole
from qmq.server.access import Access, Limits, check_broker, check_client
from qmq.server.overload import ConnectionState, Flow
from qmq.server.pulse import Pulse

if TYPE_CHECKING:
    from qmq.server.service import Service

log = logging.getLogger(__name__)

LOGIN_S = 5.0
LOGIN_PACKET_BYTES_MAX = 64 * 1024
"""Largest packet before the login, so that connections without a token take little memory."""
_UNTIL_ANSWERED = (ConnectionState.SHARING, ConnectionState.FLOW)


@dataclass(slots=True)
class Port:
    """Listening port and its connections. Made by the service; ends with it."""

    commands: frozenset[Command]
    number: int
    connections_max: int
    connections: int = 0
    unauthenticated: dict[Acceptor, None] = field(default_factory=dict)
    """Connections without a login, oldest first."""

    def entered(self, acceptor: Acceptor) -> Acceptor | None:
        """Count a new connection; return the connection to close if there are too many, or None. Opening a connection
        needs no token, so the oldest without a login makes room for others.
        """
        self.connections += 1
        to_close = None
        if self.connections > self.connections_max:
            to_close = next(iter(self.unauthenticated), acceptor)
            self.unauthenticated.pop(to_close, None)
        self.unauthenticated[acceptor] = None
        return to_close


class _Guest(Connection):
    """An accepted connection; logs its invalid requests."""

    logs_refusals = True

    def __init__(self, acceptor: Acceptor, packet_bytes_max: int) -> None:
        super().__init__(acceptor, packet_bytes_max)
        self._acceptor = acceptor

    def answer(self, request: Packet, *parts: Buffer, code: int = ErrorCode.SUCCESS) -> None:
        is_produced = request.code == Command.PRODUCE and code == ErrorCode.SUCCESS
        advice = commands.encode_batch_bytes(self._acceptor.batch_bytes) if is_produced else b""
        super().answer(request, *parts, advice, code=code)
        if request.code == Command.PRODUCE and self._acceptor.flow.state in _UNTIL_ANSWERED:
            self._acceptor.follow_flow()

    def refuse(self, request: Packet, error: QmqError) -> None:
        if error.limit:
            self._acceptor.limit_reached(error.limit, str(error), error.limited_subject)
        elif isinstance(error, InvalidName | InvalidMessage | InvalidRequest | MissingRight):
            self._acceptor.log_once(self, error)
        super().refuse(request, error)


class Acceptor:
    """One accepted connection. Made by the service; ends with the connection."""

    def __init__(self, service: Service[Any], port: Port, settings: CopySettings, access: Access) -> None:
        self._service = service
        self._port = port
        self._settings = settings
        self._access = access
        self._is_client = Command.PRODUCE in port.commands
        self._is_in = False
        self.app = ""
        self.clock_ahead_ms: int | None = None
        """Difference of the client's clock to this broker's at login; positive if the client's is ahead, None if it was
        not sent.
        """
        self.flow = Flow(settings.window_bytes)
        self._token = ""
        self._limits: Limits | None = None
        self._pulse: Pulse | None = None
        self._login: asyncio.Task[None] | None = None
        self.connection = _Guest(self, LOGIN_PACKET_BYTES_MAX)
        loop = asyncio.get_running_loop()
        if (last := port.entered(self)) is not None:
            reason = f"port {port.number} has {port.connections_max} connections, and may have no more"
            loop.call_soon(last.connection.close, reason)
            loop.call_soon(last.limit_reached, "connections_max", reason)
        self._login_timer = loop.call_later(LOGIN_S, self.connection.close, "it did not authenticate in time")

    def limit_reached(self, setting: str, text: str, subject: str = "") -> None:
        self._service.limit_reached(setting, self.connection.peer, text, subject)

    def log_once(self, connection: Connection, error: QmqError) -> None:
        self._service.log_once(connection.peer, error)

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        if self._pulse is not None and self._pulse.received(packet):
            return
        if packet.code in self._port.commands and self._is_in:
            if self._limits is None or self._is_within_limits(self._limits, connection, packet):
                self._service.packet_received(connection, packet)
                if packet.code == Command.PRODUCE:
                    self.flow.produces = True
                    self._service.shares.produced(self, len(packet.body), self._service.monotonic_ms())
                    self.follow_flow()
                elif packet.code == Command.SUBSCRIBE:
                    self.flow.consumes = True
        elif packet.code == Command.AUTHENTICATE and self._is_in:
            connection.refuse(
                packet, InvalidRequest("this connection is authenticated already; open another one for another token")
            )
        elif packet.code == Command.AUTHENTICATE and self._login is None:
            self._authenticate(connection, packet)
        elif not self._is_in:
            self._reject(connection, packet, AccessError("authenticate first: AUTHENTICATE with an API token"))
        else:
            connection.refuse(packet, InvalidRequest(f"command {packet.code} is not served on this port"))

    @property
    def batch_bytes(self) -> int:
        """Advised maximum of a batch; 0 for no advice."""
        return self._service.shares.batch_bytes or 0

    def follow_flow(self) -> None:
        """Stop or resume reading, depending on the window, the share and the process's memory."""
        service, flow = self._service, self.flow
        unacked_bytes, share_bytes = self.connection.unacked_bytes, service.shares.bytes
        if flow.follow(unacked_bytes, share_bytes=share_bytes, memory_is_short=service.memory_alarm.is_on):
            service.stops[flow.state] += 1
            if flow.state is ConnectionState.FLOW:
                self.limit_reached("window_bytes", f"{self.app!r} has more under way than its window allows")
        self.connection.read(flow.state is ConnectionState.RUNNING)

    def _is_within_limits(self, limits: Limits, connection: Connection, packet: Packet) -> bool:
        service = self._service
        try:
            limits.check(packet, service.node.log.state.next_sequence, now_ms=service.monotonic_ms())
        except QmqError as error:
            connection.refuse(packet, error)
            return False
        return True

    def _authenticate(self, connection: Connection, packet: Packet) -> None:
        try:
            fields = decode_json(packet.body, token=str, app=str)
        except QmqError as error:
            connection.refuse(packet, error)
            connection.close(str(error))
            return
        token, self.app = fields["token"], fields["app"][:100]
        if type(wall_ms := fields.get("wall_ms")) is int:
            self.clock_ahead_ms = wall_ms - self._service.now_ms()
        if (caller := self._access.own(token)) is not None:
            self._admit(connection, packet, token, caller)
        else:
            self._login = asyncio.ensure_future(self._look_up(connection, packet, token))

    async def _look_up(self, connection: Connection, packet: Packet, token: str) -> None:
        try:
            caller = await self._access.check(token)
            if connection.is_open:
                self._admit(connection, packet, token, caller)
        except MissingRight as error:
            self._reject(connection, packet, error)
        except AccessError as error:
            self._reject(connection, packet, AccessError(f"the token of {self.app!r} is not valid here: {error}"))
        except (NotServed, Overloaded) as error:
            self._reject(connection, packet, error)
        finally:
            self._login = None

    def _admit(self, connection: Connection, packet: Packet, token: str, caller: Caller) -> None:
        """Open the connection with this caller's rights; raises MissingRight or Overloaded."""
        group, settings = self._service.node.group, self._settings
        (check_client if self._is_client else check_broker)(caller, group)
        if self._is_client and self._access.connections_of(token) >= settings.token_connections_max:
            raise Overloaded(
                f"token {caller.name!r} has {settings.token_connections_max:,} connections to {group}, and may have no "
                "more (token_connections_max)",
                "token_connections_max",
            )
        if self._is_client and caller.role != TokenRole.CLUSTER:
            access, clock = self._access, self._service.monotonic_ms
            self._limits = Limits(caller, access.new_subjects, access.sent)
            connection.ration = TokenRation(
                caller,
                access.groups,
                access.sent,
                clock,
                producers=access.producers,
                subscriptions_max=settings.token_subscriptions_max,
            )
        connection.sends_on = caller.role == TokenRole.CLUSTER
        self._is_in = True
        self._token = token
        self._login_timer.cancel()
        self._port.unauthenticated.pop(self, None)
        if self._is_client:
            self._service.acceptors[self] = None
            self._log_clock()
        self._access.entered(token, self)
        connection.allow_packets(settings.packet_bytes_max if self._is_client else SYNC_PACKET_BYTES_MAX)
        connection.answer(
            packet,
            encode_json(
                broker_group=group,
                packet_bytes_max=settings.packet_bytes_max,
                message_bytes_max=settings.message_bytes_max,
                window_bytes=settings.window_bytes,
            ),
        )
        if not self._is_client:
            self._pulse = Pulse(self._service.node, connection, self._service.now_ms)

    @property
    def is_clock_off(self) -> bool:
        """Whether the client's clock differed too much from this broker's at login. After a delayed login a clock seems
        to be behind.
        """
        return abs(self.clock_ahead_ms or 0) > self._settings.clock_difference_ms_max

    def _log_clock(self) -> None:
        if self.is_clock_off and self.clock_ahead_ms is not None:
            how = "ahead of" if self.clock_ahead_ms > 0 else "behind"
            off_s = abs(self.clock_ahead_ms) // 1000
            log.warning(
                "clock of a client app=%s peer=%s: %d s %s this broker's", self.app, self.connection.peer, off_s, how
            )

    def _reject(self, connection: Connection, packet: Packet, error: QmqError) -> None:
        log.warning("connection refused peer=%s: %s", connection.peer, error)
        connection.refuse(packet, error)
        connection.close(str(error))

    def revoke(self, reason: str) -> None:
        """Close the connection: its token is not valid any more."""
        log.warning("connection ended peer=%s: %s", self.connection.peer, reason)
        self.connection.close(reason)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self._login_timer.cancel()
        self._port.connections -= 1
        self._port.unauthenticated.pop(self, None)
        self._service.acceptors.pop(self, None)
        self._service.shares.lost(self)
        self._access.left(self._token, self)
        if self._is_in:  # otherwise the core never got a packet of this connection
            self._service.guarded(lambda: self._service.node.link_lost(connection))

    def writable_again(self, connection: Connection) -> None:
        self._service.guarded(lambda: self._service.node.writable_again(connection))
