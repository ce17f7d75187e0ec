"""Core. The circuit breaker's four moves, and what counts for them."""

from __future__ import annotations

import pytest

from qmq.client.routes import FAILURES_MAX, OPEN_MS, SUCCESSES, Breaker, BreakerState


def opened(now_ms: int = 0) -> Breaker:
    breaker = Breaker()
    assert [breaker.failed(now_ms) for _ in range(FAILURES_MAX)] == [False] * (FAILURES_MAX - 1) + [True]
    return breaker


def test_the_limits_are_those_of_qmq():
    assert (FAILURES_MAX, OPEN_MS, SUCCESSES) == (100, 5_000, 20)


def test_a_hundred_failures_in_a_row_open_it_and_one_answer_begins_the_count_anew():
    """Rule: closed."""
    breaker = Breaker()
    for _ in range(FAILURES_MAX - 1):
        assert not breaker.failed(0)
    breaker.answered()
    for _ in range(FAILURES_MAX - 1):
        assert not breaker.failed(0)
    assert breaker.allows(0) and breaker.failed(0)
    assert not breaker.allows(0)


@pytest.mark.parametrize("after_ms, is_allowed", [(0, False), (OPEN_MS - 1, False), (OPEN_MS, True)])
def test_open_it_allows_nothing_for_five_seconds_and_is_half_open_when_next_looked_at(after_ms, is_allowed):
    """Rule: open."""
    breaker = opened(now_ms=1_000)
    assert breaker.allows(1_000 + after_ms) is is_allowed
    assert breaker.state is (BreakerState.HALF_OPEN if is_allowed else BreakerState.OPEN)


def test_half_open_twenty_answers_close_it():
    """Rule: half-open, all requests pass."""
    breaker = opened()
    for _ in range(SUCCESSES):
        assert breaker.allows(OPEN_MS) and breaker.state is BreakerState.HALF_OPEN
        breaker.answered()
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.failed(OPEN_MS), "closed, it counts to a hundred again"


def test_half_open_one_failure_opens_it_for_the_whole_time():
    """Rule: half-open."""
    breaker = opened()
    breaker.allows(OPEN_MS)
    for _ in range(SUCCESSES - 1):
        breaker.answered()
    assert breaker.failed(7_000)
    assert not breaker.allows(7_000 + OPEN_MS - 1) and breaker.allows(7_000 + OPEN_MS)


def test_failures_of_what_was_under_way_do_not_keep_it_open_for_longer():
    breaker = opened(now_ms=0)
    assert not breaker.failed(4_000)
    assert breaker.allows(OPEN_MS)
