"""Shell. Every fault once, at random moments, against real processes; `qmq chaos` runs for longer."""

from __future__ import annotations

import asyncio

from qmq.deploy.chaos.nemesis import Nemesis, possible
from qmq.deploy.chaos.trial import attempt
from tests.support.ports import run_of_ports

SEED = 1


def test_no_fault_takes_doubles_or_reorders_what_was_acknowledged(tmp_path):
    """Kill -9 at any moment, in any order, and what operators do meanwhile; W2, W3, W13, W14, W16."""
    told = []
    outcome = asyncio.run(
        attempt(tmp_path, seed=SEED, strike=Nemesis.strike_all, http_port=run_of_ports(), say=told.append)
    )
    assert not outcome.findings, "\n".join([*told, *map(str, outcome.findings)])
    assert len([one for one in outcome.history.sent if one.outcome == "stored"]) > 1000, outcome.summary()
    assert len({line.partition(" group=")[0] for line in told}) == len(possible()) >= 17, told
