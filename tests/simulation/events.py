"""Virtual time, one queue of events, one seed: everything in the simulator that could differ between two runs."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from zlib import crc32

Call = Callable[[], None]
Met = Counter[tuple[str, str]]
"""(fault, state) -> how often the fault struck a copy in this state."""
KEPT_EVENTS = 60


class Violation(Exception):
    """A promise was broken. The text begins with the invariant's number."""


class Events:
    """Queue of future events. Events of one moment run in the order in which they were added."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.now_us = 0
        self.steps = 0
        self.counts: Counter[str] = Counter()
        """Faults injected and situations reached, by name."""
        self.met: Met = Counter()
        self.recent: deque[tuple[int, str]] = deque(maxlen=KEPT_EVENTS)
        self._hash = 0
        self._queue: list[tuple[int, int, Call]] = []
        self._asked = 0

    @property
    def now_ms(self) -> int:
        return self.now_us // 1000

    @property
    def hash(self) -> int:
        """Differs between two runs unless the same things happened at the same moments."""
        return self._hash

    def after(self, ms: float, call: Call) -> None:
        self._asked = asked = self._asked + 1
        us = int(ms * 1000)
        heapq.heappush(self._queue, (self.now_us + us if us > 0 else self.now_us, asked, call))

    def between(self, low_ms: float, high_ms: float, call: Call) -> None:
        self.after(low_ms + (high_ms - low_ms) * self.rng.random(), call)

    def note(self, what: str) -> None:
        """Add an event to the trace."""
        self.recent.append((self.now_us, what))
        self._hash = crc32(f"{self.now_us} {what}".encode(), self._hash)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def run_until(self, end_us: int, done: Callable[[], bool] | None = None) -> bool:
        """Run events until `end_us` or until `done` is true, checked each 50 ms; return whether it is."""
        queue, next_look = self._queue, self.now_us if done is not None else end_us + 1
        while queue and (at_us := queue[0][0]) <= end_us:
            if at_us >= next_look and done is not None:
                next_look = at_us + 50_000
                if done():
                    return True
            _, _, call = heapq.heappop(queue)
            self.now_us = at_us
            self.steps += 1
            call()
        self.now_us = max(self.now_us, end_us)
        return done is not None and done()
