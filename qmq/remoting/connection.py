"""Shell. TCP connection that carries packets both ways; brokers, clients and slaves use the same class."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, cast

from qmq.codec import Buffer
from qmq.errors import ErrorCode, InvalidRequest, NotServed, OutcomeUnknown, QmqError, cause_of, from_code
from qmq.logs import bounded
from qmq.message_sizes import LARGE_BYTES_MIN
from qmq.rations import Ration
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.packet import ONE_WAY, RESPONSE, Packet, PacketReader, PacketTooLarge, packet_header
from qmq.types import Endpoint, ip_address_of, plain_peer

log = bounded(__name__)

Answered = Callable[[memoryview | QmqError], None]

WRITE_BUFFER_BYTES = 4 << 20
"""Unsent bytes above which the peer reads too slowly: `writable` becomes false, and senders must wait."""


class PacketHandler(Protocol):
    """Callbacks of a connection's owner, on the event loop."""

    def packet_received(self, connection: Connection, packet: Packet) -> None: ...

    def connection_lost(self, connection: Connection, reason: str) -> None: ...

    def writable_again(self, connection: Connection) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """Connection. Made by the event loop when it is accepted, or by `connect`; used on the loop only.

    Responses are matched to their requests here. Every other packet goes to the handler.
    """

    logs_refusals = False
    """Whether `refuse` logs the limit that a packet exceeds, so that no other line is needed."""

    def __init__(self, handler: PacketHandler, packet_bytes_max: int) -> None:
        self._handler = handler
        self._reader = PacketReader(packet_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, Answered] = {}
        self._opaque = 0
        self.writable: bool = True
        self.received_bytes: int = 0
        self.unacked_bytes = self.owed_bytes = 0
        self.sends_on = False
        self.produced: dict[str, int] = {}
        self.ration: Ration = Ration()
        """Used by a broker's core (qmq.replication.ports.Link)."""
        self._is_read = True
        self.peer: str = "?"
        self.lost_reason: str = ""

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods, not the class
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._transport = transport
        name = transport.get_extra_info("peername")
        self.peer = str(Endpoint(plain_peer(name[0]), name[1])) if name else "?"
        if self.lost_reason:  # its owner closed it before it was connected
            transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        try:
            packets = self._reader.received(nbytes)
            for packet in packets:
                if packet.is_response:
                    self._answered(packet)
                else:
                    self._handler.packet_received(self, packet)
        except InvalidRequest as error:
            is_logged = False
            if isinstance(error, PacketTooLarge) and not error.request.is_response:
                self.refuse(error.request, error)
                is_logged = self.logs_refusals
            if not is_logged:
                log.warning("connection closed peer=%s reason=%s", self.peer, error)
            self.close(str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.lost_reason = self.lost_reason or (str(exc) if exc else "the other end closed the connection")
        waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            answered(OutcomeUnknown(f"{self.peer}: {self.lost_reason}"))
        self._reader.close()
        self._handler.connection_lost(self, self.lost_reason)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._handler.writable_again(self)

    # Used by the owner.

    def allow_packets(self, packet_bytes_max: int) -> None:
        """Accept larger packets from now on."""
        self._reader.packet_bytes_max = packet_bytes_max

    def read(self, is_read: bool) -> None:
        """Read from the socket, or stop reading so that the peer's socket fills; received packets are still handled."""
        if is_read is not self._is_read and self._transport is not None and not self._transport.is_closing():
            self._is_read = is_read
            (self._transport.resume_reading if is_read else self._transport.pause_reading)()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self, reason: str = "") -> None:
        """Close after all written bytes are sent; `connection_lost` gets `reason`."""
        self.lost_reason = self.lost_reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once, because the peer does not read. Written bytes may be lost."""
        self.lost_reason = self.lost_reason or reason
        if self._transport is not None:
            self._transport.abort()

    def send(self, code: int, flag: int, opaque: int, request_code: int, *parts: Buffer) -> None:
        """Send one packet. Does nothing if the connection is closed, which `connection_lost` reports."""
        if self._transport is None:
            return
        size = 0
        for part in parts:
            size += len(part)
        header = packet_header(code, opaque, flag, request_code, size)
        if size <= 2048:
            self._transport.write(b"".join((header, *parts)))
            return
        # asyncio's own loop, from Python 3.12 on, never removes an empty part at the end: it would try to write it for
        # ever, and not end the connection
        pending: list[Buffer] = [header, *filter(len, parts)]
        if max(map(len, pending)) < LARGE_BYTES_MIN:
            self._transport.writelines(pending)
            return
        for part in pending:  # asyncio joins lines before Python 3.12, and copies what remains of `bytes`
            self._transport.write(memoryview(part) if len(part) >= LARGE_BYTES_MIN else part)

    def answer(self, request: Packet, *parts: Buffer, code: int = ErrorCode.SUCCESS) -> None:
        if not request.flag & ONE_WAY:
            self.send(code, RESPONSE, request.opaque, request.code, *parts)

    def refuse(self, request: Packet, error: QmqError) -> None:
        """Answer with the error's code and text."""
        self.answer(request, str(error).encode(), code=error.code)

    def push(self, command: Command, *parts: Buffer) -> None:
        """Send a one-way packet."""
        self.send(command, ONE_WAY, 0, command, *parts)

    def ask(self, answered: Answered, command: Command, *parts: Buffer) -> None:
        """Send a request; `answered` gets the answer's body, its error, or OutcomeUnknown.

        Called in the order in which packets arrive, so before later packets are handled.
        """
        if not self.is_open:
            answered(OutcomeUnknown(f"{self.peer}: {self.lost_reason or 'not connected'}"))
            return
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        self._waiting[self._opaque] = answered
        self.send(command, 0, self._opaque, command, *parts)

    def request(self, command: Command, *parts: Buffer) -> asyncio.Future[memoryview]:
        """Send a request; the future ends like the callback of `ask`."""
        future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

        def answered(answer: memoryview | QmqError) -> None:
            if future.done():  # the caller has stopped waiting
                return
            if isinstance(answer, QmqError):
                future.set_exception(answer)
                future.exception()
            else:
                future.set_result(answer)

        self.ask(answered, command, *parts)
        return future

    def _answered(self, packet: Packet) -> None:
        answered = self._waiting.pop(packet.opaque, None)
        if answered is None:
            return
        if packet.code == ErrorCode.SUCCESS or packet.code == ErrorCode.NO_MESSAGE:
            answered(packet.body)
        else:
            answered(from_code(packet.code, str(packet.body, "utf-8", "replace")))


_KEEPALIVE = [
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 15_000))
    if hasattr(socket, name)
]


def notice_dead_peers(sock: socket.socket | None) -> None:
    """Let the kernel probe a silent peer, and end the connection to a lost machine within 15 s.

    A listening socket passes the options on to its accepted connections: setting them one by one took a fifth of a
    connection's cost.
    """
    if sock is None:
        return
    # One socket object for all calls; uvloop creates another object per call.
    with socket.socket(sock.family, sock.type, sock.proto, os.dup(sock.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            own.setsockopt(socket.IPPROTO_TCP, option, value)


async def connect(
    endpoint: Endpoint, *, handler: PacketHandler, token: str, app: str, packet_bytes_max: int, timeout_s: float
) -> tuple[Connection, dict[str, object]]:
    """Connect and authenticate; return the connection and the broker's answer (qmq.remoting.commands).

    Raises:
        AccessError: the token is invalid.
        NotServed: no answer at `endpoint`.
    """

    def make() -> Connection:
        return Connection(handler, packet_bytes_max)

    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, connection = await _open(make, endpoint, timeout_s)
            notice_dead_peers(transport.get_extra_info("socket"))
            request = commands.encode_json(token=token, app=app, wall_ms=time.time_ns() // 1_000_000)
            body = await connection.request(Command.AUTHENTICATE, request)
        return connection, commands.decode_json(body)
    except BaseException as error:
        if connection is not None:
            connection.close("not authenticated")
        if isinstance(error, OutcomeUnknown):  # the text names the peer
            raise NotServed(str(error)) from None
        if isinstance(error, OSError | TimeoutError):
            raise NotServed(f"{endpoint}: {cause_of(error)}") from None
        raise


async def _open(
    make: Callable[[], Connection], endpoint: Endpoint, timeout_s: float
) -> tuple[asyncio.Transport, Connection]:
    """Connect to the first address of a host that answers. Each address gets a share of the time, because one may be
    silent.
    """
    addresses = [endpoint.host] if ip_address_of(endpoint.host) else await look_up(endpoint.host)
    lost = OSError(f"{endpoint.host} has no address")
    for address in addresses:
        try:
            async with asyncio.timeout(timeout_s / len(addresses)):
                return await asyncio.get_running_loop().create_connection(make, address, endpoint.port)
        except OSError as error:  # TimeoutError is one
            lost = error
    raise lost


_look_ups: dict[str, Future[list[str]]] = {}
"""Look-ups that have begun, by name."""
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_look_ups.clear)


async def look_up(name: str) -> list[str]:
    """Return the addresses of a name. Raises OSError.

    A silent name server takes 40 s. Callers that connect again meanwhile wait for the same look-up. It has a thread of
    its own, because look-ups would use up the loop's threads, and the loop would wait for these at its end.
    """
    future = _look_ups.get(name)
    if future is None:
        future = _look_ups[name] = Future()
        threading.Thread(target=_resolve, args=(name, future), name=f"look-up {name}", daemon=True).start()
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def pass_on(found: Future[list[str]]) -> None:
        if answer.done():  # the caller has given up
            return
        if error := found.exception():
            answer.set_exception(error)
        else:
            answer.set_result(found.result())

    def found(future: Future[list[str]]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(pass_on, future)

    future.add_done_callback(found)
    return await answer


def _resolve(name: str, future: Future[list[str]]) -> None:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        future.set_result(list(dict.fromkeys(str(entry[4][0]) for entry in found)))
    except (OSError, UnicodeError) as error:
        future.set_exception(OSError(str(error)))
    finally:
        _look_ups.pop(name, None)  # loops of two threads may have begun at once
