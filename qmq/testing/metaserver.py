"""Shell. In-memory metaserver with one broker group for every subject, and a delay group on request.

Routes go over gRPC, and over HTTP to clients without gRPC, such as those in a forked process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc.aio

from qmq.control_plane import SERVER_OPTIONS
from qmq.crc import crc32
from qmq.descriptors import close_server
from qmq.errors import NotServed
from qmq.grpc_forks import grpc_begins
from qmq.logs import retrieve_error
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverServicer, add_MetaserverServicer_to_server
from qmq.types import GroupKind


class Metaserver(MetaserverServicer):  # type: ignore[misc]  # protoc writes no types
    """Metaserver of a broker; ends with it. `publish` changes the routes and sends them to every client.

    Args:
        open_delays: starts the delay group, if it does not run; returns its name and port, or raises NotServed.
    """

    def __init__(self, group: str, open_delays: Callable[[], Awaitable[tuple[str, int]]]) -> None:
        self._group = group
        self._open_delays = open_delays
        self._port = self._term = 0
        self._readonly: frozenset[str] = frozenset()
        self._watches: set[_Watch] = set()
        self._http: asyncio.Server | None = None
        self._answering: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._grpc: Any = None
        self._grpc_port = 0
        self.url: str = ""

    async def open(self, http_port: int = 0) -> None:
        await self.open_grpc()
        self._http = await asyncio.start_server(self._accept_http, "127.0.0.1", http_port)
        self.url = f"http://127.0.0.1:{self._http.sockets[0].getsockname()[1]}"

    async def open_grpc(self) -> None:
        grpc_begins()
        self._grpc = grpc.aio.server(options=SERVER_OPTIONS)
        add_MetaserverServicer_to_server(self, self._grpc)
        self._grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        await self._grpc.start()

    async def close(self) -> None:
        if self._http is not None:
            await close_server(self._http)
        await self._grpc.stop(None)
        for writer in self._answering.values():
            writer.transport.abort()
        await asyncio.gather(*self._answering, return_exceptions=True)  # otherwise sockets stay open when the loop ends

    def publish(self, *, port: int, term: int, readonly: frozenset[str]) -> None:
        """Set the master's address and term, and the readonly subjects of the group."""
        self._port = port
        self._term = term
        self._readonly = readonly
        self.notify()

    def notify(self) -> None:
        """Send every client the routes that differ from its own."""
        for watch in self._watches:
            watch.moved.set()

    async def route(self, subject: str, kind: int) -> pb.SubjectRoute:
        """Return the route of a subject; its version is a hash of its content."""
        if kind == GroupKind.DELAY:
            route = await self._delay_route(subject)
        else:
            writable = self._readonly.isdisjoint({subject, "*"})
            group = group_route(self._group, self._port, writable, self._term)
            route = pb.SubjectRoute(subject=subject, groups=[group])
        route.version = crc32(route.SerializeToString(deterministic=True)) + 1
        return route

    async def _delay_route(self, subject: str) -> pb.SubjectRoute:
        try:
            name, port = await self._open_delays()
        except NotServed as error:
            return pb.SubjectRoute(subject=subject, refused=str(error))
        return pb.SubjectRoute(subject=subject, groups=[group_route(name, port, True, 1)])

    # Over gRPC.

    async def WatchRoutes(
        self, requests: AsyncIterator[pb.RouteRequest], context: Any
    ) -> AsyncIterator[pb.RouteUpdate]:
        watch = _Watch(requests)
        self._watches.add(watch)
        try:
            while True:
                await watch.moved.wait()
                watch.moved.clear()
                routes = [await self.route(subject, watch.kind) for subject in list(watch.held)]
                routes = [route for route in routes if route.version != watch.held[route.subject]]
                if routes or watch.is_asked:
                    watch.is_asked = False
                    watch.held.update({route.subject: route.version for route in routes})
                    yield pb.RouteUpdate(version=1, routes=routes)
        finally:
            self._watches.discard(watch)
            watch.listening.cancel()

    # Over HTTP.

    def _accept_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Registered before the task begins, because a task that is cancelled before does not close its writer.
        task = asyncio.get_running_loop().create_task(self._serve_http(reader, writer))
        self._answering[task] = writer
        task.add_done_callback(self._answering.pop)

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            url = urlsplit(head.split(b" ", 2)[1].decode())
            status, body = await self._answer(url.path, parse_qs(url.query), head)
            writer.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
            pass  # a client may close its connection, or send anything
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, path: str, words: dict[str, list[str]], head: bytes) -> tuple[bytes, bytes]:
        """Return status and body; `head` is the request with its headers."""
        if path == "/meta/address":
            return b"200 OK", b"127.0.0.1:%d" % self._grpc_port
        if path != "/meta/routes":
            return b"404 Not Found", b""
        held = dict(word.rsplit(":", 1) for word in words.get("held", []))
        kind = GroupKind[words.get("kind", ["NORMAL"])[0]]
        routes = [await self.route(subject, kind) for subject in words.get("subject", [])]
        changed = [_as_json(route) for route in routes if held.get(route.subject) != f"{route.version:016x}"]
        return b"200 OK", json.dumps({"routes": changed}).encode()


class _Watch:
    """Stream of one client: its subjects, and the version of each route that it has."""

    def __init__(self, requests: AsyncIterator[pb.RouteRequest]) -> None:
        self.held: dict[str, int] = {}
        self.kind = 0
        self.is_asked = False
        self.moved = asyncio.Event()
        self.listening = asyncio.ensure_future(self._listen(requests))
        self.listening.add_done_callback(retrieve_error)

    async def _listen(self, requests: AsyncIterator[pb.RouteRequest]) -> None:
        async for request in requests:
            self.kind = request.kind
            for subject in request.forgotten:
                self.held.pop(subject, None)
            for subject in request.subjects:
                self.held[subject] = request.held.get(subject, 0)
                self.is_asked = True
            self.moved.set()


def _as_json(route: pb.SubjectRoute) -> dict[str, object]:
    groups = [
        {
            "brokerGroup": group.broker_group,
            "term": group.term,
            "writable": group.writable,
            "master": {"ip": group.master.ip, "servePort": group.master.serve_port},
        }
        for group in route.groups
    ]
    return {"subject": route.subject, "version": f"{route.version:016x}", "refused": route.refused, "groups": groups}


def group_route(name: str, port: int, writable: bool, term: int) -> pb.BrokerGroupRoute:
    """Return a group's part of a route; `port` is its master's."""
    master = pb.BrokerAddress(ip="127.0.0.1", serve_port=port)
    return pb.BrokerGroupRoute(broker_group=name, master=master, writable=writable, term=term)
