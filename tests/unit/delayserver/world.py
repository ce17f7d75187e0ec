"""Core. Test world of two real delay server cores, and broker groups with scripted answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qmq.client.batch import NotStored, Stored, Unknown
from qmq.codec import decode_envelope, encode_labels, encode_message, label_of, split_batch
from qmq.delayserver.decisions import Counters
from qmq.delayserver.master import DelayMaster
from qmq.delayserver.schedule import Schedule, discard
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.upkeep import DelayRetention, ScheduleFiler
from qmq.errors import NotServed
from qmq.log import MessageLog
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED
from qmq.log.memory_disk import MemoryDisk
from qmq.message import Message
from qmq.remoting import commands
from qmq.remoting.commands import Cancel, Command, Recur, RecurAction, Reschedule
from qmq.replication.identity import IdentityFile
from qmq.replication.node import Node
from tests.unit.broker.world import Broker, Client, FakeHost, Group
from tests.unit.delayserver.delay_log import HOUR_MS, delayed

SETTINGS = DelaySettings(
    hostname="d",
    data=Path("unused"),
    token="secret",
    segment_bytes=1 << 16,
    tail_bytes=1 << 20,
    slave_wait_ms=5_000,
    message_bytes_max=1024,
    packet_bytes_max=1 << 20,
    window_bytes=1 << 20,
    segment_minutes=60,
    load_ahead_minutes=10,
)


class Senders:
    """Broker groups with all subjects. They store batches unless a test sets something else."""

    def __init__(self, *groups: str) -> None:
        self.up = dict.fromkeys(groups or ("g1",), True)
        self.routeless: set[str] = set()
        self.stored: dict[tuple[str, int, int], list[str]] = {}
        """(group, producer, number) -> ids: batches that each group remembers (P2)."""
        self.attempts: list[tuple[str, int, int, list[str]]] = []
        self.mute: set[str] = set()
        """Groups that store and do not answer."""
        self.refusing: dict[str, str] = {}
        """Message id -> reason why every broker refuses it."""

    def watch(self, subject):
        pass

    def groups(self, subject):
        return [] if subject in self.routeless else [name for name, is_up in self.up.items() if is_up]

    def home(self, subject, label):
        names = sorted(self.up)
        return names[(label >> 32) % len(names)]

    def sharers(self, subject):
        return sorted(self.up)

    def is_usable(self, name):
        return self.up[name]

    def room(self, name):
        return 1 << 20 if self.up[name] else 0

    def in_flight(self, name):
        return 0

    def why_not(self, subject):
        return "none is there"

    def send(self, group, batch, done):
        body = b"".join(batch.blocks)
        ids = [decode_envelope(bytes(data)).id for data in split_batch(body, batch.count)]
        self.attempts.append((group, batch.producer, batch.number, ids))
        if not self.up[group]:
            done(NotStored(NotServed(f"{group} is away")))
            return
        refused = [(at, self.refusing[id]) for at, id in enumerate(ids) if id in self.refusing]
        known = self.stored.setdefault((group, batch.producer, batch.number), ids)
        assert known == ids, "the same numbers stand for the same messages for ever"
        if group in self.mute:
            done(Unknown("no answer"))
        else:
            done(Stored(0, len(ids) - len(refused), refused))

    def batches(self):
        """Return the ids of each attempt."""
        return [ids for *_, ids in self.attempts]

    def delivered(self):
        """Return the ids stored by all groups, in the order of arrival; a repeated batch counts once."""
        return [id for ids in self.stored.values() for id in ids if id not in self.refusing]


class SlowSenders(Senders):
    """Broker groups that answer when a test does."""

    def __init__(self, *groups):
        super().__init__(*groups)
        self.waiting = []

    def send(self, group, batch, done):
        answers = []
        super().send(group, batch, answers.append)
        self.waiting.append((self.attempts[-1], answers[0], done))

    def answer(self, answer=None):
        """Answer the oldest attempt."""
        attempt, stored, done = self.waiting.pop(0)
        if answer is not None:
            del self.stored[attempt[:3]]
        done(answer or stored)


class DelayServer(Broker):
    """One delay server. Its schedule has its own disk."""

    def __init__(self, name, settings=SETTINGS, senders=None):
        self.shelf = MemoryDisk()
        self.senders = senders or Senders()
        super().__init__(name, settings)

    def start(self):
        self.starts += 1
        self.host = FakeHost()
        settings = self.settings
        message_log = MessageLog(self.disk, segment_bytes=settings.segment_bytes, tail_bytes=settings.tail_bytes)
        self.counters = Counters()
        identity = IdentityFile(self.disk, new_incarnation=f"{self.name}-{self.starts}")
        self.node = Node(
            message_log=message_log, host=self.host, identity=identity, settings=settings, promote=self._promote
        )
        self.host.node = self.node
        self.filing = ScheduleFiler(
            message_log,
            self.host,
            make=self._make,
            discard=lambda: discard(self.shelf),
            found_damage=self.node.found_damage,
        )
        self.keeper = DelayRetention(lambda: self.filing, settings)

    def _make(self, log_start):
        return Schedule(
            self.shelf, segment_ms=self.settings.segment_minutes * 60_000, log_start=log_start, keep_ms=72 * HOUR_MS
        )

    def _promote(self, promotion):
        return DelayMaster(promotion, self.settings, self.counters, self.filing, self.senders)

    def crash(self, rng=None):
        self.shelf.crash(rng)
        super().crash(rng)

    def beat(self):
        """Beat as delayserver.main does every 10 ms."""
        if self.node.master is not None:
            self.node.master.beat()
        else:
            self.filing.go_on(self.filing.known_end)
        self.filing.keep(self.host.now_ms())


class Copies(Group):
    """A delay group; `run` lets time pass."""

    @classmethod
    def made(cls, *groups, **changes):
        settings, senders = replace(SETTINGS, **changes), Senders(*groups)
        return cls(DelayServer("a", settings, senders), DelayServer("b", settings, senders))

    @property
    def senders(self):
        return self.a.senders

    @property
    def now_ms(self):
        return self.a.host.now_ms()

    hears = True
    """Whether heartbeats carry other clocks."""

    def run(self, ms, step_ms=100):
        for _ in range(max(1, ms // step_ms)):
            for server in (self.a, self.b):
                server.host.clock_ms += step_ms
            if self.hears:
                self.hear_clocks()
            for server in (self.a, self.b):
                server.node.tick()
                server.beat()
            self.settle()
            for server in (self.a, self.b):
                server.beat()
            self.settle()

    def producer(self):
        return Producer(self.a, settle=self.settle)

    def power_fails(self, term=1, rng=None):
        """The master's machine loses power and its unsynced bytes; its process begins again, without its slave."""
        if self.at_master is not None:
            self.cut()
        clock_ms = self.a.host.clock_ms
        self.a.crash(rng)
        self.a.host.clock_ms = clock_ms
        self.a.assign(0, term)

    def restart(self):
        self.power_fails()
        self.agree()
        self.run(100)

    def outlive_segments(self, producer):
        """Let five hours pass, each with 2 MiB of messages that are sent at once: older segments are deleted."""
        for hour in range(1, 6):
            for _ in range(40):
                producer.delayed(self.now_ms, *(f"x{hour}" for _ in range(60)), size=900)
                self.run(100)
            self.run(HOUR_MS, step_ms=60_000)
            self.look_after_logs()


class Producer(Client):
    """A producer's connection to a delay server."""

    def delayed(self, due_ms, *ids, subject="s", key=None, size=0):
        messages = [delayed(subject, id, due_ms, key=key, size=size) for id in ids]
        return self.produce_raw(messages, subject=subject)

    def keyed(self, due_ms, keys):
        """Send messages, id -> order key or None."""
        messages = [delayed("s", id, due_ms) for id in keys]
        labels = encode_labels([label_of((), key) for key in keys.values()])
        return self.produce_raw(messages, after=labels, flags=FLAG_LABELLED | FLAG_ORDERED)

    def cancel(self, *ids, subject="s", keys=(), due_ms=0):
        return self.send(Command.CANCEL, commands.encode_cancel(Cancel(subject, list(ids), list(keys), due_ms)))

    def fates(self, opaque):
        answer = commands.decode_cancelled(self.body(opaque))
        return [*map(str, answer.ids), *map(str, answer.keys)]

    def cancelled(self, *ids, **terms):
        """Cancel, settle, and return the fates."""
        opaque = self.cancel(*ids, **terms)
        self.settle()
        return self.fates(opaque)

    def rescheduled(self, id, due_ms, **terms):
        """Reschedule, settle, and return the fate."""
        opaque = self.reschedule(id, due_ms, **terms)
        self.settle()
        return self.fate(opaque)

    def reschedule(self, id, due_ms, *, subject="s", key=""):
        return self.send(Command.RESCHEDULE, commands.encode_reschedule(Reschedule(subject, id, key, due_ms)))

    def recur(self, action="put", name="daily", *, cron="0 8 * * *", timezone="UTC", subject="s", owner="o", **content):
        message = encode_message(Message(subject, id="any", **content), 0)
        recur = Recur(RecurAction(action), subject, name, owner, cron, timezone, message)
        return self.send(Command.RECUR, commands.encode_recur(recur))

    def schedules(self, opaque):
        return commands.decode_recurring(self.body(opaque))

    def fate(self, opaque):
        return str(commands.decode_rescheduled(self.body(opaque)))


def a_group(*groups, slow=False, **changes):
    """Return a delay group that accepts messages, and a producer; with `slow`, tests give the brokers' answers."""
    copies = Copies.made(*groups, **changes)
    if slow:
        copies.a.senders = copies.b.senders = SlowSenders(*groups)
    copies.start()
    copies.run(100)
    return copies, copies.producer()
