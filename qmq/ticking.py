"""Core. When timers fire that may fire about once a second: all of a process together.

To wake costs a process that has nothing to do more than what it then does: 0.1 ms, measured. So heartbeats and looks at
the clock that are due each second fall on the same moment, the whole seconds of the monotonic clock.
"""

from __future__ import annotations

SECOND_S = 1.0
LEAST_S = 0.2
"""A timer that fired a little early does not fire again at once; so two are never further apart than 1.2 s."""


def until_next_second(now_s: float) -> float:
    """Return how long to wait for the next whole second of the clock that says `now_s`."""
    wait_s = SECOND_S - now_s % SECOND_S
    return wait_s if wait_s >= LEAST_S else wait_s + SECOND_S
