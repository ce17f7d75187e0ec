"""How a seed is steered: to a fault, to a state that the fault shall meet, or past some of its strikes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

CALM = 4
"""How many times as often as all others the faults strike that lead to a state: others lead away from it."""


@dataclass(frozen=True)
class Steering:
    """`fault`: half of the strikes are this one. `state`: it strikes whenever a copy is in this state, and most other
    strikes are those which bring copies there (`tests.simulation.ways`). `skipped`: numbers of strikes left out."""

    fault: str = ""
    state: str = ""
    skipped: frozenset[int] = frozenset()

    @staticmethod
    def parse(text: str) -> Steering:
        """Read `FAULT` or `FAULT@STATE`."""
        fault, _, state = text.partition("@")
        return Steering(fault, state)

    def __str__(self) -> str:
        return f"{self.fault}@{self.state}" if self.state else self.fault

    def enabled(
        self, rng: Random, faults: Iterable[str], weights: Mapping[str, float], least: float, ways: Iterable[str] = ()
    ) -> dict[str, float]:
        """Draw the faults of a seed, with how often they strike: up to their weight more than `least`. `ways`: faults
        that bring copies to the state."""
        names = list(faults)
        favoured = [name for name in names if name in ways] or [self.fault]
        chosen = [name for name in names if rng.random() < 0.6 or name in favoured] or names
        drawn = {name: rng.random() * weights.get(name, 1.0) + least for name in chosen}
        if self.fault:
            times = CALM if self.state else 1
            drawn |= dict.fromkeys(favoured, times * sum(drawn.values()) / len(favoured))
        return drawn


UNSTEERED = Steering()
