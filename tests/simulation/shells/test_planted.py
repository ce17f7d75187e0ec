"""Bugs that are planted into shells are found, each within a bounded number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.bugs import assert_found
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.shells.planted import BUGS
from tests.support.planting import Bug

FOUND_WITHIN = 20


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert_found(SCENARIOS["shells"], bug, FOUND_WITHIN)
