"""Shell. A few of the rounds of `python -m tests.chaos.silent_metaserver`."""

from __future__ import annotations

import asyncio

from tests.chaos.silent_metaserver import GROUPS, trial
from tests.support.promises import Tries


def test_slaves_are_promoted_beside_a_silent_metaserver(tmp_path, mariadb):
    """docs/failover.md."""
    for number in (tries := Tries(7.0, "each slave is the master")):
        folder = tmp_path / str(number)
        folder.mkdir()
        with trial(folder, mariadb.create_database(), seed=number) as running:
            assert asyncio.run(running.run(GROUPS)) == []
            tries.took(running.longest_s("silent"))
