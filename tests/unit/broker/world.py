"""Core. Test world of two real broker cores: tests play network, disk threads and clock, step by step.

Packets are delivered by `deliver`, commits by `fsync`, and turns end on request; `settle` repeats all three until
nothing is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from zlib import crc32

from qmq.broker.answers import Counters
from qmq.broker.master import BrokerMaster
from qmq.broker.positions import Ask
from qmq.broker.retention import Retention
from qmq.broker.settings import BrokerSettings
from qmq.broker.subscriptions import LOOKS_IN_LEASE
from qmq.codec import decode_envelope, encode_labels, encode_message, join_batch, label_of_message, split_batch
from qmq.errors import ErrorCode, LogError, from_code
from qmq.log import Commit, MessageLog
from qmq.log.frame import Frame, FrameKind, decode_frames, label_flags
from qmq.log.group import Group as LogGroup
from qmq.log.memory_disk import MemoryDisk
from qmq.log.progress_frame import Progress, decode_progress
from qmq.log.segments import log_name
from qmq.message import Message
from qmq.rations import Ration
from qmq.remoting import commands
from qmq.remoting.commands import Ack, Command, Nack, NackEntry, Produced, Pull, Verdict
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.replication.assignment import Address, Assignment
from qmq.replication.clocks import MASTER, METASERVER, SLAVE
from qmq.replication.identity import IdentityFile
from qmq.replication.node import Node
from qmq.replication.slave import Slave
from qmq.types import Role

SETTINGS = BrokerSettings(
    hostname="b",
    data=Path("unused"),
    token="secret",
    segment_bytes=4096,
    tail_bytes=1 << 20,
    lease_ms=30_000,
    slave_wait_ms=5_000,
    message_bytes_max=1024,
    packet_bytes_max=1 << 20,
    window_bytes=1 << 20,
)


_batches = count(1_000)
"""Batch numbers for batches without an explicit one."""


class FakeLink:
    """One end of a connection: records packets, or carries them to the other end's inbox."""

    def __init__(self, peer: str) -> None:
        self.peer, self.writable, self.is_open, self.reason = peer, True, True, ""
        self.unacked_bytes = self.owed_bytes = 0
        self.sends_on = False
        self.produced: dict[str, int] = {}
        self.ration = Ration()
        self.answers: dict[int, tuple[int, bytes]] = {}
        self.order: list[int] = []
        self.pushed: deque[tuple[Command, bytes]] = deque()

    def answer(self, request, *parts, code=0):
        if self.is_open and not request.flag & ONE_WAY:
            assert request.opaque not in self.answers, "a request is answered once"
            self.answers[request.opaque] = (int(code), b"".join(parts))
            self.order.append(request.opaque)

    def refuse(self, request, error):
        self.answer(request, str(error).encode(), code=error.code)

    def push(self, command, *parts):
        if self.is_open:
            self.pushed.append((command, b"".join(parts)))

    def close(self, reason=""):
        self.is_open, self.reason = False, self.reason or reason


class FakeHost:
    """Host of one node."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.clock_ms, self.wall_skew_ms, self.pass_is_due = 1_000, 0, False
        self.commits: deque[Commit] = deque()
        self.reads: deque = deque()
        self.hellos: list[bytes] = []
        self.holds_reads = False
        self.performed = self.role_changes = 0

    def now_ms(self):
        return 1_700_000_000_000 + self.clock_ms + self.wall_skew_ms

    def monotonic_ms(self):
        return self.clock_ms

    def pass_soon(self):
        self.pass_is_due = True

    def commit(self, commit):
        self.commits.append(commit)

    def read(self, job, done):
        self.reads.append((job, done))

    def write(self, job, done):
        done(job())

    def hello(self, body):
        self.hellos.append(body)

    def role_changed(self):
        self.role_changes += 1

    # Methods for tests.

    def turn(self) -> bool:
        if not self.pass_is_due:
            return False
        self.pass_is_due = False
        self.node.end_of_pass()
        return True

    def fsync(self) -> bool:
        if not self.commits:
            return False
        commit = self.commits.popleft()
        self.node.log.perform(commit)
        self.performed += 1
        self.node.committed(commit)
        return True

    def do_read(self) -> bool:
        if self.holds_reads or not self.reads:
            return False
        job, done = self.reads.popleft()
        try:
            result = job()
        except LogError as error:
            result = error
        done(result)
        return True

    def settle(self) -> None:
        while self.turn() or self.fsync() or self.do_read():
            pass


class Broker:
    """One broker: disk, identity, node. `crash` drops unsynced bytes and restarts it."""

    ask: Ask | None = None
    """Asks the cluster for the begin of consumer groups."""

    def __init__(self, name: str, settings: BrokerSettings = SETTINGS) -> None:
        self.name, self.settings = name, replace(settings, hostname=name)
        self.disk, self.starts, self.instance = MemoryDisk(), 0, f"{name} at its place"
        self.start()

    def copied(self) -> Broker:
        """Start a process on a copy of the directory."""
        other = Broker(self.name, self.settings)
        other.disk, other.instance = self.disk.copy(), "a copy"
        other.start()
        return other

    def start(self) -> None:
        self.starts += 1
        self.host = FakeHost()
        settings = self.settings
        message_log = MessageLog(self.disk, segment_bytes=settings.segment_bytes, tail_bytes=settings.tail_bytes)
        self.counters = Counters()
        identity = IdentityFile(self.disk, new_incarnation=f"{self.name}-{self.starts}", instance=self.instance)
        self.node = Node(
            message_log=message_log,
            host=self.host,
            identity=identity,
            settings=settings,
            promote=partial(BrokerMaster, settings=settings, counters=self.counters, ask=self.ask),
        )
        self.host.node = self.node
        self.keeper = Retention(settings)

    def drop_oldest_segment(self) -> None:
        """Commit alone, as the service does, if nothing else is to be written."""
        self.log.drop_oldest_segment()
        self.host.pass_soon()
        self.host.settle()

    def drop_segments(self, *, left: int) -> None:
        while len(self.log.bases) > left:
            self.drop_oldest_segment()

    def flip(self, offset: int) -> None:
        """Flip a bit of the byte at an offset of the log."""
        base = max(base for base in self.log.bases if base <= offset)
        self.disk.flip(log_name(base), 8 * (offset - base))

    def crash(self, rng=None) -> None:
        self.disk.crash(rng)
        self.start()

    @property
    def log(self) -> MessageLog:
        return self.node.log

    @property
    def master(self) -> BrokerMaster:
        assert self.node.master is not None
        return self.node.master

    @property
    def slave(self) -> Slave:
        assert self.node.slave is not None
        return self.node.slave

    def assign(self, role: Role, term: int = 1, *, slaves: int = 1, **fields) -> None:
        address = Address("127.0.0.1", 1, 2, 3)
        self.node.assign(Assignment("g1", term, role, address, (address,) * slaves, **fields))

    def wait(self, ms: int) -> None:
        """Let time pass, in steps too short for this broker to count as paused."""
        while ms > 0:
            step = min(ms, self.settings.lease_ms // LOOKS_IN_LEASE)
            self.host.clock_ms += step
            self.node.tick()
            ms -= step

    def stand_still(self, ms: int) -> None:
        self.host.clock_ms += ms
        self.node.tick()

    def alone(self, term: int = 0) -> None:
        """Begin a mastership with a whole log and without a slave, after a restart or in this new term."""
        self.node.identity.completed(True)
        self.assign(Role.MASTER, term or self.node.identity.value.term or 1)
        self.wait(self.settings.slave_wait_ms)
        self.host.settle()


class Client:
    """Connection of a producer or consumer to one broker."""

    def __init__(self, broker: Broker, name: str = "client", settle: Callable[[], None] | None = None) -> None:
        self.broker, self.link, self.opaque = broker, FakeLink(name), 0
        self.settle = settle or broker.host.settle
        self.last_subscription = 1  # of a broker's first connection; others are read from the answer

    def send(self, command: Command, body: bytes) -> int:
        self.opaque += 1
        self.broker.node.packet_received(self.link, Packet(command, self.opaque, 0, command, memoryview(body)))
        return self.opaque

    def lost(self) -> None:
        self.link.is_open = False
        self.broker.node.link_lost(self.link)

    def answered(self, opaque: int) -> bool:
        return opaque in self.link.answers

    def code(self, opaque: int) -> ErrorCode:
        return ErrorCode(self.link.answers[opaque][0])

    def text(self, opaque: int) -> str:
        return self.link.answers[opaque][1].decode()

    def body(self, opaque: int) -> bytes:
        code, body = self.link.answers[opaque]
        assert code == 0, body
        return body

    def done(self, opaque: int) -> bytes:
        """Settle, and return the body of a successful answer."""
        self.settle()
        return self.body(opaque)

    def outcome(self, opaque: int) -> ErrorCode:
        """Settle, and return the code of the answer."""
        self.settle()
        return self.code(opaque)

    # Producing.

    def produce(self, *ids: str, subject: str = "s", producer: int = 7, batch: int = 0, size: int = 0) -> int:
        """Send one batch; batch 0 stands for a new number."""
        return self.produce_raw(
            [message(subject, id, size) for id in ids], subject=subject, producer=producer, batch=batch
        )

    def produce_raw(
        self,
        messages: list[bytes],
        *,
        subject: str = "s",
        producer: int = 7,
        batch: int = 0,
        crc: int | None = None,
        after: bytes = b"",
        flags: int = 0,
    ) -> int:
        """Send a batch; `after` it comes the section that `flags` declare."""
        body = join_batch(messages) + after
        head = commands.produce_header(
            producer, batch or next(_batches), len(messages), crc32(body) if crc is None else crc, subject, flags
        )
        return self.send(Command.PRODUCE, head + body)

    def receipt(self, opaque: int) -> Produced:
        return commands.decode_produced(memoryview(self.body(opaque)))

    def store(self, *ids: str, **terms) -> Produced:
        """Send one batch, settle, and return its receipt."""
        return commands.decode_produced(memoryview(self.done(self.produce(*ids, **terms))))

    def store_labelled(self, *messages: Message) -> list[int]:
        """Send one batch with labels to the subject s, settle, and return the labels."""
        labels = [label_of_message(message) for message in messages]
        encoded = [encode_message(message, 0) for message in messages]
        self.done(self.produce_raw(encoded, after=encode_labels(labels), flags=label_flags(labels)))
        return labels

    # Consuming.

    def subscribe(
        self, consumer: str = "c1", *, subject: str = "s", group: str = "g", start: str = "earliest", **terms
    ) -> int:
        body = commands.encode_subscribe(subject=subject, group=group, consumer=consumer, start=start, **terms)
        return self.send(Command.SUBSCRIBE, body)

    def subscription(self, opaque: int) -> int:
        self.last_subscription = commands.decode_json(self.body(opaque))["subscription"]
        return self.last_subscription

    def join(self, consumer: str = "c1", **terms) -> int:
        """Subscribe, settle, and return the subscription."""
        opaque = self.subscribe(consumer, **terms)
        self.settle()
        return self.subscription(opaque)

    def leave(self, subscription: int = 0) -> int:
        return self.send(Command.UNSUBSCRIBE, commands.encode_json(subscription=subscription or self.last_subscription))

    def heartbeat(self) -> int:
        return self.send(Command.HEARTBEAT, b"")

    def take(self, subscription: int = 0, **pull) -> list[str]:
        """Pull, settle, and return the ids of the messages; empty without messages or with an error."""
        opaque = self.pull(subscription, **pull)
        self.settle()
        return self.ids(opaque) if self.link.answers.get(opaque, (1, b""))[0] == 0 else []

    def acked(self, *ids: str) -> int:
        """Ack messages of the last pull, settle, and return the acked end."""
        numbers = [self.number(id) for id in ids]
        return commands.decode_acked(memoryview(self.done(self.ack_ranges(*[(n, n + 1) for n in numbers]))))

    def nacked(self, *ids: str, **terms) -> None:
        """Nack messages of the last pull, with the `terms` of `nack`, and settle."""
        for number in [self.number(id) for id in ids]:
            self.done(self.nack(number, number + 1, **terms))

    def number(self, id: str) -> int:
        """Return the pull sequence of a message of the last pull."""
        return {id: number for number, _, id in self.pulled(self.last_pull)}[id]

    @property
    def first(self) -> int:
        """Pull sequence of the first message that the last `pull` or `take` delivered."""
        return self.pulled(self.last_pull)[0][0]

    def ids(self, opaque: int) -> list[str]:
        return [id for _, _, id in self.pulled(opaque)]

    def pull(self, subscription: int = 0, most: int = 100, bytes_max: int = 1 << 20, timeout_ms: int = 0) -> int:
        pull = Pull(subscription or self.last_subscription, most, bytes_max, timeout_ms)
        self.last_pull = self.send(Command.PULL, commands.encode_pull(pull))
        return self.last_pull

    def pulled(self, opaque: int) -> list[tuple[int, int, str]]:
        """Return (pull sequence, sequence, message id) of a pull's messages."""
        found = []
        for piece in commands.decode_pulled(memoryview(self.body(opaque))):
            for i, data in enumerate(split_batch(piece.body, piece.count)):
                found.append((piece.pull_sequence + i, piece.sequence + i, id_of(bytes(data))))
        return found

    def flags(self, opaque: int) -> set[int]:
        return {piece.flags for piece in commands.decode_pulled(memoryview(self.body(opaque)))}

    def times(self, opaque: int) -> list[int]:
        """Return the delivery count of each message of a pull."""
        pieces = commands.decode_pulled(memoryview(self.body(opaque)))
        return [piece.times for piece in pieces for _ in range(piece.count)]

    def ack(self, begin: int, end: int, subscription: int = 0) -> int:
        return self.ack_ranges((begin, end), subscription=subscription)

    def ack_ranges(self, *ranges: tuple[int, int], subscription: int = 0) -> int:
        ack = Ack(subscription or self.last_subscription, list(ranges))
        return self.send(Command.ACK, commands.encode_ack(ack))

    def begin(self, begin: int, end: int) -> int:
        """Report that a handler begins with these messages."""
        return self.send(Command.BEGIN, commands.encode_ack(Ack(self.last_subscription, [(begin, end)])))

    def nack(
        self,
        begin: int,
        end: int,
        *,
        delay_ms: int = 0,
        dead: bool = False,
        verdict: Verdict = Verdict.RETRY,
        reason: str = "",
        subscription: int = 0,
    ) -> int:
        entry = NackEntry(begin, end, delay_ms, Verdict.DEAD_LETTER if dead else verdict)
        nack = Nack(subscription or self.last_subscription, [entry], reason)
        return self.send(Command.NACK, commands.encode_nack(nack))


def message(subject: str, id: str, size: int = 0) -> bytes:
    return encode_message(Message(subject, {"x": "y" * size} if size else {}, id=id), 0)


def id_of(data: bytes) -> str:
    return decode_envelope(data).id


@dataclass
class Group:
    """A master `a`, a slave `b` and the wire between them."""

    a: Broker = field(default_factory=lambda: Broker("a"))
    b: Broker = field(default_factory=lambda: Broker("b"))
    at_master: FakeLink | None = None
    at_slave: FakeLink | None = None
    _hellos: int = 0

    @classmethod
    def made(cls, settings: BrokerSettings = SETTINGS, **changes) -> Group:
        settings = replace(settings, **changes)
        return cls(Broker("a", settings), Broker("b", settings))

    def start(self, term: int = 1) -> Group:
        """Assign roles, connect, and let both agree."""
        self.a.assign(Role.MASTER, term)
        self.b.assign(Role.SLAVE, term)
        self.agree()
        return self

    def subscribed(self, consumer: str = "c1", **terms) -> Client:
        """Return a connection to `a` that consumes as `consumer`, with the `terms` of `Client.subscribe`."""
        client = self.client(consumer)
        client.join(consumer, **terms)
        return client

    def client(self, name: str = "client") -> Client:
        """Return a connection to `a`."""
        return Client(self.a, name, self.settle)

    @property
    def progress(self) -> LogGroup:
        """Progress of the consumer group g on subject s."""
        return self.a.log.state.groups["s", "g"]

    def frames(self, *kinds: FrameKind) -> list[tuple[Frame, Progress]]:
        """Return the progress frames of these kinds in the log of `a`."""
        found = decode_frames(self.a.log.stored.read_bytes(self.a.log.start, self.a.log.end), self.a.log.start, None)
        return [(frame, decode_progress(body)) for frame, body in found if frame.kind in kinds]

    def wait(self, ms: int, times: int = 1) -> None:
        """Let time pass at `a`, and settle."""
        for _ in range(times):
            self.a.wait(ms)
            self.settle()

    def connect(self) -> None:
        self.at_master, self.at_slave = FakeLink("slave"), FakeLink("master")
        self.b.host.hellos.clear()
        self.b.slave.connected(self.at_slave)

    def agree(self) -> None:
        """Connect, and let both copies agree."""
        self.connect()
        self.settle()

    def cut(self) -> None:
        """Break the connection; packets on the way are lost."""
        for link, broker in ((self.at_master, self.a), (self.at_slave, self.b)):
            link.is_open = False
            link.pushed.clear()
            broker.node.link_lost(link)

    def deliver_hello(self) -> bool:
        if not self.b.host.hellos or self.at_slave is None or not self.at_slave.is_open:
            return False
        body = self.b.host.hellos.pop(0)
        self._hellos += 1
        opaque = 10_000 + self._hellos
        packet = Packet(Command.HELLO, opaque, 0, Command.HELLO, memoryview(body))
        self.a.node.packet_received(self.at_master, packet)
        if opaque in self.at_master.answers:
            code, answer = self.at_master.answers.pop(opaque)
            while code and self.to_slave():  # sent before the refusal
                pass
            self.b.node.agreed(self.at_slave, from_code(code, answer.decode()) if code else memoryview(answer))
        return True

    def to_slave(self) -> bool:
        """Deliver one packet that the master sent."""
        return self._deliver(self.at_master, self.b, self.at_slave)

    def to_master(self) -> bool:
        return self._deliver(self.at_slave, self.a, self.at_master)

    def _deliver(self, sender: FakeLink | None, to: Broker, at: FakeLink | None) -> bool:
        if sender is None or at is None or not sender.pushed:
            return False
        command, body = sender.pushed.popleft()
        if at.is_open:
            to.node.packet_received(at, Packet(command, 0, ONE_WAY, command, memoryview(body)))
        return True

    def settle(self) -> None:
        busy = True
        while busy:
            self.a.host.settle()
            self.b.host.settle()
            busy = self.deliver_hello() or self.to_slave() or self.to_master()
            if self.at_master is not None and not (self.at_master.is_open and self.at_slave.is_open):
                self.cut()
                self.at_master = self.at_slave = None
                busy = True

    def hear_clocks(self, metaserver_skew_ms: int = 0) -> None:
        """Deliver heartbeats with the clocks of metaserver and peer. Hosts differ by their skew alone."""
        for broker, other, whose in ((self.a, self.b, SLAVE), (self.b, self.a, MASTER)):
            true_ms = broker.host.now_ms() - broker.host.wall_skew_ms
            broker.node.record_metaserver_clock(true_ms + metaserver_skew_ms)
            if self.at_master is not None:
                theirs_ms = true_ms + other.host.wall_skew_ms
                broker.node.clocks.record(whose, theirs_ms, monotonic_ms=broker.host.monotonic_ms())

    def clocks_agree(self) -> None:
        """Let both copies follow a metaserver's clock that agrees with theirs now."""
        far_ms = 1 << 40
        for broker in (self.a, self.b):
            wall_ms, monotonic_ms = broker.host.now_ms() + far_ms, broker.host.monotonic_ms() + far_ms
            broker.node.clocks.record(METASERVER, wall_ms, monotonic_ms=monotonic_ms)

    def look_after_logs(self, **skew: int) -> int:
        """Run retention as the service does, until nothing more is deleted; return the number of segments, of both
        copies.
        """
        before = len(self.a.log.bases) + len(self.b.log.bases)
        for _ in range(3):  # decided; acknowledged; deleted
            self.hear_clocks(**skew)
            for broker in (self.a, self.b):
                broker.node.decide_retention(broker.keeper)
                self.settle()
            for broker in (self.a, self.b):
                while broker.node.oldest_may_go(broker.keeper, ()):
                    broker.drop_oldest_segment()
        return before - len(self.a.log.bases) - len(self.b.log.bases)

    def swap(self, term: int) -> None:
        """Change roles by force: a new term in the metaserver's row."""
        if self.at_master is not None:
            self.cut()
        self.a.assign(Role.SLAVE, term)
        self.b.assign(Role.MASTER, term)
        self.a, self.b = self.b, self.a
        self.agree()


def a_group(**settings) -> tuple[Group, Client]:
    """Return a group that accepts messages, and a connection to its master."""
    group = Group.made(**settings).start()
    return group, group.client()
