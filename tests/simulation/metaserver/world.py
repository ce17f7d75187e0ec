"""Two metaservers, their database, model brokers and two operators, in one loop that advances step by step."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

from qmq import rpc_access
from qmq.errors import NotServed, OperatorError, OutcomeUnknown
from qmq.metaserver import main
from qmq.metaserver.actions.clients import Clients
from qmq.metaserver.cluster import upkeep
from qmq.metaserver.model import Broker, ReplicaState
from qmq.metaserver.rpc.convert import state_from_message
from qmq.metaserver.rpc.servicer import ConsumerGroups, MetaserverRpc
from qmq.metaserver.settings import MetaserverSettings
from qmq.metaserver.storage import database
from qmq.proto import qmq_pb2 as pb
from qmq.rights import Caller, TokenRole
from qmq.types import Role
from tests.simulation.metaserver.brokers import Box, Brokers, Disk, Process, Refused
from tests.simulation.metaserver.database import AWAY, FINE, Access, Fate, Template, read_tables
from tests.simulation.metaserver.jobs import WRITES, Job, JobLoop
from tests.simulation.metaserver.oracle import Oracle

TIMEOUT_S = 2.0
"""Heartbeat timeout."""
SETTINGS = {
    "cluster_token": "the key of this installation",
    "snapshot": "none",
    "poll_ms": 1000,
    "heartbeat_timeout_ms": 2000,
    "broker_timeout_ms": 300,
    "swap_catch_up_ms": 500,
    "swap_hold_ms": 2000,
    "swap_finish_ms": 3000,
    "groups_per_subject_min": 1,
    "groups_per_subject_new": 1,
    "database_timeout_ms": 1000,
}


class Aborted(Exception):
    """A call that the metaserver aborted."""


class Dead(Exception):
    """Result of a job of a killed metaserver."""


class Context:
    """Call context of a gRPC handler."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: Any, text: str) -> None:
        raise Aborted(f"{code.name}: {text}")


@dataclass(eq=False)
class Errand:
    """Task at a metaserver: an operator's action, a broker's stream, a client's request, or upkeep."""

    server: Server
    process: Running
    what: str
    words: Mapping[str, str] = field(default_factory=dict)
    who: str = ""
    task: asyncio.Task[Any] | None = None
    status: int | None = None
    commits: int = 0
    """Its transactions that changed operators' decisions."""
    failures: int = 0
    """Its jobs that failed, or had a lost or late answer."""
    given_up: bool = False
    reported: Counter[str] = field(default_factory=Counter)
    """Newest term of each group that its metaserver knew when an action began."""

    @property
    def is_action(self) -> bool:
        return bool(self.who)

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.words.items())
        return f"{self.what} {words} at {self.server.name}" if words else f"{self.what} at {self.server.name}"


def _marked(write: Any) -> Any:
    """Return `Database.write` with its job marked as a write."""

    async def marked(self: database.Database, work: Any, **named: Any) -> Any:
        token = WRITES.set(True)
        try:
            return await write(self, work, **named)
        finally:
            WRITES.reset(token)

    return marked


class Running:
    """Process of a metaserver: all of `metaserver.main` except sockets."""

    def __init__(self, world: World, name: str) -> None:
        def clients(hub: Any, others: Any, **named: Any) -> Clients:
            return Clients(hub, list, **named)  # this world has no route watchers

        with (
            mock.patch.object(main, "Brokers", lambda *_, **__: Calls(world)),
            mock.patch.object(main, "Clients", clients),
        ):
            settings = MetaserverSettings(**SETTINGS, database=f"sqlite:///{name}")
            self.all = main.Metaserver(settings)
        self.has_learned = False
        """Whether the first read is over; the ports open after it."""
        self.newest_terms: Counter[str] = Counter()
        """Group -> newest term that it sent to brokers or received from them."""
        row = self.all._row()
        self.upkeep = upkeep.Upkeep(
            self.registry, self.all._brokers, self.all._snapshots, row, poll_ms=settings.poll_ms
        )
        self.rpc = MetaserverRpc(
            self.registry,
            self.all.hubs,
            self.all._access,
            self.all._metrics,
            self.upkeep.ask,
            self.upkeep.hold_lease,
            self.all._database,
            self.all._vault,
            ConsumerGroups(self.registry, self.all._database, self.all._brokers),
        )

    @property
    def registry(self) -> Any:
        return self.all.registry

    async def work(self) -> None:
        await self.all._learn()
        self.has_learned = True
        await self.upkeep.run()


class Server:
    """Machine of a metaserver; `process` is None while none runs."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.access = Access(world.uri, world.committed)
        self.process: Running | None = None
        self.is_away = False
        """Whether the database is out of reach here."""

    def start(self) -> None:
        assert self.process is None
        with self.world.loop.own_clock():
            self.process = process = Running(self.world, self.name)
        self.do("its work", self._work(process))

    async def _work(self, process: Running) -> None:
        try:
            await process.work()
        except (main.CannotServe, database.DatabaseAway) as error:
            self.world.note(f"  {self.name} cannot start: {error}")
            self.world.dead.append(self)

    def do(self, what: str, work: Any, words: Mapping[str, str] | None = None, who: str = "") -> Errand:
        errand = Errand(self, self.process, what, words or {}, who)
        errand.task = self.world.loop.begin(errand, work)
        return errand

    def kill(self) -> None:
        """Cut the power. The world decides about jobs under way."""
        process, self.process = self.process, None
        if process:
            self.world.cancel_tasks(process)


class Calls:
    """Stands in for `metaserver.rpc.broker_client.Brokers`: calls become jobs."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def replica_status(self, broker: Broker) -> ReplicaState:
        return await self._ask(broker, lambda box: None)

    async def prepare_swap(
        self, broker: Broker, *, term: int, hold_ms: int, timeout_ms: int, target: str = "", promised_term: int = 0
    ) -> ReplicaState:
        def prepare(box: Box) -> None:
            until = self._world.loop.time() + hold_ms / 1000
            brokers = self._world.brokers
            brokers.prepare_swap(box, term=term, until=until, target=target, promised_term=promised_term)

        return await self._ask(broker, prepare)

    async def prepare_failover(
        self,
        broker: Broker,
        *,
        term: int,
        hold_ms: int,
        silent_ms: int,
        promised_term: int = 0,
        master_gone: bool = False,
    ) -> ReplicaState:
        def prepare(box: Box) -> None:
            until = self._world.loop.time() + hold_ms / 1000
            self._world.brokers.prepare_failover(
                box, term=term, until=until, promised_term=promised_term, master_gone=master_gone
            )

        return await self._ask(broker, prepare)

    async def cancel_swap(self, broker: Broker) -> ReplicaState:
        def cancel(box: Box) -> None:
            box.process.holds_until = 0.0

        return await self._ask(broker, cancel)

    async def consumers(self, broker: Broker, **_: str) -> pb.ConsumersAnswer:
        await self._ask(broker, lambda box: None)
        return pb.ConsumersAnswer()

    async def _ask(self, broker: Broker, order: Callable[[Box], None]) -> ReplicaState:
        world = self._world

        def call() -> ReplicaState:
            box = world.brokers.boxes[broker.hostname]
            if box.process is None or box.is_cut_off:
                raise NotServed(f"{broker.key} does not answer")
            order(box)
            return state_from_message(world.brokers.state(box))

        answer: ReplicaState = await world.loop.ask(call)
        return answer


@dataclass(eq=False)
class Stream:
    """Connection of a broker to a metaserver."""

    box: Box
    process: Process
    server: Server
    sent: asyncio.Queue[pb.BrokerState | None]
    inbox: list[pb.Assignment] = field(default_factory=list)
    errand: Errand = field(init=False)


class World:
    """One world, with the trace of its steps."""

    def __init__(self, template: Template) -> None:
        self.loop = JobLoop()
        self.loop.on_job = self._job
        self.copies: list[sqlite3.Connection] = []
        """Copies of the database, the newest last."""
        self.went_back = False
        """Whether the database was restored. No promise covers a disk and the database at once."""
        self.bare = template.bare
        self.uri, self.database = template.copy()
        self.brokers = Brokers("abcdef")
        self.trace: list[str] = []
        self.dead: list[Server] = []
        """Servers that could not start."""
        self.counts: Counter[str] = Counter()
        self.jobs: list[Job] = []
        self._now: Errand | None = None
        self.oracle = Oracle(self.brokers, read_tables(self.database))
        self.servers = [Server(self, "m1"), Server(self, "m2")]
        self.streams: dict[str, Stream] = {}
        self.actions: list[Errand] = []
        self.withheld: list[Job] = []
        """Writes that take long."""
        self._patches = [
            mock.patch.object(database, "open_database", self._open),
            mock.patch.object(database.Database, "write", _marked(database.Database.write)),
        ]
        for patch in self._patches:
            patch.start()

    def _open(self, url: str) -> Any:
        for server in self.servers:
            if url.endswith(server.name):
                return server.access.engine
        raise LookupError(url)

    def note(self, line: str) -> None:
        self.trace.append(f"{self.loop.time() - 1000:7.2f} {line}")

    def story(self) -> str:
        return "\n".join(self.trace)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        self.run()
        self.finish()

    def close(self) -> None:
        for server in self.servers:
            server.kill()
            server.access.engine.dispose()
        for patch in self._patches:
            patch.stop()
        self.loop.close()
        for connection in (self.database, *self.copies):
            connection.close()

    def _job(self, job: Job) -> None:
        if job.whose.process is not job.whose.server.process:
            job.resolve(None, Dead())
            return
        self.jobs.append(job)

    def run(self) -> None:
        self.loop.run_ready()
        for context in self.loop.failed:
            raise AssertionError(f"an unhandled error of a task: {context}") from context.get("exception")
        while self.dead:
            self.dead.pop().kill()
        self._check_answers()

    def carry_out(self, job: Job, fate: Fate = FINE) -> None:
        self.jobs.remove(job)
        errand: Errand = job.whose
        result, error = self._call(job, AWAY if job.kind == "sql" and errand.server.is_away else fate)
        self.note(f"  {job.kind} of {errand}, {fate}" + (f": {error}" if error else ""))
        if error is not None:
            errand.failures += 1
        job.resolve(result, error)
        self.run()

    def carry_out_unheard(self, job: Job) -> Callable[[], None]:
        """Carry out a job; return the function that delivers its answer."""
        self.jobs.remove(job)
        result, error = self._call(job, FINE)
        self.note(f"  {job.kind} of {job.whose}, its answer is late")

        def deliver() -> None:
            job.resolve(result, error)
            self.run()

        return deliver

    def _call(self, job: Job, fate: Fate) -> tuple[Any, Exception | None]:
        errand: Errand = job.whose
        access, self._now = errand.server.access, errand
        try:
            if job.kind == "sql":
                with access.job(fate), self.loop.own_clock():
                    return job.call(), None
            if fate.kind == "away":
                raise NotServed("it does not answer")
            result = job.call()
            if fate.kind != "fine":
                raise NotServed("its answer was lost")
            return result, None
        except Exception as error:
            return None, error
        finally:
            self._now = None
            self.oracle.raise_found()

    def committed(self) -> None:
        self.oracle.committed(self._now, read_tables(self.database))

    def keep_copy(self) -> None:
        copy = sqlite3.connect(":memory:")
        self.database.backup(copy)
        self.copies.append(copy)

    def put_database_back(self, copy: sqlite3.Connection) -> None:
        """Restore the database. Jobs under way may fail, and later changes are gone."""
        copy.backup(self.database)
        self.went_back = True
        for errand in self.actions:
            errand.failures += 1
            errand.commits = 0
        self.oracle.went_back(read_tables(self.database))

    def cancel_tasks(self, process: Running) -> None:
        """Cancel the tasks of a killed metaserver. Its jobs may still be carried out."""
        for name in [name for name, stream in self.streams.items() if stream.errand.process is process]:
            del self.streams[name]
        for _ in range(100):
            tasks = [task for task, errand in self.loop.tasks.items() if errand.process is process]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.loop.run_ready()
        else:
            raise AssertionError(f"tasks do not end: {tasks}")
        self.actions = [errand for errand in self.actions if errand.process is not process]
        self.loop.failed.clear()

    def strike(self, errand: Errand, fate: Fate | None) -> None:
        """Carry out an action up to its write; that one fails, or is withheld."""
        for _ in range(100):
            job = next((job for job in self.jobs if job.whose is errand), None)
            if job is None:
                return
            if not job.writes:
                self.carry_out(job)
            elif fate is not None:
                return self.carry_out(job, fate)
            else:
                self.note(f"  {job.kind} of {errand} is withheld")
                errand.failures += 1
                self.jobs.remove(job)
                self.withheld.append(job)
                return self.wait(1.3)
        raise AssertionError(f"{errand} asks without an end")

    def release(self) -> None:
        """Put withheld writes behind all present jobs."""
        self.jobs += self.withheld
        self.withheld = []

    def finish(self) -> None:
        """Carry out every job, and the jobs that follow."""
        for _ in range(10_000):
            if not self.jobs:
                return
            self.carry_out(self.jobs[0])
        raise AssertionError("the jobs do not come to an end")

    def wait(self, seconds: float, *, stuck: bool = False) -> None:
        """Let time pass; connected brokers send and receive meanwhile.

        Args:
            stuck: the database and the brokers answer no job meanwhile.
        """
        end = self.loop.time() + seconds
        spoke = self.loop.time() - 1
        while self.loop.time() < end:
            if self.loop.time() >= spoke + 0.5:
                spoke = self.loop.time()
                self.exchange_all()
            if not stuck:
                self.finish()
            timer = self.loop.next_timer()
            step = min(spoke + 0.5, end, end if timer is None else timer)
            for job in self.jobs if stuck else []:
                job.whose.failures += 1  # before its caller gives up and answers
            self.loop.now_s = self.brokers.now = max(step, self.loop.time() + 0.001)
            self.run()

    def exchange_all(self) -> None:
        self.brokers.notice_lost_links()
        for box in self.brokers.boxes.values():
            if box.process and box.name not in self.streams and not box.is_cut_off:
                running = [server for server in self.servers if server.process]
                if running:
                    self.connect(box, running[self.loop.rng.randrange(len(running))])
            if box.name in self.streams:
                self.take_assignments(box)
            if box.name in self.streams:
                self.report(box)
                self.deliver(box)

    def start_box(self, box: Box, server: Server) -> None:
        assert not box.is_lost
        box.process = Process(box.disk)
        self.connect(box, server)

    def stop_box(self, box: Box, *, closes: bool) -> None:
        box.process = None
        if closes:
            self.disconnect(box)

    def connect(self, box: Box, server: Server) -> None:
        self.disconnect(box)
        if server.process is None or (self.went_back and not server.process.has_learned):
            return
        stream = Stream(box, box.process, server, asyncio.Queue())
        self.streams[box.name] = stream
        stream.errand = server.do(f"stream of {box.name}", self._serve(stream, server.process.rpc))
        self.run()

    def disconnect(self, box: Box) -> None:
        stream = self.streams.pop(box.name, None)
        if stream:
            stream.sent.put_nowait(None)
            self.run()

    async def _serve(self, stream: Stream, rpc: Any) -> None:
        try:
            rpc_access._caller.set(Caller("the cluster", TokenRole.CLUSTER))
            identity = self.brokers.identity(stream.box)
            self._note_term(stream, identity.broker_group, identity.term)
            assignment = await rpc.Register(identity, Context())
            self._note_term(stream, assignment.broker_group, assignment.term)
            if stream.box.process is stream.process:  # its first report is of this assignment
                self.brokers.take(stream.process, assignment)
            async for assignment in rpc.Heartbeat(self._states(stream), Context()):
                self._note_term(stream, assignment.broker_group, assignment.term)
                stream.inbox.append(assignment)
        except (Aborted, Refused) as error:
            self.note(f"  {stream.box.name} is refused: {error}")
        finally:
            if self.streams.get(stream.box.name) is stream:
                del self.streams[stream.box.name]

    async def _states(self, stream: Stream) -> AsyncIterator[pb.BrokerState]:
        if stream.box.process is stream.process:
            yield self.brokers.state(stream.box)
        while (state := await stream.sent.get()) is not None:
            yield state

    def report(self, box: Box) -> None:
        if box.process:
            box.process.outbox.append(self.brokers.state(box))

    def deliver(self, box: Box) -> None:
        """Deliver a broker's reports to its metaserver."""
        stream = self.streams.get(box.name)
        if stream:
            while stream.process.outbox:
                state = stream.process.outbox.popleft()
                self._note_term(stream, state.broker_group, state.term)
                stream.sent.put_nowait(state)
            self.run()

    def _note_term(self, stream: Stream, group: str, term: int) -> None:
        terms = stream.errand.process.newest_terms
        terms[group] = max(terms[group], term)

    def take_assignments(self, box: Box) -> None:
        """Deliver a metaserver's assignments to its broker."""
        stream = self.streams.get(box.name)
        if stream and box.process is stream.process:
            try:
                for assignment in stream.inbox:
                    self.brokers.take(stream.process, assignment)
            except Refused as refused:
                self.note(f"  {box.name} refuses: {refused}")
                self.disconnect(box)
        if stream:
            stream.inbox.clear()

    def remembers(self, disk: Disk) -> bool:
        """Whether the database holds the disk's acknowledged point."""
        asked = "SELECT log_end FROM acknowledged_point WHERE incarnation = ?"
        stored = self.database.execute(asked, [disk.incarnation]).fetchone()
        return disk.point is None or (stored is not None and stored[0] >= disk.point.end)

    def operate(self, server: Server, what: str, words: Mapping[str, str], who: str = "operator 0") -> Errand:
        self.counts[what] += 1
        caller = Caller(who, TokenRole.ADMIN, peer="127.0.0.1:1")
        errand = server.do(what, server.process.all._actions.run(what, words, caller), words, who)
        self.note(f"{who}: {errand}")
        self.actions.append(errand)
        self.oracle.begun(errand)
        self.run()
        return errand

    def ask_route(self, server: Server, subject: str) -> Errand:
        errand = server.do(f"route of {subject}", self._route(server.process.registry, subject))
        self.run()
        return errand

    async def _route(self, registry: Any, subject: str) -> None:
        with suppress(NotServed, OperatorError, OutcomeUnknown):  # a client asks again
            await registry.routes_for([subject])

    def _check_answers(self) -> None:
        for errand in [known for known in self.actions if known.task and known.task.done()]:
            self.actions.remove(errand)
            if errand.task.cancelled() and errand.given_up:
                continue
            answer = errand.task.result()
            self.note(f"  answer to {errand}: {answer.status.name} {answer.message}"[:300])
            self.counts[f"{errand.what} {answer.status.name}"] += 1
            self.counts[f"  {errand.what} {answer.message[:70]}"] += 1
            self.oracle.answered(errand, int(answer.status), answer.message)

    def busy(self, errand: Errand | None) -> bool:
        return errand is not None and errand.task is not None and not errand.task.done()


def add_groups(template: Template) -> None:
    """Fill the template with a group of two copies, one of three, and four subjects."""
    world = World(template)
    world.loop.rng = Random(2)  # or copies would draw the same names again
    world.start()
    for group, names in (("g1", "ab"), ("g2", "cde")):
        for role, name in zip((Role.MASTER, Role.SLAVE, Role.SLAVE), names):
            world.operate(world.servers[0], "AddBroker", place(world.brokers.boxes[name], group, role))
            world.finish()
    for subject, groups in (("s1", ["g1", "g2"]), ("s2", ["g1", "g2"]), ("s3", ["g1"]), ("s4", ["g1"])):
        row = (subject, json.dumps(groups), 1, 0, 0, 0)  # as if clients had asked for them
        columns = "subject_info, broker_group_json, version, changed, create_time, update_time"
        world.database.execute(f"INSERT INTO subject_route ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
    template.keep(world.database)
    world.close()


def populate(world: World) -> None:
    """Start all brokers of the two groups, with messages."""
    for name, server in zip("abcde", world.servers * 3):
        world.start_box(world.brokers.boxes[name], server)
        world.finish()
    world.wait(0.1)
    for name in "ac":
        world.brokers.sync(world.brokers.boxes[name])
        world.brokers.produce(world.brokers.boxes[name])
    world.wait(0.6)


def place(box: Box, group: str, role: int) -> dict[str, str]:
    words = {"brokerGroup": group, "role": str(int(role)), "hostname": box.name, "ip": box.ip}
    return words | {"servePort": "20881", "syncPort": "20882"}
