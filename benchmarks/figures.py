"""Shell. Figures: repeated measurements, bench.json, the printed table, and readings from /proc.

/proc gives CPU time and memory of our processes, and the load of other programs.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Goal:
    """Goal of a figure. `least`: more is better; otherwise less is."""

    value: float
    least: bool
    aim: float | None = None

    def is_met(self, value: float) -> bool:
        return value >= self.value if self.least else value <= self.value


GOALS: dict[str, Goal] = {
    "produce_1k_per_s": Goal(300_000, True, 500_000),
    "produce_100b_per_s": Goal(800_000, True, 1_500_000),
    "send_each_per_s": Goal(60_000, True),
    "send_one_p50_ms": Goal(0.25, False, 0.12),
    "consume_1k_per_s": Goal(300_000, True),
    "listen_1k_per_s": Goal(50_000, True),
    "listen_wide_1k_per_s": Goal(50_000, True),
    "listen_typed_per_s": Goal(20_000, True),
    "e2e_p50_ms": Goal(0.4, False),
    "e2e_p99_ms": Goal(2.0, False),
    "subjects_p99_ms": Goal(20.0, False),
    "tags_cost_ratio": Goal(0.1, False),
    "stalled_p99_ratio": Goal(1.2, False, 1.1),
    "big_group_p99_ratio": Goal(1.2, False, 1.1),
    "beside_backlog_p99_ratio": Goal(1.2, False, 1.1),
    "beside_drain_p99_ratio": Goal(1.2, False, 1.1),
    "backlog_rss_mb": Goal(100, False),
    "restart_s": Goal(5, False),
    "audit_mb_per_s_core": Goal(150, True),
}
REQUIRED = [
    "produce_1k_per_s",
    "produce_100b_per_s",
    "send_each_per_s",
    "send_one_p50_ms",
    "consume_1k_per_s",
    "e2e_p50_ms",
    "e2e_p99_ms",
    "listen_1k_per_s",
    "subjects_p99_ms",
    "crowd_p99_ms",
    "tags_cost_ratio",
    "stalled_p99_ratio",
    "big_group_p99_ratio",
    "beside_backlog_p99_ratio",
    "beside_drain_p99_ratio",
    "backlog_rss_mb",
    "restart_s",
    "audit_mb_per_s_core",
]
"""Keys always present in bench.json; null if not measured."""


@dataclass
class Figure:
    """One figure of the table.

    `values`: one per repetition. `elsewhere`: for each, how many cores other programs of this machine kept busy.
    `cpu_us`: microseconds of CPU per message of each of our processes, user and system, over all repetitions.
    """

    name: str
    values: list[float] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)
    cpu_us: dict[str, float] = field(default_factory=dict)
    note: str = ""
    more_is_better: bool = True

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def best(self) -> float:
        return max(self.values) if self.more_is_better else min(self.values)

    @property
    def worst(self) -> float:
        return min(self.values) if self.more_is_better else max(self.values)

    @property
    def cpu_bound(self) -> float | None:
        """Messages per second that one core can carry, by the CPU time per message of all processes; None: not
        measured.
        """
        total_us = sum(self.cpu_us.values())
        return 1e6 / total_us if total_us else None

    def as_json(self) -> dict[str, Any]:
        bound = self.cpu_bound
        return {
            "median": rounded(self.value),
            "best": rounded(self.best),
            "worst": rounded(self.worst),
            "repetitions": len(self.values),
            "elsewhere_cores": [round(cores, 2) for cores in self.elsewhere],
            "cpu_us_per_message": {name: round(us, 3) for name, us in self.cpu_us.items()},
            "cpu_bound_per_s_core": bound and rounded(bound),
            "note": self.note,
        }


def percentile(sorted_values: Sequence[float], part: float) -> float:
    """The value below which `part` (0 to 1) of the values lie; nearest rank."""
    return sorted_values[min(len(sorted_values) - 1, int(part * len(sorted_values)))]


def rounded(value: float) -> float | int:
    """Return as many digits as a repetition on the same machine would confirm."""
    if abs(value) >= 100:
        return round(value)
    return round(value, 3)


def result(figures: Mapping[str, Figure], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of bench.json: medians by name, then their repetitions."""
    medians: dict[str, Any] = dict.fromkeys(REQUIRED)
    medians |= {name: rounded(figure.value) for name, figure in figures.items()}
    return {**medians, "details": {name: figure.as_json() for name, figure in figures.items()}, **about}


def table(figures: Mapping[str, Figure]) -> str:
    """Return one line per figure: median, best and worst repetition, other load, goal, CPU per message."""
    lines = [f"{'':<28}{'median':>11}{'best':>11}{'worst':>11}{'others':>8}  {'goal':<18}CPU per message, µs"]
    for figure in figures.values():
        others = f"{max(figure.elsewhere):.1f}" if figure.elsewhere else ""
        cpu = "  ".join(f"{name} {us:.2f}" for name, us in figure.cpu_us.items())
        if (bound := figure.cpu_bound) is not None:
            cpu += f"  = {bound:,.0f}/s per core"
        lines.append(
            f"{figure.name:<28}{_number(figure.value):>11}{_number(figure.best):>11}{_number(figure.worst):>11}"
            f"{others:>8}  {_goal(figure):<18}{cpu}".rstrip()
        )
        if figure.note:
            lines.append(f"    {figure.note}")
    return "\n".join(lines)


def _goal(figure: Figure) -> str:
    goal = GOALS.get(figure.name)
    if goal is None:
        return ""
    sign = "≥" if goal.least else "≤"
    return f"{sign} {_number(goal.value)} {'met' if goal.is_met(figure.value) else 'MISSED'}"


def _number(value: float) -> str:
    return f"{rounded(value):,}"


TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
PROBE_BYTES = 128 * MIB


@dataclass(frozen=True)
class Spent:
    """Seconds on the clock between two readings, CPU seconds of each process, and of all others."""

    seconds: float
    cpu_s: dict[str, float]
    others_s: float

    @property
    def elsewhere(self) -> float:
        """Cores used by other programs and the kernel's own threads."""
        return max(0.0, self.others_s / self.seconds)


class Clock:
    """Reads the CPU time of processes by name, from its creation on."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._began, self._cpu, self._busy = self._read()

    def spent(self) -> Spent:
        now, cpu, busy = self._read()
        used = {name: cpu[name] - self._cpu[name] for name in cpu}
        return Spent(now - self._began, used, busy - self._busy - sum(used.values()))

    def _read(self) -> tuple[float, dict[str, float], float]:
        return time.monotonic(), {name: cpu_seconds(pid) for name, pid in self._pids.items()}, _busy_seconds()


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _busy_seconds() -> float:
    """Return the machine's CPU time that was not idle, including time stolen by a host."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_disk_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def sync_us(directory: Path) -> float:
    """Return the median time of an fdatasync after writing 4 KiB; every acknowledgement waits for two in parallel."""
    path = directory / "sync-probe"
    times = []
    with path.open("wb", buffering=0) as file:
        file.write(bytes(MIB))
        for position in range(200):
            file.seek(position * 4096)
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - began) * 1e6)
    path.unlink()
    return median(times)


def page_cache_us(directory: Path) -> tuple[float, float]:
    """Return the CPU time of writing a KiB into new pages of the cache, and into existing ones."""
    path, block = directory / "cache-probe", os.urandom(MIB)
    costs = []
    with path.open("wb", buffering=0) as file:
        for _ in range(2):
            file.seek(0)
            began = time.thread_time()
            for _ in range(PROBE_BYTES // MIB):
                file.write(block)
            costs.append((time.thread_time() - began) / (PROBE_BYTES / 1024) * 1e6)
    path.unlink()
    return costs[0], costs[1]


def describe(directory: Path) -> dict[str, object]:
    """Return the properties of the machine that figures depend on."""
    fresh_us, present_us = page_cache_us(directory)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(": ")[2] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "fdatasync_us": round(sync_us(directory), 1),
        "cache_write_fresh_us_per_kib": round(fresh_us, 2),
        "cache_write_present_us_per_kib": round(present_us, 2),
        "load_before": round(os.getloadavg()[0], 2),
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
