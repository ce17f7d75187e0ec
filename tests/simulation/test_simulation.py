"""Two brokers, the metaserver's row and their clients, with everything going wrong that may, a thousand times over.

`make simulate` runs more seeds and prints what they met.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.cores.world import simulate
from tests.simulation.coverage import STATES, Met
from tests.simulation.outcome import Outcome, assert_well
from tests.simulation.scenarios import SCENARIOS, kept_seeds, of_mix
from tests.simulation.steering import UNSTEERED, Steering

SEEDS = range(10_001, 10_161)
MOVES = range(10_001, 10_041)
FAILOVERS = range(10_001, 10_013)
COPIES = range(10_001, 10_021)
CLONES = range(10_001, 10_013)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    logging.disable(logging.CRITICAL)
    found = [*map(simulate, SEEDS), simulate(10_026, steering=Steering("put_back"))]
    logging.disable(logging.NOTSET)
    return found


def test_every_promise_is_kept_whatever_fails(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert_well(outcome)


def test_every_kind_of_fault_occurs(outcomes: list[Outcome]) -> None:
    counts: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    assert [name for name in SCENARIOS["cores"].must_occur if not counts[name]] == []


def test_the_seeds_do_enough_work_to_mean_something(outcomes: list[Outcome]) -> None:
    assert sum(outcome.acknowledged for outcome in outcomes) > 10_000
    assert sum(outcome.delivered for outcome in outcomes) > 10_000
    assert sum(outcome.counts["swapped"] + outcome.counts["role change"] for outcome in outcomes) > 30


def test_every_promise_is_kept_while_an_operator_moves_groups() -> None:
    counts: Counter[str] = Counter()
    for seed in MOVES:
        outcome = simulate(seed, moves=True)
        assert_well(outcome)
        counts += outcome.counts
    assert min(counts[name] for name in ("move told", "move refused")) > 0


def test_every_promise_is_kept_while_the_metaserver_makes_slaves_masters() -> None:
    counts: Counter[str] = Counter()
    for seed in FAILOVERS:
        outcome = simulate(seed, fails_over=True)
        assert_well(outcome)
        counts += outcome.counts
    assert counts["failed over"] > 0


def test_every_promise_is_kept_while_copies_of_directories_run() -> None:
    counts: Counter[str] = Counter()
    for seed in CLONES:
        outcome = SCENARIOS["clones"].simulate(seed, steering=Steering("clone"))
        assert_well(outcome)
        counts += outcome.counts
    assert [name for name in ("clone", "copy refused", "began elsewhere", "failed over") if not counts[name]] == []


def test_every_promise_is_kept_with_three_copies() -> None:
    counts: Counter[str] = Counter()
    mix = ((seed, 2 if seed % 4 else 3, UNSTEERED) for seed in COPIES)
    for seed, min_copies, steering in (*mix, (10_016, 2, Steering("put_back")), (10_055, 3, UNSTEERED)):
        outcome = simulate(seed, copies=3, min_copies=min_copies, steering=steering)
        assert_well(outcome)
        counts += outcome.counts
    names = ("failed over", "swapped", "promised", "row raised", "cut_off_master", "batch acknowledged")
    names += ("put_back", "forgets_last_write", "flush_lies", "flip", "rotten_tail")
    assert [name for name in names if not counts[name]] == []


def test_seeds_that_found_something_find_it_no_more() -> None:
    seeds = kept_seeds("cores")
    for seed, steering, _ in seeds:
        assert_well(of_mix(seed, steering=steering))
    assert seeds


RARE = {"FollowerState.DIVERGED", "SlaveState.AWAITING_SNAPSHOT"}
"""These take more seeds than the suite has."""


def test_each_state_of_a_copy_is_met_by_some_fault(outcomes: list[Outcome]) -> None:
    met: Met = Counter()
    for outcome in outcomes:
        met.update(outcome.met)
    states = {state for _, state in met}
    assert {state for state in STATES if state not in states} <= RARE


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_seed_gives_the_same_trace_twice(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def test_a_seed_gives_the_same_trace_in_another_process_with_other_hashes() -> None:
    said = set()
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "5"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        said.add(run.stdout)
    assert len(said) == 1, said
