"""Faults of drains, broker groups and rows. Networks, databases and the application have theirs in the world."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.nemesis import Nemesis, fault, faults_of
from tests.simulation.steering import Steering

if TYPE_CHECKING:
    from tests.simulation.outbox.world import World


class OutboxNemesis(Nemesis):
    """Made per seed; strikes when the world's schedule has it."""

    def __init__(self, world: World, steering: Steering) -> None:
        super().__init__(Random(f"{world.events.seed} nemesis"), steering, world.events, FAULTS, least=0.3)
        self._world = world

    def strike(self) -> None:
        self._strike()

    def states(self) -> list[str]:
        return []

    def _again(self) -> None:
        """Do nothing: the world's schedule has all strikes."""

    def _reroll(self, text: str) -> None:
        self._rng = Random(f"{self._world.events.seed} {text}")

    @fault()
    def leader_deposed(self) -> bool:
        """Elect another watchdog. Earlier leaders continue as leaders."""
        if may := bool(self._world.watchdogs) and self._rng.random() < 0.6:
            self._world.elect()
        return may

    @fault()
    def leader_killed(self) -> bool:
        watchdogs = self._world.watchdogs
        if may := len(watchdogs) > 1 and self._rng.random() < 0.5:
            watchdogs.remove(self._rng.choice(watchdogs))
        return may

    @fault()
    def relay_starts(self) -> bool:
        """Start a process of the application; its producer relays rows that others left."""
        if may := len(self._world.relays) < 3:
            self._world.start_relay()
        return may

    @fault()
    def relay_killed(self) -> bool:
        relays = self._world.relays
        if may := len(relays) > 1 and self._rng.random() < 0.5:
            relays.remove(self._rng.choice(relays))
        return may

    @fault(3)
    def group_changes(self) -> bool:
        group = self._rng.choice(list(self._world.groups.values()))
        group.state = self._rng.choice(("writable", "writable", "readonly", "down", "moved"))
        self._world.events.count(f"group {group.state}")
        return True

    @fault()
    def unreadable_row(self) -> bool:
        if may := self._rng.random() < 0.3:
            with self._world.engine.begin() as connection:
                self._world.insert(connection, '{"unreadable')
        return may


FAULTS = faults_of(OutboxNemesis)
