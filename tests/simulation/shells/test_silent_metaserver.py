"""Shell. A failover ends in time although one of two metaservers stops at about the same moment.

ROUNDS=200 runs more rounds and prints their times (`pytest -s`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from tests.simulation.outcome import assert_well
from tests.simulation.shells.world import Swarm, World, simulate
from tests.simulation.steering import Steering

ROUNDS = int(os.environ.get("ROUNDS", "6"))
KILLED_S, SILENT_S = 5.0, 7.0
"""Limits of docs/failover.md: for a master that ends, and for one that falls silent, as its metaserver does."""
AROUND_S = 4.0
LOOK_S = 0.05


class Trial(World):
    """One failover."""

    took_s = 0.0

    def __init__(self, seed: int, folder: Path, steering: Steering, **words: Any) -> None:
        dice = self.dice = Random(f"{seed} silent metaserver")
        copies = dice.choice((2, 3))
        drawn = Swarm.draw(dice, second=False, watchdogs=0, unreadable=False, joins=False)
        swarm = replace(
            drawn, copies=copies, min_copies=2, metaservers=2, fails_over=True, delays=False, tail_bytes=1 << 20
        )
        with mock.patch.object(Swarm, "draw", lambda *_, **__: swarm):
            super().__init__(seed, folder, steering, **words)

    async def _war(self) -> None:
        dice = self.dice
        if not await self._lasts(60.0, self._is_in_sync):
            self.fail("the slaves are not in sync")
        await self._lasts(dice.uniform(0.0, 4.0))
        (master,) = (copy for copy in self.groups["g1"] if self._is_master(copy))
        ends_s = self.loop.now_s + AROUND_S + dice.random()
        silent = dice.choice(self.metaservers).process
        assert master.process is not None and silent is not None
        self.loop.at(ends_s + dice.uniform(-AROUND_S, 1.0), silent.stop)
        end = dice.choice((master.process.kill, master.process.stop))
        with mock.patch.object(master, "start"):  # or its machine would restart it at once
            self.loop.at(ends_s, end)
            self._wait_for(master, ends_s)
            await self._lasts(30.0, lambda: self.took_s > 0)
        if not 0 < self.took_s <= (KILLED_S if master.process.is_dead else SILENT_S):
            self.fail(f"failover took {self.took_s:.1f} s")
        silent.go_on()
        master.process.go_on()
        master.start()

    def _wait_for(self, old: Any, since_s: float) -> None:
        if any(copy is not old and self._is_master(copy) for copy in self.groups["g1"]):
            self.took_s = max(LOOK_S, self.loop.now_s - since_s)
        else:
            self.loop.at(self.loop.now_s + LOOK_S, self._wait_for, old, since_s)

    @staticmethod
    def _is_master(copy: Any) -> bool:
        return copy.is_running and copy.node is not None and copy.node.master is not None

    def _is_in_sync(self) -> bool:
        masters = [copy.node.master for copy in self.groups["g1"] if self._is_master(copy)]
        return len(masters) == 1 and masters[0] is not None and len(masters[0].in_sync) == len(self.groups["g1"]) - 1


def test_failover_is_in_time_beside_a_silent_metaserver() -> None:
    took: list[float] = []
    for seed in range(1, ROUNDS + 1):
        worlds: list[Trial] = []

        def made(*args: Any, **words: Any) -> Trial:
            worlds.append(Trial(*args, **words))  # noqa: B023
            return worlds[-1]  # noqa: B023

        outcome = simulate(seed, is_plain=True, world_of=made)
        took.append(worlds[0].took_s)
        assert_well(outcome)
        assert outcome.acknowledged > 0
    took.sort()
    print(
        f"{ROUNDS} rounds: p50 {took[len(took) // 2]:.1f} s, p99 {took[int(len(took) * 0.99)]:.1f} s, {took[-1]:.1f} s"
    )
