"""Shell. World of one schedule: a real database, brokers in memory, an application, watchdogs and relays that crash.

Cores and SQL are the product's. The world models the rest: brokers that store a batch once (the last 64 numbers of a
producer), a network that delays and loses, databases that fail before or after a commit, and leaders that stop between
a decision and its work, while another one leads.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from qmq.client.batch import NotStored, Stored, Unknown
from qmq.client.routes import group_of_key
from qmq.codec import decode_envelope, labels_bytes, split_batch
from qmq.errors import BrokerReadOnly, NotMaster
from qmq.message import Message
from qmq.outbox.claims import (
    RELAY_TERM,
    AdoptClaims,
    ClaimName,
    ClaimRows,
    ReadClaims,
    ReadPage,
    SettleClaims,
    batch_of,
    candidate_of,
    is_relay,
)
from qmq.outbox.drain_plan import RELAY_MS, DrainPlan, Limits
from qmq.outbox.row import encode_row
from qmq.outbox.schema import create_statements
from qmq.watchdog.database import Outbox, open_source
from qmq.watchdog.settings import Source
from tests.simulation.outcome import Outcome, failure_of
from tests.simulation.steering import UNSTEERED

TABLE = "qmq_msg_queue"
SUBJECTS = ("order.paid", "ticket.issued", "seat.moved")
REFUSED = "refused-"
"""Prefix of ids that brokers refuse."""
WINDOW = 64
MUST_OCCUR = (
    "crash in the transaction",
    "crash before the send",
    "crash before the delete",
    "poison",
    "leader deposed",
    "leader killed",
    "relay killed",
    "claims adopted",
    "group down",
    "group moved",
    "group readonly",
    "request lost",
    "answer lost",
    "request late",
    "commit refused",
    "commit unanswered",
)


@dataclass
class Group:
    """Broker group: its log, and the batches that it remembers."""

    name: str
    log: list = field(default_factory=list)
    windows: dict = field(default_factory=lambda: defaultdict(dict))
    state: str = "writable"

    def produce(self, batch):
        """Store a batch and answer as a broker does."""
        if self.state == "down":
            return Unknown("the group is down")
        body = b"".join(bytes(block) for block in batch.blocks)
        if batch.flags:
            body = body[: len(body) - labels_bytes(batch.count)]
        ids = [decode_envelope(bytes(message)).id for message in split_batch(body, batch.count)]
        refused = [(at, "no broker takes it") for at, id in enumerate(ids) if id.startswith(REFUSED)]
        window = self.windows[batch.producer]
        if batch.number in window:
            return Stored(*window[batch.number], refused)
        if window and batch.number + WINDOW <= max(window):
            return Unknown("too old to tell")
        if self.state == "readonly":
            return NotStored(BrokerReadOnly("no slave"))
        if self.state == "moved":
            return NotStored(NotMaster("another one is"))
        good = [id for id in ids if not id.startswith(REFUSED)]
        if good:
            window[batch.number] = len(self.log), len(good)
            if len(window) > WINDOW:
                del window[min(window)]
        self.log += [(batch.subject, id) for id in good]
        return Stored(len(self.log) - len(good), len(good), refused)


class View:
    """Groups as a watchdog sees them, maybe outdated."""

    def __init__(self, groups):
        self._groups = groups

    def watch(self, subject):
        pass

    def groups(self, subject):
        return [name for name, group in self._groups.items() if group.state == "writable"]

    def home(self, subject, label):
        return group_of_key(label >> 32, sorted(self._groups))

    def is_usable(self, name):
        return self._groups[name].state in ("writable", "readonly")

    def is_any_usable(self):
        return any(map(self.is_usable, self._groups))

    def room(self, name):
        return 100_000

    def in_flight(self, name):
        return 0

    def why_not(self, subject):
        return "no group is usable"


class Watchdog:
    """Leader of one term, or relay of a producer. `hand`: work that is decided and not done."""

    def __init__(self, term, world):
        self.term = term
        self.world = world
        limits = Limits(
            page_rows=world.rng.choice([2, 5, 20]),
            claims_max=world.rng.choice([1, 3, 6]),
            release_ms=0,
            postpone_ms=0,
            postpone_ms_max=0,
            rest_ms=1,
            repeat_ms=1,
            repeat_ms_max=5,
            errors_max=10_000,
        )
        self.core = DrainPlan(term, limits, View(world.groups), lambda: world.rng.getrandbits(52))
        self.hand = None

    def step(self):
        world, core = self.world, self.core
        for attempt in core.attempts(world.now_ms):
            world.network.append((self, attempt))
        if self.hand is None:
            self.hand = core.next_work(world.now_ms)
            if self.hand is None or world.rng.random() < world.pauses:
                return
        work, self.hand = self.hand, None
        try:
            result = world.database(work)
        except OperationalError:
            core.failed(work, world.now_ms)
            return
        match work:
            case ReadPage():
                core.page(result._replace(clock=None), world.now_ms)  # the world's time is not the database's
            case ClaimRows():
                core.claimed(result, world.now_ms)
            case SettleClaims():
                core.settled(work, world.now_ms)
            case ReadClaims():
                core.known(result)
            case AdoptClaims():
                core.adopted(work, result, world.now_ms)
                world.counts["claims adopted"] += is_relay(ClaimName.parse(work.old).term) and bool(result)


class World:
    """World of one schedule: random moves, then the end of all faults, then `check`."""

    def __init__(self, seed, source):
        self.seed = seed
        self.rng = random.Random(seed)
        if source.kind == "sqlite":
            Path(source.place[2]).touch()
        self.engine = open_source(source)
        if self.engine.dialect.name == "sqlite":  # without power cuts, ten times as many schedules run in the time
            event.listen(self.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
        self.outbox = Outbox(self.engine, source)
        with self.engine.begin() as connection:
            for statement in create_statements(self.engine.dialect.name, TABLE):
                connection.execute(text(statement))
            connection.execute(text("CREATE TABLE business (id VARCHAR(50) PRIMARY KEY)"))
        self.groups = {name: Group(name) for name in ("g1", "g2")}
        self.now_ms = 1_000
        self.term = 0
        self.made = 0
        self.network = []
        self.watchdogs = []
        self.relays = []
        self.has_watchdogs = self.rng.random() < 0.7
        """Whether there are watchdogs; otherwise only producers drain the outbox."""
        self.claimed_ms = {}
        self.sent_by_application = set()
        self.poison = set()
        self.counts = Counter()
        self.loses, self.fails, self.pauses = (self.rng.choice([0, 0.1, 0.4]) for _ in range(3))

    def close(self):
        self.engine.dispose()

    def run(self, steps=250):
        moves = [self.business] * 4 + [self.act] * 12 + [self.deliver] * 8
        moves += [
            self.elect,
            self.kill,
            self.start,
            self.stop,
            self.group_changes,
            self.group_changes,
            self.spoil,
            self.pass_time,
        ]
        self.elect()
        self.start()
        for _ in range(steps):
            self.rng.choice(moves)()
            self.now_ms += self.rng.choice([0, 0, 1, 3])

    def business(self):
        """Run a transaction of the application, up to its crash."""
        crash = self.rng.choice(["none", "none", "in the transaction", "before the send", "before the delete"])
        self.counts[f"crash {crash}"] += 1
        names, rows = [], []
        for _ in range(self.rng.choice([1, 1, 3, 8])):
            self.made += 1
            kind = REFUSED if self.rng.random() < 0.03 else "m-"
            key = self.rng.choice([None, None, "k1", "k2"])
            message = Message(self.rng.choice(SUBJECTS), {"n": self.made}, id=f"{kind}{self.made}", order_key=key)
            names.append(message.id)
            rows.append(encode_row(message, 1_700_000_000_000))
        with self.engine.connect() as connection, connection.begin() as transaction:
            for name, row in zip(names, rows):
                connection.execute(text("INSERT INTO business (id) VALUES (:id)"), {"id": name})
                self._insert(connection, row)
            if crash == "in the transaction":
                transaction.rollback()
                return
        if crash == "before the send" or self.rng.random() < 0.6:
            return
        self._send(names, rows, deletes=crash == "none")

    def _insert(self, connection, content):
        connection.execute(
            text(
                f"INSERT INTO {TABLE} (content, status, error, create_time, update_time)"
                " VALUES (:content, 0, 0, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)"
            ),
            {"content": content},
        )

    def _send(self, names, rows, *, deletes):
        """Send as the producer does after a commit, here one message a batch."""
        for number, (name, row) in enumerate(zip(names, rows), 1):
            candidate = candidate_of(0, row, 0, 0)
            group = self.rng.choice(list(self.groups.values()))
            self.sent_by_application.add(name)
            answer = group.produce(batch_of(ClaimName(self.rng.getrandbits(60), number, 0, group.name), [candidate]))
            if isinstance(answer, Stored) and not answer.refused and deletes:
                with self.engine.begin() as connection:
                    connection.execute(text(f"DELETE FROM {TABLE} WHERE content = :content"), {"content": row})

    def spoil(self):
        """Add an unreadable row."""
        if self.rng.random() < 0.3:
            self.made += 1
            with self.engine.begin() as connection:
                self._insert(connection, f'{{"poison": {self.made}')
                self.poison.add(self.made)
                self.counts["poison"] += 1

    def elect(self):
        """Elect another watchdog; earlier leaders go on until they learn of it."""
        if self.has_watchdogs and (self.rng.random() < 0.3 or not self.watchdogs):
            self.counts["leader deposed"] += bool(self.watchdogs)
            self.term += 1
            self.watchdogs.append(Watchdog(self.term, self))

    def kill(self):
        if len(self.watchdogs) > 1 and self.rng.random() < 0.5:
            self.counts["leader killed"] += 1
            self.watchdogs.remove(self.rng.choice(self.watchdogs))

    def start(self):
        """Start a process of the application, whose producer relays rows of others."""
        if len(self.relays) < 3:
            self.relays.append(self.new_relay())

    def stop(self):
        if len(self.relays) > 1 and self.rng.random() < 0.7:
            self.counts["relay killed"] += 1
            self.relays.remove(self.rng.choice(self.relays))

    def new_relay(self):
        return Watchdog(RELAY_TERM + self.rng.getrandbits(20), self)

    @property
    def drains(self):
        return self.watchdogs + self.relays

    def act(self):
        self.rng.choice(self.drains).step()

    def deliver(self):
        """Let a request arrive; its answer may be lost, and its sender may be gone."""
        if self.network:
            watchdog, attempt = self.network.pop(self.rng.randrange(len(self.network)))
            lost = self.rng.random()
            answer = Unknown("the request was lost")
            if lost >= self.loses / 2:
                answer = self.groups[attempt.group].produce(attempt.batch)
                if lost < self.loses:
                    answer = Unknown("the answer was lost")
                    self.counts["answer lost"] += 1
            else:
                self.counts["request lost"] += 1
            if (
                isinstance(answer, Unknown) and self.rng.random() < 0.3
            ):  # the link was given up, and the request arrives all the same
                self.network.append((None, attempt))
                self.counts["request late"] += 1
            if watchdog in self.drains:
                watchdog.core.answered(attempt.claim, answer, self.now_ms)

    def group_changes(self):
        group = self.rng.choice(list(self.groups.values()))
        group.state = self.rng.choice(["writable", "writable", "readonly", "down", "moved"])
        self.counts[f"group {group.state}"] += 1

    def pass_time(self):
        self.now_ms += self.rng.choice([5, 50, 2_000, RELAY_MS])

    def database(self, work):
        """Do a watchdog's work; the connection may break before or after the commit."""
        fate = self.rng.random()
        if fate < self.fails / 2:
            self.counts["commit refused"] += 1
            raise OperationalError("the connection broke before the commit", {}, Exception())
        result = self.outbox.do(work)
        if isinstance(work, ClaimRows):
            self.claimed_ms |= dict.fromkeys((ClaimName.parse(claim)[:2] for claim in work.claims), self.now_ms)
        elif isinstance(work, ReadClaims):  # the world's time is not the database's
            ages = [self.now_ms - self.claimed_ms[ClaimName.parse(known.claim)[:2]] for known in result]
            result = [known._replace(age_ms=age_ms) for known, age_ms in zip(result, ages)]
        if fate < self.fails:
            self.counts["commit unanswered"] += 1
            raise OperationalError("the connection broke after the commit", {}, Exception())
        return result

    def recover(self):
        """End all faults: one new leader, or the relay of a new producer, drains the rest."""
        self.loses = self.fails = self.pauses = 0.0
        for group in self.groups.values():
            group.state = "writable"
        self.term += 1
        last = Watchdog(self.term, self) if self.has_watchdogs else self.new_relay()
        (self.watchdogs if self.has_watchdogs else self.relays).append(last)
        self.now_ms += RELAY_MS
        for _ in range(3_000):
            for drain in self.drains:  # deposed ones too, until the end
                drain.step()
            while self.network:
                self.deliver()
            self.now_ms += 2
            if not self.waiting() and not last.core._claims:
                return
        raise AssertionError(f"seed {self.seed}: {self.waiting()} rows are not sent though all is well")

    def waiting(self):
        with self.engine.connect() as connection:
            return connection.execute(text(f"SELECT COUNT(*) FROM {TABLE} WHERE status = 0")).scalar_one()

    def check(self):
        """Check that each business row has one stored message, and that other rows are parked with a reason."""
        with self.engine.connect() as connection:
            business = {row[0] for row in connection.execute(text("SELECT id FROM business"))}
            left = connection.execute(text(f"SELECT content, status, reason, claim FROM {TABLE}")).all()
        stored = Counter(id for group in self.groups.values() for _, id in group.log)
        wanted = {id for id in business if not id.startswith(REFUSED)}
        assert set(stored) == wanted, f"seed {self.seed}: {wanted ^ set(stored)}"
        again = {id for id, count in stored.items() if count > 1} - self.sent_by_application
        assert not again, f"seed {self.seed}: stored twice without cause: {again}"
        assert all(status == -2 and reason and claim is None for _, status, reason, claim in left), f"seed {self.seed}"
        parked = len(business - wanted) + len(self.poison)
        assert len(left) == parked, f"seed {self.seed}: {len(left)} rows are parked, not {parked}"


def play(seed, source, steps=250):
    """Run one schedule on an empty database; return its world."""
    world = World(seed, source)
    try:
        world.run(steps)
        world.recover()
        world.check()
    finally:
        world.close()
    return world


def simulate(seed, *, steering=UNSTEERED):
    """Run one seed on SQLite to its end; a failure is in the outcome. Steering has no effect."""
    worlds = []
    with tempfile.TemporaryDirectory(prefix="qmq-outbox-") as folder:
        source = Source(f"sqlite://host:1/{folder}/application.db", age_ms=0)
        failure = failure_of(lambda: worlds.append(play(seed, source)))
    counts = worlds[0].counts if worlds else Counter()
    stored = sum(len(group.log) for world in worlds for group in world.groups.values())
    made = sum(world.made for world in worlds)
    return Outcome(seed, 0, sum(counts.values()), made, stored, counts, failure=failure)
