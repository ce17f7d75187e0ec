"""Nemesis of a world: its table of faults, and when they strike.

Subclasses mark each fault with `@fault`. A fault returns whether it did anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Protocol, TypeVar

from tests.simulation.events import Met
from tests.simulation.steering import Steering

Strike = TypeVar("Strike", bound=Callable[..., bool])
RARE = 0.3
"""Weight of faults after which copies need long to be well again."""


def fault(weight: float = 1.0) -> Callable[[Strike], Strike]:
    """Enter a method into its class's table of faults; `weight`: how often it strikes at most."""

    def mark(strike: Strike) -> Strike:
        strike.weight = weight
        return strike

    return mark


def faults_of(nemesis: type) -> dict[str, float]:
    """Return the table of faults, as name -> weight; those of base classes first."""
    classes = reversed(nemesis.__mro__)
    return {name: strike.weight for cls in classes for name, strike in vars(cls).items() if hasattr(strike, "weight")}


class Record(Protocol):
    """A world's notes of its strikes."""

    counts: Counter[str]
    met: Met

    def note(self, text: str) -> None: ...


class Nemesis:
    """Made per seed; strikes until it is stopped.

    Args:
        least: weight that each enabled fault has at least.
        ways: faults that lead to the state that the seed is steered to.
    """

    def __init__(
        self,
        rng: Random,
        steering: Steering,
        record: Record,
        faults: Mapping[str, float],
        *,
        least: float,
        ways: Iterable[str] = (),
    ) -> None:
        self._rng = rng
        self._steering = steering
        self._record = record
        self._weights = steering.enabled(rng, faults, faults, least=least, ways=ways)
        self._is_active = True

    def stop(self) -> None:
        self._is_active = False

    def states(self) -> list[str]:
        """Name the states that the world's copies and clients are in."""
        raise NotImplementedError

    def _again(self) -> None:
        """Let `_strike` be called after a pause."""
        raise NotImplementedError

    def _reroll(self, text: str) -> None:
        """Take new dice, where each strike has its own."""

    def _strike(self) -> None:
        if self._is_active:
            self._strike_by("")
            self._again()

    def _strike_by(self, name: str) -> bool:
        """Strike by this fault, or by one that the dice choose; return whether it did anything."""
        counts = self._record.counts
        number = counts["strike"]
        counts["strike"] += 1
        self._reroll(f"strike {number}")
        name = name or self._rng.choices(list(self._weights), self._weights.values())[0]
        states = self.states()
        has_struck = number not in self._steering.skipped and bool(getattr(self, name)())
        if has_struck:
            counts[name] += 1
            self._record.met.update((name, state) for state in states)
            self._record.note(f"nemesis {number}: {name}")
        self._reroll(f"pause {number}")
        return has_struck
