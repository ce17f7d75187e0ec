"""Shell. Time limits on machines that may pause for seconds."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

TRIES = 4


class Tries:
    """Time limit that the quickest of a few tries must keep.

    A machine that pauses makes one try late; a slow program makes all of them late. Use it as `for _ in (tries :=
    Tries(1.0, "a mark is known")):`, and record the duration of each try.
    """

    def __init__(self, limit_s: float, what: str, *, most: int = TRIES) -> None:
        self._limit_s, self._what, self._most = limit_s, what, most
        self._took_s: list[float] = []

    def __iter__(self) -> Tries:
        return self

    def __next__(self) -> int:
        """Begin another try, unless one was quick enough."""
        if any(took_s < self._limit_s for took_s in self._took_s):
            raise StopIteration
        assert len(self._took_s) < self._most, (
            f"{self._what}: within {self._limit_s} s in none of {self._most} tries, which took {self._took_s}"
        )
        return len(self._took_s)

    def took(self, seconds: float) -> None:
        self._took_s.append(seconds)

    def time(self, attempt: Callable[[], object]) -> None:
        """Run one try, and record its duration."""
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
