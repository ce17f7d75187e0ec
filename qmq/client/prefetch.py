"""Core. How many messages a listener asks for ahead of its handlers: as much work as takes a moment, and no more.

What waits here waits for no other consumer of the group. Where handlers take 0.2 s, a thousand messages ahead are more
than three minutes of work that a second consumer cannot share; where they take microseconds, a few are an idle worker.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import NamedTuple

AHEAD_S = 0.5
"""Work that waits here or is on its way. Asking for more takes a few milliseconds; a second consumer that joins has its
share after this."""
BEFORE_KNOWN_MIN = 4
"""Messages asked for before a handler has ended for the first time; twice as many as handlers if that is more."""
WEIGHT = 0.25
"""Of a new measurement: a handler that becomes slow is noticed within a few messages."""
MEASURED_EVERY = 16
"""One message of so many of each worker is timed: to time each one cost a listener a twentieth of its throughput."""
LOOK_S = 0.25
"""How often a listener looks at how many messages its handlers took, while some wait: no message pays for that."""
PACE_S = 1.5
"""What was taken in so long is the pace: nothing goes back when fast handlers pause for half of it, for a lock or for a
connection that is made anew."""
WAITS_S_MAX = 1.5
"""Work that may stay here, though less would be asked for now: or handlers that take now longer and now shorter would
have messages come and go."""


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

    def seen(self, pace: Pace) -> None:
        """So many messages were taken while others waited. Most calls are not timed, and none before it ends; but so
        long they took, at least."""
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
            wanted = self._messages_max  # and no division by a time too short to measure
        else:
            wanted = max(at_once, ceil(AHEAD_S * at_once / self._handler_s))
        self.messages = min(wanted, self._messages_max)


class Pace(NamedTuple):
    """How many messages handlers took, and in which time, while they had work all the time."""

    messages: int
    seconds: float

    def is_too_slow_for(self, waiting: int) -> bool:
        """Whether so many messages would wait for too long."""
        return waiting * self.seconds > WAITS_S_MAX * self.messages


class _Look(NamedTuple):
    at_s: float
    arrived: int
    taken: int


class Pacer:
    """Sees from outside how fast messages are taken. One for each subscription."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def looked(self, now_s: float, *, arrived: int, taken: int) -> Pace | None:
        """Return the pace of the last `PACE_S`; None: handlers may have waited for messages, or it is too early.

        Args:
            arrived, taken: messages since the subscription began, taken in the order in which they arrived.
        """
        looks = self._looks
        looks.append(_Look(now_s, arrived, taken))
        while len(looks) > 1 and looks[1].at_s <= now_s - PACE_S:
            looks.popleft()
        began = looks[0]
        if began.at_s > now_s - PACE_S or taken >= began.arrived:  # else the next one was here already
            return None
        return Pace(taken - began.taken, now_s - began.at_s)
