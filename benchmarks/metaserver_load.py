"""Shell. Simulated brokers and clients of `make bench-metaserver`: many gRPC streams in one process.

Watchers of routes are too many for grpc.aio and use `benchmarks.lean_stream`.

    python -m benchmarks.metaserver_load '{"role": "watchers", "address": "127.0.0.1:8081", …}'

Prints one JSON object per line: {"ready": …} once all streams are up, then one for each line of input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from benchmarks.figures import percentile
from benchmarks.lean_stream import Connection, Stream, connect
from qmq.client.route_watch import CONFIRM_WITHIN_S
from qmq.control_plane import META_CHANNEL_OPTIONS
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub

HOT = "bench.hot"
"""The subject of every watcher."""
WATCH_ROUTES = "/qmq.Metaserver/WatchRoutes"
OPTIONS = [*META_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # otherwise all channels share one connection
STARTED_AT_ONCE = 200
FILL_AT_ONCE = 10
PARTS = (0.5, 0.99, 1.0)


def subject_name(number: int) -> str:
    return f"bench.team{number % 97}.subject{number:06d}"


def group_name(number: int) -> str:
    return f"group{number:04d}"


def emit(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def spread(times_s: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(times_s)
    return {f"p{part * 100:g}": percentile(ordered, part) * 1000 for part in PARTS} | {"count": len(ordered)}


class Load:
    """Common part: the metaserver's address, connections to it, the token."""

    def __init__(self, words: dict[str, Any]) -> None:
        self.words = words
        self.metadata = [("x-api-token", words["token"])]
        self.channels = [
            grpc.aio.insecure_channel(words["address"], options=OPTIONS) for _ in range(words["connections"])
        ]

    def stub(self, number: int) -> MetaserverStub:
        return MetaserverStub(self.channels[number % len(self.channels)])


class Watcher:
    """One client that behaves as the library's watcher of routes: it watches its subjects and confirms their routes."""

    def __init__(self, load: Watchers, number: int, ready: asyncio.Queue[int]) -> None:
        rng = random.Random(number)
        self._load = load
        self._number = number
        self._ready = ready
        self._subjects = [HOT, *(subject_name(rng.randrange(load.words["subjects"])) for _ in range(4))]
        self._is_ready = False
        self.hot: dict[str, bool] = {}
        self._unconfirmed: dict[str, int] = {}
        self._confirming: asyncio.TimerHandle | None = None
        self._stream: Stream | None = None

    async def begin(self) -> None:
        """Watch; reconnect after a moment whenever the stream was rejected."""
        try:
            connection = await self._load.connection(self._number)
        except OSError:
            self._come_back()
            return
        self._stream = connection.stream(self._take, self._come_back)
        request = pb.RouteRequest(subjects=self._subjects, app="bench", client_id=f"c{self._number}", produces=True)
        self._stream.write(request.SerializeToString())

    def _come_back(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(random.uniform(0.1, 1.0), lambda: self._load.keep(loop.create_task(self.begin())))

    def _take(self, message: bytes) -> None:
        update = pb.RouteUpdate.FromString(message)
        for route in update.routes:
            if route.subject == HOT:
                self.hot = {group.broker_group: group.writable for group in route.groups}
                self._load.saw(self)
            self._unconfirmed[route.subject] = route.version
        if update.routes and self._confirming is None:
            wait_s = random.uniform(0.0, CONFIRM_WITHIN_S)
            self._confirming = asyncio.get_running_loop().call_later(wait_s, self._confirm)
        if not self._is_ready:
            self._is_ready = True
            self._ready.put_nowait(self._number)

    def _confirm(self) -> None:
        self._confirming = None
        held = self._unconfirmed
        self._unconfirmed = {}
        assert self._stream
        self._stream.write(pb.RouteRequest(held=held).SerializeToString())


class Watchers:
    """Clients that watch the hot subject and four others each; too many for grpc.aio."""

    def __init__(self, words: dict[str, Any]) -> None:
        self.words = words
        first = words["first"]
        self._ready = asyncio.Queue[int]()
        self._watchers = [Watcher(self, number, self._ready) for number in range(first, first + words["watchers"])]
        self._connections: dict[int, Connection] = {}
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected: tuple[str, bool] | None = None
        self._seen: dict[Watcher, float] = {}

    async def connection(self, number: int) -> Connection:
        """Return the connection of a watcher, opened again if it was closed. Raise OSError."""
        place = number % self.words["connections"]
        async with self._connecting:
            connection = self._connections.get(place)
            if connection is None or not connection.is_open:
                token = [("x-api-token", self.words["token"])]
                connection = self._connections[place] = await connect(self.words["address"], WATCH_ROUTES, token)
        return connection

    def keep(self, task: asyncio.Task[None]) -> None:
        """The loop alone keeps no reference to a task."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def saw(self, watcher: Watcher) -> None:
        """Record when a watcher's hot route first is the expected one."""
        if self._expected is None or watcher in self._seen or watcher.hot.get(self._expected[0]) != self._expected[1]:
            return
        self._seen[watcher] = time.monotonic()
        if len(self._seen) == len(self._watchers):
            emit(first=min(self._seen.values()), last=max(self._seen.values()), notified=len(self._seen))
            self._expected = None

    async def run(self) -> None:
        for begin in range(0, len(self._watchers), STARTED_AT_ONCE):
            some = self._watchers[begin : begin + STARTED_AT_ONCE]
            for watcher in some:
                await watcher.begin()
            for _ in some:
                await self._ready.get()
        emit(ready=len(self._watchers))
        await on_lines(self._expect)

    async def _expect(self, words: dict[str, Any]) -> None:
        self._seen.clear()
        self._expected = words["group"], words["writable"]
        for watcher in self._watchers:
            self.saw(watcher)


class Brokers(Load):
    """Masters and slaves that register and send a heartbeat every second."""

    async def run(self) -> None:
        first, count = self.words["first"], self.words["groups"]
        tasks, ready = [], asyncio.Queue[int]()
        for begin in range(first, first + count, STARTED_AT_ONCE):
            numbers = range(begin, min(begin + STARTED_AT_ONCE, first + count))
            tasks += [asyncio.create_task(self._serve(number, role, ready)) for number in numbers for role in (0, 1)]
            for _ in range(len(numbers) * 2):
                await ready.get()
        emit(ready=len(tasks))
        await on_lines(None)

    async def _serve(self, number: int, role: int, ready: asyncio.Queue[int]) -> None:
        """One broker; reconnects after a moment whenever the metaserver is down."""
        state = pb.BrokerState(
            hostname=f"host{number:04d}-{role}",
            serve_port=20881,
            boot=1,
            durability="fsync",
            log_end=number << 20,
            incarnation=f"disk{number:04d}-{role}",
        )
        while True:
            try:
                await self._beat(number, state, ready)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the latter: written as the stream ended
                await asyncio.sleep(random.uniform(0.2, 1.0))

    async def _beat(self, number: int, state: pb.BrokerState, ready: asyncio.Queue[int]) -> None:
        stub = self.stub(number * 2 + int(state.hostname[-1]))
        identity = pb.BrokerIdentity(
            hostname=state.hostname,
            serve_port=20881,
            sync_port=20882,
            control_port=20883,
            metrics_port=20884,
            ip="127.0.0.1",
            incarnation=state.incarnation,
        )
        self._take(state, await stub.Register(identity, metadata=self.metadata))
        stream = stub.Heartbeat(metadata=self.metadata)
        listening = asyncio.create_task(self._listen(stream, state))
        try:
            await stream.write(state)
            ready.put_nowait(number)
            await asyncio.sleep(random.random())
            while not listening.done():
                await stream.write(state)
                await asyncio.sleep(1.0)
        finally:
            listening.cancel()
            stream.cancel()

    async def _listen(self, stream: Any, state: pb.BrokerState) -> None:
        while (assignment := await stream.read()) is not grpc.aio.EOF:
            if assignment.term:  # otherwise it holds the metaserver's clock alone
                self._take(state, assignment)

    def _take(self, state: pb.BrokerState, assignment: pb.Assignment) -> None:
        state.broker_group, state.role, state.term = assignment.broker_group, assignment.role, assignment.term
        state.writable = assignment.role == 0


class Fill(Load):
    """Clients that create all subjects."""

    async def run(self) -> None:
        began, each = time.monotonic(), self.words["each"]
        begins = iter(range(0, self.words["subjects"], each))

        async def work() -> None:
            for begin in begins:
                await self._bring(range(begin, begin + each))

        await asyncio.gather(*(work() for _ in range(FILL_AT_ONCE)))
        emit(seconds=time.monotonic() - began)

    async def _bring(self, numbers: range) -> None:
        stream = self.stub(numbers.start // len(numbers)).WatchRoutes(metadata=self.metadata)
        missing = {subject_name(number) for number in numbers}
        await stream.write(pb.RouteRequest(subjects=sorted(missing), app="bench", client_id="fill", produces=True))
        while missing:
            update = await stream.read()
            missing -= {route.subject for route in update.routes if route.groups}
        stream.cancel()


class Lookups(Load):
    """Clients that request one more existing subject, on their present stream or on a new one each."""

    async def run(self) -> None:
        self._streams: asyncio.Queue[Any] = asyncio.Queue()
        for number in range(len(self.channels)):
            stream = self.stub(number).WatchRoutes(metadata=self.metadata)
            await self._ask(stream)
            self._streams.put_nowait(stream)
        emit(ready=len(self.channels))
        await on_lines(self._look_up)

    async def _look_up(self, words: dict[str, Any]) -> None:
        look_up = self._on_a_new_stream if words["new"] else self._on_an_open_stream
        tasks, began = [], time.monotonic()
        for number in range(words["count"]):
            await asyncio.sleep(max(0.0, began + number / words["per_s"] - time.monotonic()))
            tasks.append(asyncio.create_task(look_up(number)))
        emit(**spread(list(await asyncio.gather(*tasks))))

    async def _on_an_open_stream(self, _: int) -> float:
        stream = await self._streams.get()
        took = await self._ask(stream)
        self._streams.put_nowait(stream)
        return took

    async def _on_a_new_stream(self, number: int) -> float:
        began = time.monotonic()
        stream = self.stub(number).WatchRoutes(metadata=self.metadata)
        await self._ask(stream)
        stream.cancel()
        return time.monotonic() - began

    async def _ask(self, stream: Any) -> float:
        began = time.monotonic()
        subject = subject_name(random.randrange(self.words["subjects"]))
        await stream.write(pb.RouteRequest(subjects=[subject], app="bench", client_id="look-up"))
        update = await stream.read()
        assert update is not grpc.aio.EOF
        return time.monotonic() - began


async def on_lines(act: Callable[[dict[str, Any]], Awaitable[None]] | None) -> None:
    """Carry out each line of standard input until its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if act is not None:
            await act(json.loads(line))


ROLES: dict[str, type[Watchers | Brokers | Fill | Lookups]] = {
    "watchers": Watchers,
    "brokers": Brokers,
    "fill": Fill,
    "lookups": Lookups,
}


async def main() -> None:
    words = json.loads(sys.argv[1])
    await ROLES[words["role"]](words).run()


if __name__ == "__main__":
    import os

    import uvloop

    uvloop.run(main())
    os._exit(0)  # thousands of streams need not be closed one by one
