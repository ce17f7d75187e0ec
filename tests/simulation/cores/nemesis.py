"""Faults of two copies made of cores. A seed enables some and draws when and how they strike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmq.errors import CorruptFrame
from qmq.types import Role
from tests.simulation.cores.metaserver import META
from tests.simulation.disk import Medium
from tests.simulation.nemesis import RARE, Nemesis, fault, faults_of
from tests.simulation.states import states_of_node
from tests.simulation.steering import way_to

if TYPE_CHECKING:
    from tests.simulation.cores.machine import Machine, Process
    from tests.simulation.cores.world import World

REACHED_MS = 0.0, 0.0, 0.1, 1.0, 10.0
"""Longest delays between a copy's arrival in its state and the steered strike: some states end with the next packet."""
RETRY_MS = 0.0, 20.0
"""Pause after a strike that came too late or did nothing."""


class CoreNemesis(Nemesis):
    """Faults of two copies, their metaserver and their clients."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._events = world.events
        rng, way = world.events.rng, way_to(world.steering.state)
        super().__init__(rng, world.steering, world.events, self.faults(), least=0.02, ways=way.faults)
        self.victim = self._rng.choice(world.machines) if way.victim is None else world.machines[way.victim]
        """The only machine with a disk that loses fsynced bytes: no promise covers two lost disks."""
        self._image: Medium | None = None
        self._image_of = ""
        self._rests = False
        """Whether a steered strike is due, or has just happened."""
        self._again()
        if world.steering.state:
            world.watch = self._watch

    def faults(self) -> dict[str, float]:
        return faults_of(type(self))

    def _again(self) -> None:
        self._events.between(*self._world.swarm.strike_ms, self._strike)

    def _watch(self, process: Process) -> None:
        """Strike soon if the copy is in the steered state."""
        if self._rests or not self._is_active or self._world.steering.state not in states_of_node(process.node):
            return
        self._rests = True
        self._events.between(0, self._rng.choice(REACHED_MS), self._strike_there)

    def _strike_there(self) -> None:
        def again() -> None:
            self._rests = False

        is_there = self._is_active and self._world.steering.state in self.states()
        has_struck = is_there and self._strike_by(self._world.steering.fault)
        self._events.between(*(self._world.swarm.strike_ms if has_struck else RETRY_MS), again)

    def states(self) -> list[str]:
        running = [machine.process for machine in self._world.machines if machine.process is not None]
        return [state for process in running for state in states_of_node(process.node)]

    def _machine(self) -> Machine:
        return self._rng.choice(self._world.machines)

    @fault()
    def kill(self) -> bool:
        machine = self._machine()
        machine.die("killed")
        return True

    @fault()
    def power(self) -> bool:
        machine = self._machine()
        machine.die("power", power=True)
        return True

    @fault(0.5)
    def power_everywhere(self) -> bool:
        for machine in self._world.machines:
            machine.die("power everywhere", power=True)
        return True

    @fault()
    def refuse(self) -> bool:
        disk = self._machine().disk
        disk.fail_after(self._rng.randint(1, 80))
        return True

    @fault()
    def errs_once(self) -> bool:
        """Let one call fail. A failed fsync may lose its bytes, and the next fsync succeeds."""
        system = self._machine().disk.system
        system.fails_once_at = system.calls + self._rng.randint(1, 80)
        return True

    @fault(0.5)
    def no_space(self) -> bool:
        """Let each call fail that needs space; the reserve is gone too."""
        self._machine().disk.system.is_full = True
        return True

    @fault(0.4)
    def flush_lies(self) -> bool:
        """Let fsyncs report bytes as durable that are not; then cut the power."""
        world, victim = self._world, self.victim
        victim.disk.system.is_lying = True
        process = victim.process

        def power() -> None:
            if process is not None and process.is_alive and world.may_forget(victim.name):
                victim.die("power, and its flushes were lies", power=True)
            victim.disk.system.is_lying = False

        self._events.between(5, 300, power)
        return True

    @fault(RARE)
    def bad_block(self) -> bool:
        """Make a block of one copy unreadable."""
        return self.victim.disk.go_bad_somewhere(self._rng)

    @fault()
    def disk_full(self) -> bool:
        process = self._machine().process
        if process is None:
            return False
        process.guarded(lambda: process.node.set_disk_full(True))
        self._events.between(50, 800, lambda: process.guarded(lambda: process.node.set_disk_full(False)))
        return True

    @fault()
    def cut(self) -> bool:
        return self._cut_between("a", "b", both_ways=True)

    @fault()
    def cut_one_way(self) -> bool:
        return self._cut_between("a", "b", both_ways=False)

    @fault()
    def cut_metaserver(self) -> bool:
        return self._cut_between(self._machine().name, META, both_ways=True)

    @fault()
    def cut_client(self) -> bool:
        client = self._rng.choice(self._world.clients)
        return self._cut_between(self._machine().name, client.name, both_ways=self._rng.random() < 0.5)

    def _cut_between(self, first: str, second: str, *, both_ways: bool) -> bool:
        if self._rng.random() < 0.5:
            first, second = second, first
        network = self._world.network
        network.cut(first, second)
        self._events.between(20, 2500, lambda: network.heal(first, second))
        if both_ways:
            network.cut(second, first)
            self._events.between(20, 2500, lambda: network.heal(second, first))
        return True

    @fault()
    def slow_path(self) -> bool:
        path = self._world.network.path("a", "b") if self._rng.random() < 0.5 else self._world.network.path("b", "a")
        path.slow_ms = self._rng.uniform(5, 400)

        def ends() -> None:
            path.slow_ms = 0.0

        self._events.between(100, 1500, ends)
        return True

    @fault()
    def reset(self) -> bool:
        return self._reset(3.0)

    @fault()
    def half_open(self) -> bool:
        return self._reset(3000.0)

    def _reset(self, late_ms: float) -> bool:
        ends = self._world.network.connections()
        between_brokers = [end for end in ends if {end.host, end.peer} == {"a", "b"}]
        if between_brokers and self._rng.random() < 0.6:
            ends = between_brokers
        if ends:
            self._world.network.reset(self._rng.choice(ends), late_ms=late_ms)
        return bool(ends)

    @fault(RARE)
    def clock(self) -> bool:
        self._machine().wall_skew_ms += self._rng.randint(-86_400_000, 86_400_000)
        return True

    @fault()
    def metaserver_down(self) -> bool:
        self._world.metaserver.go_down(self._rng.uniform(50, 3000))
        return True

    @fault(4.0)
    def swap(self) -> bool:
        self._world.metaserver.swap()
        return True

    @fault(1.5)
    def replace(self) -> bool:
        """Exchange roles by hand, whichever broker runs."""
        metaserver = self._world.metaserver
        metaserver.replace(Role.MASTER)
        self._events.between(0, 800, lambda: metaserver.replace(Role.SLAVE))
        return True

    @fault()
    def failover(self) -> bool:
        """Kill the master and put the slave in its place, by an operator or by the metaserver."""
        group = self._world.metaserver.group
        if group.master is None:
            return False
        self._world.machine(group.master.hostname).die("failover", power=self._rng.random() < 0.5)
        return self._world.metaserver.fails_over or self.replace()

    @fault()
    def mark(self) -> bool:
        metaserver = self._world.metaserver
        subject = self._rng.choice(["*", *self._world.swarm.subjects])
        metaserver.marks |= {subject}

        def unmark() -> None:
            metaserver.marks -= {subject}

        self._events.between(50, 1500, unmark)
        return True

    @fault(RARE)
    def flip(self) -> bool:
        """Flip one bit of one copy, running or not."""
        process = self.victim.process
        return self.victim.disk.flip_some(self._rng, process.log.flushed_end if process else None)

    @fault(RARE)
    def flip_while_down(self) -> bool:
        self.victim.die("power, and its disk rots", power=True)
        return self.flip()

    @fault(RARE)
    def rotten_tail(self) -> bool:
        """Corrupt the newest frames of one copy, restart it, and restart it again before it meets the other one."""
        process = self.victim.process
        if process is None or not process.log.flushed_end:
            return False
        log = process.log
        base = log.bases[-1]
        size = log.flushed_end - base
        self.victim.die("power, and the end of its log rots", power=True)
        if size > 0:
            self.victim.disk.flip(f"log/{base:020d}.log", 8 * self._rng.randrange(max(size - 300, 0), size))
        self.cut()
        self._events.between(50, 1500, lambda: self.victim.die("killed again"))
        return True

    @fault(RARE)
    def wipe(self) -> bool:
        """Replace the slave's disk by an empty one."""
        slaves = {slave.hostname for slave in self._world.metaserver.group.slaves}
        name = self.victim.name
        if name not in slaves or not self._world.may_forget(name):
            return False
        self.victim.die("its disk is replaced", power=True)
        self.victim.disk.wipe()
        self._world.metaserver.disk_replaced(name)
        return True

    @fault(RARE)
    def back_up(self) -> bool:
        """Copy a machine's disk as it is now."""
        self._image = self.victim.disk.image()
        self._image_of = self.victim.process.node.identity.value.incarnation if self.victim.process else ""
        return True

    @fault(0.5)
    def put_back(self) -> bool:
        """Put the copied disk of the same data directory back into its machine."""
        world, victim = self._world, self.victim
        process, backup = victim.process, self._image
        if backup is None or process is None or not world.may_forget(victim.name):
            return False
        if process.node.identity.value.incarnation != self._image_of:
            return False
        victim.forgot = max(victim.forgot, process.node.identity.value.epoch)
        victim.die("its disk is put back", power=True)
        victim.disk.put_back(backup)
        victim.forgot_what_it_had()
        return True

    @fault(0.4)
    def forgets_last_write(self) -> bool:
        """Lose the newest fsynced frames of a machine, as if its last fsync had lied."""
        world, victim = self._world, self.victim
        process = victim.process
        if process is None or not process.log.bases or not world.may_forget(victim.name):
            return False
        if process.log.flushed_end <= process.log.bases[-1]:
            return False
        log, base = process.log, process.log.bases[-1]
        try:
            chunk = log.stored.read(base, log.flushed_end, 1 << 30)
        except CorruptFrame:
            return False  # an earlier flipped bit
        begin = self._rng.choice(chunk.frames[-4:]).offset
        victim.die("power, and its last flush was a lie", power=True)
        size = victim.disk.file_bytes(f"log/{base:020d}.log")
        victim.disk.write(f"log/{base:020d}.log", begin - base, [bytes(max(0, size - (begin - base)))])
        victim.disk.sync(f"log/{base:020d}.log")
        victim.forgot_what_it_had()
        return True

    @fault()
    def consumer_vanishes(self) -> bool:
        consumer = self._rng.choice(self._world.consumers)
        longest = 3 * self._world.swarm.limits.lease_ms
        consumer.vanish(self._rng.uniform(10, longest), forgets=self._rng.random() < 0.5)
        return True

    @fault()
    def client_reconnects(self) -> bool:
        self._rng.choice(self._world.clients).drop_link()
        return True


FAULTS = faults_of(CoreNemesis)
