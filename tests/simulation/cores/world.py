"""World of one seed, made of cores: war, peace, and the final checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from qmq.audit.derived import check_segment
from qmq.codec import Buffer
from qmq.errors import CorruptFrame, QmqError
from qmq.log.fold import State
from qmq.log.segments import index_name, snapshot_name
from qmq.remoting.packet import Packet
from qmq.types import Role
from tests.simulation.cores.clients import Client, Consumer, Producer
from tests.simulation.cores.clones import CloneNemesis, stop_copies
from tests.simulation.cores.machine import Limits, Machine, Process
from tests.simulation.cores.many_copies import ManyCopies, ManyNemesis
from tests.simulation.cores.metaserver import Metaserver
from tests.simulation.cores.nemesis import CoreNemesis
from tests.simulation.cores.network import End, Network
from tests.simulation.cores.operator import Operator
from tests.simulation.cores.oracle import Oracle
from tests.simulation.cores.watched_log import BesideLog, WatchedLog
from tests.simulation.events import Events, Violation
from tests.simulation.outcome import Outcome, failure_of
from tests.simulation.steering import UNSTEERED, Steering, way_to

PEACE_S = 60
"""Seconds after the last fault within which the group works again (I20)."""


@dataclass(frozen=True)
class Swarm:
    """Numbers that differ between deployments, drawn from the seed."""

    limits: Limits
    delay_ms: float
    stall: float
    keepalive_ms: float
    think_ms: tuple[float, float]
    window: int
    batch_messages: int
    subjects: tuple[str, ...]
    producers: int
    consumers: int
    strike_ms: tuple[float, float]
    down_ms: tuple[float, float]
    war_ms: int
    slow_sync: float
    crash_in_recovery: float
    lonely_start_ms: int
    unsubscribe: float
    nack: float
    give_up: float
    deliveries_max: int
    tagged: bool
    keys: bool

    @classmethod
    def draw(cls, rng: Random) -> Swarm:
        think = rng.choice((5.0, 15.0, 40.0))
        strike = rng.choice((30.0, 120.0, 400.0))
        return cls(
            limits=Limits(
                segment_bytes=rng.choice((4096, 4096, 8192, 65536)),
                tail_bytes=rng.choice((0, 1024, 16384)),
                window_bytes=rng.choice((1500, 20_000)),
                message_bytes_max=rng.choice((500, 4096)),
                lease_ms=rng.choice((500, 1500, 6000)),
                slave_wait_ms=rng.choice((0, 100, 800, 3000)),
                slave_lag_bytes_max=rng.choice((3000, 100_000)),
                slave_lag_ms_max=rng.choice((30, 500, 5000)),
                catch_up_bytes_per_s=rng.choice((30_000, 1 << 20)),
                sync_ms=rng.choice((0.05, 0.5, 3.0)),
                retention_ms=rng.choice((1500, 5000, 1 << 50)),
            ),
            delay_ms=rng.choice((0.1, 0.5, 4.0)),
            stall=rng.choice((0.0, 0.0, 0.02)),
            keepalive_ms=rng.choice((300.0, 1500.0, 5000.0)),
            think_ms=(think / 2, 2 * think),
            window=rng.choice((1, 2, 4)),
            batch_messages=rng.choice((1, 3, 8)),
            subjects=("s0", "s1")[: rng.randint(1, 2)],
            producers=rng.randint(2, 4),
            consumers=rng.randint(1, 2),
            strike_ms=(strike / 3, 2 * strike),
            down_ms=(5.0, rng.choice((100.0, 800.0, 3000.0))),
            war_ms=rng.choice((2000, 4000, 7000)),
            slow_sync=rng.choice((0.0, 0.01, 0.1)),
            crash_in_recovery=rng.choice((0.0, 0.1, 0.3)),
            lonely_start_ms=rng.choice((50, 700, 3000)),
            unsubscribe=rng.choice((0.0, 0.01)),
            nack=rng.choice((0.0, 0.05, 0.3)),
            give_up=rng.choice((0.0, 0.02)),
            deliveries_max=rng.choice((0, 0, 2, 5)),
            tagged=rng.choice((False, False, True)),
            keys=rng.choice((False, False, True)),
        )

    def on_the_way(self, state: str) -> Swarm:
        """Return it with the sizes and times that lead to a state."""
        way = way_to(state)
        return replace(self, limits=replace(self.limits, **way.limits), **way.settings)


class World:
    """World of one seed.

    Args:
        moves: an operator moves consumer groups.
        fails_over: the metaserver makes the slave the master by itself, as always with more `copies`.
        clones: a copy of a data directory is started on another machine.
    """

    def __init__(
        self,
        seed: int,
        *,
        moves: bool = False,
        fails_over: bool = False,
        clones: bool = False,
        copies: int = 2,
        min_copies: int = 2,
        steering: Steering = UNSTEERED,
    ) -> None:
        self.events = Events(seed)
        self.copies = copies
        self._clones = clones
        self.steering = steering
        self._moves = moves
        self._fails_over = fails_over
        self.watch: Callable[[Process], None] | None = None
        """Called with each process after an event."""
        self.swarm = swarm = self._draw()
        self.oracle = self._make_oracle()
        self.network = Network(self.events, delay_ms=swarm.delay_ms, stall=swarm.stall, keepalive_ms=swarm.keepalive_ms)
        self.network.on_answer = self._on_answer
        self.machines = self._make_machines()
        self.stopped: list[Machine] = []
        """Machines that an operator stopped for good."""
        self.oracle.machines, self.oracle.copies, self.oracle.min_copies = self.machines, copies, min_copies
        for machine in self.machines:
            self.network.listen(machine)
        names = [machine.name for machine in self.machines]
        self.metaserver = Metaserver(self, "a", "b") if copies == 2 else ManyCopies(self, names, min_copies)
        self.metaserver.fails_over = fails_over or copies > 2
        self.producers: list[Producer] = []
        self.consumers: list[Consumer] = []
        self.clients = self._make_clients()

    def _draw(self) -> Swarm:
        swarm = Swarm.draw(self.events.rng).on_the_way(self.steering.state)
        if self._clones:  # a process without its part writes on, and the oracle notes times by offset
            swarm = replace(swarm, limits=replace(swarm.limits, retention_ms=1 << 50))
        return swarm

    def _make_oracle(self) -> Oracle:
        oracle, swarm = Oracle(self.events), self.swarm
        oracle.has_operator, oracle.deliveries_max = self._moves, swarm.deliveries_max
        oracle.is_counted = not self._moves and not swarm.unsubscribe
        # A deposed master answers acks alone until it has a newer assignment. Its acks are taken back after later
        # messages of the same key were finished.
        oracle.is_ordered = swarm.keys and not self._moves and not self._fails_over and self.copies == 2
        oracle.choosy = {"g1"} if swarm.tagged else set()
        return oracle

    def _make_machines(self) -> list[Machine]:
        return [Machine(self, name) for name in "abcde"[: self.copies]]

    def _make_clients(self) -> list[Client]:
        self.producers = [Producer(self, f"p{i}", i + 1) for i in range(self.swarm.producers)]
        self.consumers = [
            Consumer(self, f"{group}-{subject}-{i}", group, subject)
            for group in ("g0", "g1")
            for subject in self.swarm.subjects
            for i in range(self.swarm.consumers)
        ]
        return [*self.producers, *self.consumers]

    def machine(self, name: str) -> Machine:
        return next(machine for machine in (*self.machines, *self.stopped) if machine.name == name)

    def may_forget(self, name: str) -> bool:
        """Whether a strike may take the disk's bytes: another copy has a whole log with everything committed."""
        others = [machine for machine in self.machines if machine.name != name]
        return self.metaserver.may_forget(name) and any(map(self.holds_all, others))

    def holds_all(self, machine: Machine) -> bool:
        process = machine.process
        if process is None or process.log.damage is not None or machine.disk.flipped:
            return False
        return process.log.flushed_end >= self.oracle.committed.end

    def _on_answer(self, end: End, request: Packet, code: int, parts: tuple[Buffer, ...]) -> None:
        process = self.machine(end.host).process
        if process is not None and end.owner is process:
            process.on_answer(request, code, parts)

    def run(self) -> None:
        """Run war and peace. Raises Violation."""
        for machine in self.machines:
            machine.start()
        self.events.run_until(int(self.swarm.war_ms * 100))
        stoppable = self._begin_war()
        self.events.run_until(int(self.swarm.war_ms * 1000))
        for part in stoppable:
            part.stop()
        self._make_peace()
        if not self.events.run_until(self.events.now_us + PEACE_S * 1_000_000, self._is_well):
            raise Violation(f"I20: not working {PEACE_S} s after the last fault: {self.describe()}")
        self._check_end()

    def _begin_war(self) -> list[CoreNemesis | Operator]:
        nemesis = (CloneNemesis if self._clones else CoreNemesis if self.copies == 2 else ManyNemesis)(self)
        operators = [Operator(self)] if self._moves else []
        if self._fails_over or self.copies > 2:
            self.metaserver.look()
        return [nemesis, *operators]

    def _check_end(self) -> None:
        self.oracle.check_end(["g0", "g1"])
        self._check_beside()

    def _check_beside(self) -> None:
        """Check, as the audit does, that index and snapshot beside each segment follow from the log."""
        logs = {machine.name: machine.process.log for machine in self.machines if machine.process is not None}
        copies = {name: BesideLog(log) for name, log in logs.items()}
        bases = {name: list(log.bases) for name, log in logs.items()}
        for base in sorted({base for of in bases.values() for base in of}):
            for name, wrong in check_segment(copies, bases, base):
                flipped = {file for file, _ in self.machine(name).disk.flipped}
                if flipped.isdisjoint({index_name(wrong.base), snapshot_name(wrong.base)}):
                    raise Violation(f"I17: {wrong.what} beside the segment of {name} at {wrong.base}: {wrong.text}")

    def _make_peace(self) -> None:
        events = self.events
        events.note("peace")
        self.network.heal_all()
        self.metaserver.is_up = True
        self.metaserver.marks = frozenset()
        for machine in self.machines:
            machine.disk.heal()
            if machine.process is not None:
                process = machine.process
                process.guarded(lambda process=process: process.node.set_disk_full(False))
            else:
                events.between(10, 500, machine.start)
        for producer in self.producers:
            producer.is_producing = False
        for consumer in self.consumers:
            consumer.sleeps_until_ms = 0
        # Keys wait for their retries one after the other: with many retries, the backlog alone would take a minute.
        nack = min(self.swarm.nack, 0.05)
        self.swarm = replace(self.swarm, crash_in_recovery=0.0, slow_sync=0.0, nack=nack)
        events.after(1000, self._look_after)

    def _look_after(self) -> None:
        """Do the work of operators and of the nightly audit: finish a half-done swap, read both logs through."""
        self.events.after(1000, self._look_after)
        self.network.heal_all()  # faults that were still under way
        self.metaserver.look_after()
        if self._clones:
            stop_copies(self)
        if self.metaserver.master_is_refused:
            self.metaserver.replace(Role.MASTER)
        if self.metaserver.master_is_refused:  # still refused: its disk is lost, and the other copy was never in sync
            self.metaserver.replace(Role.MASTER, accept_loss=True)
        if self.metaserver.group.half_swapped:
            self.metaserver.replace(Role.SLAVE)
        for machine in self.machines:
            machine.disk.heal()
            process = machine.process
            if process is not None and process.log.damage is None and machine.disk.flipped:
                with contextlib.suppress(CorruptFrame):
                    self._read_through(process.log)
                    continue
                self.events.count("damage found by the audit")

    def _read_through(self, log: WatchedLog) -> None:
        at = log.start
        while at < log.flushed_end:
            try:
                at = log.stored.read(at, log.flushed_end, 1 << 20).end
            except CorruptFrame as problem:
                log.damaged_at(problem)
                raise

    def _is_well(self) -> bool:
        """Whether all copies are equal, one is writable, each client is done, and all bytes can be read."""
        processes = [machine.process for machine in self.machines]
        if any(process is None or process.log.damage is not None or not process.log.is_idle for process in processes):
            return False
        logs = [process.log for process in processes if process is not None]
        if len({(log.end, log.chain) for log in logs}) > 1:
            return False
        master = next((process for process in processes if process is not None and process.node.writable), None)
        return master is not None and self._are_clients_done(master) and self._reads_well()

    def _are_clients_done(self, master: Process) -> bool:
        if any(producer.outstanding for producer in self.producers):
            return False
        return all(consumer.is_idle for consumer in self.consumers) and self._is_drained(master.log.state)

    def _reads_well(self) -> bool:
        for machine in self.machines:
            if machine.process is not None and machine.disk.flipped:
                try:
                    self._read_through(machine.process.log)
                except QmqError:
                    return False
        return True

    def _is_drained(self, state: State) -> bool:
        for (subject, _), group in state.groups.items():
            if group.position != state.next_sequence.get(subject, 0) or group.requeued:
                return False
            if any(consumer.unacked for consumer in group.consumers.values()):
                return False
        return len(state.groups) == 2 * len(self.swarm.subjects)

    def describe(self) -> str:
        parts = [
            f"{machine.name}: {machine.process.describe() if machine.process else 'down'}" for machine in self.machines
        ]
        parts.append(f"row term={self.metaserver.group.term} half={self.metaserver.group.half_swapped}")
        parts.append(f"outstanding={[len(producer.outstanding) for producer in self.producers]}")
        parts.append(f"idle={[consumer.is_idle for consumer in self.consumers]}")
        return "; ".join(parts)


def copies_of(seed: int) -> dict[str, int]:
    """Return the copies of a seed in the mix of `make simulate`: every fourth group has three."""
    return {} if seed % 4 else {"copies": 3, "min_copies": 2 if seed % 16 else 3}


def simulate(seed: int, **kinds: Any) -> Outcome:
    """Run one seed to its end; a failure is in the outcome. `kinds`: as of `World`."""
    world = World(seed, **kinds)
    failure = failure_of(world.run)
    return outcome_of(seed, world.events, len(world.oracle.acked), len(world.oracle.delivered), failure)


def outcome_of(seed: int, events: Events, acknowledged: int, delivered: int, failure: str) -> Outcome:
    recent = tuple(f"{at_us / 1000:10.2f}  {what}" for at_us, what in events.recent) if failure else ()
    return Outcome(seed, events.hash, events.steps, acknowledged, delivered, events.counts, events.met, failure, recent)
