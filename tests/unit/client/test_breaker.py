"""Core. Moves of the circuit breaker."""

from __future__ import annotations

import pytest

from qmq.client.routes import FAILURES_MAX, OPEN_MS, SUCCESSES, Breaker, BreakerState


def opened(now_ms: int = 0) -> Breaker:
    breaker = Breaker()
    assert [breaker.failed(now_ms) for _ in range(FAILURES_MAX)] == [False] * (FAILURES_MAX - 1) + [True]
    return breaker


def test_the_limits_are_those_of_qmq():
    assert (FAILURES_MAX, OPEN_MS, SUCCESSES) == (100, 5_000, 20)


def test_hundred_failures_open_the_breaker():
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
def test_open_breaker_turns_half_open(after_ms, is_allowed):
    """Rule: open."""
    breaker = opened(now_ms=1_000)
    assert breaker.allows(1_000 + after_ms) is is_allowed
    assert breaker.state is (BreakerState.HALF_OPEN if is_allowed else BreakerState.OPEN)


def test_twenty_answers_close_the_breaker():
    """Rule: half-open, all requests pass."""
    breaker = opened()
    for _ in range(SUCCESSES):
        assert breaker.allows(OPEN_MS) and breaker.state is BreakerState.HALF_OPEN
        breaker.answered()
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.failed(OPEN_MS), "closed, it counts to a hundred again"


def test_half_open_failure_reopens():
    """Rule: half-open."""
    breaker = opened()
    breaker.allows(OPEN_MS)
    for _ in range(SUCCESSES - 1):
        breaker.answered()
    assert breaker.failed(7_000)
    assert not breaker.allows(7_000 + OPEN_MS - 1) and breaker.allows(7_000 + OPEN_MS)


def test_late_failures_do_not_extend_opening():
    breaker = opened(now_ms=0)
    assert not breaker.failed(4_000)
    assert breaker.allows(OPEN_MS)
