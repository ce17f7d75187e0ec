"""Shell. What /proc says: CPU time and memory of our processes, and how busy the rest of the machine is."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
PROBE_BYTES = 128 * MIB


@dataclass(frozen=True)
class Spent:
    """Between two readings: seconds on the clock, CPU seconds of each process, CPU seconds of everybody else."""

    seconds: float
    cpu_s: dict[str, float]
    others_s: float

    @property
    def elsewhere(self) -> float:
        """Cores that other programs, and the kernel's own threads, kept busy."""
        return max(0.0, self.others_s / self.seconds)


class Clock:
    """Reads the CPU time of processes by name; made at the beginning of a measurement."""

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
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _busy_seconds() -> float:
    """CPU time of the whole machine that was not idle, also what a host took from it."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_disk_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def sync_us(directory: Path) -> float:
    """Median time of an fdatasync after writing 4 KiB: what every acknowledgement waits for, twice at the same time."""
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
    """CPU time of writing a KiB into new pages of the cache, and into pages that are there already."""
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
    """What a figure depends on besides the program."""
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
