"""Shell. Promises about time, on machines that stand still for seconds at any moment."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

TRIES = 4


class Tries:
    """Holds a promise about time against the quickest of a few tries.

    A machine that stands still makes one of them late; a program that keeps its promise no more, all of them.
    Use it as `for _ in (tries := Tries(1.0, "a mark is known")):`, and tell it each time what the try took.
    """

    def __init__(self, limit_s: float, what: str, *, most: int = TRIES) -> None:
        self._limit_s, self._what, self._most = limit_s, what, most
        self._took_s: list[float] = []

    def __iter__(self) -> Tries:
        return self

    def __next__(self) -> int:
        """Begin another try, if there is none yet that was quick enough."""
        if any(took_s < self._limit_s for took_s in self._took_s):
            raise StopIteration
        assert len(self._took_s) < self._most, (
            f"{self._what}: within {self._limit_s} s in none of {self._most} tries, which took {self._took_s}"
        )
        return len(self._took_s)

    def took(self, seconds: float) -> None:
        self._took_s.append(seconds)

    def time(self, attempt: Callable[[], object]) -> None:
        """Run the try, and record its duration."""
        began = time.monotonic()
        try:
            attempt()
        finally:
            self.took(time.monotonic() - began)

    async def time_async(self, attempt: Callable[[], Awaitable[object]]) -> None:
        began = time.monotonic()
        try:
            await attempt()
        finally:
            self.took(time.monotonic() - began)
