"""A delay group, its broker groups and its clients, with everything going wrong that may (I11).

`python -m tests.simulation --scenario delay` runs more seeds and prints what they met.
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from tests.simulation.bugs import assert_found
from tests.simulation.delay.planted import BUGS
from tests.simulation.delay.world import DelayWorld, simulate
from tests.simulation.outcome import Outcome, assert_well
from tests.simulation.scenarios import SCENARIOS, kept_seeds
from tests.simulation.steering import Steering
from tests.support.planting import Bug

SEEDS = range(1, 25)
FOUND_WITHIN = 40


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    logging.disable(logging.CRITICAL)
    found = [simulate(seed) for seed in SEEDS]
    logging.disable(logging.NOTSET)
    return found


def test_delayed_messages_are_sent_once_in_time_and_not_when_cancelled_whatever_fails(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert_well(outcome)


def test_the_seeds_do_enough_work_to_mean_something(outcomes: list[Outcome]) -> None:
    counts: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    assert sum(outcome.acknowledged for outcome in outcomes) > 1_000
    wanted = (
        "told: cancelled",
        "told: rescheduled",
        "told: sent",
        "outcome unknown",
        "schedule made anew",
        "swapped",
        "schedule begins with its checkpoint",
        "schedule compared",
        "segment dropped",
    )
    assert [name for name in wanted if not counts[name]] == []


def test_a_seed_gives_the_same_trace_twice() -> None:
    assert simulate(17) == simulate(17)


def test_seeds_that_found_something_find_it_no_more() -> None:
    seeds = kept_seeds("delay")
    for seed, steering, _ in seeds:
        assert_well(simulate(seed, steering=steering))
    assert seeds


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert_found(SCENARIOS["delay"], bug, FOUND_WITHIN)


def test_a_seed_is_as_wild_as_the_fault_that_it_is_steered_to() -> None:
    seed = next(seed for seed in range(1, 100) if DelayWorld(seed).is_calm)
    outcome = simulate(seed, steering=Steering("put_back"))
    assert not outcome.failure and outcome.counts["strike"] > 0
