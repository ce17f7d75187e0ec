"""Shell. Delayed messages come due while their servers are killed and swapped; receivers get exactly those sent.

`make delay-ledger` runs 100,000 messages, twenty kills and five swaps.
"""

from __future__ import annotations

from tests.chaos.delay_trial import run_trial


def test_delayed_messages_arrive_once_despite_kills_and_swaps(tmp_path):
    ledgers = run_trial(tmp_path, messages=3_000, kills=4, swaps=1, spread_s=10.0, say=lambda line: None)
    assert len(ledgers.stored) == 3_000 and (ledgers.kills, ledgers.swaps) == (4, 1)
    assert (ledgers.lost, ledgers.doubled, ledgers.early, ledgers.unknown) == ([], [], [], [])
