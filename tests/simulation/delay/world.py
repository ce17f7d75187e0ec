"""World of one seed: a delay group, its broker groups and clients, and their faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from unittest import mock

from qmq.delayserver.schedule import DamagedSchedule, Schedule
from qmq.delayserver.settings import DelaySettings
from qmq.log.frame import decode_frames
from qmq.log.memory_disk import MemoryDisk
from tests.simulation.cores.clients import Client
from tests.simulation.cores.nemesis import CoreNemesis
from tests.simulation.cores.operator import Operator
from tests.simulation.cores.world import Swarm, World, outcome_of
from tests.simulation.delay.brokers import BrokerGroups
from tests.simulation.delay.clients import Asker, DelayProducer
from tests.simulation.delay.machine import DelayMachine, DelayProcess
from tests.simulation.delay.nemesis import CALM, DelayNemesis
from tests.simulation.delay.oracle import DelayOracle
from tests.simulation.events import Violation
from tests.simulation.outcome import Outcome, failure_of
from tests.simulation.steering import UNSTEERED, Steering

FAR_MS = 1 << 50


class DelayWorld(World):
    """World of one seed."""

    oracle: DelayOracle
    machines: list[DelayMachine]

    def _make_oracle(self) -> DelayOracle:
        return DelayOracle(self.events, self.unknown_ms)

    def _make_machines(self) -> list[DelayMachine]:
        self.brokers = BrokerGroups(self, self.broker_groups)
        machines = [DelayMachine(self, "a"), DelayMachine(self, "b")]
        clocks = Random(f"clocks {self.events.seed}")  # dice of their own: other seeds stay as they are
        if clocks.random() < 0.4 and not self.refusing:
            clocks.choice(machines).wall_skew_ms = clocks.choice((-20_000, 20_000, 3_600_000, -3_600_000))
        return machines

    def _make_clients(self) -> list[Client]:
        self.producers = [DelayProducer(self, f"p{i}", i + 1) for i in range(self.swarm.producers)]
        self.askers = [Asker(self, f"q{i}") for i in range(2)]
        return [*self.producers, *self.askers]

    def _draw(self) -> Swarm:
        rng = self.events.rng
        swarm = replace(Swarm.draw(rng), consumers=0, tagged=False, keys=rng.random() < 0.3)
        self.broker_groups = ("g1", "g2", "g3")[: rng.randint(1, 3)]
        self.segment_lengths = rng.choice(((1000,), (60_000,), (300, 1000, 5000)))
        self.ahead_ms = rng.choice((0, 100, 2000, 60_000))
        self.room = rng.choice((3000, 50_000, 1 << 20))
        self.asking = rng.choice((0.0, 0.1, 0.5))
        self.unknown_ms = rng.choice((300, 1500, 5000))
        self.loaded_max = rng.choice((20, 1 << 20, 1 << 20))
        self.refusing = rng.random() < 0.2
        self.is_calm = rng.random() < 0.3 and self.steering.fault in ("", *CALM)
        self._is_peace = self.is_quiet = False
        self.constants = {
            "qmq.delayserver.schedule.schedule.FLUSH_ROWS": rng.choice((64, 200)),
            "qmq.delayserver.schedule.schedule.MARKS_LEAST": rng.choice((1, 20)),
            "qmq.delayserver.schedule.schedule.READ_ROWS": rng.choice((16, 64, 65_536)),
            "qmq.delayserver.schedule.schedule.CHECKPOINT_MS": rng.choice((50, 500, 3000)),
            "qmq.delayserver.schedule.state.SETTLE_ROWS": rng.choice((1, 50, 16_384)),
            "qmq.delayserver.schedule.state.STRETCH_BITS": rng.choice((8, 12)),
            "qmq.delayserver.upkeep.BORDER_BYTES": 4096,
            "qmq.delayserver.upkeep.CARRIED_MESSAGES": rng.choice((3, 2000)),
            "qmq.delayserver.dispatching.BATCH_MESSAGES_MAX": rng.choice((1, 5, 500)),
            "qmq.delayserver.flights.IN_FLIGHT_MAX": rng.choice((20, 100_000)),
            "qmq.delayserver.flights.SPAN_MAX": rng.choice((4, 48)),
            "qmq.delayserver.flights.REFUSED_MS": 700,
            "qmq.delayserver.upkeep.PASS_BYTES": rng.choice((500, 1 << 20)),
            "qmq.replication.clocks.WINDOW_MS": 500,
            "qmq.replication.clocks.CATCH_UP_MS": 200,
            "qmq.replication.clocks.READING_MS_MAX": 2000,
            "qmq.delayserver.upkeep.READ_BYTES": rng.choice((2000, 1 << 20)),
        }
        return swarm

    def segment_ms(self) -> int:
        """Return the segment length; operators may change it with each start."""
        return self.events.rng.choice(self.segment_lengths)

    def settings(self, name: str) -> DelaySettings:
        return DelaySettings(
            **self.swarm.limits.of_copy(name),
            load_ahead_minutes=self.ahead_ms / 60_000,
            loaded_messages_max=self.loaded_max,
            unknown_ms=self.unknown_ms,
        )

    def refuses(self, id: str) -> bool:
        """Whether brokers reject this message, until an operator raises their limits."""
        return self.refusing and not self._is_peace and hash_of(id) % 20 == 0

    def _begin_war(self) -> list[CoreNemesis | Operator]:
        nemesis = DelayNemesis(self)
        self.events.between(100, 800, self._compare)
        return [nemesis]

    def _check_end(self) -> None:
        if not self.events.run_until(self.events.now_us + 2_000_000, lambda: self._has_filed_all):
            raise Violation(f"I20: not everything is filed: {self.describe()}")
        for machine in self.machines:
            self._compare_with_log(machine.process)
        self._compare_copies()
        self.oracle.check_sent()

    def _make_peace(self) -> None:
        self._is_peace = True
        self.brokers.heal()
        for machine in self.machines:
            machine.shelf.heal()
            machine.wall_skew_ms, machine.skewed_ms = 0, self.events.now_ms
        for asker in self.askers:
            asker.is_asking = False
        super()._make_peace()

    def _are_clients_done(self, master: DelayProcess) -> bool:
        if any(producer.outstanding for producer in self.producers) or any(asker.open for asker in self.askers):
            return False
        schedule = master.filing.schedule
        return schedule.filed_end == master.log.end and not schedule.pending_messages and not schedule.in_flight

    @property
    def _has_filed_all(self) -> bool:
        """Whether both schedules have all frames. A slave learns from the next frame that the last one is safe; here
        `is_quiet` replaces that frame.
        """
        self.is_quiet = True
        return all(m.process is not None and m.process.filing.reaches(m.process.log.end) for m in self.machines)

    def describe(self) -> str:
        parts = [super().describe(), f"open questions={[asker.open for asker in self.askers]}"]
        for machine in self.machines:
            if (process := machine.process) is not None:
                schedule = process.filing.schedule
                parts.append(
                    f"{machine.name}: filed={schedule.filed_end} pending={schedule.pending_messages} "
                    f"in flight={list(schedule.in_flight)}"
                )
                if process.node.master is not None and process.node.master.has_begun:
                    parts.append(str(process.node.master.stats()))
        return "; ".join(parts)

    def _compare(self) -> None:
        self.events.between(200, 900, self._compare)
        self._compare_with_log(self.events.rng.choice(self.machines).process)

    def _compare_with_log(self, process: DelayProcess | None) -> None:
        """Check that a schedule equals one made from its log."""
        if process is None or process.log.damage is not None or process.machine.disk.flipped:
            return
        schedule, log = process.filing.schedule, process.log
        if not log.start <= schedule.filed_end <= log.flushed_end or process.filing._rebuild_reason:
            return
        if not process.filing._is_our_history(process.filing.schedule.filed_end):
            return
        if schedule.pending_from() < log.start and schedule.filed_end < log.flushed_end:
            return  # frames not filed yet decide about messages that the log no longer has
        fresh = Schedule(MemoryDisk(), segment_ms=700, log_start=log.start)
        at = log.start
        while at < schedule.filed_end:
            chunk = log.stored.read(at, schedule.filed_end, 1 << 20)
            for frame, body in decode_frames(chunk.data, at, None):
                fresh.file(frame, body)
            at = chunk.end
        self.events.count("schedule compared")
        try:
            ours = _contents(schedule)
        except DamagedSchedule as problem:
            why = str(problem)
            process.guarded(lambda: process.filing.rebuild(why))  # as for operators' queries
            return
        if ours != (anew := _contents(fresh)):
            raise Violation(f"I11: the schedule of {process.name} is {ours}, made from its log it is {anew}")

    def _compare_copies(self) -> None:
        try:
            first, second = (_contents(machine.process.filing.schedule) for machine in self.machines)
        except DamagedSchedule:
            return  # a flipped bit that no process has read yet
        if first != second:
            raise Violation(f"I11: one copy has {first}, the other {second}")


def hash_of(id: str) -> int:
    return sum(id.encode())


def _contents(schedule: Schedule) -> tuple[object, ...]:
    listed = schedule.list(0, FAR_MS, None, 1 << 30)()
    pending = [
        (
            int(record["due"]),
            int(record["number"]),
            int(record["crc"]),
            int(record["label"]),
            schedule.subjects[record["subject"]],
        )
        for record in listed
    ]
    flying = {
        key: (batch.group, batch.subject, batch.records["number"].tolist()) for key, batch in schedule.in_flight.items()
    }
    return len(pending), schedule.pending_messages, schedule.pending_bytes, pending, flying


@contextlib.contextmanager
def constants(values: dict[str, int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch(name, value))
        yield


def simulate(seed: int, *, steering: Steering = UNSTEERED) -> Outcome:
    """Run one seed to its end; a failure is in the outcome."""
    world = DelayWorld(seed, steering=steering)
    with constants(world.constants):
        failure = failure_of(world.run)
    stored = sum(map(len, world.oracle.places.values()))
    return outcome_of(seed, world.events, len(world.oracle.acked), stored, failure)
