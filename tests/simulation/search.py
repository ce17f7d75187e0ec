"""Searches: the first seed that shows a planted bug, and the fewest strikes with which a failing seed fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.bugs import Bug
from tests.simulation.outcome import Outcome
from tests.simulation.scenarios import Scenario
from tests.simulation.steering import UNSTEERED, Steering

MISFITS = "TypeError", "AttributeError", "NameError"
"""Errors of a patch after a change of its function."""


def first_seed_with(bug: Bug, scenario: Scenario, count: int) -> Outcome | None:
    """Return the first outcome that shows the bug; None: not one of `count` seeds does.

    Raises:
        AssertionError: the bug's patch does not fit the product.
    """
    kinds = {**scenario.of_bugs, **bug.kinds}
    with bug.planted():
        for seed in range(bug.first, bug.first + count):
            outcome = scenario.simulate(seed, steering=Steering(bug.favoured), **kinds)
            if outcome.failure.startswith(MISFITS):
                raise AssertionError(f"{bug.name} does not fit the product any more: {outcome.failure}")
            if outcome.failure:
                return outcome
    return None


def shrink(
    simulate: Callable[..., Outcome], seed: int, *, steering: Steering = UNSTEERED, **kinds: Any
) -> tuple[Outcome, set[int]]:
    """Leave out strikes one by one while fewer of them still break a promise.

    Returns:
        The last failing outcome and its strikes. A run without a strike may last longer and have other strikes.
    """
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
