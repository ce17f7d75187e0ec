"""World of one seed: a shipped cluster and its applications in one process; war, then peace, then the final checks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import io
import shutil
import sqlite3
import sys
import tempfile
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from qmq import Message
from qmq.client.batch import BATCH_LIFE
from qmq.client.session_life import SESSION
from qmq.log import RealDisk
from qmq.metaserver.storage.engine import open_database
from tests.simulation.events import KEPT_EVENTS, Met, Violation
from tests.simulation.loop import current
from tests.simulation.outcome import Outcome, failure_of
from tests.simulation.shells.applications import GROUP, SUBJECTS, ConsumerProgram, ProducerProgram, Shop, ShopProgram
from tests.simulation.shells.machines import (
    SERVE_PORT,
    SYNC_PORT,
    Application,
    BrokerMachine,
    CopyMachine,
    DelayMachine,
    Machine,
    MetaserverMachine,
    WatchdogMachine,
)
from tests.simulation.shells.nemesis import ShellNemesis
from tests.simulation.shells.network import Network, NetworkLoop
from tests.simulation.shells.operator import OPERATOR, Operator
from tests.simulation.shells.oracle import Oracle
from tests.simulation.shells.stand_ins import replaced
from tests.simulation.states import STATES as STATES_OF_COPIES
from tests.simulation.states import states_of_node, states_to_meet
from tests.simulation.steering import UNSTEERED, Steering

PEACE_S = 90.0
CATCH_UP_S = 180.0
"""Additional time for a delay group whose due times fell behind, by a year if two of three clocks did."""
SLICE_S = 0.5
STATES = [*STATES_OF_COPIES, *states_to_meet(SESSION, BATCH_LIFE)]
"""States of copies, and of clients' sessions and batches."""


@dataclass(frozen=True)
class Swarm:
    """Settings of one seed's world."""

    copies: int
    min_copies: int
    metaservers: int
    fails_over: bool
    segment_bytes: int
    tail_bytes: int
    war_s: float
    strike_s: float
    sends_per_s: float
    fails: float
    keys: float
    buffer_bytes: int
    delays: bool
    """Whether there is a delay group."""
    second: bool
    """Whether there is a second broker group, of two copies."""
    watchdogs: int
    """Watchdogs of a shop with an outbox; 0: without a shop."""
    unreadable: bool
    """Whether the shop's outbox gets rows that are no messages."""
    joins: bool
    """Whether the second broker group joins each subject during the war.

    The consumer group starts at the latest message, before the first one is sent: it has to get all messages.
    """

    @staticmethod
    def draw(rng: Random, *, second: bool, watchdogs: int, unreadable: bool, joins: bool) -> Swarm:
        copies = rng.choice((2, 2, 2, 3))
        return Swarm(
            copies=copies,
            min_copies=2 if copies == 2 or rng.random() < 0.7 else 3,
            metaservers=rng.choice((1, 1, 2)),
            fails_over=rng.random() < 0.5,
            segment_bytes=rng.choice((16 << 10, 64 << 10, 1 << 20)),
            tail_bytes=rng.choice((0, 4096, 1 << 20)),
            war_s=rng.uniform(5, 40),
            strike_s=rng.choice((1.0, 4.0, 10.0)),
            sends_per_s=rng.choice((2.0, 8.0)),
            fails=rng.choice((0.0, 0.05)),
            keys=rng.choice((0.0, 0.3)),
            buffer_bytes=rng.choice((1 << 10, 1 << 16)),
            delays=rng.random() < 0.5,
            second=second,
            watchdogs=watchdogs,
            unreadable=unreadable,
            joins=joins,
        )


class World:
    """World of one seed."""

    def __init__(
        self, seed: int, folder: Path, steering: Steering, *, is_plain: bool, joins: bool | None = None
    ) -> None:
        self.loop = NetworkLoop(seed)
        self.seed = seed
        self.steering = steering
        self._folder = folder
        self.is_plain = is_plain
        self.counts: Counter[str] = Counter()
        self.met: Met = Counter()
        self.recent: deque[str] = deque(maxlen=KEPT_EVENTS)
        self.hash = 0
        self.failure = ""
        self.is_at_war = True
        self.token = ""
        second = joins or (not is_plain and Random(f"{seed} groups").random() < 0.3)
        self.swarm = Swarm.draw(
            self.loop.rng,
            second=second,
            watchdogs=Random(f"{seed} outbox").choice((0, 0, 1, 2)),
            unreadable=Random(f"{seed} unreadable").random() < 0.3,
            joins=second and Random(f"{seed} joins").random() < 0.5 if joins is None else joins,
        )
        self.network = self.loop.network = Network(self.loop, self.note)
        self.network.buffer_bytes = self.swarm.buffer_bytes
        self.is_producing = not self.swarm.joins
        self.oracle = Oracle(self)
        self.shop = Shop(folder / "shop.db")
        self.metaservers = [
            MetaserverMachine(self, f"meta{i}", f"10.0.0.{i + 1}", folder) for i in range(self.swarm.metaservers)
        ]
        brokers = [BrokerMachine(self, f"g1-{'abc'[i]}", f"10.0.1.{i + 1}") for i in range(self.swarm.copies)]
        others = [BrokerMachine(self, f"g2-{'ab'[i]}", f"10.0.5.{i + 1}") for i in range(2 * self.swarm.second)]
        self.delays = [DelayMachine(self, f"d1-{'ab'[i]}", f"10.0.4.{i + 1}") for i in range(2 * self.swarm.delays)]
        self.copies: list[CopyMachine] = [*brokers, *others, *self.delays]
        groups: dict[str, Sequence[CopyMachine]] = {"g1": brokers, "g2": others, "d1": self.delays}
        self.groups = {name: list(copies) for name, copies in groups.items() if copies}
        self.applications = [
            *(Application(self, f"p{i}", f"10.0.2.{i + 1}", ProducerProgram) for i in (0, 1)),
            *(Application(self, f"c{i}", f"10.0.3.{i + 1}", ConsumerProgram) for i in (0, 1)),
        ]
        if self.swarm.watchdogs:
            self.applications.append(Application(self, "s0", "10.0.6.1", ShopProgram))
        self.watchdogs = [WatchdogMachine(self, f"w{i}", f"10.0.7.{i + 1}") for i in range(self.swarm.watchdogs)]
        self.machines: list[Machine] = [*self.metaservers, *self.copies, *self.applications, *self.watchdogs]
        self._by_name = {machine.name: machine for machine in self.machines}
        self._messages = 0
        self._term = 0
        self._master = ""

    def machine(self, name: str) -> Machine:
        return self._by_name[name]

    def copy(self, name: str) -> CopyMachine:
        copy = self.machine(name)
        return copy

    def new_message(self, subject: str, name: str) -> Message:
        self._messages += 1
        key = self.loop.rng.choice(("red", "blue")) if self.loop.rng.random() < self.swarm.keys else None
        text = f"<{name}.{self._messages}>"
        return Message(subject, {"text": text}, id=text, order_key=key)

    def disk(self, root: Path, *, cached_bytes: int | None = None) -> RealDisk:
        """Return the disk of the calling copy."""
        process = current()
        return self.copy(process.name).disk(root, cached_bytes=cached_bytes)

    def later(self, low_s: float, high_s: float, call: Callable[[], object]) -> None:
        self.loop.at(self.loop.now_s + self.loop.rng.uniform(low_s, high_s), call)

    def note(self, what: str) -> None:
        self.recent.append(f"{self.loop.now_s - 1000:10.4f}  {what}")
        self.hash = crc32(f"{self.loop.now_s:.6f} {what}".encode(), self.hash)

    def fail(self, what: str) -> None:
        if not self.failure:
            self.failure = what
            self.note(f"FAILED {what}")

    def states(self) -> list[str]:
        nodes = [copy.node for copy in self.copies if copy.is_running and copy.node is not None]
        lives = [life for process, life in self.loop.lives if not process.is_dead]
        return [
            *(state for node in nodes for state in states_of_node(node)),
            *(f"{life.table.name}.{life.state.name}" for life in lives),
        ]

    def is_held_by_other(self, copy: CopyMachine) -> bool:
        """Whether another copy has a whole log with everything that this one has."""
        end = copy.message_log.flushed_end if copy.message_log is not None else 0
        (copies,) = (copies for copies in self.groups.values() if copy in copies)
        others = [other for other in copies if other is not copy and other.is_whole and not other.is_off]
        return any(other.message_log is not None and other.message_log.flushed_end >= end for other in others)

    # The run.

    async def run(self) -> None:
        await self._set_up()
        await self._lasts(2.0)
        if self.swarm.joins:
            if not await self._lasts(PEACE_S, self._has_consumer_groups):
                raise Violation(f"I20: no consumer group begins within {PEACE_S:.0f} s")
            self.is_producing = True
            self.later(0.0, self.swarm.war_s / 2, self._join)
        await self._war()
        self._make_peace()
        peace_s = PEACE_S + (CATCH_UP_S if self.delays and self.counts["clock"] else 0.0)
        if not await self._lasts(peace_s, self._is_well):
            raise Violation(f"I20: not working {peace_s:.0f} s after the last fault: {self.describe()}")
        self._check_end()

    async def _war(self) -> None:
        nemesis = ShellNemesis(self, self.seed)
        await self._lasts(self.swarm.war_s)
        nemesis.stop()

    async def _lasts(self, seconds: float, done: Callable[[], bool] | None = None) -> bool:
        end_s = self.loop.now_s + seconds
        while self.loop.now_s < end_s:
            await asyncio.sleep(SLICE_S)
            self.oracle.check_always()
            self._note_roles()
            if self.loop.errors:
                self.fail(f"an unhandled error: {self.loop.errors[0]}")
            if self.failure:
                raise Violation(self.failure)
            if done is not None and done():
                return True
        return False

    def _note_roles(self) -> None:
        for machine in self.metaservers:
            if machine.metaserver is not None and (group := machine.metaserver.registry.directory.groups.get("g1")):
                master = group.master.hostname if group.master is not None else ""
                if group.term > self._term:
                    self.counts["role change"] += bool(self._master) and master != self._master
                    self._term = group.term
                    self._master = master

    async def _set_up(self) -> None:
        for metaserver in self.metaservers:
            metaserver.start()
            await metaserver.is_serving.wait()
        for group, copies in self.groups.items():
            for role, copy in zip((5, 6) if group == "d1" else (0, 1, 1), copies, strict=False):
                place = {"hostname": copy.name, "ip": copy.ip, "servePort": SERVE_PORT, "syncPort": SYNC_PORT}
                await self._act("AddBroker", brokerGroup=group, role=role, **place)
        if self.swarm.min_copies > 2:
            await self._act("SetCopies", brokerGroup="g1", minCopies=self.swarm.min_copies)
        if self.watchdogs:
            self.shop.create()
            place = {"type": "sqlite", "host": "shop", "port": 1, "database": self.shop.path}
            await self._act("AddDb", **place, username="u", password="p", age=self.loop.rng.choice((0, 3)))
        answer = await self._act("AddToken", name="applications", role="client")
        self.token = answer["token"]
        for machine in self.machines:
            machine.start()

    async def _act(self, action: str, **words: object) -> Any:
        """Let the first metaserver run an action."""
        machine = self.metaservers[0]
        given = {name: str(word) for name, word in words.items()}
        answer = await machine.process.start(machine.metaserver._actions.run(action, given, OPERATOR))
        if answer.status.name != "DONE":
            raise RuntimeError(f"{action}: {answer}")
        return answer.data

    def _has_consumer_groups(self) -> bool:
        logs = [copy.message_log for copy in self.copies if copy.message_log is not None]
        return all(any((subject, GROUP) in log.state.groups for log in logs) for subject in SUBJECTS)

    def _join(self) -> None:
        """Add both broker groups to each subject while consumers are down; repeatedly, as it may fail or be undone."""
        for machine in self.applications:
            if self.is_at_war and machine.name.startswith("c") and machine.process is not None:
                machine.process.kill()
        for subject in SUBJECTS:
            for group in ("g1", "g2"):
                self.operate("AddSubjectBrokerGroup", subject=subject, brokerGroup=group)
        self.later(5.0, 10.0, self._join)

    def operate(self, action: str, **words: object) -> None:
        """Order an action at some metaserver; it may be refused."""
        machine = self.loop.rng.choice(self.metaservers)
        if machine.is_running and machine.is_serving.is_set() and machine.process and machine.metaserver:
            given = {name: str(word) for name, word in words.items()}

            async def act() -> None:
                answer = await machine.metaserver._actions.run(action, given, OPERATOR)
                self.note(f"{action}: {answer.status.name}")
                self.counts[f"{action} {answer.status.name}"] += 1

            machine.process.start(act())

    def _make_peace(self) -> None:
        self.note("peace")
        Operator(self)
        self.is_at_war = self.is_producing = False
        self._heal()

    def _heal(self) -> None:
        """Heal everything again and again, as late faults last for a while."""
        self.network.heal()
        self.database_is_well()
        for copy in self.copies:
            copy.system.heal()
            copy.disk_is_well()
        for machine in self.machines:
            machine.step_clock(-machine.clock_s)
        self.later(1.0, 1.0, self._heal)

    def database_is_well(self) -> None:
        self.loop.database = ""

    @property
    def _database(self) -> Path:
        return self._folder / "metaserver.db"

    @property
    def _backup(self) -> Path:
        return self._folder / "backup.db"

    def back_up_database(self) -> None:
        _copy_database(self._database, self._backup)

    def restore_database(self) -> None:
        for metaserver in self.metaservers:
            if metaserver.process is not None:
                metaserver.process.kill()
        _copy_database(self._backup, self._database)

    def _is_well(self) -> bool:
        if not all(machine.is_running for machine in self.machines) or self.oracle.forgotten or self.oracle.missing:
            return False
        if self.shop.rows():
            return False
        return all(map(_is_equal_and_writable, self.groups.values()))

    def _check_end(self) -> None:
        for group, copies in self.groups.items():
            if group != "d1":
                self.oracle.check_logs(group, {copy.name: copy.message_log for copy in copies if copy.message_log})
        self.oracle.check_whole()
        self.oracle.check_parked(self.shop.parked())

    def describe(self) -> str:
        oracle = self.oracle
        return "; ".join(
            [
                *(copy.describe() for copy in self.copies),
                f"stopped: {[machine.name for machine in self.machines if not machine.is_running]}",
                f"without outcome: {sorted(oracle.forgotten)[:5]}",
                f"not consumed: {sorted(oracle.missing)[:5]} of {len(oracle.acked)}",
                f"rows of the outbox: {self.shop.rows()}",
            ]
        )


def _is_equal_and_writable(copies: list[CopyMachine]) -> bool:
    logs = [copy.message_log for copy in copies]
    ends = {(log.end, log.chain, log.damage is None, log.is_idle) for log in logs if log is not None}
    return len(ends) == 1 and any(copy.is_writable for copy in copies)


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database while other connections are open."""
    with (
        contextlib.closing(sqlite3.connect(source)) as read,
        contextlib.closing(sqlite3.connect(target)) as written,
    ):
        read.backup(written)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignore complaints about collected objects of killed processes."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


def simulate(
    seed: int,
    *,
    steering: Steering = UNSTEERED,
    is_plain: bool = False,
    joins: bool | None = None,
    world_of: Callable[..., World] = World,
) -> Outcome:
    """Run one seed to its end; a failure is in the outcome.

    Args:
        is_plain: one broker group, with disks and a database that lose no bytes.
        joins: as in `Swarm`; None: as the seed has it.
    """
    folder = Path(tempfile.mkdtemp(prefix="qmq-simulation-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    (folder / "metaserver.db").write_bytes(_empty_database())
    world = world_of(seed, folder, steering, is_plain=is_plain, joins=joins)
    _freeze()
    try:
        with _quiet():
            with replaced(world.loop, world.network, world.disk, seed):
                failure = failure_of(partial(world.loop.run_until_complete, world.run()))
                outcome = _outcome(seed, world, failure)
                world.loop.abandon()
            world.shop.close()
            del world
            gc.collect()
    finally:
        shutil.rmtree(folder)
    return outcome


@functools.cache
def _freeze() -> None:
    """Exclude imported modules from garbage collection after each seed."""
    gc.collect()
    gc.freeze()


@functools.cache
def _empty_database() -> bytes:
    """Return a migrated database; the migration takes longer than a war, so it runs once."""
    with tempfile.TemporaryDirectory() as folder:
        open_database(f"sqlite:///{folder}/metaserver.db").dispose()
        return Path(folder, "metaserver.db").read_bytes()


def _outcome(seed: int, world: World, failure: str) -> Outcome:
    world.counts["killed within a call"] += sum(copy.system.kills for copy in world.copies)
    return Outcome(
        seed,
        world.hash,
        world.loop.steps,
        len(world.oracle.acked),
        len(world.oracle.done),
        world.counts,
        world.met,
        failure,
        tuple(world.recent) if failure else (),
    )
