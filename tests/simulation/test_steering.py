"""Seeds reach the states that they are steered to, and a failing seed shrinks."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from qmq.client.batch import BATCH_LIFE
from qmq.client.session_life import SESSION
from qmq.log.recovery import HEALTH
from qmq.replication.follower import FOLLOWER
from qmq.replication.slave import SLAVE
from tests.simulation.cores.many_copies import MANY_FAULTS
from tests.simulation.cores.nemesis import FAULTS
from tests.simulation.cores.world import Swarm, simulate
from tests.simulation.outcome import Outcome
from tests.simulation.planted import BUGS
from tests.simulation.run import main
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.search import shrink
from tests.simulation.states import NOT_MET, STATES
from tests.simulation.steering import WAYS, Steering

TABLES = FOLLOWER, SLAVE, HEALTH, SESSION, BATCH_LIFE


@pytest.mark.parametrize("text", ["", "kill", "put_back@SlaveState.RESTORING", "kill_at_a_call@SessionState.RESTING"])
def test_steering_is_parsed_and_printed_alike(text: str) -> None:
    assert str(Steering.parse(text)) == text


def test_steered_seed_strikes_in_its_state() -> None:
    wanted = "errs_once", "FollowerState.CATCHING_UP"
    assert not simulate(1).met[wanted]
    assert simulate(1, steering=Steering(*wanted)).met[wanted]


def test_ways_name_existing_states_and_faults() -> None:
    drawn = Swarm.draw(Random(1))
    for state, way in WAYS.items():
        assert state in STATES and set(way.faults) <= FAULTS.keys() & MANY_FAULTS.keys()
        assert drawn.on_the_way(state) != drawn or not (way.limits or way.settings)


def test_unreachable_states_are_no_goal_of_steering() -> None:
    every = {f"{table.name}.{state.name}" for table in TABLES for state in type(table.initial)}
    assert NOT_MET.keys() <= every
    assert NOT_MET.keys().isdisjoint(state for scenario in SCENARIOS.values() for state in scenario.states)


def test_skipped_strike_does_not_happen() -> None:
    every = frozenset(range(10_000))
    assert simulate(1, steering=Steering("kill", skipped=every)).counts["kill"] == 0


def failing(seed: int, *, steering: Steering) -> Outcome:
    """Fail at six strikes if strikes 2 and 5 happen; otherwise after 30."""
    first = {2, 5}.isdisjoint(steering.skipped)
    strikes = 6 if first else 30
    return Outcome(seed, 0, 0, 0, 0, Counter(strike=strikes), failure="broken")


def test_failing_seed_shrinks_to_needed_strikes() -> None:
    outcome, strikes = shrink(failing, 1)
    assert (outcome.counts["strike"], strikes) == (6, {2, 5})


def test_shrunk_seed_fails_in_the_same_way() -> None:
    bug = BUGS["a lost slave goes on counting"]
    with bug.planted():
        outcome, strikes = shrink(simulate, bug.first)
        skipped = frozenset(range(1000)) - strikes
        assert simulate(bug.first, steering=Steering(skipped=skipped)) == outcome
    assert outcome.failure and strikes


def test_seed_without_failure_needs_no_strike() -> None:
    outcome, strikes = shrink(simulate, 1)
    assert not outcome.failure and strikes == set()


def test_runner_plants_a_bug_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bug", "a lost slave goes on counting", "--seeds", "60"]) == 0
    assert "and enough count" in capsys.readouterr().out


def test_runner_reports_missing_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--jobs", "1"]) == 1
    assert "never happened:" in capsys.readouterr().err
