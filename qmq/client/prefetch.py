"""Core. Prefetch of a listener: about half a second of work for its handlers.

Messages that wait here are kept from other consumers. With handlers of 0.2 s, a thousand messages are three minutes of
work that a second consumer cannot share. With handlers of microseconds, a few messages leave a worker idle.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import NamedTuple

AHEAD_S = 0.5
"""Work that waits here or is requested. Requests take a few milliseconds, and a consumer that joins gets its share
after this time.
"""
BEFORE_KNOWN_MIN = 4
"""Messages requested before the first handler has ended; twice the number of handlers if that is more."""
WEIGHT = 0.25
"""Weight of a new measurement: a handler that becomes slow is noticed within a few messages."""
MEASURED_EVERY = 16
"""Messages of a worker per measurement; timing each one cost a twentieth of the throughput."""
LOOK_S = 0.25
"""Interval of counting taken messages, while some wait. It costs nothing per message."""
PACE_S = 1.5
"""Window of the pace. Fast handlers may pause for half of it, for a lock or a reconnect, and release no messages."""
WAITS_S_MAX = 1.5
"""Work that may stay here even if less would be requested now. Otherwise handlers of varying speed would have messages
come and go.
"""


class Prefetch:
    """Current prefetch of a listener: `messages`, from 1 to the application's limit.

    Args:
        messages_max: the application's limit.
    """

    def __init__(self, messages_max: int, concurrency: int) -> None:
        self._messages_max = messages_max
        self._handler_s: float | None = None
        self.messages: int = 1
        self.set_concurrency(concurrency)

    def set_concurrency(self, concurrency: int) -> None:
        """Set the number of handlers that run at the same time."""
        self._concurrency = concurrency
        self._decide()

    def record_call(self, handler_s: float) -> None:
        """Record the duration of one handler call."""
        known = self._handler_s
        self._handler_s = handler_s if known is None else known + WEIGHT * (handler_s - known)
        self._decide()

    def record_pace(self, pace: Pace) -> None:
        """Record a pace, as a lower bound of the handlers' time: most calls are not timed, and none before its end."""
        at_once = self._concurrency
        least_s = at_once * pace.seconds / (pace.messages + at_once)  # the last ones may have begun just now
        if self._handler_s is None or self._handler_s < least_s:
            self._handler_s = least_s
            self._decide()

    def _decide(self) -> None:
        at_once = self._concurrency
        if self._handler_s is None:
            wanted = max(BEFORE_KNOWN_MIN, 2 * at_once)
        elif self._handler_s * self._messages_max <= AHEAD_S * at_once:
            wanted = self._messages_max  # no division by a time too short to measure
        else:
            wanted = max(at_once, ceil(AHEAD_S * at_once / self._handler_s))
        self.messages = min(wanted, self._messages_max)


class Pace(NamedTuple):
    """Messages that handlers took within a time in which they always had work."""

    messages: int
    seconds: float

    def is_too_slow_for(self, waiting: int) -> bool:
        """Return whether `waiting` messages would wait too long."""
        return waiting * self.seconds > WAITS_S_MAX * self.messages


class _Look(NamedTuple):
    at_s: float
    arrived: int
    taken: int


class Pacer:
    """Pace of taking messages, measured from outside; one per subscription."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def pace(self, now_s: float, *, arrived: int, taken: int) -> Pace | None:
        """Return the pace of the last `PACE_S`, or None if handlers may have waited for messages or the window is not
        full.

        Args:
            arrived, taken: numbers of messages since the subscription began; messages are taken in order of arrival.
        """
        looks = self._looks
        looks.append(_Look(now_s, arrived, taken))
        while len(looks) > 1 and looks[1].at_s <= now_s - PACE_S:
            looks.popleft()
        began = looks[0]
        if began.at_s > now_s - PACE_S or taken >= began.arrived:  # otherwise the next one was here already
            return None
        return Pace(taken - began.taken, now_s - began.at_s)
