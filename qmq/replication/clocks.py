"""Core. Clocks that take part in a decision: this machine's, the other copies', the metaserver's; and the due clock.

Heartbeats carry the sender's time. A reading advances by this machine's monotonic clock, so a jump of any wall clock
shows at once. It counts for `READING_MS_MAX`. Ignore readings of clocks that stopped reporting.
"""

from __future__ import annotations

from collections import deque
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
    """Last readings of other clocks. Made by the node; ends with the process."""

    def __init__(self, difference_ms_max: int) -> None:
        self._difference_ms_max = difference_ms_max
        self._readings: dict[str, _Reading] = {}

    def record(self, clock: str, wall_ms: int, *, monotonic_ms: int) -> None:
        """Record a clock's present reading."""
        self._readings[clock] = _Reading(wall_ms, monotonic_ms)

    def ahead_ms(self, *, now_ms: int, monotonic_ms: int) -> dict[str, int]:
        """Return how far this machine's clock, at `now_ms`, is ahead of each clock with a recent reading."""
        return {
            clock: now_ms - reading.wall_ms - (monotonic_ms - reading.monotonic_ms)
            for clock, reading in self._readings.items()
            if monotonic_ms - reading.monotonic_ms <= READING_MS_MAX
        }

    def off_s(self, ahead_ms: dict[str, int]) -> int:
        """Return the whole seconds by which this machine's clock is ahead of all others; negative if it is behind all.

        The difference is that to the nearest clock. It is 0 if the nearest agrees, if some are ahead and some behind,
        or without a reading of the metaserver or of any copy.
        """
        ahead = ahead_ms.values()
        if METASERVER not in ahead_ms or len(ahead) < 2 or min(ahead) < 0 < max(ahead):
            return 0
        return max(-OFF_S_MAX, min(int(min(ahead, key=abs) / 1000), OFF_S_MAX))

    def disagreement(self, ahead_ms: dict[str, int]) -> str:
        """Return the clocks with too large a difference, as text; empty if there are none."""
        far = {clock: ms for clock, ms in ahead_ms.items() if abs(ms) > self._difference_ms_max}
        return "; ".join(
            f"this machine's is {abs(ms) / 1000:,.1f} s {'ahead of' if ms > 0 else 'behind'} the {clock}'s"
            for clock, ms in sorted(far.items())
        )


WINDOW_MS = 5_000
"""Readings arrive late by their travel time; the fastest of this window counts."""
DEAD_BAND_MS = 20
"""Smaller differences are travel times."""
CATCH_UP_MS = 10_000
"""Half of a lag is caught up in about 7 s; each ms adds at least one."""


class DueClock:
    """Median of three clocks, by which delayed messages come due. Made by the delay master; ends with the mastership.

    The three are this machine's clock, the other copy's and the metaserver's, as `Clocks` has them. A message is due
    when two of the three have reached its due time, so one wrong clock sends nothing early and nothing late. Between
    readings time follows the monotonic clock, so setting a clock does not show.

        others     the due time
        two        follows the median of three: steps back to it at once, because a message due by one clock alone is
                   early; catches up gradually, as fast as it is behind
        one        before this mastership ever had three: follows the earlier of two; afterwards it continues as it was
        none       continues as it was; at first by this machine's clock

    Source: docs/decisions/0030-a-message-is-due-by-two-clocks-of-three.md.
    """

    def __init__(self) -> None:
        self.other_clocks: tuple[str, ...] = ()
        """Other clocks that count now, besides this machine's."""
        self.is_settled = False
        """Whether due time has reached its target, so that only a change of these clocks can move it."""
        self._offset_ms: int | None = None
        """Due time minus monotonic time."""
        self._last_ms = 0
        self._had_three = False
        self._offsets: dict[str, deque[tuple[int, int]]] = {}
        """Clock -> (monotonic ms, clock minus monotonic time) of the last readings."""

    @property
    def offset_ms(self) -> int:
        """Due time minus monotonic time. Call `compare` first."""
        assert self._offset_ms is not None
        return self._offset_ms

    def compare(self, *, own_ms: int, monotonic_ms: int, ahead_ms: dict[str, int]) -> None:
        """Follow these clocks from now on.

        Args:
            own_ms: this machine's clock.
            ahead_ms: how far `own_ms` is ahead of each clock that reported lately (`Clocks.ahead_ms`).
        """
        own = own_ms - monotonic_ms
        others = {name: own - ahead_ms[clock] for name, clock in _others(ahead_ms).items()}
        self._note(others, monotonic_ms)
        self.other_clocks = tuple(others)
        target = self._target([own, *(self._fastest(name) for name in others)])
        if self._offset_ms is None:
            self._offset_ms = own if target is None else target
        elif target is not None:
            self._approach(target, monotonic_ms - self._last_ms)
        self._last_ms = monotonic_ms
        self.is_settled = target is None or abs(target - self._offset_ms) <= DEAD_BAND_MS

    def _note(self, others: dict[str, int], monotonic_ms: int) -> None:
        """Keep the readings of the window. Drop those of clocks that stopped reporting, because these clocks may be set
        meanwhile.
        """
        self._offsets = {name: readings for name, readings in self._offsets.items() if name in others}
        for name, offset in others.items():
            readings = self._offsets.setdefault(name, deque())
            if not readings or readings[-1][1] != offset:
                readings.append((monotonic_ms, offset))
            while len(readings) > 1 and monotonic_ms - readings[1][0] > WINDOW_MS:
                readings.popleft()

    def _fastest(self, name: str) -> int:
        return max(offset for _, offset in self._offsets[name])

    def _target(self, clocks: list[int]) -> int | None:
        if len(clocks) > 2:
            self._had_three = True
            return sorted(clocks)[1]
        return min(clocks) if len(clocks) == 2 and not self._had_three else None

    def _approach(self, target: int, elapsed_ms: int) -> None:
        assert self._offset_ms is not None
        behind = target - self._offset_ms
        if behind < -DEAD_BAND_MS:
            self._offset_ms = target
        elif behind > DEAD_BAND_MS:
            self._offset_ms += min(behind, elapsed_ms * max(1, behind // CATCH_UP_MS))


def _others(ahead_ms: dict[str, int]) -> dict[str, str]:
    """Return the other clocks by their role. Readings of the other copy as master, before it was a slave, count as its
    clock too.
    """
    copy = min((clock for clock in ahead_ms if clock.startswith(SLAVE)), default=MASTER)
    places = {"metaserver": METASERVER, "copy": copy}
    return {name: clock for name, clock in places.items() if clock in ahead_ms}
