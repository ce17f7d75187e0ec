"""Core. Comparison of the clocks that take part in a decision: this machine's, the other copies', the metaserver's.

Heartbeats carry the sender's time. A reading advances by our monotonic clock, so a jump of any wall clock shows at
once. It counts for `READING_MS_MAX`. Ignore readings of clocks that stopped reporting.
"""

from __future__ import annotations

from typing import NamedTuple

METASERVER, MASTER, SLAVE = "metaserver", "master", "slave"

READING_MS_MAX = 9_000
"""The other copy reports every second, a metaserver every two, an older one every four; one report may be late."""


OFF_S_MAX = 1 << 30
"""Bound of a reported difference: 34 years."""


class _Reading(NamedTuple):
    wall_ms: int
    monotonic_ms: int


class Clocks:
    """Last readings of other clocks. Made by the node; lives as long as the process."""

    def __init__(self, difference_ms_max: int) -> None:
        self._difference_ms_max = difference_ms_max
        self._readings: dict[str, _Reading] = {}

    def record(self, whose: str, wall_ms: int, *, monotonic_ms: int) -> None:
        """Record a clock's reading of now."""
        self._readings[whose] = _Reading(wall_ms, monotonic_ms)

    def ahead_ms(self, *, now_ms: int, monotonic_ms: int) -> dict[str, int]:
        """Return how far our clock, at `now_ms`, is ahead of each clock with a recent reading."""
        return {
            whose: now_ms - reading.wall_ms - (monotonic_ms - reading.monotonic_ms)
            for whose, reading in self._readings.items()
            if monotonic_ms - reading.monotonic_ms <= READING_MS_MAX
        }

    def off_s(self, ahead_ms: dict[str, int]) -> int:
        """Return the whole seconds by which our clock is ahead of all others; negative: behind all.

        The difference is that to the nearest clock. 0: the nearest agrees, or some are ahead and some behind, or the
        metaserver or all copies are missing as witnesses.
        """
        ahead = ahead_ms.values()
        if METASERVER not in ahead_ms or len(ahead) < 2 or min(ahead) < 0 < max(ahead):
            return 0
        return max(-OFF_S_MAX, min(int(min(ahead, key=abs) / 1000), OFF_S_MAX))

    def disagreement(self, ahead_ms: dict[str, int]) -> str:
        """Return the clocks with too large a difference, as text; empty: none."""
        far = {whose: ms for whose, ms in ahead_ms.items() if abs(ms) > self._difference_ms_max}
        return "; ".join(
            f"this machine's is {abs(ms) / 1000:,.1f} s {'ahead of' if ms > 0 else 'behind'} the {whose}'s"
            for whose, ms in sorted(far.items())
        )
