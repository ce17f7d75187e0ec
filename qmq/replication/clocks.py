"""Core. Whether the clocks of those who share a decision agree: this machine's, the other copy's, the metaserver's.

Each says in its heartbeats what time it has. Such a reading goes on by our monotonic clock, so a wall clock that jumps
is noticed at once, whoever's it is. It counts for `READING_MS_MAX`; whoever says nothing agrees with nobody.
"""

from __future__ import annotations

from typing import NamedTuple

METASERVER, MASTER, SLAVE = "metaserver", "master", "slave"

READING_MS_MAX = 9_000
"""The other copy says it every second, a metaserver every other one, an older one every four; one may be late."""


OFF_S_MAX = 1 << 30
"""What is told of a clock that is wrong by more than 34 years."""


class _Reading(NamedTuple):
    wall_ms: int
    monotonic_ms: int


class Clocks:
    """What others' clocks said last. Made by the node; lives as long as the process."""

    def __init__(self, difference_ms_max: int) -> None:
        self._difference_ms_max = difference_ms_max
        self._readings: dict[str, _Reading] = {}

    def record(self, whose: str, wall_ms: int, *, monotonic_ms: int) -> None:
        """Take note that a clock said `wall_ms` just now."""
        self._readings[whose] = _Reading(wall_ms, monotonic_ms)

    def ahead_ms(self, *, now_ms: int, monotonic_ms: int) -> dict[str, int]:
        """Return how far our clock, at `now_ms`, is ahead of each that was heard lately."""
        return {
            whose: now_ms - reading.wall_ms - (monotonic_ms - reading.monotonic_ms)
            for whose, reading in self._readings.items()
            if monotonic_ms - reading.monotonic_ms <= READING_MS_MAX
        }

    def off_s(self, ahead_ms: dict[str, int]) -> int:
        """Return by how many whole seconds our clock is ahead of all that were heard, behind them if negative.

        It is the difference to the nearest one. 0: that agrees, some are ahead and some behind, or there is no other
        witness than the metaserver, or than copies.
        """
        ahead = ahead_ms.values()
        if METASERVER not in ahead_ms or len(ahead) < 2 or min(ahead) < 0 < max(ahead):
            return 0
        return max(-OFF_S_MAX, min(int(min(ahead, key=abs) / 1000), OFF_S_MAX))

    def disagreement(self, ahead_ms: dict[str, int]) -> str:
        """Say which clocks differ by more than they may; empty: none."""
        far = {whose: ms for whose, ms in ahead_ms.items() if abs(ms) > self._difference_ms_max}
        return "; ".join(
            f"this machine's is {abs(ms) / 1000:,.1f} s {'ahead of' if ms > 0 else 'behind'} the {whose}'s"
            for whose, ms in sorted(far.items())
        )
