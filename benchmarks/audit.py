"""Shell. How fast the audit reads: MB of log per second and core, both copies counted, and what memory it takes.

    python -m benchmarks.audit

Writes two equal logs (1 KiB messages in frames of 100), starts Spark, audits a small log so that workers are there and
the JVM has compiled what it runs, then audits the large one: every byte of both copies, by the same code as the nightly
job. A core is a core of this machine: the rate is bytes / seconds / cores. With `--groups N`, what a broker group costs
by itself: N groups with a handful of messages are audited, and one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from pyspark.sql import SparkSession

from qmq.audit.copies import place_options
from qmq.audit.group import Group, Options, Result, audit_groups
from qmq.audit.spark import start_spark
from qmq.codec import encode_message, join_batch
from qmq.log.frame import NO_CHAIN, FrameKind, encode_header, subject_field
from qmq.message import Message
from qmq.types import Epoch

COPY_BYTES = 1 << 30
WARM_UP_BYTES = 192 << 20
SUBJECT = "order.changed"
SAMPLE_S = 0.1


class Figures(NamedTuple):
    audit_mb_per_s_core: float
    """MB (10^6 bytes) of log, both copies, per second of wall time and core."""
    seconds: float
    megabytes: float
    messages: int
    worker_peak_rss_mb: float
    """Most memory that one Python worker had."""
    mb_per_cpu_s: float
    """MB of log per second of CPU time of driver, JVM and workers together: what a busy machine does not change."""


def write_log(data: Path, size: int, count: int = 100) -> None:
    """Write a log of `size` bytes in frames of `count` messages as a broker does, in one segment."""
    folder = data / "log"
    folder.mkdir(parents=True)
    messages = [encode_message(Message(SUBJECT, {"text": "x" * 940}, id=f"{0:032d}"), 1)] * count
    body, message_bytes = bytearray(join_batch(messages)), len(messages[0])
    id_at = [4 * (count + 1) + number * message_bytes + messages[0].index(b"0" * 32) for number in range(count)]
    offset, chain, sequence = 0, NO_CHAIN, 0
    with (folder / f"{0:020d}.log").open("wb") as file:
        while offset < size:
            for number, at in enumerate(id_at, sequence):
                body[at : at + 32] = b"%032d" % number
            is_first = offset == 0
            stored, subject = (b"", "") if is_first else (bytes(body), SUBJECT)
            head, frame = encode_header(
                kind=FrameKind.EPOCH if is_first else FrameKind.MESSAGES,
                flags=0,
                subject=subject,
                field=subject_field(subject),
                count=0 if is_first else count,
                body_bytes=len(stored),
                body_crc=crc32(stored),
                epoch=Epoch(1, 1),
                offset=offset,
                high_watermark=offset,
                timestamp_ms=1_700_000_000_000 + sequence // 100,
                first_sequence=sequence,
                producer=not is_first,
                batch=sequence,
                previous_chain=chain,
            )
            file.write(head + stored)
            offset, chain, sequence = frame.end, frame.chain, sequence + frame.count


def _children(of: int) -> set[int]:
    """Return the processes that `of` started, and theirs, by /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found, new = set(), {of}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in found} - found
    return found - {of}


def _cpu_seconds() -> float:
    """Return the CPU time of this process, the JVM and the workers, ended ones included."""
    ticks = 0
    for pid in _children(os.getpid()) | {os.getpid()}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


class _WorkerMemory(threading.Thread):
    """Watches the resident memory of the Python workers, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(SAMPLE_S):
            for pid in _children(os.getpid()):
                try:
                    if "python" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]:
                        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                        self.peak = max(self.peak, pages * os.sysconf("SC_PAGE_SIZE"))
                except (OSError, IndexError):
                    continue

    def stop(self) -> None:
        self._done.set()
        self.join()


def measure(folder: Path, *, copy_bytes: int = COPY_BYTES, count: int = 100) -> Figures:
    """Write the logs into `folder`, audit them, return the figures. Raises RuntimeError if the audit is not clean."""
    for name, size in (("warm", WARM_UP_BYTES), ("large", copy_bytes)):
        write_log(folder / name / "master", size, count)
        shutil.copytree(folder / name / "master", folder / name / "slave")
    cores = os.cpu_count() or 1
    spark = start_spark(f"local[{cores}]", "qmq audit benchmark")
    try:
        _audit(spark, folder / "warm")
        memory = _WorkerMemory()
        memory.start()
        began, cpu = time.perf_counter(), _cpu_seconds()
        result = _audit(spark, folder / "large")
        seconds, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
        memory.stop()
    finally:
        spark.stop()
    megabytes = sum(read["bytes"] for read in result.read.values()) / 1e6
    messages = sum(read["messages"] for read in result.read.values())
    return Figures(megabytes / seconds / cores, seconds, megabytes, messages, memory.peak / 1e6, megabytes / cpu)


def measure_groups(folder: Path, groups: int) -> float:
    """Return the CPU seconds, of all processes, that one more small broker group costs."""
    for number in range(groups):
        for copy in ("master", "slave"):
            write_log(folder / f"g{number}" / copy, 20_000, 1)
    folders = [folder / f"g{number}" for number in range(groups)]
    spark = start_spark("local[*]", "qmq audit benchmark")
    try:
        costs = []
        for some in (folders, folders[:1], folders):  # the first one warms it up
            cpu = _cpu_seconds()
            _audit_all(spark, some)
            costs.append(_cpu_seconds() - cpu)
    finally:
        spark.stop()
    return (costs[2] - costs[1]) / (groups - 1)


def _audit(spark: SparkSession, folder: Path) -> Result:
    return _audit_all(spark, [folder])[0]


def _audit_all(spark: SparkSession, folders: list[Path]) -> list[Result]:
    groups = [
        Group(folder.name, {copy: place_options(str(folder / copy), "") for copy in ("master", "slave")})
        for folder in folders
    ]
    results = audit_groups(spark, groups, Options())
    for result in results:
        if result.status:
            raise RuntimeError(f"the audit of equal logs says {result.unreadable or result.found}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description="Measure the audit.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--messages", type=int, default=100, help="messages of 1 KiB in a frame")
    parser.add_argument("--megabytes", type=int, default=COPY_BYTES >> 20, help="size of each copy, MiB")
    parser.add_argument("--groups", type=int, default=0, help="measure what each of so many small groups costs instead")
    options = parser.parse_args()
    if options.groups:
        with tempfile.TemporaryDirectory(prefix="qmq-audit-") as folder:
            print(f"CPU seconds per broker group {measure_groups(Path(folder), options.groups):.3f}")
        return 0
    wants_json = options.json
    with tempfile.TemporaryDirectory(prefix="qmq-audit-") as folder:
        figures = measure(Path(folder), copy_bytes=options.megabytes << 20, count=options.messages)
    if wants_json:
        note = f"{figures.mb_per_cpu_s:.0f} MB per CPU second, worker peak {figures.worker_peak_rss_mb:.0f} MB"
        print(json.dumps(figures._asdict() | {"note": note}))
        return 0
    print(f"{figures.messages} messages, {figures.megabytes:.0f} MB of both copies in {figures.seconds:.2f} s")
    print(f"audit_mb_per_s_core {figures.audit_mb_per_s_core:.0f}")
    print(f"MB per second of CPU time {figures.mb_per_cpu_s:.0f}")
    print(f"peak memory of a Python worker {figures.worker_peak_rss_mb:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
