"""Core. History of the console's figures: rings of numbers in memory, bounded in series and in bytes.

    recent   a value per 10 s, for half an hour    180 × 4 bytes
    long     a value per 5 min, for 12 hours       144 × 4 bytes; the highest of its 5 minutes

A series takes 1.3 KB of numbers and less than 1 KB around them. With 4,000 series the history has 9 MB at most; the
series that was written longest ago leaves first. Nothing is stored: after a restart the history begins anew.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable

RECENT_MS, RECENT = 10_000, 180
LONG_MS, LONG = 300_000, 144
SERIES_MAX = 4_000

Key = tuple[str, ...]
Point = tuple[int, float]
"""Milliseconds since 1970, and the value."""

NOTHING = math.nan


class Ring:
    """Newest values of one series, one per slot of time. Slots without a value are left out."""

    __slots__ = ("_newest", "_step_ms", "_values")

    def __init__(self, step_ms: int, slots: int) -> None:
        self._step_ms = step_ms
        self._values = array("f", [NOTHING]) * slots
        self._newest = -1

    def record(self, at_ms: int, value: float) -> None:
        """Keep the highest value of a slot. A clock that went back does not write into the past."""
        slot, size = at_ms // self._step_ms, len(self._values)
        if slot < self._newest:
            return
        begin = max(self._newest + 1, slot - size + 1) if self._newest >= 0 else slot
        for passed in range(begin, slot + 1):
            self._values[passed % size] = NOTHING
        before, self._newest = self._values[slot % size], slot
        self._values[slot % size] = value if math.isnan(before) else max(before, value)

    def points(self) -> list[Point]:
        """Return the values, oldest first."""
        size = len(self._values)
        slots = range(max(self._newest - size + 1, 0), self._newest + 1)
        found = ((slot * self._step_ms, self._values[slot % size]) for slot in slots)
        return [point for point in found if not math.isnan(point[1])]


class History:
    """Series by key. Made by the survey; used on the loop."""

    def __init__(self, series_max: int = SERIES_MAX) -> None:
        self._series: OrderedDict[Key, tuple[Ring, Ring]] = OrderedDict()
        self._series_max = series_max

    def record(self, key: Key, at_ms: int, value: float) -> None:
        rings = self._series.get(key)
        if rings is None:
            rings = self._series[key] = Ring(RECENT_MS, RECENT), Ring(LONG_MS, LONG)
            while len(self._series) > self._series_max:
                self._series.popitem(last=False)
        self._series.move_to_end(key)
        for ring in rings:
            ring.record(at_ms, value)

    def settle(self, kind: str, present: Iterable[Key], at_ms: int) -> None:
        """Record 0 for series of this kind that are not `present` any more."""
        kept = set(present)
        absent = [key for key in self._series if key[0] == kind and key not in kept]
        for key in absent:
            self.record(key, at_ms, 0.0)

    def recent(self, *key: str) -> list[Point]:
        """Return the last half hour of a series."""
        return self._series[key][0].points() if key in self._series else []

    def long(self, *key: str) -> list[Point]:
        """Return the last twelve hours of a series, of which the last half hour in full."""
        if key not in self._series:
            return []
        recent, long = (ring.points() for ring in self._series[key])
        return [point for point in long if not recent or point[0] + LONG_MS <= recent[0][0]] + recent
