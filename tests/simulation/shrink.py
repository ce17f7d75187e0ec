"""The few strikes of a failing seed without which it would not fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.outcome import Outcome
from tests.simulation.steering import UNSTEERED, Steering


def shrink(
    simulate: Callable[..., Outcome], seed: int, *, steering: Steering = UNSTEERED, **kinds: Any
) -> tuple[Outcome, set[int]]:
    """Leave out one strike after the other, as long as a promise is broken by fewer of them; return the last outcome
    that broke one, and the strikes that it had. A run may last longer without a strike, and have others for it."""
    outcome = simulate(seed, steering=steering, **kinds)
    skipped = steering.skipped
    struck = _struck(outcome, skipped)
    for number in sorted(struck, reverse=True):
        less = simulate(seed, steering=replace(steering, skipped=skipped | {number}), **kinds)
        if len(_struck(less, skipped | {number})) < len(struck) and less.failure:
            outcome, skipped = less, skipped | {number}
            struck = _struck(outcome, skipped)
    return outcome, struck


def _struck(outcome: Outcome, skipped: frozenset[int]) -> set[int]:
    return set(range(outcome.counts["strike"])) - skipped if outcome.failure else set()
