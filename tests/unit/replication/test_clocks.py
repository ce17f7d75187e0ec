"""Core. Clocks that were heard lately, and which of them are too far from ours."""

from __future__ import annotations

from qmq.replication.clocks import READING_MS_MAX, Clocks


def test_what_a_clock_said_goes_on_by_ours_and_counts_for_a_while():
    clocks = Clocks(1_000)
    assert clocks.ahead_ms(now_ms=50_000, monotonic_ms=100) == {}
    clocks.heard("slave", 50_000, monotonic_ms=100)
    assert clocks.ahead_ms(now_ms=50_007, monotonic_ms=100) == {"slave": 7}
    assert clocks.ahead_ms(now_ms=50_007, monotonic_ms=103) == {"slave": 4}
    last_ms = 100 + READING_MS_MAX
    assert clocks.ahead_ms(now_ms=50_000, monotonic_ms=last_ms) == {"slave": -READING_MS_MAX}
    assert clocks.ahead_ms(now_ms=50_000, monotonic_ms=last_ms + 1) == {}


def test_clocks_that_differ_by_more_than_they_may_are_named():
    clocks = Clocks(1_000)
    assert clocks.disagreement({"slave": 1_000, "metaserver": -1_000}) == ""
    assert clocks.disagreement({"slave": 1_001, "metaserver": -2_500_000, "master": 0}) == (
        "this machine's is 2,500.0 s behind the metaserver's; this machine's is 1.0 s ahead of the slave's"
    )
