"""Shell. Metaserver and brokers in memory with the real protocols on real sockets, which fail on demand."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from urllib.parse import parse_qs, urlsplit
from zlib import crc32

import grpc
import grpc.aio

from qmq.codec import check_batch, decode_labels, decode_message, join_batch, labels_bytes, split_batch
from qmq.errors import (
    AccessError,
    InvalidAck,
    NotMaster,
    NotServed,
    PostponesTooMuch,
    QmqError,
    SubscriptionReplaced,
    UnknownSubscription,
)
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED
from qmq.message import DELAY_KEY, ORDER_KEY
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverServicer, add_MetaserverServicer_to_server
from qmq.remoting import commands
from qmq.remoting.commands import Command, DelayState, RecurAction, RecurringSchedule, Verdict
from qmq.remoting.connection import Connection
from qmq.remoting.packet import Packet
from qmq.types import GroupKind
from tests.support.http import HttpServer
from tests.support.ports import free_ports

TOKEN = "secret"


@dataclass
class Attempt:
    """One PRODUCE as it arrived."""

    producer: int
    batch: int
    count: int
    subject: str
    body: bytes
    labels: list[int] = field(default_factory=list)


@dataclass
class Subscriber:
    """Progress of a consumer in a group, kept over connections as in a broker's log."""

    pulled: dict[int, int] = field(default_factory=dict)  # pull sequence -> sequence, unacked
    next_pull: int = 0
    connection: Connection | None = None
    handed_end: int = 0
    deliveries_max: int = 0

    @property
    def acked_end(self) -> int:
        return min(self.pulled, default=self.next_pull)


class FakeBroker:
    """Master of one broker group. `on_produce` may answer itself; it returns True if it did."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attempts: list[Attempt] = []
        self.subjects: dict[str, list[bytes]] = defaultdict(list)
        self.window: dict[tuple[int, int], commands.Produced] = {}
        self.refuse_with: QmqError | None = None
        self.on_produce: Callable[[Connection, Packet, Attempt], bool] = lambda *_: False
        self.limits = {"packet_bytes_max": 4 << 20, "message_bytes_max": 1 << 20, "window_bytes": 16 << 20}
        self.keep = True
        self.batch_bytes = 0
        """Batch size that answers advise."""
        self.connections: set[Connection] = set()
        self.subscribers: dict[tuple[str, str, str], Subscriber] = {}
        self.positions: dict[tuple[str, str], int] = {}
        self.returned: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.times: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.dead: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)  # sequence, reason
        self.begins = False
        """Whether it knows BEGIN and NOT_BEGUN; older brokers do not."""
        self.suspected: set[int] = set()
        """Sequences held by a consumer that vanished."""
        self.begun: list[int] = []
        """Sequences of BEGIN requests."""
        self.passed: set[int] = set()
        """Sequences that no consumer gets, as with a tag filter."""
        self.acks: list[list[tuple[int, int]]] = []
        self.holds_acks = False
        self._held_acks: list[tuple[Connection, Packet]] = []
        self.nacks: list[commands.Nack] = []
        self.unsubscribes = 0
        self.loses_answer_to: Command | None = None
        """The next request of this command is carried out, and then the connections are cut instead of an answer."""
        self.subscribes: list[dict[str, object]] = []
        self.pulls: list[commands.Pull] = []
        self.ack_error: QmqError | None = None
        self.postpones = True
        """False refuses delayed retries, as at the limit."""
        self.stores_dead_letters = True
        self.refusals = 0
        """False refuses dead letters, as without a slave."""
        self.heartbeats = 0
        self.lease_ms = 10_000
        self.unacked: list[tuple[int, int]] = []
        """Unsettled sequences in the answer to SUBSCRIBE."""
        self.mastership = 1
        self._subscriptions: dict[tuple[Connection, int], tuple[str, str, str]] = {}
        self._subscribed = 0
        self._server: asyncio.Server | None = None
        self._grown = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self.port = port or free_ports(1)[0]  # one that is free while the broker is down
        self._server = await loop.create_server(self._accept, "127.0.0.1", self.port)

    def _accept(self) -> Connection:
        connection = Connection(self, 64 << 20)
        self.connections.add(connection)
        return connection

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for _ in range(100):  # one that was just accepted has no transport yet
            self.cut()
            if not self.connections:
                break
            await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Cut every connection, and keep listening."""
        for connection in list(self.connections):
            if connection._transport is not None:
                connection._transport.abort()

    # Owner of connections.

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        self.connections.add(connection)
        try:
            match packet.code:
                case Command.AUTHENTICATE:
                    if commands.decode_json(packet.body, token=str)["token"] != TOKEN:
                        raise AccessError("unknown token")
                    connection.answer(packet, commands.encode_json(broker_group=self.name, **self.limits))
                case Command.PRODUCE:
                    self._produce(connection, packet)
                case Command.SUBSCRIBE:
                    self._subscribe(connection, packet)
                case Command.PULL:
                    task = asyncio.get_running_loop().create_task(self._pull(connection, packet))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case Command.ACK:
                    self._ack(connection, packet)
                case Command.NACK:
                    self._nack(connection, packet)
                case Command.BEGIN if self.begins:
                    self._begin(connection, packet)
                case Command.HEARTBEAT:
                    self.heartbeats += 1
                    connection.answer(packet)
                case Command.UNSUBSCRIBE:
                    self._unsubscribe(connection, packet)
        except QmqError as error:
            self.refusals += 1
            connection.refuse(packet, error)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self.connections.discard(connection)

    def writable_again(self, connection: Connection) -> None: ...

    # Produce.

    def _produce(self, connection: Connection, packet: Packet) -> None:
        request = commands.decode_produce(packet.body)
        batch, labels = request.body, []
        if request.flags & FLAG_LABELLED:
            labels = list(decode_labels(batch, request.count))
            batch = batch[: -labels_bytes(request.count)]
        body = bytes(batch) if self.keep else b""
        attempt = Attempt(request.producer, request.batch, request.count, request.subject, body, labels)
        self.attempts.append(attempt)
        if self.on_produce(connection, packet, attempt):
            return
        if self.refuse_with is not None:
            raise self.refuse_with
        advice = commands.encode_batch_bytes(self.batch_bytes)
        connection.answer(packet, commands.encode_produced(self.store(attempt, batch)), advice)

    def store(self, attempt: Attempt, body: memoryview | None = None) -> commands.Produced:
        """Store a batch once; return the first answer to a repeated one."""
        key = attempt.producer, attempt.batch
        if key not in self.window:
            data = attempt.body if body is None else body
            check = check_batch(data, attempt.count, self.limits["message_bytes_max"])
            log = self.subjects[attempt.subject]
            refused = dict(check.refused)
            first = len(log)
            if self.keep:
                messages = split_batch(data, attempt.count)
                log.extend(bytes(one) for at, one in enumerate(messages) if at not in refused)
            stored = attempt.count - len(refused)
            self.window[key] = commands.Produced(first, stored, 0, list(check.refused))
            self.grown()
        return self.window[key]

    # Consume.

    def _subscribe(self, connection: Connection, packet: Packet) -> None:
        if self.refuse_with is not None and isinstance(self.refuse_with, NotMaster):
            raise self.refuse_with
        fields = commands.decode_json(
            packet.body,
            subject=str,
            group=str,
            consumer=str,
            start=str,
            since_ms=int,
            held_end=int,
            broadcast=bool,
            deliveries_max=int,
            tags=list,
            tag_mode=str,
        )
        self.subscribes.append(fields)
        key = fields["subject"], fields["group"], fields["consumer"]
        start = len(self.subjects[fields["subject"]]) if fields["start"] == "latest" else 0
        self.positions.setdefault(key[:2], start)
        subscriber = self.subscribers.setdefault(key, Subscriber(next_pull=self.mastership << 32))
        if not fields["held_end"]:
            self.returned[key[:2]].extend(subscriber.pulled.values())
            subscriber.pulled.clear()
        subscriber.connection, subscriber.deliveries_max = connection, fields["deliveries_max"]
        subscriber.handed_end = fields["held_end"]
        self._subscriptions = {place: other for place, other in self._subscriptions.items() if other != key}
        self._subscribed += 1
        number = self._subscribed
        self._subscriptions[connection, number] = key
        connection.answer(
            packet,
            commands.encode_json(
                subscription=number,
                acked_end=subscriber.acked_end,
                lease_ms=self.lease_ms,
                unacked=self.unacked,
                **({"begins": True} if self.begins else {}),
                expires=True,
            ),
        )
        self.grown()

    def grown(self) -> None:
        """Answer waiting pulls if there are messages."""
        self._grown.set()
        self._grown = asyncio.Event()

    def add(self, subject: str, encoded: bytes) -> None:
        """Store a message."""
        self.subjects[subject].append(encoded)
        self.grown()

    def _subscriber(self, connection: Connection, number: int) -> tuple[tuple[str, str, str], Subscriber]:
        key = self._subscriptions.get((connection, number))
        if key is None and 0 < number <= self._subscribed:
            raise SubscriptionReplaced("another connection uses this consumer id")
        if key is None:
            raise UnknownSubscription("subscribe first")
        return key, self.subscribers[key]

    async def _pull(self, connection: Connection, packet: Packet) -> None:
        pull = commands.decode_pull(packet.body)
        self.pulls.append(pull)
        deadline = asyncio.get_running_loop().time() + pull.timeout_ms / 1000
        try:
            while True:
                grown = self._grown
                key, subscriber = self._subscriber(connection, pull.subscription)
                if parts := self._deliver(key, subscriber, pull):
                    connection.answer(packet, *parts)
                    return
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    connection.answer(packet, code=4)
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(grown.wait(), left)
        except QmqError as error:
            connection.refuse(packet, error)

    def _deliver(self, key: tuple[str, str, str], subscriber: Subscriber, pull: commands.Pull) -> list[bytes]:
        log, group, times = self.subjects[key[0]], key[:2], self.times[key[:2]]
        again = [at for at in sorted(subscriber.pulled) if at >= subscriber.handed_end][: pull.messages_max]
        if again:
            subscriber.handed_end = again[-1] + 1
            sequences = [subscriber.pulled[at] for at in again]
            pieces = [
                self._piece(at, [log[sequence]], sequence, times[sequence]) for at, sequence in zip(again, sequences)
            ]
            return [part for piece in pieces for part in piece]
        self._make_dead(key, subscriber)
        if self.returned[group]:
            sequences = [min(self.returned[group])]
            self.returned[group].remove(sequences[0])
        else:
            new = (number for number in range(self.positions[group], len(log)) if number not in self.passed)
            sequences = list(islice(new, pull.messages_max))
            self.positions[group] = sequences[-1] + 1 if sequences else len(log)
        if not sequences:
            return []
        at = subscriber.next_pull
        for sequence in sequences:
            times[sequence] += 1
        subscriber.pulled.update(zip(range(at, at + len(sequences)), sequences, strict=True))
        subscriber.next_pull = subscriber.handed_end = at + len(sequences)
        pieces: list[list[int]] = []
        for sequence in sequences:
            is_alike = pieces and (pieces[-1][-1] in self.suspected) == (sequence in self.suspected)
            if is_alike and (pieces[-1][-1] + 1, times[pieces[-1][-1]]) == (sequence, times[sequence]):
                pieces[-1].append(sequence)
            else:
                pieces.append([sequence])
        begins = accumulate(map(len, pieces), initial=at)
        parts = [
            self._piece(begin, [log[one] for one in piece], piece[0], times[piece[0]])
            for begin, piece in zip(begins, pieces)
        ]
        return [part for piece in parts for part in piece]

    def _make_dead(self, key: tuple[str, str, str], subscriber: Subscriber) -> None:
        """Make dead letters of messages at their delivery limit."""
        group, most = key[:2], subscriber.deliveries_max
        over = [one for one in self.returned[group] if most and self.times[group][one] >= most]
        for sequence in over:
            self.returned[group].remove(sequence)
            self.dead[group].append((sequence, "delivered too often"))

    def _piece(self, at: int, messages: list[bytes], sequence: int, times: int) -> list[bytes]:
        body = join_batch(messages)
        flags = FLAG_ORDERED if ORDER_KEY.encode() in body else 0
        flags |= commands.FLAG_SUSPECTED if sequence in self.suspected else 0
        return [commands.piece_header(at, sequence, len(messages), len(body), crc32(body), flags, times), body]

    def release_acks(self) -> None:
        """Answer the acks that waited for `holds_acks`."""
        self.holds_acks = False
        held, self._held_acks = self._held_acks, []
        for connection, packet in held:
            self._ack(connection, packet)

    def _ack(self, connection: Connection, packet: Packet) -> None:
        ack = commands.decode_ack(packet.body)
        if self.holds_acks:
            self._held_acks.append((connection, packet))
            return
        _, subscriber = self._subscriber(connection, ack.subscription)
        if self.ack_error is not None:
            error, self.ack_error = self.ack_error, None
            raise error
        self.acks.append(ack.ranges)
        for begin, end in ack.ranges:
            self._settle(subscriber, begin, end)
        self._answer_settled(connection, packet, subscriber)

    def _nack(self, connection: Connection, packet: Packet) -> None:
        nack = commands.decode_nack(packet.body)
        key, subscriber = self._subscriber(connection, nack.subscription)
        if not self.stores_dead_letters and any(entry.verdict == Verdict.DEAD_LETTER for entry in nack.entries):
            raise NotServed("the slave is missing")
        if not self.postpones and any(entry.delay_ms for entry in nack.entries):
            raise PostponesTooMuch("it keeps so many")
        self.nacks.append(nack)
        loop = asyncio.get_running_loop()
        for entry in nack.entries:
            for sequence in self._settle(subscriber, entry.begin, entry.end):
                if entry.verdict == Verdict.DEAD_LETTER:
                    self.dead[key[:2]].append((sequence, nack.reason))
                elif entry.verdict == Verdict.NOT_BEGUN:
                    assert self.begins, "no older broker knows it"
                    self.times[key[:2]][sequence] -= 1
                    self._due(key[:2], sequence)
                elif entry.verdict != Verdict.EXPIRED:
                    loop.call_later(entry.delay_ms / 1000, self._due, key[:2], sequence)
        self._answer_settled(connection, packet, subscriber)

    def _begin(self, connection: Connection, packet: Packet) -> None:
        begun = commands.decode_ack(packet.body)
        _, subscriber = self._subscriber(connection, begun.subscription)
        self.begun += [subscriber.pulled[number] for range_ in begun.ranges for number in range(*range_)]
        connection.answer(packet)

    def _due(self, group: tuple[str, str], sequence: int) -> None:
        self.returned[group].append(sequence)
        self.grown()

    @staticmethod
    def _settle(subscriber: Subscriber, begin: int, end: int) -> list[int]:
        """Return the sequences that were not settled before."""
        if not begin < end <= subscriber.next_pull or begin >> 32 != (end - 1) >> 32:
            raise InvalidAck(f"[{begin}, {end}) was not delivered")
        return [subscriber.pulled.pop(at) for at in range(begin, end) if at in subscriber.pulled]

    def _answer_settled(self, connection: Connection, packet: Packet, subscriber: Subscriber) -> None:
        if self.loses_answer_to == packet.code:
            self.loses_answer_to = None
            self.cut()
        else:
            connection.answer(packet, commands.encode_acked(subscriber.acked_end))

    def _unsubscribe(self, connection: Connection, packet: Packet) -> None:
        """Messages given back were not begun and do not count as delivered."""
        number = commands.decode_json(packet.body, subscription=int)["subscription"]
        key, subscriber = self._subscriber(connection, number)
        for sequence in subscriber.pulled.values():
            self.times[key[:2]][sequence] -= 1
        self.returned[key[:2]].extend(subscriber.pulled.values())
        subscriber.pulled.clear()
        del self._subscriptions[connection, number]
        self.unsubscribes += 1
        connection.answer(packet)
        self.grown()

    def move_to(self, other: FakeBroker) -> None:
        """Promote the other copy, with the same log, window and progress; this one is no master any more."""
        other.subjects, other.window, other.positions = self.subjects, self.window, self.positions
        other.subscribers, other.returned, other.times = self.subscribers, self.returned, self.times
        for subscriber in self.subscribers.values():
            subscriber.next_pull = (self.mastership + 1) << 32
        other.mastership = self.mastership + 1
        self.refuse_with = NotMaster("this broker is not the master")


class FakeDelayServer(FakeBroker):
    """Master of one delay group: stores messages and sends none; a test sets which count as sent."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent: set[str] = set()
        self.cancelled: set[str] = set()
        self.asked: list[commands.Cancel | commands.Reschedule] = []
        self.recurring: dict[tuple[str, str], RecurringSchedule] = {}
        self.templates: dict[tuple[str, str], bytes] = {}
        self.refuse_put_with: QmqError | None = None
        self.refuse_recall_with: QmqError | None = None
        self.is_silent = False

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        handlers = {Command.CANCEL: self._cancel, Command.RESCHEDULE: self._reschedule, Command.RECUR: self._recur}
        if packet.code not in handlers:
            super().packet_received(connection, packet)
            return
        try:
            answer = handlers[Command(packet.code)](packet)
        except QmqError as error:
            connection.refuse(packet, error)
            return
        if self.loses_answer_to == packet.code:
            self.loses_answer_to = None
            self.cut()
        elif self.refuse_recall_with is not None:
            connection.refuse(packet, self.refuse_recall_with)
        elif not self.is_silent:
            connection.answer(packet, answer)

    def _cancel(self, packet: Packet) -> bytes:
        cancel = commands.decode_cancel(packet.body)
        self.asked.append(cancel)
        ids = [self._recall(cancel.subject, id, "", DelayState.CANCELLED) for id in cancel.ids]
        keys = [self._recall(cancel.subject, "", key, DelayState.CANCELLED) for key in cancel.keys]
        return commands.encode_cancelled(commands.Cancelled(ids, keys))

    def _reschedule(self, packet: Packet) -> bytes:
        reschedule = commands.decode_reschedule(packet.body)
        self.asked.append(reschedule)
        state = self._recall(reschedule.subject, reschedule.id, reschedule.key, DelayState.RESCHEDULED)
        return commands.encode_rescheduled(state)

    def _recur(self, packet: Packet) -> bytes:
        recur = commands.decode_recur(packet.body)
        key = (recur.subject, recur.name)
        if self.refuse_recall_with is not None or self.is_silent:
            return b""
        if recur.action is RecurAction.PUT:
            if self.refuse_put_with is not None:
                raise self.refuse_put_with
            self.recurring[key] = RecurringSchedule(
                recur.subject, recur.name, recur.owner, recur.cron, recur.timezone, due_ms=0
            )
            self.templates[key] = recur.message
            return commands.encode_recurring([self.recurring[key]])
        found = [one for one in self.recurring.values() if one.subject == recur.subject]
        if recur.action is RecurAction.DELETE:
            found = [one for one in found if one.name == recur.name]
            self.recurring.pop(key, None)
        return commands.encode_recurring(found)

    def _recall(self, subject: str, id: str, key: str, done: DelayState) -> DelayState:
        messages = [decode_message(data) for data in self.subjects[subject]]
        found = {str(message.id) for message in messages if message.id == id or (key and message.get(DELAY_KEY) == key)}
        if not found:
            return DelayState.UNKNOWN
        if found <= self.sent:
            return DelayState.SENT
        if done is DelayState.CANCELLED:
            self.cancelled |= found - self.sent
        return done


class FakeMetaserver(MetaserverServicer):
    """Route server; `set_group` changes routes and sends each watch the ones that differ from its versions."""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[int, bool, int]] = {}  # port, writable, term
        self.delay_groups: dict[str, tuple[int, bool, int]] = {}
        self.refuse: dict[str, str] = {}  # subject -> reason
        self.requests: list[pb.RouteRequest] = []
        self.polls: list[dict[str, list[str]]] = []
        self.updates: list[list[str]] = []
        self.http_port = self.grpc_port = 0
        self._changed: set[asyncio.Event] = set()
        self._http = HttpServer(self._answer_http)
        self._grpc: grpc.aio.Server | None = None
        self._wall: socket.socket | None = None

    async def start(self, http_port: int = 0) -> None:
        await self.start_grpc()
        self.http_port = http_port or free_ports(1)[0]
        await self._http.start(self.http_port)

    async def start_grpc(self) -> None:
        self._grpc = grpc.aio.server()
        add_MetaserverServicer_to_server(self, self._grpc)
        self.grpc_port = self._grpc.add_insecure_port(f"127.0.0.1:{free_ports(1)[0]}")
        await self._grpc.start()

    async def stop(self) -> None:
        if self._wall is not None:
            self._wall.close()
        await self.stop_grpc()
        await self._http.stop()

    async def stop_grpc(self) -> None:
        assert self._grpc
        await self._grpc.stop(None)

    async def block_grpc(self) -> None:
        """Block gRPC from now on; HTTP works."""
        self._wall = socket.socket()
        self._wall.bind(("127.0.0.1", 0))  # takes no connections
        await self.stop_grpc()

    async def unblock_grpc(self) -> None:
        assert self._wall
        await self.start_grpc()
        self._wall.close()
        self._wall = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def set_group(self, broker: FakeBroker, *, writable: bool = True, term: int = 1) -> None:
        self.groups[broker.name] = broker.port, writable, term
        self.tell()

    def tell(self) -> None:
        for event in self._changed:
            event.set()

    def confirmed(self) -> dict[str, int]:
        """Confirmed routes of clients, newest last."""
        return {subject: version for request in self.requests for subject, version in request.held.items()}

    def _answer_http(self, head: bytes) -> tuple[str, bytes]:
        url = urlsplit(head.split(b" ", 2)[1].decode())
        port = self._wall.getsockname()[1] if self._wall else self.grpc_port
        status, body = "200 OK", f"127.0.0.1:{port}".encode()
        if url.path == "/meta/routes":
            words = parse_qs(url.query)
            self.polls.append(words)
            held = {subject: int(version, 16) for subject, version in (w.split(":") for w in words.get("held", []))}
            kind = GroupKind[words.get("kind", ["NORMAL"])[0]]
            known = (self.route(subject, kind) for subject in words["subject"])
            routes = [route for route in known if route.version != held.get(route.subject)]
            body = json.dumps({"routes": [as_json(route) for route in routes]}).encode()
            if f"x-api-token: {TOKEN}\r\n".encode() not in head.lower():
                status, body = "401 Unauthorized", b"unknown token"
        return status, body

    async def WatchRoutes(
        self, requests: AsyncIterator[pb.RouteRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RouteUpdate]:
        if dict(context.invocation_metadata() or ()).get("x-api-token") != TOKEN:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown token")
        event = asyncio.Event()
        self._changed.add(event)
        sent: dict[str, int] = {}
        kind, asked = GroupKind.NORMAL, 0

        async def listen() -> None:
            nonlocal asked, kind
            async for request in requests:
                self.requests.append(request)
                kind = GroupKind(request.kind or GroupKind.NORMAL)
                for subject in request.forgotten:
                    sent.pop(subject, None)
                for subject in request.subjects:
                    sent[subject] = request.held.get(subject, sent.get(subject, 0))
                asked += bool(request.subjects)
                if request.subjects:
                    event.set()

        task = asyncio.get_running_loop().create_task(listen())
        answered = 0
        try:
            while True:
                await event.wait()
                event.clear()
                routes = [self.route(subject, kind) for subject in sorted(sent)]
                routes = [route for route in routes if route.version != sent[route.subject]]
                if routes or asked > answered:
                    answered = asked
                    sent.update({route.subject: route.version for route in routes})
                    self.updates.append([route.subject for route in routes])
                    yield pb.RouteUpdate(version=1, routes=routes)
        finally:
            self._changed.discard(event)
            task.cancel()

    def route(self, subject: str, kind: GroupKind = GroupKind.NORMAL) -> pb.SubjectRoute:
        groups = self.delay_groups if kind is GroupKind.DELAY else self.groups
        route = pb.SubjectRoute(subject=subject, refused=self.refuse.get(subject, ""))
        if not route.refused:
            route.groups.extend(
                pb.BrokerGroupRoute(
                    broker_group=name,
                    master=pb.BrokerAddress(ip="127.0.0.1", serve_port=port),
                    writable=writable,
                    term=term,
                )
                for name, (port, writable, term) in groups.items()
            )
        route.version = crc32(route.SerializeToString(deterministic=True))
        return route


def as_json(route: pb.SubjectRoute) -> dict[str, object]:
    """Return the route as in an answer of GET /meta/routes."""
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


@asynccontextmanager
async def cluster(*names: str) -> AsyncIterator[tuple[FakeMetaserver, list[FakeBroker]]]:
    """Run a metaserver and one broker per name."""
    metaserver = FakeMetaserver()
    await metaserver.start()
    brokers = [FakeBroker(name) for name in names]
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
async def delay_cluster(*names: str) -> AsyncIterator[tuple[FakeMetaserver, FakeBroker, list[FakeDelayServer]]]:
    """Run a metaserver, one broker, and one delay server per name."""
    async with cluster("g1") as (metaserver, [broker]):
        servers = [FakeDelayServer(name) for name in names]
        try:
            for server in servers:
                await server.start()
                metaserver.delay_groups[server.name] = server.port, True, 1
            metaserver.tell()
            yield metaserver, broker, servers
        finally:
            for server in servers:
                await server.stop()
