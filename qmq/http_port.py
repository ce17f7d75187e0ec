"""Shell. HTTP port of a process: health, metrics, and the process's own pages.

Connecting needs no token, so a connection must be cheap and short:

    no whole request head within HEAD_S, from the first byte or the connection on    closed
    more connections than `connections_max`    the one that has waited longest for a head is closed; if all are
                                               being answered, the new one

None of this is logged, because anyone without a token could fill the log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from typing import ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from qmq.descriptors import HTTP_MAX, socket_family, stop_accepting
from qmq.types import Host, plain_peer

HEAD_S = 10.0
"""Time for the head of a request, which clients send within milliseconds."""
STOP_S = 2
"""Time that a stopping process leaves for its answers."""
HEADERS = "header X-Api-Token, or Authorization: Bearer"


class Connection(H11Protocol):
    """uvicorn's protocol with the bounds above. Made by uvicorn, one per connection."""

    connections_max: ClassVar[int] = HTTP_MAX

    _late: asyncio.TimerHandle | None = None
    _waits_since: float = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.connections_max and not self._make_room():
            transport.abort()
            return
        super().connection_made(transport)
        if self.client is not None:
            self.client = (plain_peer(self.client[0]), self.client[1])  # compared with the trusted proxies
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            return  # aborted before it began
        super().data_received(data)
        self._expect_head()

    def eof_received(self) -> None:
        if self.transport is not None:
            super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        if self.transport is not None:
            super().connection_lost(error)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a head; return False if all are being answered."""
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and connection._late is not None
        ]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda request: request._waits_since)
        oldest.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _expect_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None:
            self._waits_since = self.loop.time()
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 takes a free port, and `::` accepts IPv4, too. Raises OSError if the port is
    taken.

    Args:
        host: an IP address; see `bind_address`.
    """
    is_any = host == "::"
    listener = socket.create_server((host, port), family=socket_family(host), backlog=1024, dualstack_ipv6=is_any)
    # asyncio sets this option only on its own sockets. Without it the second answer of a connection waits 40 ms: the
    # answer's body is sent only when the client has confirmed the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def bind_address(host: str) -> str:
    """Return the IP address of a host to listen on; for a name, an IPv4 address if there is any. Raises OSError."""
    if Host(host).address is not None:
        return host
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


class HttpPort:
    """HTTP server on one port, opened with `listen`. Made by a process's main; `run` ends when it is cancelled."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        connections_max: int = HTTP_MAX,
        trusted_proxies: Iterable[str] = (),
    ) -> None:
        self._listener = listener
        protocol = type("Connection", (Connection,), {"connections_max": connections_max})
        proxies = list(trusted_proxies)
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # one line per malformed request
        self._server = _Server(
            uvicorn.Config(
                _Dated(app),
                http=protocol,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=proxies,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=STOP_S,
                ws="none",
            )
        )

    async def run(self) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            await asyncio.wait([serving])
        finally:
            await stop_accepting(self._listener)
            self._server.stop()
            await serving
            self._listener.close()


class _Dated:
    """ASGI application that adds the time to each answer of another one. Doctor compares clocks with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"date", formatdate(usegmt=True).encode())]
            await send(message)

        await self._app(scope, receive, send_dated)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, because each process stops more than this, and without its timer, which
    would wake the process ten times a second for the header `Date`.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_over = asyncio.Event()

    async def main_loop(self) -> None:
        await self._is_over.wait()

    def stop(self) -> None:
        self.should_exit = True
        self._is_over.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BodyTooLarge(Exception):
    """The body of a request is longer than its limit; the text names both."""


async def read_body(receive: Receive, *, bytes_max: int, timeout_s: float) -> bytes | None:
    """Return the body of a request, or None if the client disconnects before its end.

    Raises:
        BodyTooLarge: the body is longer than `bytes_max`; the rest was not read.
        TimeoutError: the body did not arrive within `timeout_s`.
    """
    pieces, length = [], 0
    async with asyncio.timeout(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            length += len(pieces[-1])
            if length > bytes_max:
                raise BodyTooLarge(f"the request is longer than {bytes_max} bytes")
            if not message.get("more_body"):
                return b"".join(pieces)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body already read."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def nothing() -> Message:
    """Serve as `receive` of an answer that reads no request."""
    return {"type": "http.disconnect"}


def shown_token(headers: Mapping[str, str]) -> str:
    """Return the token of a request; empty without one. Prometheus can send only the second form."""
    token = headers.get("x-api-token", "")
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    return token or (bearer.strip() if kind.lower() == "bearer" else "")
