"""Bugs that are planted into what ships are found, each within a bounded number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.planted import BUGS, Bug, search

FOUND_WITHIN = 500


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    outcome = search(bug, range(bug.first, bug.first + FOUND_WITHIN))
    assert outcome is not None, f"nobody notices: {bug.name}"
    print(f"{bug.name}: seed {outcome.seed}: {outcome.failure.splitlines()[0]}")
