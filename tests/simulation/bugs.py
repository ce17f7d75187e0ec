"""Looks for planted bugs, seed after seed. A simulator that does not find them proves nothing."""

from __future__ import annotations

from tests.simulation.outcome import Outcome
from tests.simulation.scenarios import Scenario
from tests.simulation.steering import Steering
from tests.support.planting import Bug, planted


def search(scenario: Scenario, bug: Bug, count: int) -> Outcome | None:
    """Return the first outcome that shows the bug."""
    kinds = {**scenario.of_bugs, **bug.kinds}
    with planted(bug):
        for seed in range(bug.first, bug.first + count):
            outcome = scenario.simulate(seed, steering=Steering(bug.favoured), **kinds)
            if outcome.failure:
                return outcome
    return None


def assert_found(scenario: Scenario, bug: Bug, within: int) -> None:
    outcome = search(scenario, bug, within)
    assert outcome is not None, f"nobody notices: {bug.name}"
    print(f"{bug.name}: seed {outcome.seed}: {outcome.failure.splitlines()[0]}")
