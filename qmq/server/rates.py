"""Shell. What a copy took and delivered, sampled every 5 s and kept for ten minutes: the console draws it.

Kept here, not at the metaservers: any of them can ask, whichever hears the heartbeats, and one that starts finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

SAMPLE_S = 5.0
SAMPLES_MAX = 121


class Sample(NamedTuple):
    """Messages since the process began, at a moment in milliseconds since 1970."""

    at_ms: int
    taken: int
    delivered: int


class Samples:
    """Made by main; `run` ends when it is cancelled.

    Args:
        read: messages taken and delivered so far.
    """

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read
        self._kept: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    async def run(self) -> None:
        while True:
            self._kept.append(self._now())
            await asyncio.sleep(SAMPLE_S)

    def all(self) -> list[Sample]:
        """What is kept, the oldest first, and how it is now."""
        return [*self._kept, self._now()]

    def _now(self) -> Sample:
        return Sample(time.time_ns() // 1_000_000, *self._read())
