"""Producers and consumers of the cores' world, which exchange real packets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from qmq.client.received import UnackedPiece
from qmq.client.unacked import Refusal, SentAck, SentNack, Unacked
from qmq.codec import Buffer, encode_labels, encode_message, join_batch, label_of, split_batch
from qmq.errors import ErrorCode
from qmq.log.frame import FLAG_LABELLED, FLAG_NO_SLAVE_IN_SYNC, FLAG_ORDERED
from qmq.message import Message
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command, Nack, Pull, Verdict
from qmq.remoting.packet import Packet
from tests.simulation.cores.network import End

if TYPE_CHECKING:
    from tests.simulation.cores.world import World


class Client:
    """Connection to the master that the route names."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self._events = world.events
        self.link: End | None = None
        self._is_connecting = False
        self._events.between(0, 50, self._step)

    def _step(self) -> None:
        self._events.between(*self.world.swarm.think_ms, self._step)
        self.act()

    def act(self) -> None:
        raise NotImplementedError

    def connect(self) -> None:
        target = self.world.metaserver.route()
        if self._is_connecting or target is None:
            return
        self._is_connecting = True

        def connected(link: End | None) -> None:
            self._is_connecting = False
            self.link = link
            if link is not None:
                self.connected(link)

        self.world.network.connect(self, target, connected)

    def connected(self, link: End) -> None: ...

    def drop_link(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.owner = None
            link.close("the client gives up")
            self.disconnected()

    def disconnected(self) -> None: ...

    def packet_received(self, link: End, packet: Packet) -> None:
        raise AssertionError("a broker asks clients nothing")

    def link_lost(self, link: End) -> None:
        if link is self.link:
            self.link = None
            self.disconnected()

    def writable_again(self, link: End) -> None: ...


@dataclass(kw_only=True)
class Request:
    """Request that a client repeats until it is answered."""

    attempts: int = 0
    sent_ms: int | None = None
    """When the last attempt was sent; None: no attempt is under way."""
    not_before_ms: int = 0


class Repeater(Client):
    """Client that repeats its requests."""

    TIMEOUT_MS = 900

    @property
    def requests(self) -> list[Request]:
        """Requests without an outcome."""
        raise NotImplementedError

    def make(self) -> None:
        """Add new requests, if it is time."""
        raise NotImplementedError

    def send(self, link: End, request: Request) -> None:
        raise NotImplementedError

    def act(self) -> None:
        self.make()
        if self.link is None:
            if self.requests:
                self.connect()
            return
        now_ms = self._events.now_ms
        for request in self.requests:
            if request.sent_ms is not None and now_ms - request.sent_ms > self.TIMEOUT_MS:
                request.sent_ms = None
                if self._events.chance(0.5):
                    return self.drop_link()
            if request.sent_ms is None and request.not_before_ms <= now_ms:
                request.attempts += 1
                request.sent_ms = now_ms
                self.send(self.link, request)

    def repeat_later(self, link: End, request: Request, code: int) -> None:
        """Repeat a refused request after a pause, on another connection if that may help."""
        request.sent_ms = None
        request.not_before_ms = self._events.now_ms + self._events.rng.randint(5, 150)
        if code in (ErrorCode.NOT_MASTER, ErrorCode.FENCED) and link is self.link:
            self.drop_link()

    def disconnected(self) -> None:
        for request in self.requests:
            request.sent_ms = None


@dataclass
class Batch(Request):
    number: int
    subject: str
    ids: list[str]
    parts: tuple[Buffer, Buffer]


TAG = "t"
MESSAGES_MAX = 300
"""Messages of a seed, spread over its war. A fault meets batches under way, not earlier ones, and the backlog must be
done within a minute of peace, with order keys one message at a time.
"""


def is_tagged(identity: str) -> bool:
    """Whether the message of this id has the tag that some groups filter by."""
    return crc32(identity.encode()) % 3 == 0


def order_key(identity: str) -> str | None:
    """Return the order key of the message of this id; some have none."""
    return (None, "k1", "k2", "k3")[crc32(identity.encode()) >> 8 & 3]


class Producer(Repeater):
    """Producer that repeats a batch, byte by byte, until its outcome is known."""

    def __init__(self, world: World, name: str, identity: int) -> None:
        super().__init__(world, name)
        self._identity = identity
        self._next = 1
        self.is_producing = True
        self.outstanding: dict[int, Batch] = {}

    @property
    def requests(self) -> list[Request]:
        return list(self.outstanding.values())

    def make(self) -> None:
        oldest = min(self.outstanding, default=self._next)
        if self.is_producing and not self._is_early() and len(self.outstanding) < self.world.swarm.window:
            if self._next - oldest < 60:
                self._make()

    def _is_early(self) -> bool:
        """Whether the seed's messages would be used up too soon."""
        return len(self.world.oracle.sent) * self.world.swarm.war_ms > MESSAGES_MAX * self._events.now_ms

    def _make(self) -> None:
        rng, number = self._events.rng, self._next
        self._next += 1
        subject = rng.choice(self.world.swarm.subjects)
        ids, messages, labels = [], [], []
        for i in range(rng.randint(1, self.world.swarm.batch_messages)):
            identity = f"{self.name}-{number}-{i}"
            size = rng.choice((0, 10, 60, 200, 700))
            ids.append(identity)
            tags = (TAG, "other") if is_tagged(identity) else ("other",) if size == 10 else ()
            messages.append(encode_message(Message(subject, {"n": "x" * size}, id=identity, tags=tags), number))
            labels.append(label_of(tags, order_key(identity) if self.world.swarm.keys else None))
            self.world.oracle.sent[identity] = subject
        if rng.random() < 0.02:
            ids.append("nothing")
            messages.append(b"garbage")
            labels.append(0)
        is_labelled = self.world.swarm.keys or rng.random() < 0.5
        self._add(number, subject, ids, messages, labels if is_labelled else [])

    def _add(self, number: int, subject: str, ids: list[str], messages: list[bytes], labels: list[int]) -> None:
        body, flags = join_batch(messages), 0
        if labels:
            body += encode_labels(labels)
            flags = FLAG_LABELLED | (FLAG_ORDERED if any(label >> 32 for label in labels) else 0)
        header = commands.produce_header(self._identity, number, len(messages), crc32(body), subject, flags)
        self.outstanding[number] = Batch(number, subject, ids, (header, body))

    def send(self, link: End, request: Request) -> None:
        if request.attempts > 1:
            self._events.count("batch repeated")
        link.request(Command.PRODUCE, *request.parts, then=lambda packet: self._answered(link, request, packet))

    def _answered(self, link: End, batch: Batch, packet: Packet) -> None:
        code = packet.code
        self._events.note(f"{self.name} batch {batch.number} answered {code}")
        if code == ErrorCode.SUCCESS:
            produced = commands.decode_produced(packet.body)
            if produced.stored:
                key = (self._identity, batch.number)
                self.world.oracle.acknowledged(key, batch.subject, batch.ids, produced)
            self.outstanding.pop(batch.number, None)
            self._events.count("batch acknowledged")
            return
        self._events.count(f"produce answered {code}")
        if code == ErrorCode.OUTCOME_UNKNOWN:
            self.outstanding.pop(batch.number, None)
            return
        self.repeat_later(link, batch, code)


@dataclass(slots=True)
class Session:
    """State of a consumer on one connection."""

    subscription: int | None = None
    is_subscribing: bool = False
    pull_sent_ms: int | None = None
    ack_under_way: SentAck | None = None
    nack_under_way: SentNack | None = None
    asked_ms: int = 0


class Consumer(Client):
    """Consumer that pulls, finishes messages in any order, acks, nacks, and may lose its memory."""

    TIMEOUT_MS = 2500

    def __init__(self, world: World, name: str, group: str, subject: str) -> None:
        super().__init__(world, name)
        self.group = group
        self.subject = subject
        self.is_choosy = world.swarm.tagged and group == "g1"
        """Whether it filters by the tag."""
        self._session = Session()
        self._acker: Any = None
        """None: `act` sends acks and nacks."""
        self._forget()
        self.sleeps_until_ms = 0

    def _forget(self) -> None:
        self._unacked = Unacked()
        self._is_new = True
        self._undone: list[tuple[UnackedPiece, int, int]] = []
        """(piece, position in it, sequence)"""

    @property
    def is_idle(self) -> bool:
        return not self._unacked.messages and self._unacked.is_settled

    def vanish(self, ms: float, *, forgets: bool) -> None:
        self.sleeps_until_ms = self._events.now_ms + int(ms)
        if forgets or self._events.chance(0.5):
            self.drop_link()
        if forgets:
            self._forget()

    def connected(self, link: End) -> None:
        self._session = Session()

    def disconnected(self) -> None:
        self._session = Session()

    def act(self) -> None:
        now_ms, rng = self._events.now_ms, self._events.rng
        if now_ms < self.sleeps_until_ms:
            return
        link, session = self.link, self._session
        if link is None:
            return self.connect()
        if self._waits_since(session) < now_ms - self.TIMEOUT_MS:
            return self.drop_link()
        if session.subscription is None:
            if not session.is_subscribing:
                self._subscribe(link, session)
            return
        if session.pull_sent_ms is None and self._unacked.messages < 40:
            self._pull(link, session)
        self._work()
        if session.ack_under_way is None and rng.random() < 0.7:
            self._ack(link, session)
        if session.nack_under_way is None and rng.random() < 0.7:
            self._nack(link, session)
        if rng.random() < 0.05:
            link.request(Command.HEARTBEAT, then=lambda packet: None)
        if rng.random() < self.world.swarm.unsubscribe and self.is_idle:
            self._events.count("unsubscribe")
            body = commands.encode_json(subscription=session.subscription)
            link.request(Command.UNSUBSCRIBE, body, then=lambda packet: self.drop_link() if link is self.link else None)

    def _waits_since(self, session: Session) -> int:
        since_ms = self._events.now_ms
        if session.is_subscribing or session.ack_under_way is not None or session.nack_under_way is not None:
            since_ms = session.asked_ms
        return since_ms if session.pull_sent_ms is None else min(since_ms, session.pull_sent_ms)

    def _work(self) -> None:
        """Finish some messages or reject them, at times a later one before an earlier one."""
        rng, swarm, now_ms = self._events.rng, self.world.swarm, self._events.now_ms
        for _ in range(rng.randint(0, len(self._undone))):
            piece, at, sequence = self._undone.pop(0 if rng.random() < 0.8 else rng.randrange(len(self._undone)))
            chance = rng.random()
            if piece.is_dropped:
                continue
            if chance < swarm.nack:
                delay_ms = rng.choice((0, 20, 300, 2000))
                self._unacked.nack(Refusal(piece, at, now_ms + delay_ms, Verdict.RETRY, "not yet"))
                self._events.count("nacked")
            elif chance < swarm.nack + swarm.give_up:
                self._unacked.nack(Refusal(piece, at, now_ms, Verdict.DEAD_LETTER, "never"))
                self._events.count("given up")
            else:
                piece.mark(at)
                self.world.oracle.finished(self.group, self.subject, sequence)

    def _subscribe(self, link: End, session: Session) -> None:
        session.is_subscribing, session.asked_ms = True, self._events.now_ms
        body = commands.encode_subscribe(
            subject=self.subject,
            group=self.group,
            consumer=self.name,
            start="earliest",
            held_end=self._unacked.held_end,
            is_new=self._is_new,
            deliveries_max=self.world.swarm.deliveries_max,
            tags=[TAG] if self.is_choosy else [],
        )
        link.request(Command.SUBSCRIBE, body, then=lambda packet: self._subscribed(link, session, packet))

    def _is_current(self, link: End, packet: Packet) -> bool:
        """Whether this answer still counts; an error closes the connection."""
        if link is not self.link:
            return False
        if packet.code in (ErrorCode.SUCCESS, ErrorCode.NO_MESSAGE):
            return True
        self._events.count(f"consumer answered {packet.code}")
        if packet.code == ErrorCode.INVALID_ACK:
            self._forget()
        self.drop_link()
        self.sleeps_until_ms = self._events.now_ms + self._events.rng.randint(5, 100)
        return False

    def _subscribed(self, link: End, session: Session, packet: Packet) -> None:
        session.is_subscribing = False
        if self._is_current(link, packet):
            fields = commands.decode_json(packet.body, subscription=int, acked_end=int, unacked=list)
            session.subscription = fields["subscription"]
            self._is_new = False
            self._unacked.subscribed(fields["acked_end"], [tuple(piece) for piece in fields["unacked"]])

    def _pull(self, link: End, session: Session) -> None:
        rng = self._events.rng
        session.pull_sent_ms = self._events.now_ms
        pull = Pull(session.subscription, rng.randint(1, 12), rng.choice((1, 500, 100_000)), rng.choice((0, 100, 1000)))
        link.request(Command.PULL, commands.encode_pull(pull), then=lambda packet: self._pulled(link, session, packet))

    def _pulled(self, link: End, session: Session, packet: Packet) -> None:
        session.pull_sent_ms = None
        if not self._is_current(link, packet):
            return
        for piece in commands.decode_pulled(packet.body):
            if piece.flags & FLAG_NO_SLAVE_IN_SYNC:
                self._events.count("pulled from a master alone")
            for i, message in enumerate(split_batch(piece.body, piece.count)):
                self.world.oracle.received(self, piece.sequence + i, bytes(message))
                self.world.oracle.counted(self, piece, i)
                self.world.oracle.numbered(self, piece.pull_sequence + i, piece.sequence + i)
            held = self._unacked.received(piece.pull_sequence, piece.count, piece.times, self._acker, "g")
            if held is not None:
                first = piece.sequence + held[1]
                self._undone += [(held[0], at, first + at) for at in range(piece.count - held[1])]

    def _ack(self, link: End, session: Session) -> None:
        found = self._unacked.next_ack(everything=self._events.chance(0.3))
        if found is None:
            return
        session.ack_under_way, session.asked_ms = found, self._events.now_ms
        body = commands.encode_ack(Ack(session.subscription, found.ranges))
        link.request(Command.ACK, body, then=lambda packet: self._acked(link, session, packet))

    def _acked(self, link: End, session: Session, packet: Packet) -> None:
        ack, session.ack_under_way = session.ack_under_way, None
        if ack is not None and self._is_current(link, packet):
            self._unacked.acked(ack)

    def _nack(self, link: End, session: Session) -> None:
        found = self._unacked.next_nack(self._events.now_ms)
        if found is None:
            return
        session.nack_under_way, session.asked_ms = found, self._events.now_ms
        body = commands.encode_nack(Nack(session.subscription, found.entries, found.reason))
        link.request(Command.NACK, body, then=lambda packet: self._nacked(link, session, packet))

    def _nacked(self, link: End, session: Session, packet: Packet) -> None:
        nack, session.nack_under_way = session.nack_under_way, None
        if nack is not None and self._is_current(link, packet):
            self._unacked.nacked(nack)
