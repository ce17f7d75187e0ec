"""Core. Common time for all timers of a process that fire about once a second.

To wake up costs an idle process more than its work: 0.1 ms, measured. So heartbeats and checks that are due each second
all run at the whole seconds of the monotonic clock.
"""

from __future__ import annotations

SECOND_S = 1.0
LEAST = 0.2
"""Shortest wait, so that a timer that fired a little early does not fire again at once. Two are thus at most 1.2 s
apart.
"""


def until_next_second(now_s: float, second_s: float = SECOND_S) -> float:
    """Return the time until the next whole second of the clock at `now_s`, or the next multiple of `second_s`."""
    wait_s = second_s - now_s % second_s
    return wait_s if wait_s >= LEAST * second_s else wait_s + second_s
