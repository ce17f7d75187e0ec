"""World of one seed: an application, the drains of its outbox, and broker groups, with a real database.

The plan of a drain and its SQL are the product's. The world models the rest: broker groups, a network that delays and
loses, databases that fail before or after a commit, and drains that stop between a decision and its work.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import Connection, event, text
from sqlalchemy.exc import OperationalError

from qmq.client.batch import Answer, Stored, Unknown
from qmq.message import Message
from qmq.outbox import claims
from qmq.outbox.drain_plan import RELAY_MS, Attempt, DrainPlan, Limits
from qmq.outbox.row import encode_row
from qmq.outbox.schema import create_statements
from qmq.watchdog.database import Outbox, open_source
from tests.simulation.cores.world import outcome_of
from tests.simulation.events import Events, Violation
from tests.simulation.outbox.brokers import REFUSED, BrokerGroup, Routes
from tests.simulation.outbox.nemesis import FAULTS, OutboxNemesis
from tests.simulation.outcome import Outcome, failure_of
from tests.simulation.shells.stand_ins import SINCE_1970_S, give_virtual_time
from tests.simulation.steering import UNSTEERED, Steering
from tests.support.databases import source_of

SUBJECTS = "order.paid", "ticket.issued", "seat.moved"
STEPS = 250
CRASHES = "in the transaction", "before the send", "before the delete"
AT_ONCE = {"release_ms": 0, "postpone_ms": 0, "postpone_ms_max": 0, "rest_ms": 1, "repeat_ms": 1, "repeat_ms_max": 5}
"""Limits of a drain that hardly waits."""
MUST_OCCUR = (
    *FAULTS,
    *(f"crash {moment}" for moment in CRASHES),
    "claims adopted",
    *(f"group {state}" for state in ("down", "moved", "readonly")),
    "request lost",
    "answer lost",
    "request late",
    "commit refused",
    "commit unanswered",
)


class Drain:
    """Watchdog of one term, or relay of a producer."""

    def __init__(self, term: int, world: World) -> None:
        rng = world.events.rng
        pages = {"page_rows": rng.choice((2, 5, 20)), "claims_max": rng.choice((1, 3, 6))}
        limits = Limits(**AT_ONCE, **pages, errors_max=10_000)
        self.plan = DrainPlan(term, limits, Routes(world.groups), lambda: rng.getrandbits(52))
        self._world = world
        self._decided: claims.Work | None = None
        """Work that is decided and not done."""

    def step(self) -> None:
        world, plan = self._world, self.plan
        world.network += [(self, attempt) for attempt in plan.attempts(world.now_ms)]
        if self._decided is None:
            self._decided = plan.next_work(world.now_ms)
            if self._decided is None or world.events.chance(world.pauses):
                return
        work, self._decided = self._decided, None
        try:
            result = world.do(work)
        except OperationalError:
            plan.failed(work, world.now_ms)
        else:
            self._done(work, result)

    def _done(self, work: claims.Work, result: Any) -> None:
        plan, now_ms = self.plan, self._world.now_ms
        match work:
            case claims.ReadPage():
                plan.page(result._replace(clock=None), now_ms)  # the world's time is not the database's
            case claims.ClaimRows():
                plan.claimed(result, now_ms)
            case claims.SettleClaims():
                plan.settled(work, now_ms)
            case claims.ReadClaims():
                plan.known(result)
            case claims.AdoptClaims():
                plan.adopted(work, result, now_ms)
                if result and claims.is_relay(claims.ClaimName.parse(work.old).term):
                    self._world.events.count("claims adopted")


class World:
    """World of one seed. Each has its own tables, so seeds may share a database.

    Args:
        url: SQLAlchemy URL of the database.
    """

    def __init__(self, seed: int, url: str, steering: Steering) -> None:
        self.events = Events(seed)
        rng = self.events.rng
        source = source_of(url, table=f"outbox_{seed}", age_ms=0)
        self.table, self._business = source.table, f"business_{seed}"
        if source.kind == "sqlite":
            Path(source.place[2]).touch()
        self.engine = open_source(source)
        if source.kind == "sqlite":
            event.listen(self.engine, "connect", self._prepare_sqlite)
        self._outbox = Outbox(self.engine, source)
        with self.engine.begin() as connection:
            for table in (self.table, self._business):
                connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
            for statement in create_statements(self.engine.dialect.name, self.table):
                connection.execute(text(statement))
            connection.execute(text(f"CREATE TABLE {self._business} (id VARCHAR(50) PRIMARY KEY)"))
        self.groups = {name: BrokerGroup(name) for name in ("g1", "g2")}
        self.network: list[tuple[Drain | None, Attempt]] = []
        """Requests under way, with the drain that waits for an answer."""
        self.watchdogs: list[Drain] = []
        self.relays: list[Drain] = []
        self._claimed_ms: dict[tuple[int, int], int] = {}
        """(producer, number) of a claim -> time when it was written."""
        self._sent: set[str] = set()
        """Messages stored by the application's own send."""
        self.made = 0
        self._term = 0
        self._has_watchdogs = rng.random() < 0.7  # otherwise only producers drain the outbox
        self._loses, self._fails, self.pauses = (rng.choice((0, 0.1, 0.4)) for _ in range(3))
        self._nemesis = OutboxNemesis(self, steering)

    def _prepare_sqlite(self, connection: Any, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")  # without power cuts, ten times as many seeds run in the time
        give_virtual_time(connection, lambda: SINCE_1970_S + self.now_ms / 1000)

    @property
    def now_ms(self) -> int:
        return self.events.now_ms

    def pass_ms(self, ms: int) -> None:
        self.events.now_us += ms * 1000

    def run(self) -> None:
        """Run random moves, end all faults, and check."""
        moves = [self._trade] * 4 + [self._drain] * 12 + [self._nemesis.strike] * 7 + [self._wait] * 2
        moves += [self._deliver] * self.events.rng.choice((3, 8))
        self.pass_ms(1000)
        if self._has_watchdogs:
            self.elect()
        self.start_relay()
        for _ in range(STEPS):
            self.events.rng.choice(moves)()
            self.events.steps += 1
            self.pass_ms(self.events.rng.choice((0, 0, 1, 3)))
        self._recover()
        self._check()

    def _wait(self) -> None:
        self.pass_ms(self.events.rng.choice((5, 2_000, RELAY_MS)))

    # Drains.

    def elect(self) -> Drain:
        self._term += 1
        self.watchdogs.append(Drain(self._term, self))
        return self.watchdogs[-1]

    def start_relay(self) -> Drain:
        self.relays.append(Drain(claims.RELAY_TERM + self.events.rng.getrandbits(20), self))
        return self.relays[-1]

    def _drain(self) -> None:
        self.events.rng.choice(self.watchdogs + self.relays).step()

    def do(self, work: claims.Work) -> Any:
        """Do a drain's work; the connection may break before or after the commit."""
        fate = self.events.rng.random()
        if fate < self._fails / 2:
            self.events.count("commit refused")
            raise OperationalError("the connection broke before the commit", {}, Exception())
        result = self._outbox.do(work)
        self.events.note(f"claims {work.claims}" if isinstance(work, claims.ClaimRows) else str(work))
        if isinstance(work, claims.ClaimRows):
            self._claimed_ms |= {claims.ClaimName.parse(claim)[:2]: self.now_ms for claim in work.claims}
        elif isinstance(work, claims.ReadClaims):  # the world's time is not the database's
            ages = [self.now_ms - self._claimed_ms[claims.ClaimName.parse(known.claim)[:2]] for known in result]
            result = [known._replace(age_ms=age_ms) for known, age_ms in zip(result, ages, strict=True)]
        if fate < self._fails:
            self.events.count("commit unanswered")
            raise OperationalError("the connection broke after the commit", {}, Exception())
        return result

    def _deliver(self) -> None:
        """Let a request arrive; it or its answer may be lost, and its drain may be gone."""
        if not self.network:
            return
        rng = self.events.rng
        drain, attempt = self.network.pop(rng.randrange(len(self.network)))
        fate = rng.random()
        if fate < self._loses / 2:
            answer: Answer = Unknown("the request was lost")
            self.events.count("request lost")
        else:
            answer = self.groups[attempt.group].produce(attempt.batch)
            self.events.note(f"{attempt.claim.name}: {answer}")
            if fate < self._loses:
                answer = Unknown("the answer was lost")
                self.events.count("answer lost")
        if isinstance(answer, Unknown) and rng.random() < 0.3:  # the link was given up; the request arrives later
            self.network.append((None, attempt))
            self.events.count("request late")
        if drain in self.watchdogs + self.relays:
            drain.plan.answered(attempt.claim, answer, self.now_ms)

    # The application.

    def _trade(self) -> None:
        """Run a transaction of the application, up to its crash."""
        rng = self.events.rng
        crash = rng.choice(("none", "none", *CRASHES))
        self.events.count(f"crash {crash}")
        rows = dict(self._new_row(rng) for _ in range(rng.choice((1, 1, 3, 8))))
        with self.engine.connect() as connection, connection.begin() as transaction:
            for id, row in rows.items():
                connection.execute(text(f"INSERT INTO {self._business} (id) VALUES (:id)"), {"id": id})
                self.insert(connection, row)
            if crash == "in the transaction":
                transaction.rollback()
                return
        if crash != "before the send" and rng.random() < 0.4:
            self._send(rows, deletes=crash == "none")

    def _new_row(self, rng: Random) -> tuple[str, str]:
        self.made += 1
        id = f"{REFUSED if rng.random() < 0.03 else 'm-'}{self.made}"
        key = rng.choice((None, None, "k1", "k2"))
        return id, encode_row(Message(rng.choice(SUBJECTS), {"n": self.made}, id=id, order_key=key), 1_700_000_000_000)

    def insert(self, connection: Connection, content: str) -> None:
        connection.execute(text(f"INSERT INTO {self.table} (content) VALUES (:content)"), {"content": content})

    def _send(self, rows: dict[str, str], *, deletes: bool) -> None:
        """Send as the producer does after a commit, here one message a batch."""
        rng = self.events.rng
        for number, (id, row) in enumerate(rows.items(), 1):
            group = rng.choice(list(self.groups.values()))
            name = claims.ClaimName(rng.getrandbits(60), number, 0, group.name)
            answer = group.produce(claims.batch_of(name, [claims.candidate_of(0, row, 0, 0)]))
            if isinstance(answer, Stored) and not answer.refused:
                self._sent.add(id)
                if deletes:
                    with self.engine.begin() as connection:
                        connection.execute(text(f"DELETE FROM {self.table} WHERE content = :content"), {"content": row})

    # The end.

    def _recover(self) -> None:
        """End all faults: a new leader, or the relay of a new producer, drains the rest."""
        self._loses = self._fails = self.pauses = 0.0
        for group in self.groups.values():
            group.state = "writable"
        last = self.elect() if self._has_watchdogs else self.start_relay()
        drains = self.watchdogs + self.relays  # deposed ones too, until the end
        self.pass_ms(RELAY_MS)
        for _ in range(3_000):
            for drain in drains:
                drain.step()
            while self.network:
                self._deliver()
            self.pass_ms(2)
            if not self._waiting() and not last.plan._claims:
                return
        raise Violation(f"I20: {self._waiting()} rows are not sent after all faults have ended")

    def _waiting(self) -> int:
        return int(self._read(f"SELECT COUNT(*) FROM {self.table} WHERE status = 0")[0][0])

    def _read(self, query: str) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(query)))

    def _check(self) -> None:
        """Check that each committed message is stored, by drains once, and that only unsendable rows stay, parked."""
        committed = {id for (id,) in self._read(f"SELECT id FROM {self._business}")}
        wanted = {id for id in committed if not id.startswith(REFUSED)}
        stored = Counter(self.stored())
        if wanted != stored.keys():
            raise Violation(f"I11: stored and not committed, or the reverse: {sorted(wanted ^ stored.keys())}")
        again = sorted(id for id, count in (stored - Counter(self._sent)).items() if count > 1)
        if again:
            raise Violation(f"I18: drains stored {again} more than once")
        left = self._read(f"SELECT status, reason, claim FROM {self.table}")
        if not all(status == -2 and reason and claim is None for status, reason, claim in left):
            raise Violation(f"outbox: rows are left that are not parked: {left}")
        if len(left) != (parked := len(committed - wanted) + self.events.counts["unreadable_row"]):
            raise Violation(f"outbox: {len(left)} rows are parked, not {parked}")

    def stored(self) -> list[str]:
        return [id for group in self.groups.values() for id in group.stored]


def simulate(seed: int, *, steering: Steering = UNSTEERED, url: str = "") -> Outcome:
    """Run one seed to its end; a failure is in the outcome.

    Args:
        url: of a database; "" for SQLite in a temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix="qmq-outbox-") as folder:
        world = World(seed, url or f"sqlite:///{folder}/application.db", steering)
        try:
            failure = failure_of(world.run)
        finally:
            world.engine.dispose()
    return outcome_of(seed, world.events, world.made, len(world.stored()), failure)
