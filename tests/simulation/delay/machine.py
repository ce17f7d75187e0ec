"""Machine of a delay group, with a second disk for the schedule, and the delay servers that run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmq.delayserver.decisions import Counters
from qmq.delayserver.master import DelayMaster
from qmq.delayserver.schedule import Schedule, discard
from qmq.delayserver.upkeep import DelayRetention, ScheduleFiler
from qmq.replication.master import Promotion
from qmq.replication.node import Node
from tests.simulation.cores.machine import Doze, Machine, Process
from tests.simulation.delay.brokers import GroupSenders
from tests.simulation.disk import SimulatedDisk

if TYPE_CHECKING:
    from tests.simulation.delay.world import DelayWorld

KEEP_MS = 1 << 40


class DelayMachine(Machine):
    """Machine with two disks, which outlive its processes."""

    world: DelayWorld
    process: DelayProcess | None

    def __init__(self, world: DelayWorld, name: str) -> None:
        super().__init__(world, name)
        self.shelf = SimulatedDisk(world.events.rng)
        self.skewed_ms = -(1 << 40)
        """When its clock was last set."""

    def make_process(self) -> DelayProcess:
        self.shelf.heal()
        self.shelf.reopen()
        return DelayProcess(self)

    def _lose_unsynced(self) -> None:
        super()._lose_unsynced()
        self.shelf.heal()
        self.shelf.crash(self.world.events.rng if self.world.events.chance(0.8) else None)


class DelayProcess(Process):
    """One process of a delay server: the work of delayserver.main and qmq.server.service around the core."""

    machine: DelayMachine
    world: DelayWorld

    def _build(self) -> None:
        self.alone_end = 0
        """End of the frames written without a slave, or with one that was lost: plans before it may be sent alone."""
        self._beat_doze = Doze(self, self._quiet_ms)
        self.counters = Counters()
        self.log = self._watched_log()
        self.settings = self.world.settings(self.name)
        self.senders = GroupSenders(self.world, self)
        self.node: Node[DelayMaster] = Node(
            message_log=self.log,
            host=self,
            settings=self.settings,
            promote=self._promote,
            identity=self._identity(),
        )
        self.filing = ScheduleFiler(
            self.log,
            self,
            make=self._make,
            discard=lambda: discard(self.machine.shelf),
            found_damage=self.node.found_damage,
        )
        self.keeper = DelayRetention(lambda: self.filing, self.settings)
        if self.filing.schedule.filed_end > self.log.start:
            self._events.count("schedule begins with its checkpoint")

    def _make(self, log_start: int) -> Schedule:
        schedule = Schedule(
            self.machine.shelf, segment_ms=self.world.segment_ms(), log_start=log_start, keep_ms=KEEP_MS
        )
        if schedule.rebuilt:
            self._events.count("schedule made anew")
            self._events.note(f"{self.name} schedule anew: {schedule.rebuilt}")
        return schedule

    def _promote(self, promotion: Promotion) -> DelayMaster:
        return DelayMaster(promotion, self.settings, self.counters, self.filing, self.senders)

    def begin(self) -> None:
        super().begin()
        self._every(10, 30, self._beat)

    def _beat(self) -> None:
        if self._beat_doze.lasts():
            return
        master = self.node.master
        if master is not None:
            self.run_guarded(master.beat)
        else:
            known_end = self.filing.known_end
            if self.world.is_quiet:
                known_end = max(known_end, self.log.flushed_end)  # or the last frame would wait for the next one
            self.run_guarded(lambda: self.filing.go_on(known_end))
        if self.is_alive:
            self.run_guarded(lambda: self.filing.keep(self.now_ms()))
            self._beat_doze.begin()

    def _quiet_ms(self) -> int:
        if self.world.is_quiet:
            return 0
        master = self.node.master
        return self.filing.quiet_ms() if master is None else master.due_in_ms()
