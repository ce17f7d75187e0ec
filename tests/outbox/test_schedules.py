"""Shell. Random schedules of applications and watchdogs that crash (`make outbox` runs more, on three databases)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.errors import IllegalTransition
from qmq.watchdog.claims import ClaimName
from qmq.watchdog.draining import Draining
from qmq.watchdog.sources import Source
from tests.integration.watchdog_world import source_of
from tests.outbox.world import play


@pytest.mark.parametrize("seed", range(40))
def test_business_and_consumed_messages_are_equal_in_the_end(seed, tmp_path):
    play(seed, Source(f"sqlite://host:1/{tmp_path}/application.db", age_ms=0))


@pytest.mark.parametrize("seed", range(3))
def test_they_are_on_every_database(seed, database_url):
    play(seed, source_of(database_url, age_ms=0))


def _forget_the_term(self, term):
    return self


def _send_before_the_claim(self, page, now_ms):
    compose(self, page, now_ms)
    for text, claim in self._new.items():
        self._claims[text] = replace(claim, rows=list(claim.rows))


compose = Draining._compose

PLANTED = [
    pytest.param(ClaimName, "of_term", _forget_the_term, id="a new leader does not put its term in the claim"),
    pytest.param(
        Draining, "_repeat_delay_ms", lambda self, claim: self._release(claim, "?") or 0, id="doubt is dropped"
    ),
    pytest.param(Draining, "_compose", _send_before_the_claim, id="sent before the claim is stored"),
]


@pytest.mark.parametrize("owner, name, wrong", PLANTED)
def test_schedules_find_what_is_wrong(owner, name, wrong, monkeypatch, tmp_path):
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError, IllegalTransition)):
        for seed in range(60):
            play(seed, Source(f"sqlite://host:1/{tmp_path}/{seed}.db", age_ms=0))
