"""Shell. 50,000 messages through real processes that die, stall and swap; `make history` sends a million."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.history.records import KILLED, LEFT, STORED
from tests.history.trial import attempt

MESSAGES = 50_000
SEED = 1


def test_nothing_is_lost_or_doubled_without_a_cause_and_keys_keep_their_order(tmp_path):
    """Consumers nack, give up, vanish, stand still and rejoin while masters and slaves are killed and swapped."""
    told = []
    outcome = asyncio.run(attempt(tmp_path, messages=MESSAGES, rate=1_500, keys=3_000, seed=SEED, say=told.append))
    assert not outcome.findings, "\n".join([*told, *map(str, outcome.findings)])
    history, summary = outcome.history, outcome.summary()
    stored = Counter(one.outcome for one in history.messages.values())[STORED]
    assert stored > 0.9 * MESSAGES and len(history.messages) == MESSAGES, summary
    assert {KILLED, LEFT, "stalled"} <= set(history.befell), told
    assert {"kill master", "swap roles", "kill slave"} <= {fault.name for fault in history.faults}, told
    assert any(history.dead.values()) and any(one.times > 1 for one in every_got(history)), summary


def every_got(history):
    return (one.got for numbers in history.by_consumer.values() for one in numbers.values())
