"""A copied data directory is started beside its original: a cloned machine, or a backup beside its broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.cores.machine import Machine
from tests.simulation.cores.nemesis import CoreNemesis
from tests.simulation.nemesis import fault, faults_of

if TYPE_CHECKING:
    from tests.simulation.cores.world import World


class CloneNemesis(CoreNemesis):
    """Faults with one clone per seed. No disk loses fsynced bytes."""

    def faults(self) -> dict[str, float]:
        return CLONE_FAULTS

    @fault()
    def clone(self) -> bool:
        """Start a copy of a disk on another machine; the original may be down."""
        world, rng = self._world, self._rng
        if len(world.machines) > world.copies:
            return False
        original = rng.choice(world.machines)
        if original.disk.durable_file("broker.json") is None:
            return False  # still empty
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
        """Cut any two machines."""
        first, second = self._rng.sample([machine.name for machine in self._world.machines], 2)
        return self._cut_between(first, second, both_ways=True)


def stop_copies(world: World) -> None:
    """Follow the refusal's remedy: stop the process that the row does not name, and delete its directory."""
    for copied in [machine for machine in world.machines if machine.name != machine.broker]:
        row = world.metaserver.broker(copied.broker)
        pair = [machine for machine in world.machines if machine.broker == copied.broker]
        if row is None or len(pair) < 2 or any(machine.process is None for machine in pair):
            return
        (other,) = (machine for machine in pair if machine.name != row.ip)
        if world.machine(row.ip).process.node.role is None:
            return
        if other.process is not None and other.process.node.role is not None:
            return  # not refused yet
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
