"""Core. The clock by which messages come due: the middle one of three.

Compared are this machine's clock, the other copy's, and the metaserver's, as heartbeats bring them
(qmq.replication.clocks). A message is due when two of the three say so: one wrong clock, whoever's it is, sends nothing
early and nothing late. Between readings the time goes on by our monotonic clock, so nothing that is set here shows.

    heard      the due time
    two        goes by the middle clock of three: steps back to it at once, for what is due by one clock alone is early;
               catches up with it little by little, as fast as it is behind
    one        before there were ever three in this mastership: by the earlier of two; after that it goes on as it was
    nobody     goes on as it was; at first by this machine's clock

Source: docs/decisions/0030-a-message-is-due-by-two-clocks-of-three.md.
"""

from __future__ import annotations

from collections import deque

from qmq.replication.clocks import MASTER, METASERVER, SLAVE

WINDOW_MS = 5_000
"""A reading was on its way for a while, so it is behind; of those of so long the one that was fastest counts."""
DEAD_BAND_MS = 20
"""Smaller differences are the ways of the readings."""
CATCH_UP_MS = 10_000
"""Half of what it is behind is caught up in about 7 s, and each ms adds at least one."""


class DueClock:
    """Made by the master for one mastership; used on its loop."""

    def __init__(self) -> None:
        self.heard: tuple[str, ...] = ()
        """Whose clocks it goes by, besides this machine's."""
        self.is_settled = False
        """Whether it goes as the clocks that it goes by: only they can change when something is due."""
        self._offset_ms: int | None = None
        """Due time minus monotonic time."""
        self._last_ms = 0
        self._had_three = False
        self._offsets: dict[str, deque[tuple[int, int]]] = {}
        """Whose -> (monotonic ms, clock minus monotonic time) of the last readings."""

    @property
    def offset_ms(self) -> int:
        """Due time minus monotonic time; `compare` was called."""
        assert self._offset_ms is not None
        return self._offset_ms

    def compare(self, *, own_ms: int, monotonic_ms: int, ahead_ms: dict[str, int]) -> None:
        """Go by these clocks from now on.

        Args:
            own_ms: this machine's clock.
            ahead_ms: how far that is ahead of each clock that was heard lately (`Clocks.ahead_ms`).
        """
        own = own_ms - monotonic_ms
        others = {name: own - ahead_ms[whose] for name, whose in _others(ahead_ms).items()}
        self._note(others, monotonic_ms)
        self.heard = tuple(others)
        target = self._target([own, *(self._fastest(name) for name in others)])
        if self._offset_ms is None:
            self._offset_ms = own if target is None else target
        elif target is not None:
            self._approach(target, monotonic_ms - self._last_ms)
        self._last_ms = monotonic_ms
        self.is_settled = target is None or abs(target - self._offset_ms) <= DEAD_BAND_MS

    def _note(self, others: dict[str, int], monotonic_ms: int) -> None:
        """Keep the readings of a window; of a clock that is not heard none, as it may be set until it is."""
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
    """Return whose clocks there are, by the place that they take: what the other copy said as master, before it was our
    slave, is its clock as well."""
    copy = min((whose for whose in ahead_ms if whose.startswith(SLAVE)), default=MASTER)
    places = {"metaserver": METASERVER, "copy": copy}
    return {name: whose for name, whose in places.items() if whose in ahead_ms}
