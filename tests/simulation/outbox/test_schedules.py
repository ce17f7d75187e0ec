"""Shell. Random schedules of applications and watchdogs that crash (`make outbox` runs more, on three databases)."""

from __future__ import annotations

import pytest

from qmq.watchdog.settings import Source
from tests.integration.watchdog_world import source_of
from tests.simulation.bugs import assert_found
from tests.simulation.outbox.planted import BUGS
from tests.simulation.outbox.world import play
from tests.simulation.scenarios import SCENARIOS


@pytest.mark.parametrize("seed", range(40))
def test_business_and_consumed_messages_are_equal_in_the_end(seed, tmp_path):
    play(seed, Source(f"sqlite://host:1/{tmp_path}/application.db", age_ms=0))


@pytest.mark.parametrize("seed", range(3))
def test_they_are_on_every_database(seed, database_url):
    play(seed, source_of(database_url, age_ms=0))


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_schedules_find_what_is_wrong(bug):
    assert_found(SCENARIOS["outbox"], bug, 60)
