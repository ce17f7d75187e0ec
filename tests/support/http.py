"""Shell. Requests to processes, and a server for fakes on the event loop of the test, which leaves nothing open.

A connection that is open when its loop ends is collected some time later, as a warning in the midst of another test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import httpx

from qmq.descriptors import close_server
from tests.support.waiting import WAIT_S

Answer = Callable[[bytes], tuple[str, bytes]]
"""Function from a request's head to status and body."""


def ask(url: str, method: str = "GET", *, token: str = "") -> httpx.Response | None:
    """Return the answer of a process; None while nothing listens."""
    try:
        headers = {"X-Api-Token": token} if token else {}
        return httpx.request(method, url, headers=headers, trust_env=False, timeout=WAIT_S)
    except httpx.TransportError:
        return None


def is_served(url: str) -> bool:
    """Whether a process answers with success."""
    answer = ask(url)
    return answer is not None and answer.is_success


class HttpServer:
    """Answers one request per connection."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server
        await close_server(self._server)
        for connection, writer in self._connections.items():
            connection.cancel()
            writer.transport.abort()  # a task that is cancelled before it begins does not close its writer
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[connection] = writer
        connection.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):  # the client has closed the connection
                status, body = self._answer(await reader.readuntil(b"\r\n\r\n"))
                head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
