"""Bugs that are planted into what ships are found, each within a bounded number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.bugs import assert_found
from tests.simulation.cores.planted import BUGS, CLONE_BUGS
from tests.simulation.scenarios import SCENARIOS
from tests.support.planting import Bug

FOUND_WITHIN = 500


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert_found(SCENARIOS["cores"], bug, FOUND_WITHIN)


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in CLONE_BUGS])
def test_a_bug_with_copied_directories_is_found(bug: Bug) -> None:
    assert_found(SCENARIOS["clones"], bug, FOUND_WITHIN)
