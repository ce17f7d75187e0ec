"""Shell. A real metaserver on real sockets, and brokers that speak the control plane but keep no log."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import httpx

from qmq.metaserver.main import Metaserver
from qmq.metaserver.settings import MetaserverSettings
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerServicer, MetaserverStub, add_BrokerServicer_to_server
from tests.support.ports import free_ports

TOKEN = "right token"
METADATA = [("x-api-token", TOKEN)]
WAIT_S = 60


class World:
    """One metaserver in this process, reached over loopback only."""

    def __init__(self, database, **settings):
        self.settings = MetaserverSettings(
            cluster_token=TOKEN,
            cluster_token_before="another token",
            database=f"sqlite:///{database}",
            http_port=0,
            grpc_port=0,
            **{"database_timeout_ms": 30_000} | settings,
        )
        self._brokers = []
        self._others = []

    async def another(self):
        """Start another metaserver on the same database; it stops with this one."""
        other = await World(self.settings.database.removeprefix("sqlite:///")).start()
        self._others.append(other)
        return other

    async def start(self):
        self.server = Metaserver(self.settings)
        self._stop, started = asyncio.Event(), asyncio.Event()
        self._serving = asyncio.create_task(self.server.serve(self._stop, started))
        starting = asyncio.create_task(started.wait())
        await asyncio.wait({self._serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            starting.cancel()
            self._serving.result()
        self.url = f"http://127.0.0.1:{self.server.http_port}"
        self.http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=WAIT_S)
        self.channel = grpc.aio.insecure_channel(await self.address())
        self.rpc = MetaserverStub(self.channel)
        return self

    async def stop(self):
        await self.channel.close()
        await self.http.aclose()
        self._stop.set()
        await self._serving

    async def address(self):
        return (await self.http.get("/meta/address")).text

    async def post(self, action, *, token=TOKEN, **words):
        answer = await self.http.post("/management", data={"action": action, **words}, headers={"X-Api-Token": token})
        return answer.json()

    async def done(self, action, **words):
        answer = await self.post(action, **words)
        assert answer["status"] == 0, answer
        return answer["data"]

    async def refused(self, action, **words):
        answer = await self.post(action, **words)
        assert answer["status"] == -1 and answer["data"] is None, answer
        return answer["message"]

    async def add(self, group, role, hostname, port=20881):
        await self.done("AddBroker", **place(group, role, hostname, port))

    async def group(self, name):
        answer = await self.http.get("/api/v1/ListBrokerGroups", headers={"X-Api-Token": TOKEN})
        groups = answer.json()["data"]
        return next(group for group in groups if group["groupName"] == name)

    async def broker(self, hostname, port=20881, **options):
        broker = FakeBroker(self, hostname, port, **options)
        self._brokers.append(broker)
        await broker.start()
        return broker

    async def copies(self, name="g1", *, roles=(0, 1), **options):
        """Add a group of two running brokers with a writable master."""
        await self.add(name, roles[0], f"{name}-a")
        await self.add(name, roles[1], f"{name}-b")
        master, slave = await self.broker(f"{name}-a", **options), await self.broker(f"{name}-b", **options)
        await self.until(lambda: self.writable(name))
        return master, slave

    async def writable(self, name):
        return (await self.group(name))["writable"]

    async def has_new_parts(self, name):
        """Return whether each broker of a group has reported its newest part."""
        group = self.server.registry.directory.groups[name]
        states = {broker: self.server.registry.state(broker) for broker in group.brokers}
        return all(state and (state.role, state.term) == (broker.role, group.term) for broker, state in states.items())

    async def delay_copies(self, name="d1", **options):
        """Add a group of two running delay servers."""
        return await self.copies(name, roles=(5, 6), kind=2, **options)

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not await condition():
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def watch(self, *subjects, metadata=METADATA, kind=0, held=None, produces=True):
        call = self.rpc.WatchRoutes(metadata=metadata)
        await call.write(
            pb.RouteRequest(subjects=subjects, app="test", client_id="c1", produces=produces, kind=kind, held=held)
        )
        yield RouteWatch(call)
        call.cancel()

    async def close(self):
        for broker in self._brokers:
            await broker.stop()
        for world in (*self._others, self):
            await world.stop()


class RouteWatch:
    """A client's view of routes."""

    def __init__(self, call):
        self.call, self.routes, self.versions = call, {}, []

    async def next(self):
        async with asyncio.timeout(WAIT_S):
            update = await self.call.read()
        assert update is not grpc.aio.EOF
        self.versions.append(update.version)
        self.routes.update({route.subject: route for route in update.routes})
        return [route.subject for route in update.routes]

    async def until(self, condition):
        while not condition(self.routes):
            await self.next()

    def writable(self, subject):
        return {group.broker_group: group.writable for group in self.routes[subject].groups}


class FakeBroker(BrokerServicer):
    """Broker without a log: registers, beats, follows each assignment at once, and answers control calls."""

    def __init__(
        self, world, hostname, port, incarnation=None, token=TOKEN, beat_s=0.05, log_end=4096, chain=77, kind=0
    ):
        self.kind = kind
        self.world, self.hostname, self.port, self.token = world, hostname, port, token
        self.incarnation = incarnation or f"disk of {hostname}"
        self.beat_s, self.log_end, self.chain = beat_s, log_end, chain
        self.reasons = []
        self.assignments, self.clocks_ms, self.calls = [], [], []
        self.report_new_terms, self.before_status = True, None
        self.gone, self.in_sync_with = None, None
        self._changed = asyncio.Event()

    async def start(self):
        self._server = grpc.aio.server()
        add_BrokerServicer_to_server(self, self._server)
        [port] = free_ports(1)  # no other process gets this port
        self.control_port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.channel = grpc.aio.insecure_channel(await self.world.address())
        rpc = MetaserverStub(self.channel)
        metadata = [("x-api-token", self.token)]
        try:
            self.assignments.append(await rpc.Register(self.identity(), metadata=metadata))
        except grpc.aio.AioRpcError:
            await self.stop()
            raise
        self._stream = rpc.Heartbeat(metadata=metadata)
        self._beating = asyncio.create_task(self._beat())
        self._listening = asyncio.create_task(self._listen())
        await self.until(lambda: len(self.assignments) >= 2)

    async def stop(self):
        if hasattr(self, "_stream"):
            self._stream.cancel()
            for task in (self._beating, self._listening):
                task.cancel()
            await asyncio.gather(self._beating, self._listening, return_exceptions=True)
        await self.channel.close()
        await self._server.stop(None)

    def fall_silent(self):
        """Stop heartbeats and answers, but keep the connection, as a stopped machine does."""
        self._beating.cancel()
        self.before_status = asyncio.Event().wait

    def say(self):
        """Send a heartbeat now, as a broker does when its state changes."""
        self._speak.set()

    @property
    def assignment(self):
        return self.assignments[-1]

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_term(self, term):
        await self.until(lambda: self.assignment.term >= term)
        return self.assignment

    async def until_assigned(self, condition):
        await self.until(lambda: condition(self.assignment))

    def identity(self, **changes):
        values = {
            "hostname": self.hostname,
            "ip": "127.0.0.1",
            "serve_port": self.port,
            "sync_port": self.port + 1,
            "control_port": self.control_port,
            "metrics_port": 9100,
            "incarnation": self.incarnation,
            "kind": self.kind,
        }
        return pb.BrokerIdentity(**(values | changes))

    def state(self):
        known = self.assignments[-1] if self.report_new_terms else self.assignments[0]
        master = known.role == 0
        return pb.BrokerState(
            broker_group=known.broker_group,
            role=known.role,
            term=known.term,
            boot=1,
            log_end=self.log_end,
            flushed_end=self.log_end,
            matched_end=self.log_end,
            high_watermark=self.log_end,
            chain=self.chain,
            readonly_reasons=self.reasons,
            hostname=self.hostname,
            serve_port=self.port,
            writable=master and not self.reasons,
            durability="fsync",
            incarnation=self.incarnation,
            in_step=self.in_sync(known) if master else (),
        )

    def in_sync(self, known):
        """Return the directories in sync: of brokers that run at the addresses in the assignment."""
        if self.in_sync_with is not None:
            return [self.in_sync_with] if self.in_sync_with else []
        places = {slave.control_port for slave in known.slaves} - {0}
        running = {broker.control_port: broker.incarnation for broker in self.world._brokers}
        return [running[place] for place in places if place in running]

    async def _beat(self):
        self._speak = asyncio.Event()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._stream.write(self.state())
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.beat_s):
                        await self._speak.wait()
                self._speak.clear()

    async def _listen(self):
        try:
            async for assignment in self._stream:
                if assignment.term:
                    self.assignments.append(assignment)
                    self._changed.set()
                    self.say()
                else:
                    self.clocks_ms.append(assignment.clock_ms)
                    self._changed.set()
        except grpc.aio.AioRpcError as error:
            self.gone = error
            self._changed.set()

    async def until_gone(self):
        await self.until(lambda: self.gone)
        return self.gone

    async def _note(self, name, context):
        assert dict(context.invocation_metadata())["x-api-token"] == self.token
        self.calls.append(name)

    async def ReplicaStatus(self, request, context):
        await self._note("ReplicaStatus", context)
        if self.before_status:
            await self.before_status()
        return self.state()

    async def PrepareSwap(self, request, context):
        await self._note("PrepareSwap", context)
        assert request.term == self.assignment.term and request.hold_ms > request.timeout_ms > 0
        return self.state()

    async def CancelSwap(self, request, context):
        await self._note("CancelSwap", context)
        return self.state()


def place(group, role, hostname, port=20881):
    words = {"brokerGroup": group, "role": role, "hostname": hostname, "ip": "127.0.0.1"}
    return words | {"servePort": port, "syncPort": port + 1}
