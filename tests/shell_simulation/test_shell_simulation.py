"""What ships, in one process on virtual time, with everything going wrong that may.

`make simulate SCENARIO=shells` runs more seeds and prints what they met.
"""

from __future__ import annotations

import pytest

from tests.shell_simulation.world import simulate
from tests.simulation.outcome import assert_well
from tests.simulation.scenarios import kept_seeds
from tests.simulation.steering import UNSTEERED, Steering

SEEDS = [(seed, UNSTEERED) for seed in range(1, 5)]
KEPT = [(kept.seed, kept.steering) for kept in kept_seeds("shells")]


@pytest.mark.parametrize("seed, steering", [*SEEDS, *KEPT])
def test_every_promise_is_kept_whatever_fails(seed: int, steering: Steering) -> None:
    outcome = simulate(seed, steering=steering)
    assert_well(outcome)
    assert outcome.acknowledged > 0 and outcome.delivered > 0


def test_a_seed_gives_the_same_trace_twice() -> None:
    assert simulate(4) == simulate(4)
