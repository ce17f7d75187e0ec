"""Each planted bug is found within a bounded number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.bugs import Bug
from tests.simulation.planted import BUGS
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.search import first_seed_with


@pytest.mark.parametrize("bug", [pytest.param(bug, id=f"{bug.scenario}: {name}") for name, bug in BUGS.items()])
def test_planted_bug_is_found(bug: Bug) -> None:
    scenario = SCENARIOS[bug.scenario]
    outcome = first_seed_with(bug, scenario, scenario.bug_seeds)
    assert outcome is not None, f"{bug.name}: no failure in {scenario.bug_seeds} seeds from {bug.first} on"
    print(f"{bug.name}: seed {outcome.seed}: {outcome.failure.splitlines()[0]}")


def test_planted_bugs_fit_the_product() -> None:
    for bug in BUGS.values():
        with bug.planted():
            pass


def test_planted_bugs_name_faults_of_their_scenario() -> None:
    for bug in BUGS.values():
        assert bug.favoured in ("", *SCENARIOS[bug.scenario].faults)
