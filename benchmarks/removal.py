"""Shell. `python -m benchmarks.removal`: cost of deleting a segment, for a broker and for a neighbour on its disk.

A process appends a KiB and fsyncs it, two hundred times a second. Meanwhile a file of 1 GiB is deleted, in turns at
once (`os.unlink`) and as brokers do it (`RealDisk.remove`, then `sweep`). Shown are the time of the broker's call on
the committing thread, the longest piece, and the neighbour's longest and p99 fsync; then the ratios.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.figures import percentile
from qmq.log import RealDisk
from qmq.log.disk import REMOVED, SWEEP_S

SEGMENT_BYTES, PIECE = 1 << 30, os.urandom(1 << 20)
ROUNDS = 4
PACE_S = 0.005
QUIET_S, AFTER_S = 2.0, 3.0
"""Pause before a deletion, until writing is over, and after it, as file systems go on in the background."""
NAME = "log/segment"


@dataclass
class Cost:
    """In ms."""

    call: float
    piece: float
    fsync_p99: float
    fsync_max: float


def neighbour(path: str, pipe: Connection) -> None:
    """Append and fsync until a line of input ends it; other lines request the fsyncs since the last one."""
    descriptor, took_ms = os.open(path, os.O_CREAT | os.O_WRONLY), list[float]()
    while True:
        began = time.perf_counter()
        os.write(descriptor, PIECE[:1024])
        os.fdatasync(descriptor)
        took_ms.append((time.perf_counter() - began) * 1000)
        if pipe.poll(PACE_S):
            if pipe.recv() == "end":
                return
            pipe.send(took_ms)
            took_ms = []


def at_once(root: Path, disk: RealDisk) -> tuple[float, float]:
    disk.close()  # an open file is freed when it is closed
    took = timed(lambda: os.unlink(root / NAME))
    return took, took


def in_pieces(root: Path, disk: RealDisk) -> tuple[float, float]:
    call, longest = timed(lambda: disk.remove(NAME)), 0.0
    while disk.names(REMOVED):
        longest = max(longest, timed(disk.sweep))
        time.sleep(SWEEP_S)
    return call, longest


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def measured(root: Path, pipe: Connection, how: Callable[[Path, RealDisk], tuple[float, float]]) -> Cost:
    disk = RealDisk(root, cached_bytes=None)
    disk.create(NAME, SEGMENT_BYTES)
    for at in range(0, SEGMENT_BYTES, len(PIECE)):
        disk.write(NAME, at, [PIECE])
    disk.sync(NAME)
    time.sleep(QUIET_S)
    asked(pipe)
    call, piece = how(root, disk)
    time.sleep(AFTER_S)
    took_ms = asked(pipe)
    return Cost(call, piece, percentile(took_ms, 0.99), took_ms[-1])


def asked(pipe: Connection) -> list[float]:
    pipe.send("so far")
    return sorted(pipe.recv())


def main() -> int:
    found: dict[str, list[Cost]] = {"at once": [], "in pieces": []}
    processes = get_context("spawn")
    with TemporaryDirectory(prefix="qmq-bench-") as directory:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=neighbour, args=(f"{directory}/neighbour", theirs))
        process.start()
        try:
            for _ in range(ROUNDS):
                for how, costs in zip((at_once, in_pieces), found.values(), strict=True):
                    costs.append(measured(Path(directory, "data"), ours, how))
        finally:
            ours.send("end")
            process.join()
    for name, costs in found.items():
        print(
            f"{name:10} the call {median(cost.call for cost in costs):7.1f} ms, a piece at most "
            f"{max(cost.piece for cost in costs):6.1f} ms, a neighbour's fsync p99 "
            f"{median(cost.fsync_p99 for cost in costs):6.1f} ms, "
            f"at most {max(cost.fsync_max for cost in costs):6.1f} ms"
        )
    plain, pieces = (median(cost.fsync_max for cost in costs) for costs in found.values())
    calls, less = (median(cost.call for cost in costs) for costs in found.values())
    print(f"in pieces: {less / calls:.3f} of the call, {pieces / plain:.2f} of the neighbour's longest fsync (medians)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
