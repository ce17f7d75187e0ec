"""Shell. Random schedules of applications and watchdogs that crash (`make outbox` runs more, on three databases)."""

from __future__ import annotations

import pytest

from tests.outbox.world import play
from watchdog.sources import Source


@pytest.mark.parametrize("seed", range(60))
def test_business_and_consumed_messages_are_equal_in_the_end(seed, tmp_path):
    play(seed, Source(f"sqlite://host:1/{tmp_path}/application.db", age_ms=0))
