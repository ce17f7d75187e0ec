"""Shell. In-memory brokers, delay servers and metaserver of `qmq.testing`, on the loop of the test.

The cores decide as in production. A test records requests, and holds, refuses, loses or changes single packets.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc

import qmq
from qmq.broker.answers import Counters
from qmq.broker.master import BrokerMaster
from qmq.broker.settings import BrokerSettings
from qmq.codec import (
    Buffer,
    batch_encoder,
    decode_labels,
    decode_message,
    encode_labels,
    join_batch,
    label_of_message,
    labels_bytes,
    split_batch,
)
from qmq.delayserver.schedule.record import Messages, read_messages
from qmq.errors import AccessError, InvalidMessage, NotMaster, NotServed, PostponesTooMuch, QmqError
from qmq.log.frame import FLAG_LABELLED, label_flags
from qmq.log.group import Group
from qmq.message import Message
from qmq.proto import qmq_pb2 as pb
from qmq.remoting import commands
from qmq.remoting.commands import Command, Verdict
from qmq.remoting.connection import Connection
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.testing import delays, machine
from qmq.testing.copies import Acceptor, Clock, Copies, Copy
from qmq.testing.metaserver import Metaserver, group_route
from qmq.types import GroupKind
from tests.support.ports import free_ports
from tests.support.waiting import consuming

TOKEN = "secret"
TICK_S = 0.01


@dataclass
class Attempt:
    """One PRODUCE as it arrived."""

    producer: int
    batch: int
    count: int
    subject: str
    body: bytes
    labels: list[int] = field(default_factory=list)


class View:
    """State of a broker by subject, consumer group and consumer, read at each use."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read

    def __getitem__(self, key: str | tuple[str, ...]) -> Any:
        return self._read(*key) if isinstance(key, tuple) else self._read(key)


class Guest(Connection):
    """Accepted connection; its answers pass the port's hooks."""

    def answer(self, request: Packet, *parts: Buffer, code: int = 0) -> None:
        changed = self._handler.changed_answer(self, request, parts) if code == 0 else parts  # type: ignore[attr-defined]
        if changed is not None:
            super().answer(request, *changed, code=code)


class Port(Acceptor):
    """Client port of a copy. Hooks that return True take a packet: it does not go further."""

    def __init__(self, copies: Copies[Any], copy: Copy[Any], settings: Any, served: frozenset[Command]) -> None:
        super().__init__(copy, group=copies.group, settings=settings, commands=served, refusals=deque())
        self.name = copies.group
        self.copies = copies
        self.attempts: list[Attempt] = []
        self.on_produce: Callable[[Connection, Packet, Attempt], bool] = lambda *_: False
        self.on_answer: Callable[[Connection, Packet], bool] = lambda *_: False
        self.holds: set[Command] = set()
        """Commands of requests that wait in `held` until `release`."""
        self.held: list[tuple[Connection, Packet]] = []
        self._losing: dict[Command, Callable[[], object]] = {}
        self.refuse_with: QmqError | None = None
        self.refused = 0
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> None:
        """Listen on `port`, or on one that stays free while this port is closed."""
        await self.open(port or free_ports(1)[0])
        if not self.copies.term:
            self.copies.begin_mastership()
        await self.copies.ready()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self.copies.tick()
            await asyncio.sleep(TICK_S)

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._ticking is not None:
            self._ticking.cancel()
        self.cut()
        await self.close()

    def cut(self) -> None:
        """Cut every connection, and keep listening."""
        for connection in list(self.connections):
            connection.abort("the test cut it")

    @property
    def connections(self) -> set[Connection]:
        return self._guests

    def lose_answer(self, to: Command, then: Callable[[], object] = lambda: None) -> None:
        """Carry out the next request of this command, cut the connections instead of its answer, and call `then`."""
        self._losing[to] = then

    def limit(self, **limits: int) -> None:
        """Change settings; connections made from now on receive the new limits."""
        for name, value in limits.items():
            object.__setattr__(self._settings, name, value)

    def _accept(self) -> Connection:
        guest = Guest(self, self._settings.packet_bytes_max)
        self._guests.add(guest)
        return guest

    def _authenticate(self, connection: Connection, packet: Packet) -> None:
        if commands.decode_json(packet.body, token=str)["token"] == TOKEN:
            super()._authenticate(connection, packet)
        else:
            connection.refuse(packet, AccessError("unknown token"))

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        packet = packet._replace(body=memoryview(bytes(packet.body)))
        attempt = self.record(packet)
        if packet.code in self.holds:
            self.held.append((connection, packet))
        elif attempt is not None and self.on_produce(connection, packet, attempt):
            pass
        elif (error := self.refusal(packet)) is not None:
            self.refused += 1
            connection.refuse(packet, error)
        else:
            self.serve(connection, packet)

    def serve(self, connection: Connection, packet: Packet) -> None:
        """Pass a request to the core."""
        super().packet_received(connection, packet)

    def release(self) -> None:
        """Serve held requests, and hold no more."""
        self.holds.clear()
        held, self.held = self.held, []
        for connection, packet in held:
            self.serve(connection, packet)

    def record(self, packet: Packet) -> Attempt | None:
        """Note a request; return the attempt if it is a PRODUCE."""
        if packet.code != Command.PRODUCE:
            return None
        request, labels = commands.decode_produce(packet.body), []
        batch = request.body
        if request.flags & FLAG_LABELLED:
            labels = list(decode_labels(batch, request.count))
            batch = batch[: -labels_bytes(request.count)]
        attempt = Attempt(request.producer, request.batch, request.count, request.subject, bytes(batch), labels)
        self.attempts.append(attempt)
        return attempt

    def refusal(self, packet: Packet) -> QmqError | None:
        """Return the error that the test gives instead of the core's answer, or None."""
        return self.refuse_with if packet.code == Command.PRODUCE else None

    def changed_answer(self, connection: Connection, request: Packet, parts: tuple[Buffer, ...]) -> Any:
        """Return an answer's parts as they are sent; None sends no answer."""
        if then := self._losing.pop(request.code, None):  # type: ignore[call-overload]
            self.cut()
            then()
            return None
        return None if self.on_answer(connection, request) else parts


def raise_later(error: Exception) -> None:
    """Report an error that a core must never raise; the loop's handler fails the test."""
    raise error


class LocalBroker(Port):
    """Master of one broker group, with its slave. `slave_of` makes the port of the other copy: see `move_to`."""

    def __init__(self, name: str, *, slave_of: LocalBroker | None = None) -> None:
        settings = BrokerSettings(
            hostname=name,
            data=Path("memory"),
            token="any",
            segment_bytes=1 << 20,
            lease_ms=10_000,
            slave_lag_ms_max=1 << 50,
        )
        copies: Copies[Any] = slave_of.copies if slave_of else Copies(name, partial(_copy, settings))
        super().__init__(copies, copies.copies[1 if slave_of else 0], settings, machine.COMMANDS)
        self.batch_bytes = 0
        """Batch size that answers advise; 0: the core's advice."""
        self.lease_ms = 0
        """Lease in answers to SUBSCRIBE; 0: the core's."""
        self.is_old = False
        """Whether answers lack `begins`, as those of older brokers."""
        self.suspected: set[int] = set()
        """Sequences of pieces marked as held by a consumer that vanished."""
        self.earlier: dict[int, int] = {}
        """Sequence -> deliveries before the first one of this log."""
        self.ack_error: QmqError | None = None
        """Refuses the next ACK."""
        self.postpones = True
        """False refuses delayed retries, as at the limit."""
        self.stores_dead_letters = True
        """False refuses dead letters, as without a slave."""
        self.subscribes: list[dict[str, Any]] = []
        self.pulls: list[commands.Pull] = []
        self.acks: list[list[tuple[int, int]]] = []
        self.nacks: list[commands.Nack] = []
        self.begun: list[int] = []
        """Sequences of BEGIN requests."""
        self.heartbeats = self.unsubscribes = 0
        self.subjects, self.dead = View(self._stored), View(self._dead)
        self.positions, self.returned = View(self._position), View(self._returned)
        self.times = View(self._times)
        """(subject, group) -> deliveries of each sequence."""
        self._keys: dict[tuple[Connection, int], tuple[str, str, str]] = {}
        self._delivered: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        self._own_batches = 0
        self._producer = 2 if slave_of else 1

    def move_to(self, other: LocalBroker) -> None:
        """Promote the copy of the port `other`; this one is the slave from now on."""
        assert other.copies is self.copies
        self.copies.swap()

    # Messages of the test.

    def add(self, subject: str, *encoded: bytes) -> None:
        """Store messages as one batch."""
        labels = [_label(data) for data in encoded]
        body, flags = join_batch(encoded), 0
        if any(labels):
            body, flags = body + encode_labels(labels), label_flags(labels)
        self._own_batches += 1
        header = commands.produce_header(self._producer, self._own_batches, len(encoded), crc32(body), subject, flags)
        end = self.copies.log.state.next_sequence.get(subject, 0)
        packet = Packet(Command.PRODUCE, 0, ONE_WAY, Command.PRODUCE, memoryview(header + body))
        master = self.copies.copies[0]
        master.guarded(partial(master.node.packet_received, Connection(self, 1 << 20), packet))
        assert self.copies.log.state.next_sequence.get(subject, 0) == end + len(encoded), "the broker refused them"

    # Requests and answers.

    def record(self, packet: Packet) -> Attempt | None:
        match packet.code:
            case Command.SUBSCRIBE:
                self.subscribes.append(commands.decode_json(packet.body))
            case Command.PULL:
                self.pulls.append(commands.decode_pull(packet.body))
            case Command.HEARTBEAT:
                self.heartbeats += 1
            case Command.UNSUBSCRIBE:
                self.unsubscribes += 1
        return super().record(packet)

    def serve(self, connection: Connection, packet: Packet) -> None:
        match packet.code:
            case Command.ACK:
                self.acks.append(commands.decode_ack(packet.body).ranges)
            case Command.NACK:
                self.nacks.append(commands.decode_nack(packet.body))
            case Command.BEGIN:
                begun = commands.decode_ack(packet.body)
                unacked = self._pulled(*self._keys[connection, begun.subscription])
                self.begun += [unacked[number] for range_ in begun.ranges for number in range(*range_)]
        super().serve(connection, packet)

    def refusal(self, packet: Packet) -> QmqError | None:
        match packet.code:
            case Command.SUBSCRIBE if isinstance(self.refuse_with, NotMaster):
                return self.refuse_with
            case Command.ACK:
                error, self.ack_error = self.ack_error, None
                return error
            case Command.NACK:
                entries = commands.decode_nack(packet.body).entries
                dying = Verdict.DEAD_LETTER, Verdict.WORN_OUT
                if not self.stores_dead_letters and any(entry.verdict in dying for entry in entries):
                    return NotServed("the slave is missing")
                if not self.postpones and any(entry.delay_ms and entry.verdict == Verdict.RETRY for entry in entries):
                    return PostponesTooMuch("it keeps so many")
        return super().refusal(packet)

    def changed_answer(self, connection: Connection, request: Packet, parts: tuple[Buffer, ...]) -> Any:
        match request.code:
            case Command.PRODUCE if self.batch_bytes:
                parts = parts[0], commands.encode_batch_bytes(self.batch_bytes)
            case Command.SUBSCRIBE:
                parts = (self._subscribed(connection, request, parts),)
            case Command.PULL:
                parts = (self._delivered_pieces(connection, request, parts),)
        return super().changed_answer(connection, request, parts)

    def _subscribed(self, connection: Connection, request: Packet, parts: tuple[Buffer, ...]) -> bytes:
        asked, fields = commands.decode_json(request.body), commands.decode_json(memoryview(b"".join(parts)))
        self._keys[connection, fields["subscription"]] = asked["subject"], asked["group"], asked["consumer"]
        if self.is_old:
            del fields["begins"]
        return commands.encode_json(**fields | ({"lease_ms": self.lease_ms} if self.lease_ms else {}))

    def _delivered_pieces(self, connection: Connection, request: Packet, parts: tuple[Buffer, ...]) -> bytes:
        subject, group, _ = self._keys[connection, commands.decode_pull(request.body).subscription]
        delivered, answer = self._delivered[subject, group], []
        for pull_sequence, sequence, count, flags, times, batch in commands.decode_pulled(memoryview(b"".join(parts))):
            if self.suspected & set(range(sequence, sequence + count)):
                assert count == 1, "store messages that are suspected as batches of their own"
                flags |= commands.FLAG_SUSPECTED
            times += self.earlier.get(sequence, 0)
            delivered.update(dict.fromkeys(range(sequence, sequence + count), times))
            answer += [
                commands.piece_header(pull_sequence, sequence, count, len(batch), crc32(batch), flags, times),
                bytes(batch),
            ]
        return b"".join(answer)

    # State.

    def unacked(self, consumer: str = "c1", *, subject: str = "a", group: str = "g") -> list[int]:
        """Return the sequences of the unacked messages of a consumer."""
        return list(self._pulled(subject, group, consumer).values())

    def _stored(self, subject: str) -> list[bytes]:
        log = self.copies.log
        found = []
        for ref in log.frames(subject, 0, 1 << 30):
            frame, body = log.tail_body(ref.offset) or log.stored.read_bodies([ref])[0]
            found += map(bytes, split_batch(body, frame.count))
        return found

    def _progress(self, subject: str, group: str) -> Group:
        return self.copies.log.state.groups.get((subject, group)) or Group(0)

    def _position(self, subject: str, group: str) -> int:
        return self._progress(subject, group).position

    def _returned(self, subject: str, group: str) -> list[int]:
        return [at for span in self._progress(subject, group).requeued for at in range(span.first, span.end)]

    def _times(self, subject: str, group: str) -> dict[int, int]:
        times = dict(self._delivered[subject, group])
        for span in self._progress(subject, group).requeued:
            times.update(dict.fromkeys(range(span.first, span.end), span.attempts))
        return times

    def _pulled(self, subject: str, group: str, consumer: str) -> dict[int, int]:
        """Return pull sequence -> sequence of unacked messages."""
        known = self._progress(subject, group).consumers.get(consumer)
        spans = known.unacked if known else []
        return {span.pull + at: span.first + at for span in spans for at in range(span.count)}

    def _dead(self, subject: str, group: str) -> list[tuple[int, str]]:
        letters = [decode_message(data) for data in self._stored(f"%DEAD_RETRY%{subject}%{group}")]
        return [(int(str(letter["qmq_deadSequence"])), str(letter["qmq_deadReason"])) for letter in letters]


def _copy(settings: BrokerSettings, name: str) -> Copy[Any]:
    promote = partial(BrokerMaster, settings=settings, counters=Counters())
    return Copy(name, settings=settings, clock=Clock(), happened=lambda: None, failed=raise_later, promote=promote)


def _label(data: bytes) -> int:
    try:
        return label_of_message(decode_message(data))
    except (InvalidMessage, ValueError):  # its bytes are invalid on purpose
        return 0


class LocalDelayServer(Port):
    """Master of one delay group, which sends due messages to `broker`."""

    def __init__(self, name: str, broker: LocalBroker) -> None:
        hatch, clock = delays.Hatch(broker.copies), Clock()
        copies: Copies[Any] = Copies(
            name,
            lambda copy: delays.DelayCopy(copy, clock=clock, happened=lambda: None, failed=raise_later, hatch=hatch),
        )
        super().__init__(copies, copies.copies[0], delays.SETTINGS, delays.COMMANDS)
        self.asked: list[commands.Cancel | commands.Reschedule] = []
        self.refuse_put_with: QmqError | None = None
        self.refuse_recall_with: QmqError | None = None
        self.is_silent = False
        self.subjects = View(self._stored)

    def record(self, packet: Packet) -> Attempt | None:
        match packet.code:
            case Command.CANCEL:
                self.asked.append(commands.decode_cancel(packet.body))
            case Command.RESCHEDULE:
                self.asked.append(commands.decode_reschedule(packet.body))
        return super().record(packet)

    def refusal(self, packet: Packet) -> QmqError | None:
        if packet.code in (Command.CANCEL, Command.RESCHEDULE):
            return self.refuse_recall_with
        if packet.code == Command.RECUR:
            is_put = commands.decode_recur(packet.body).action is commands.RecurAction.PUT
            return self.refuse_put_with if is_put else self.refuse_recall_with
        return super().refusal(packet)

    def changed_answer(self, connection: Connection, request: Packet, parts: tuple[Buffer, ...]) -> Any:
        if self.is_silent and request.code not in (Command.AUTHENTICATE, Command.PRODUCE):
            return None
        return super().changed_answer(connection, request, parts)

    def _stored(self, subject: str) -> list[bytes]:
        records = self.copies.copies[0].filing.schedule.list(0, 1 << 62, subject, 1 << 30)()  # type: ignore[attr-defined]
        return read_messages(self.copies.log, Messages.of(records))


class LocalMetaserver(Metaserver):
    """Metaserver that fails on demand, with routes of several groups."""

    def __init__(self) -> None:
        super().__init__("", self._no_delays)
        self.groups: dict[str, tuple[int, bool, int]] = {}
        """Broker group -> port, writable, term."""
        self.delay_groups: dict[str, tuple[int, bool, int]] = {}
        self.refuse: dict[str, str] = {}
        """Subject -> reason."""
        self.requests: list[pb.RouteRequest] = []
        self.polls: list[dict[str, list[str]]] = []
        self.updates: list[list[str]] = []
        self._wall: socket.socket | None = None
        self.url = "http://127.0.0.1:1"  # before its start

    async def _no_delays(self) -> tuple[str, int]:
        raise NotServed("delay groups are in delay_groups")

    @property
    def http_port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def start(self, http_port: int = 0) -> None:
        await self.open(http_port)

    async def stop(self) -> None:
        if self._wall is not None:
            self._wall.close()
        await self.close()

    async def stop_grpc(self) -> None:
        await self._grpc.stop(None)

    async def block_grpc(self) -> None:
        """Block gRPC from now on; HTTP works."""
        await self.stop_grpc()
        self._wall = socket.socket()
        self._wall.bind(("127.0.0.1", 0))  # takes no connections
        self._grpc_port = self._wall.getsockname()[1]

    async def unblock_grpc(self) -> None:
        assert self._wall
        await self.open_grpc()
        self._wall.close()
        self._wall = None

    def set_group(self, broker: Port, *, writable: bool = True, term: int = 1) -> None:
        self.groups[broker.name] = broker.port, writable, term
        self.notify()

    def confirmed(self) -> dict[str, int]:
        """Return the confirmed routes of clients, newest last."""
        return {subject: version for request in self.requests for subject, version in request.held.items()}

    async def route(self, subject: str, kind: int = GroupKind.NORMAL) -> pb.SubjectRoute:
        return self.route_now(subject, kind)

    def route_now(self, subject: str, kind: int = GroupKind.NORMAL) -> pb.SubjectRoute:
        """Return the route of a subject."""
        groups = self.delay_groups if kind == GroupKind.DELAY else self.groups
        route = pb.SubjectRoute(subject=subject, refused=self.refuse.get(subject, ""))
        if not route.refused:
            route.groups.extend(group_route(name, *place) for name, place in groups.items())
        route.version = crc32(route.SerializeToString(deterministic=True))
        return route

    async def WatchRoutes(
        self, requests: AsyncIterator[pb.RouteRequest], context: Any
    ) -> AsyncIterator[pb.RouteUpdate]:
        if dict(context.invocation_metadata() or ()).get("x-api-token") != TOKEN:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown token")

        async def recorded() -> AsyncIterator[pb.RouteRequest]:
            async for request in requests:
                self.requests.append(request)
                yield request

        async for update in super().WatchRoutes(recorded(), context):
            self.updates.append([route.subject for route in update.routes])
            yield update

    async def _answer(self, path: str, words: dict[str, list[str]], head: bytes) -> tuple[bytes, bytes]:
        if path == "/meta/routes":
            self.polls.append(words)
            if f"x-api-token: {TOKEN}\r\n".encode() not in head.lower():
                return b"401 Unauthorized", b"unknown token"
        return await super()._answer(path, words, head)


@asynccontextmanager
async def cluster(*names: str) -> AsyncIterator[tuple[LocalMetaserver, list[LocalBroker]]]:
    """Run a metaserver and one broker group per name."""
    metaserver = LocalMetaserver()
    await metaserver.start()
    brokers = [LocalBroker(name) for name in names]
    try:
        for broker in brokers:
            await broker.start()
            metaserver.set_group(broker)
        yield metaserver, brokers
    finally:
        for broker in brokers:
            await broker.stop()
        await metaserver.stop()


@asynccontextmanager
async def delay_groups(
    metaserver: LocalMetaserver, broker: LocalBroker, *names: str
) -> AsyncIterator[list[LocalDelayServer]]:
    """Run one delay group per name, which sends due messages to `broker`."""
    servers = [LocalDelayServer(name, broker) for name in names]
    try:
        for server in servers:
            await server.start()
            metaserver.delay_groups[server.name] = server.port, True, 1
        metaserver.notify()
        yield servers
    finally:
        for server in servers:
            await server.stop()


# Clients.


def producer_of(metaserver: LocalMetaserver, **options: Any) -> qmq.Producer:
    return qmq.Producer(metaserver=metaserver.url, app="test", token=TOKEN, **options)


def consumer_of(metaserver: LocalMetaserver, **options: Any) -> qmq.Consumer:
    return qmq.Consumer(metaserver=metaserver.url, app="test", token=TOKEN, **options)


def fill(
    broker: LocalBroker, numbers: Iterable[int], subject: str = "a", *, apart: bool = False, **options: Any
) -> None:
    """Store numbered messages as one batch, or `apart` as one batch each; `options` are those of Message."""
    encode = batch_encoder(subject, 1)
    encoded = [encode(Message(subject, {"n": str(n)}, id=f"{broker.name}-{n}", **options)) for n in numbers]
    for batch in [[data] for data in encoded] if apart else [encoded]:
        if batch:
            broker.add(subject, *batch)


async def pull_all(puller: qmq.Puller, count: int) -> list[qmq.ReceivedMessage]:
    messages: list[qmq.ReceivedMessage] = []
    while len(messages) < count:
        messages += await puller.pull(count - len(messages), timeout=10)
    return messages


def ns(messages: Iterable[Message]) -> list[int]:
    return [int(message["n"]) for message in messages]


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def subscribes(broker: LocalBroker, subject: str = "a") -> list[dict[str, Any]]:
    """Return the fields of each SUBSCRIBE for `subject`."""
    return [fields for fields in broker.subscribes if fields["subject"] == subject]


class Handled:
    """Handler that keeps the messages of its calls. Each call waits for `gate`, if there is one."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.messages: list[qmq.ReceivedMessage] = []
        self._gate = gate

    async def handle(self, given: qmq.ReceivedMessage | list[qmq.ReceivedMessage]) -> None:
        self.messages += given if isinstance(given, list) else [given]
        if self._gate is not None:
            await self._gate.wait()

    @property
    def numbers(self) -> list[int]:
        return ns(self.messages)


def handled_by(consumer: qmq.Consumer, gate: asyncio.Event | None = None, **options: Any) -> Handled:
    """Let a consumer handle subject "a" as group "g", from the earliest message on."""
    handled = Handled(gate)
    consumer.listen("a", **{"group": "g", "start": "earliest"} | options)(handled.handle)
    return handled


@asynccontextmanager
async def handling(handler: Any, messages: int = 1, **options: Any) -> AsyncIterator[LocalBroker]:
    """Run consumer "c1" of group "g"; its handler gets the numbered messages of subject "a"."""
    async with cluster("g1") as (metaserver, [broker]):
        fill(broker, range(messages))
        consumer = consumer_of(metaserver, consumer_id="c1")
        consumer.listen("a", group="g", start="earliest", **options)(handler)
        async with consuming(consumer):
            yield broker


@asynccontextmanager
async def pulling(messages: int = 0, **options: Any) -> AsyncIterator[tuple[LocalBroker, qmq.Puller]]:
    """Open a puller of consumer "c1" and group "g" with the numbered messages of subject "a"."""
    async with cluster("g1") as (metaserver, [broker]):
        fill(broker, range(messages))
        consumer = consumer_of(metaserver, consumer_id="c1")
        async with consumer.pull("a", group="g", start="earliest", **options) as puller:
            yield broker, puller
