"""Core. A clock that stands still while the process does.

A process that was stopped, or a machine that was suspended, has not listened meanwhile: by the wall, every broker
would have been silent, and it would call them all down.
"""

from __future__ import annotations

PAUSE_MS = 2500
"""The clock is read every other second at least; a longer break was no listening."""


class AwakeClock:
    """Milliseconds that this process was awake. Created by main, read by the loop only."""

    def __init__(self) -> None:
        self._slept_ms = 0
        self._read_ms: int | None = None

    def at(self, monotonic_ms: int) -> int:
        """Return the time awake at a monotonic time; it never goes back."""
        if self._read_ms is not None and monotonic_ms - self._read_ms > PAUSE_MS:
            self._slept_ms += monotonic_ms - self._read_ms - PAUSE_MS
        self._read_ms = monotonic_ms
        return monotonic_ms - self._slept_ms
