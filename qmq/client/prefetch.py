"""Core. How many messages a listener asks for ahead of its handlers: as much work as takes a moment, and no more.

What waits here waits for no other consumer of the group. Where handlers take 0.2 s, a thousand messages ahead are more
than three minutes of work that a second consumer cannot share; where they take microseconds, a few are an idle worker.
"""

from __future__ import annotations

from math import ceil

AHEAD_S = 0.5
"""Work that waits here or is on its way. Asking for more takes a few milliseconds; a second consumer that joins has its
share after this."""
BEFORE_KNOWN_MIN = 4
"""Messages asked for before a handler has ended for the first time; twice as many as handlers if that is more."""
WEIGHT = 0.25
"""Of a new measurement: a handler that becomes slow is noticed within a few messages."""
MEASURED_EVERY = 16
"""One message of so many of each worker is timed: to time each one cost a listener a twentieth of its throughput."""


class Prefetch:
    """Made by a listener. `messages` never passes what the application asked for, and is 1 at least.

    Args:
        messages_max: the application's bound.
    """

    def __init__(self, messages_max: int, concurrency: int) -> None:
        self._messages_max = messages_max
        self._handler_s: float | None = None
        self.messages = 1
        self.concur(concurrency)

    def concur(self, concurrency: int) -> None:
        """So many handlers run at the same time."""
        self._concurrency = concurrency
        self._decide()

    def measured(self, handler_s: float) -> None:
        """A handler took so long."""
        known = self._handler_s
        self._handler_s = handler_s if known is None else known + WEIGHT * (handler_s - known)
        self._decide()

    def _decide(self) -> None:
        at_once = self._concurrency
        if self._handler_s is None:
            wanted = max(BEFORE_KNOWN_MIN, 2 * at_once)
        elif self._handler_s * self._messages_max <= AHEAD_S * at_once:
            wanted = self._messages_max  # and no division by a time too short to measure
        else:
            wanted = max(at_once, ceil(AHEAD_S * at_once / self._handler_s))
        self.messages = min(wanted, self._messages_max)
