"""How a seed is steered: to a fault, to a state that the fault shall meet, or past some of its strikes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Steering:
    """`fault`: half of the strikes are this one. `state`: it strikes besides whenever a copy is in this state.
    `skipped`: numbers of strikes that are left out."""

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
        self, rng: Random, faults: Iterable[str], weights: Mapping[str, float], least: float
    ) -> dict[str, float]:
        """Draw the faults of a seed, with how often they strike: up to their weight more than `least`."""
        names = list(faults)
        chosen = [name for name in names if rng.random() < 0.6 or name == self.fault] or names
        drawn = {name: rng.random() * weights.get(name, 1.0) + least for name in chosen}
        if self.fault:
            drawn[self.fault] = sum(drawn.values())
        return drawn


UNSTEERED = Steering()
