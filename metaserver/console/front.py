"""Core. Values of the overview: findings, totals with their lines, broker groups and processes; history of figures.

The history is rings of numbers in memory, bounded in series and in bytes:

    recent   a value per 10 s, for half an hour    180 × 4 bytes
    long     a value per 5 min, for 12 hours       144 × 4 bytes; the highest of its 5 minutes

A series takes 1.3 KB of numbers and less than 1 KB around them. With 4,000 series the history has 9 MB at most; the
series that was written longest ago leaves first. Nothing is stored: after a restart the history begins anew.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qmq.metaserver.console.display import NOTHING, duration, number, rate, size, spark
from qmq.metaserver.console.findings import Finding, shortened

PROCESSES_MAX = 100
DISK_LOW = 0.15
"""Share of free space below which a disk is shown as a warning."""
RECENT_MS, RECENT = 10_000, 180
LONG_MS, LONG = 300_000, 144
SERIES_MAX = 4_000

Key = tuple[str, ...]
Point = tuple[int, float]
"""Milliseconds since 1970, and the value."""


class Ring:
    """Newest values of one series, one per slot of time. Slots without a value are left out."""

    __slots__ = ("_newest", "_step_ms", "_values")

    def __init__(self, step_ms: int, slots: int) -> None:
        self._step_ms = step_ms
        self._values = array("f", [math.nan]) * slots
        self._newest = -1

    def record(self, at_ms: int, value: float) -> None:
        """Keep the highest value of a slot. A clock that went back does not write into the past."""
        slot, size = at_ms // self._step_ms, len(self._values)
        if slot < self._newest:
            return
        begin = max(self._newest + 1, slot - size + 1) if self._newest >= 0 else slot
        for passed in range(begin, slot + 1):
            self._values[passed % size] = math.nan
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


class Process(NamedTuple):
    """One process at one moment. Figures are None where it reports none."""

    kind: str
    name: str
    group: str
    role: str
    up: bool
    version: str = ""
    memory_bytes: int | None = None
    cpu: float | None = None
    """Processors in use, since the survey before."""
    disk_free_bytes: int | None = None
    disk_bytes: int | None = None
    running_ms: int | None = None


@dataclass(slots=True)
class Survey:
    """Result of one round."""

    at_ms: int
    took_s: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Broker group -> messages a second: in, out, acked."""
    processes: list[Process] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Doctor's, from the processes' heartbeats."""
    unasked: list[str] = field(default_factory=list)
    """Broker groups without an answer of their master."""


RATES = ("in", "out", "acked")


class Tile(NamedTuple):
    """One total of the cluster."""

    label: str
    value: str
    unit: str
    line: str
    level: str
    path: str


_TILES = (
    ("in", "In", "msg/s", ""),
    ("out", "Out", "msg/s", ""),
    ("acked", "Acked", "msg/s", ""),
    ("lag", "Lag", "msg", "/consumers"),
    ("lag_seconds", "Oldest waits", "", "/consumers"),
    ("unacked", "Unacked", "msg", "/consumers"),
    ("dead", "Dead letters", "", "/consumers"),
    ("pending", "Delayed", "pending", "/delayed"),
    ("late", "Late", "delayed", "/delayed"),
    ("disk_free", "Least disk free", "", ""),
)
_BAD_ABOVE_ZERO = frozenset({"dead", "late"})
"""Totals of which one is already too many."""


def front_of(survey: Survey | None, history: History, rows: Sequence[Mapping[str, Any]], now_ms: int) -> dict[str, Any]:
    """Return the values of the overview; `rows` are the broker groups that are shown."""
    return {
        "survey": survey,
        "findings": shortened(survey.findings) if survey else [],
        "tiles": [_tile(*tile, survey, history, now_ms) for tile in _TILES] if survey else [],
        "lines": {row["groupName"]: _line(row, survey, history, now_ms) for row in rows},
        "processes": _processes(survey),
        "more_processes": max(len(survey.processes) - PROCESSES_MAX, 0) if survey else 0,
    }


def _tile(name: str, label: str, unit: str, path: str, survey: Survey, history: History, now_ms: int) -> Tile:
    value = survey.totals.get(name, 0)
    if name in RATES:
        text = rate(value)
    elif name == "disk_free":
        text = size(value or None)
    else:
        text = duration(value) if name == "lag_seconds" else number(int(value))
    level = "bad" if value and name in _BAD_ABOVE_ZERO else ""
    return Tile(label, text, unit, spark(history.recent("total", name), now_ms), level, path)


def _line(row: Mapping[str, Any], survey: Survey | None, history: History, now_ms: int) -> dict[str, Any]:
    name = row["groupName"]
    rates = survey.rates.get(name, {}) if survey else {}
    copies = row["copies"]
    slaves = [copy for copy in copies if copy["role"].endswith("SLAVE")]
    lags = [copy["lagBytes"] for copy in slaves if copy["lagBytes"] is not None]
    ends = [copy["logEnd"] for copy in copies if copy["logEnd"] is not None]
    return {
        "up": sum(bool(copy["up"]) for copy in copies),
        "copies": len(copies),
        "master": next((copy for copy in copies if copy["role"].endswith("MASTER")), None),
        "rates": {label: rate(rates[label]) if label in rates else NOTHING for label in RATES},
        "line": spark(history.recent("rate in", name), now_ms),
        "lag_bytes": max(lags, default=None),
        "log_end": max(ends, default=None),
        "is_marked": bool(row.get("draining")) or "*" in row.get("readonlySubjects", ()),
    }


def _processes(survey: Survey | None) -> list[dict[str, Any]]:
    shown = sorted(survey.processes, key=lambda process: process.up)[:PROCESSES_MAX] if survey else []
    versions = {process.version for process in survey.processes if process.version} if survey else set()
    return [_process(process, len(versions) > 1) for process in shown]


def _process(process: Process, versions_differ: bool) -> dict[str, Any]:
    free = process.disk_free_bytes
    share = free / process.disk_bytes if free is not None and process.disk_bytes else None
    return {
        **process._asdict(),
        "is_low": share is not None and share < DISK_LOW,
        "used": None if share is None else round((1 - share) * 100),
        "versions_differ": versions_differ,
        "running_s": None if process.running_ms is None else process.running_ms // 1000,
    }
