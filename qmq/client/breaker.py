"""Core. A circuit breaker: a broker group that takes requests and answers none gets no more of them for a while.

A request fails when its connection is lost or answers none in time. Any answer is a success, a refusal too: a broker
that is overloaded or readonly is alive, and `qmq.client.routing` lets it rest for as long as that takes.

    closed      FAILURES_MAX failures in a row                  -> open
    open        OPEN_MS later, when it is next looked at        -> half-open
    half-open   one failure                                     -> open
    half-open   SUCCESSES answers                               -> closed

Source: reference of QMQ's client features, section 11.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES_MAX = 100
OPEN_MS = 5_000
SUCCESSES = 20


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The breaker of one broker group's master. Made by a producer; a new master gets a new one."""

    __slots__ = ("state", "_failures", "_successes", "_opened_ms")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = self._successes = self._opened_ms = 0

    def allows(self, now_ms: int) -> bool:
        """Say whether a request may be sent now."""
        if self.state is not BreakerState.OPEN:
            return True
        if now_ms - self._opened_ms < OPEN_MS:
            return False
        self.state, self._successes = BreakerState.HALF_OPEN, 0
        return True

    def answered(self) -> None:
        """A request was answered, with whatever."""
        self._failures = 0
        if self.state is BreakerState.HALF_OPEN:
            self._successes += 1
            if self._successes >= SUCCESSES:
                self.state = BreakerState.CLOSED

    def failed(self, now_ms: int) -> bool:
        """A request will not be answered; return whether that opened the breaker."""
        self._failures += 1
        if self.state is BreakerState.OPEN:  # one of those that were under way
            return False
        if self.state is BreakerState.CLOSED and self._failures < FAILURES_MAX:
            return False
        self.state, self._opened_ms = BreakerState.OPEN, now_ms
        return True
