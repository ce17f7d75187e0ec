"""Bugs that are planted into what ships are found, each within a bounded number of seeds."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.planted import BUGS, Bug, simulate_with
from tests.support.planting import assert_found

FOUND_WITHIN = 500


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, FOUND_WITHIN, partial(simulate_with, bug))
