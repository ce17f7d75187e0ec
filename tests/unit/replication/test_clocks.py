"""Core. Readings of other clocks, and those too far from the own clock."""

from __future__ import annotations

import pytest

from qmq.replication.clocks import READING_MS_MAX, Clocks


def test_clock_reading_advances_and_expires():
    clocks = Clocks(1_000)
    assert clocks.ahead_ms(now_ms=50_000, monotonic_ms=100) == {}
    clocks.record("slave", 50_000, monotonic_ms=100)
    assert clocks.ahead_ms(now_ms=50_007, monotonic_ms=100) == {"slave": 7}
    assert clocks.ahead_ms(now_ms=50_007, monotonic_ms=103) == {"slave": 4}
    last_ms = 100 + READING_MS_MAX
    assert clocks.ahead_ms(now_ms=50_000, monotonic_ms=last_ms) == {"slave": -READING_MS_MAX}
    assert clocks.ahead_ms(now_ms=50_000, monotonic_ms=last_ms + 1) == {}


def test_disagreement_names_clocks_beyond_the_limit():
    clocks = Clocks(1_000)
    assert clocks.disagreement({"slave": 1_000, "metaserver": -1_000}) == ""
    assert clocks.disagreement({"slave": 1_001, "metaserver": -2_500_000, "master": 0}) == (
        "this machine's is 2,500.0 s behind the metaserver's; this machine's is 1.0 s ahead of the slave's"
    )


@pytest.mark.parametrize(
    ("ahead_ms", "off_s"),
    [
        ({"metaserver": 5_200, "master": 9_000}, 5),
        ({"metaserver": -3_600_000, "master": -2_400}, -2),
        ({"metaserver": 5_200, "master": 999}, 0),
        ({"metaserver": 5_200, "master": -3_000}, 0),  # the own clock is the median
        ({"metaserver": -(1 << 50), "master": -(1 << 50)}, -(1 << 30)),
        ({"metaserver": 5_200, "slave b": 3_000, "slave c": -20}, 0),
        ({"metaserver": 5_200}, 0),
        ({"slave b": 3_000, "slave c": 3_000}, 0),
        ({}, 0),
    ],
)
def test_own_clock_is_off_if_all_others_agree(ahead_ms, off_s):
    assert Clocks(1_000).off_s(ahead_ms) == off_s
