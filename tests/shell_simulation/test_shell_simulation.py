"""What ships, in one process on virtual time, with everything going wrong that may.

`make simulate SCENARIO=shells` runs more seeds and prints what they met.
"""

from __future__ import annotations

import pytest

from tests.shell_simulation.world import simulate
from tests.simulation.outcome import assert_well
from tests.simulation.scenarios import kept_seeds
from tests.simulation.steering import Steering

PLAIN = 1, 2, 3, 4
KEPT = [(kept.seed, kept.steering) for kept in kept_seeds("shells")]
DISKS = [(12, Steering("wipe")), (16, Steering("flush lies"))]


@pytest.mark.parametrize("seed", PLAIN)
def test_every_promise_is_kept_whatever_fails(seed: int) -> None:
    outcome = simulate(seed, is_plain=True)
    assert_well(outcome)
    assert outcome.acknowledged > 0 and outcome.delivered > 0


@pytest.mark.parametrize("seed, steering", [*DISKS, *KEPT])
def test_every_promise_is_kept_though_a_disk_loses_what_it_had(seed: int, steering: Steering) -> None:
    outcome = simulate(seed, steering=steering)
    assert_well(outcome)
    assert outcome.acknowledged > 0 and outcome.delivered > 0


def test_a_seed_gives_the_same_trace_twice() -> None:
    assert simulate(4, is_plain=True) == simulate(4, is_plain=True)
