"""What ships, in one process on virtual time, with everything going wrong that may.

`make simulate-shells` runs more seeds and prints what they met.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.shell_simulation.planted import BUGS
from tests.shell_simulation.world import simulate
from tests.support.planting import Bug, assert_found

SEEDS = range(1, 5)
FOUND_WITHIN = 20


def kept() -> list[int]:
    lines = (Path(__file__).parents[1] / "seeds" / "shells.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("seed", [*SEEDS, *kept()])
def test_every_promise_is_kept_whatever_fails(seed: int) -> None:
    outcome = simulate(seed)
    events = "\n".join(outcome.recent)
    assert not outcome.failure, f"{events}\nseed {seed}: {outcome.failure}"
    assert outcome.acknowledged > 0 and outcome.delivered > 0


def test_a_seed_gives_the_same_trace_twice() -> None:
    assert simulate(4) == simulate(4)


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, FOUND_WITHIN, partial(simulate, favoured=bug.favoured))
