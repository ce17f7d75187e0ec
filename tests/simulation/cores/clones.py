"""One data directory is copied, and both are started: a cloned machine, or a backup beside the broker that it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.cores.machine import Machine
from tests.simulation.cores.nemesis import CoreNemesis
from tests.simulation.nemesis import fault, faults_of

if TYPE_CHECKING:
    from tests.simulation.cores.world import World


class CloneNemesis(CoreNemesis):
    """Copies one directory of a seed, and strikes the copy as it does others. No disk forgets anything besides."""

    def faults(self) -> dict[str, float]:
        return CLONE_FAULTS

    @fault()
    def clone(self) -> bool:
        """A copy of what one disk holds at this moment runs on another machine; the original may be down by then."""
        world, rng = self._world, self._rng
        if len(world.machines) > world.copies:
            return False
        original = rng.choice(world.machines)
        if original.disk.durable_file("broker.json") is None:
            return False  # it holds nothing yet
        copied = Machine(world, f"{original.name}'", original.broker)
        copied.disk.put_back(original.disk.image())
        world.machines.append(copied)
        world.network.listen(copied)
        if rng.random() < 0.5:
            original.die("a copy takes its place", power=True)
        copied.start()
        return True

    @fault()
    def clone_while_the_metaserver_is_away(self) -> bool:
        return self.metaserver_down() and self.clone()

    def cut(self) -> bool:
        """Between any two of them."""
        one, other = self._rng.sample([machine.name for machine in self._world.machines], 2)
        return self._cut_between(one, other, both_ways=True)


def stop_copies(world: World) -> None:
    """What the refusal says: the process whose place the row does not name is stopped, and its directory deleted."""
    for copied in [machine for machine in world.machines if machine.name != machine.broker]:
        row = world.metaserver.broker(copied.broker)
        pair = [machine for machine in world.machines if machine.broker == copied.broker]
        if row is None or len(pair) < 2 or any(machine.process is None for machine in pair):
            return
        (other,) = (machine for machine in pair if machine.name != row.ip)
        if world.machine(row.ip).process.node.role is None:  # type: ignore[union-attr]
            return
        if other.process is not None and other.process.node.role is not None:
            return  # it has not been refused yet
        other.stays_down = True
        other.die("an operator stops it")
        world.machines.remove(other)
        world.stopped.append(other)


CLONE_FAULTS = {
    name: faults_of(CloneNemesis)[name]
    for name in (
        "clone",
        "clone_while_the_metaserver_is_away",
        "kill",
        "power",
        "power_everywhere",
        "cut",
        "cut_one_way",
        "cut_metaserver",
        "slow_path",
        "reset",
        "half_open",
        "metaserver_down",
        "swap",
        "failover",
        "client_reconnects",
    )
}
