"""Core. Values of the overview: findings, totals with their lines, broker groups and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qmq.metaserver.console.burning import Finding, shortened
from qmq.metaserver.console.display import NOTHING, duration, number, rate, size, spark
from qmq.metaserver.console.history import History

PROCESSES_MAX = 100
DISK_LOW = 0.15
"""Share of free space below which a disk is shown as a warning."""


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
    ("unacked", "Un-acked", "msg", "/consumers"),
    ("dead", "Dead letters", "", "/consumers"),
    ("pending", "Delayed", "pending", "/delayed"),
    ("late", "Late", "delayed", "/delayed"),
    ("disk_free", "Least disk free", "", ""),
)
_BURNING = frozenset({"dead", "late"})
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
    level = "bad" if value and name in _BURNING else ""
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
