"""Shell. Real processes, faults of all kinds, and the check of the whole history; `qmq chaos` runs for longer."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from qmq.deploy.chaos.clients import FAULTS
from qmq.deploy.chaos.records import KILLED, LEFT, STORED
from qmq.deploy.chaos.trial import Load, Nemesis, attempt, possible
from tests.support.ports import run_of_ports

SEED = 1
MESSAGES = 50_000


def run(folder, strike, **options):
    lines = []
    trial = attempt(folder, seed=SEED, strike=strike, http_port=run_of_ports(), say=lines.append, **options)
    outcome = asyncio.run(trial)
    assert not outcome.findings, "\n".join([*lines, *map(str, outcome.findings)])
    stored = Counter(message.outcome for message in outcome.history.messages.values())[STORED]
    return outcome, stored


def test_every_fault_keeps_all_promises(tmp_path):
    """W2, W3, W13, W14, W16."""
    outcome, stored = run(tmp_path, Nemesis.strike_all)
    assert stored > 1000, outcome.summary()
    assert len(set(outcome.faults)) == len(possible()) >= 17, outcome.faults


def test_consumers_under_faults_get_each_message(tmp_path):
    """Consumers nack, give up, vanish, stand still and rejoin while masters and slaves are killed and swapped."""
    strike = partial(Nemesis.strike_in_order, names=FAULTS)
    load = Load(MESSAGES, rate=1_500)
    outcome, stored = run(tmp_path, lambda nemesis, is_over: strike(nemesis, is_over=is_over), load=load)
    history = outcome.history
    assert stored > 0.9 * MESSAGES and len(history.messages) == MESSAGES, outcome.summary()
    assert {KILLED, LEFT, "stalled"} <= set(history.consumer_faults), outcome.summary()
    assert {"kill master", "swap roles", "kill slave"} <= set(outcome.faults), outcome.summary()
    assert any(history.dead.values()) and any(delivery.got.times > 1 for delivery in history.got), outcome.summary()
