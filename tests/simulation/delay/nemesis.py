"""Faults of a delay group, besides those of any two copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.cores.nemesis import CoreNemesis
from tests.simulation.nemesis import fault, faults_of

if TYPE_CHECKING:
    from tests.simulation.delay.world import DelayWorld


class DelayNemesis(CoreNemesis):
    """Adds faults of the schedule's disk and of the broker groups."""

    _world: DelayWorld

    def faults(self) -> dict[str, float]:
        return {name: FAULTS[name] for name in CALM} if self._world.is_calm else FAULTS

    def wipe(self) -> bool:
        """Replace the slave's disks by empty ones."""
        if not super().wipe():
            return False
        self._world.machine(self.victim.name).shelf.wipe()
        return True

    def clock(self) -> bool:
        """Set a clock. Not with refusing brokers: after a jump, a refused message is due hours from now."""
        before = {machine: machine.wall_skew_ms for machine in self._world.machines}
        if self._world.refusing or not super().clock():
            return False
        for machine in self._world.machines:
            if machine.wall_skew_ms != before[machine]:
                machine.skewed_ms = self._events.now_ms
        return True

    @fault()
    def shelf_refuses(self) -> bool:
        """Let the disk fail within a flush or a checkpoint."""
        shelf = self._machine().shelf
        shelf.fail_after(self._rng.randint(1, 40))
        return True

    @fault()
    def shelf_lost(self) -> bool:
        """Lose files of the schedule, or all, while the process is stopped."""
        machine = self._machine()
        machine.die("its schedule is lost", power=self._rng.random() < 0.5)
        machine.shelf.heal()
        names = machine.shelf.all_names()
        for name in names if self._rng.random() < 0.3 else self._rng.sample(names, len(names) // 2):
            machine.shelf.remove(name)
        return bool(names)

    @fault()
    def shelf_flips(self) -> bool:
        """Flip one bit of the schedule, running or not."""
        shelf = self._machine().shelf
        names = [name for name in shelf.all_names() if shelf.file_bytes(name)]
        if not names:
            return False
        name = self._rng.choice(names)
        shelf.flip(name, self._rng.randrange(8 * shelf.file_bytes(name)))
        return True

    @fault()
    def group_away(self) -> bool:
        return self._for_a_while("is_up", False)

    @fault()
    def group_refuses(self) -> bool:
        return self._for_a_while("refuses", True)

    @fault()
    def group_mute(self) -> bool:
        return self._for_a_while("mute", self._rng.choice((0.3, 1.0)))

    @fault()
    def group_late(self) -> bool:
        return self._for_a_while("late_ms", self._rng.choice((30.0, 300.0, 1500.0)))

    def _for_a_while(self, what: str, value: Any) -> bool:
        group = self._rng.choice(list(self._world.brokers.groups.values()))
        before = {"is_up": True, "refuses": False, "mute": 0.0, "late_ms": 1.0}[what]
        setattr(group, what, value)
        self._events.between(20, 2500, lambda: setattr(group, what, before))
        return True

    @fault()
    def route_changes(self) -> bool:
        """Change the broker groups of a subject."""
        brokers = self._world.brokers
        routes = self._rng.choice(list(brokers.routes.values()))
        names = list(brokers.groups)
        routes[:] = sorted(self._rng.sample(names, self._rng.randint(0, len(names))))

        def back() -> None:
            routes[:] = names

        self._events.between(50, 2500, back)
        return True


FAULTS = {name: weight for name, weight in faults_of(DelayNemesis).items() if name != "consumer_vanishes"}
CALM = (
    "swap",
    "kill",
    "clock",
    "group_away",
    "group_refuses",
    "group_mute",
    "group_late",
    "route_changes",
    "shelf_flips",
)
"""Faults of calm seeds: both copies mostly run, so most swaps succeed amid loads and dispatches."""
