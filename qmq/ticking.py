"""Core. When timers fire that may fire about once a second: all of a process together.

To wake costs a process that has nothing to do more than what it then does: 0.1 ms, measured. So heartbeats and looks at
the clock that are due each second fall on the same moment, the whole seconds of the monotonic clock.
"""

from __future__ import annotations

SECOND_S = 1.0
LEAST = 0.2
"""A timer that fired a little early does not fire again at once; so two are never further apart than 1.2 s."""


def until_next_second(now_s: float, second_s: float = SECOND_S) -> float:
    """Return how long to wait for the next whole second of the clock that says `now_s`, or whole `second_s`."""
    wait_s = second_s - now_s % second_s
    return wait_s if wait_s >= LEAST * second_s else wait_s + second_s
