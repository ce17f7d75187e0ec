"""Core. Patience: the wait for a heartbeat's answer before the broker goes to another metaserver.

A stalled metaserver keeps its connections, so its brokers would miss a new master. A busy one answers late, and the
next may be as busy. So each change of metaserver doubles the wait, and measured answer times shorten it again.

    heartbeat ─► answered ─► next one
             └─► no answer for `limit_s` ─► did this process stall itself? ─► yes: wait once more
                                                                         └─► no: leave
"""

from __future__ import annotations

SILENT_S = 2.0
SILENT_S_MAX = 10.0
LATE_S = 0.5
"""A check that runs this late was delayed by this process itself, so the answer may have arrived unread."""
CALM_S = 5.0
"""Window of measured answer times, which decide the next wait. With a longer window, one stalled metaserver would make
its brokers slow to leave the next one.
"""


class Patience:
    """Wait of one broker, kept over all metaservers. `now_s` is of a monotonic clock."""

    def __init__(self) -> None:
        self.limit_s = SILENT_S
        self._asked_s: float | None = None
        """Time when the oldest heartbeat without an answer was sent."""
        self._wait_s = SILENT_S
        self._slowest_s = 0.0
        self._since_s: float | None = None

    def begin(self) -> None:
        """Begin a new stream of heartbeats; answers of the stream before are not waited for."""
        self._asked_s = self._since_s = None

    def asked(self, now_s: float) -> None:
        """Record a heartbeat that is sent."""
        if self._asked_s is None:
            self._asked_s = now_s
            self._wait_s = self.limit_s

    def answered(self, now_s: float) -> None:
        """Record an answer of the metaserver."""
        if self._since_s is None:
            self._since_s = now_s
            self._slowest_s = 0.0
        if self._asked_s is not None:
            self._slowest_s = max(self._slowest_s, now_s - self._asked_s)
        self._asked_s = None
        if now_s - self._since_s >= CALM_S:
            self.limit_s = min(self.limit_s, max(SILENT_S, 2 * self._slowest_s))
            self._since_s = None

    def left_s(self, now_s: float) -> float | None:
        """Return the rest of the wait: 0 to leave now, None if no answer is due."""
        if self._asked_s is None:
            return None
        over_s = now_s - self._asked_s - self._wait_s
        if over_s > LATE_S:
            self._asked_s, over_s = now_s, -self._wait_s
        return max(0.0, -over_s)

    def leave(self) -> None:
        """Double the wait at the next metaserver."""
        self.limit_s = min(2 * self.limit_s, SILENT_S_MAX)
