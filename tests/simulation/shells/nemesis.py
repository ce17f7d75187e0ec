"""Faults of a world made of shells. A seed enables some and draws when and how they strike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.nemesis import RARE, Nemesis, fault, faults_of
from tests.simulation.shells.machines import CopyMachine, Machine

if TYPE_CHECKING:
    from tests.simulation.shells.world import World

LASTS_S = 0.2, 20.0
LOOK_S = 0.005, 0.05
"""Pause between two looks of a steered seed."""


class ShellNemesis(Nemesis):
    """Faults of machines, disks, clocks, the network and the metaservers' database."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._seed = seed
        faults = {name: weight for name, weight in FAULTS.items() if not (world.is_plain and name in LOSSES)}
        super().__init__(Random(f"{seed} nemesis"), world.steering, world, faults, least=0.05)
        dice = Random(f"{seed} victims")
        self._victims = [dice.choice(copies) for copies in world.groups.values()]
        """The one copy of each group with a disk that loses fsynced bytes: no promise covers two lost disks."""
        self._again()
        if world.steering.state:
            self._look()

    def states(self) -> list[str]:
        return self._world.states()

    def _reroll(self, text: str) -> None:
        """Take dice of this strike alone: it stays the same when another one is left out."""
        self._rng = Random(f"{self._seed} {text}")

    def _again(self) -> None:
        at_s = self._world.loop.now_s + self._rng.uniform(0.1, self._world.swarm.strike_s)
        self._world.loop.at(at_s, self._strike)

    def _look(self) -> None:
        """Strike where a copy is in the steered state."""
        if self._is_active:
            between_s = LOOK_S
            if self._world.steering.state in self.states():
                self._strike_by(self._world.steering.fault)
                between_s = (0.1, self._world.swarm.strike_s)
            self._world.later(*between_s, self._look)

    def _copy(self) -> CopyMachine:
        return self._rng.choice(self._world.copies)

    def _any(self) -> Machine:
        return self._rng.choice(self._world.machines)

    def _two(self) -> tuple[str, str]:
        """Choose two machines, one of them a server."""
        server = self._rng.choice([*self._world.copies, *self._world.metaservers])
        other = self._rng.choice([machine for machine in self._world.machines if machine is not server])
        return (server.ip, other.ip) if self._rng.random() < 0.5 else (other.ip, server.ip)

    def _links(self) -> tuple[str, str]:
        """Choose two machines, mostly two copies of a group."""
        if self._rng.random() < 0.5:
            return self._two()
        first, second = self._rng.sample(self._rng.choice(list(self._world.groups.values())), 2)
        return first.ip, second.ip

    @fault()
    def kill(self) -> bool:
        machine = self._any()
        if not machine.is_running or machine.process is None:
            return False
        machine.process.kill()
        return True

    @fault()
    def kill_at_a_call(self) -> bool:
        system = self._copy().system
        system.kill_at = system.calls + self._rng.randint(1, 60)
        return True

    @fault()
    def terminate(self) -> bool:
        self._any().terminate()
        return True

    @fault()
    def power(self) -> bool:
        copy = self._copy()
        if copy.is_off:
            return False
        copy.lose_power()
        return True

    @fault()
    def power_everywhere(self) -> bool:
        for copy in self._world.copies:
            if not copy.is_off:
                copy.lose_power()
        return True

    @fault()
    def pause(self) -> bool:
        """Stop a process for a while, as a suspended or swapping machine does."""
        machine = self._any()
        process = machine.process
        if process is None or process.is_dead or process.is_stopped:
            return False
        process.stop()
        self._world.later(0.05, 10.0, process.go_on)
        return True

    @fault()
    def cut(self) -> bool:
        first, second = self._links()
        self._world.network.cut(first, second)
        if self._rng.random() < 0.5:
            self._world.network.cut(second, first)
        self._world.later(*LASTS_S, self._world.network.heal)
        return True

    @fault()
    def isolate(self) -> bool:
        """Cut a copy off from all machines, in one direction or both."""
        copy, ways = self._copy(), self._rng.choice((1, 2, 3))
        for other in self._world.machines:
            if other is not copy:
                if ways & 1:
                    self._world.network.cut(copy.ip, other.ip)
                if ways & 2:
                    self._world.network.cut(other.ip, copy.ip)
        self._world.later(*LASTS_S, self._world.network.heal)
        return True

    @fault()
    def reset(self) -> bool:
        return bool(self._world.network.reset(*self._links()))

    @fault()
    def forget(self) -> bool:
        return bool(self._world.network.forget(*self._links()))

    @fault()
    def slow(self) -> bool:
        self._world.network.slow[self._links()] = self._rng.uniform(0.01, 1.5)
        self._world.later(*LASTS_S, self._world.network.slow.clear)
        return True

    @fault()
    def slow_disk(self) -> bool:
        copy, slow_s = self._copy(), self._rng.uniform(0.02, 1.0)
        copy.thread_s = (slow_s / 2, slow_s)
        copy.system.sync_s = slow_s
        if copy.process is not None:
            copy.process.thread_s = copy.thread_s
        self._world.later(*LASTS_S, copy.disk_is_well)
        return True

    @fault()
    def disk_fails(self) -> bool:
        """Let one call fail. A failed fsync may lose its bytes."""
        system = self._copy().system
        system.fails_once_at = system.calls + self._rng.randint(1, 60)
        return True

    @fault(0.5)
    def no_space(self) -> bool:
        """Let each call fail that needs space."""
        copy = self._copy()
        copy.system.is_full = True
        self._world.later(*LASTS_S, copy.system.heal)
        return True

    @fault(RARE)
    def flip(self) -> bool:
        """Flip one bit of one copy, running or not."""
        victim = self._rng.choice(self._victims)
        victim.system.loses()
        log = victim.message_log if victim.is_running else None
        return victim.medium.flip_some(self._rng, log.flushed_end if log is not None else None)

    @fault(RARE)
    def bad_block(self) -> bool:
        """Make a block of one copy unreadable."""
        victim = self._rng.choice(self._victims)
        victim.system.loses()
        return victim.medium.go_bad_somewhere(self._rng)

    @fault(0.4)
    def flush_lies(self) -> bool:
        """Let a disk report bytes as durable that are not, then cut the power."""
        victim = self._rng.choice(self._victims)
        victim.system.is_lying = True
        self._world.later(0.05, 5.0, partial(self._lose, victim, lambda: None))
        return True

    @fault(0.5)
    def put_back(self) -> bool:
        """Put a machine's earlier disk back."""
        victim = self._rng.choice(self._victims)
        image = victim.medium.image()
        self._world.later(0.5, 15.0, partial(self._lose, victim, lambda: victim.medium.put_back(image)))
        return True

    @fault(RARE)
    def wipe(self) -> bool:
        """Replace a slave's disk by an empty one."""
        victim = self._rng.choice(self._victims)
        return victim.node is not None and victim.node.slave is not None and self._lose(victim, victim.medium.wipe)

    def _lose(self, victim: CopyMachine, how: Callable[[], None]) -> bool:
        """Cut the copy's power and lose its bytes, unless no other copy has them all."""
        may = not victim.is_off and self._world.is_held_by_other(victim)
        if may:
            victim.system.loses()
            victim.lose_power()
            how()
            self._world.counts["disk lost"] += 1
            self._world.note(f"{victim.name} has another disk")
        victim.system.is_lying = False
        return may

    @fault()
    def clock(self) -> bool:
        steps = (-0.5, 0.5, 30.0, -30.0, 3.2e7, -3.2e7)
        self._any().step_clock(self._rng.choice(steps))
        return True

    @fault()
    def database(self) -> bool:
        """Let the database refuse, lose its answers, or hang."""
        self._world.loop.database = self._rng.choice(("refuses", "forgets", "hangs"))
        self._world.later(*LASTS_S, self._world.database_is_well)
        return True

    @fault(RARE)
    def database_goes_back(self) -> bool:
        """End the metaservers and restore an earlier database."""
        self._world.back_up_database()
        self._world.later(0.5, 15.0, self._world.restore_database)
        return True

    @fault()
    def failover(self) -> bool:
        """Kill a master; an operator orders a failover."""
        group, copies = self._rng.choice(list(self._world.groups.items()))
        for copy in copies:
            if copy.is_running and copy.process and copy.node is not None and copy.node.master is not None:
                copy.process.kill()
                self._world.later(0.0, 2.0, partial(self._world.operate, "Failover", brokerGroup=group))
                return True
        return False

    @fault()
    def swap(self) -> bool:
        self._world.operate("SwapRoles", brokerGroup=self._rng.choice(list(self._world.groups)))
        return True


FAULTS = faults_of(ShellNemesis)
LOSSES = ("no_space", "flip", "bad_block", "flush_lies", "put_back", "wipe", "database_goes_back", "failover")
"""Faults that a plain world does not have."""

MUST_OCCUR = (
    *FAULTS,
    "SwapRoles DONE",
    "came again",
    "delayed",
    "disk lost",
    "ended by its disk",
    "killed within a call",
    "not stored",
    "role change",
    "unreadable row",
)
