"""Shell. Speed of the audit: MB of log per second and core, for both copies, and its memory.

    python -m benchmarks.audit

Writes two equal logs (1 KiB messages in frames of 100), starts Spark, and audits a small log to start the workers and
warm the JVM. Then it audits the large log: every byte of both copies, by the code of the nightly job. The rate is bytes
/ seconds / cores of this machine. `--groups N` measures the cost of a broker group itself: N groups with a handful of
messages are audited, and one of them. `--progress` measures the effect of all pulls and acks in one subject.
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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from pyspark.sql import SparkSession

from qmq.audit.copies import place_options
from qmq.audit.data_source import start_spark
from qmq.audit.group import audit_groups
from qmq.audit.results import Group, Result
from qmq.audit.wave import Options
from qmq.codec import encode_message, join_batch
from qmq.log.fold import State, apply, encode_snapshot
from qmq.log.frame import FrameKind, encode_header, subject_field
from qmq.log.index import SegmentIndex
from qmq.log.progress_frame import encode_progress
from qmq.log.segments import FOLDER, index_name, log_name, snapshot_name
from qmq.message import Message
from qmq.types import Epoch

COPY_BYTES = 1 << 30
SPREAD = 64
"""Subjects that share the progress."""
SMALL_BYTES = 192 << 20
SEGMENT_BYTES = 256 << 20
"""A quarter of a broker's segment size, so that small logs have closed segments with index and snapshot to check."""
SUBJECT = "order.changed"
SAMPLE_S = 0.1


class Figures(NamedTuple):
    audit_mb_per_s_core: float
    """MB (10^6 bytes) of log, both copies, per second of wall time and core."""
    seconds: float
    megabytes: float
    messages: int
    worker_peak_rss_mb: float
    """Maximum memory of one Python worker."""
    mb_per_cpu_s: float
    """MB of log per CPU second of driver, JVM and workers together; unaffected by a busy machine."""
    more_mb_per_cpu_s: float
    """The same for the difference between the large log and the small one, without the cost of starting."""
    fixed_cpu_s: float
    """CPU seconds extrapolated to a log of no bytes."""


class Skew(NamedTuple):
    """Seconds of an audit with its progress in `subjects` subjects."""

    subjects: int
    frames: int
    """Pulls and acks."""
    seconds: float
    cpu_s: float
    longest_s: float
    """Time of its longest task."""
    tasks_s: float
    """Time of all its tasks together."""


class _Writer:
    """Writes a log as a broker does, with an index and a snapshot beside each segment."""

    def __init__(self, data: Path, segment_bytes: int) -> None:
        (data / FOLDER).mkdir(parents=True)
        self.data = data
        self._segment_bytes = segment_bytes
        self.state = State()
        self._index = SegmentIndex(0)
        self._file = (data / log_name(0)).open("wb")
        self.frame(FrameKind.EPOCH, "", b"")

    def frame(self, kind: FrameKind, subject: str, body: bytes, count: int = 0) -> None:
        """Append a frame; one of `count` messages continues its subject."""
        state = self.state
        if state.end - self._index.base >= self._segment_bytes:
            self._next_segment()
        sequence = state.next_sequence.get(subject, 0)
        head, frame = encode_header(
            kind=kind,
            flags=0,
            subject=subject,
            field=subject_field(subject),
            count=count,
            body_bytes=len(body),
            body_crc=crc32(body),
            epoch=Epoch(1, 1),
            offset=state.end,
            high_watermark=state.end,
            timestamp_ms=1_700_000_000_000 + state.end // 100_000,
            first_sequence=sequence if count else 0,
            producer=bool(count),
            batch=state.end if count else 0,
            previous_chain=state.chain,
        )
        self._file.write(head + body)
        apply(state, frame, body)
        if count:
            self._index.add(frame)

    def _next_segment(self) -> None:
        self._file.close()
        end = self.state.end
        (self.data / index_name(self._index.base)).write_bytes(self._index.encode(end))
        (self.data / snapshot_name(end)).write_bytes(encode_snapshot(self.state))
        self._index = SegmentIndex(end)
        self._file = (self.data / log_name(end)).open("wb")

    def close(self) -> None:
        self._file.close()


class _Batch:
    """Return the body of a frame of `count` messages, with new message ids each time."""

    def __init__(self, subject: str, count: int, *, has_bodies: bool = False) -> None:
        content = {"body": b"x" * 947} if has_bodies else {"properties": {"text": "x" * 940}}
        message = encode_message(Message(subject, id=f"{0:032d}", **content), 1)
        self._body = bytearray(join_batch([message] * count))
        begin = 4 * (count + 1) + message.index(b"0" * 32)
        self._ids = [begin + number * len(message) for number in range(count)]

    def body(self, sequence: int) -> bytes:
        for number, at in enumerate(self._ids, sequence):
            self._body[at : at + 32] = b"%032d" % number
        return bytes(self._body)


def write_log(
    data: Path, size: int, count: int = 100, segment_bytes: int = SEGMENT_BYTES, *, has_bodies: bool = False
) -> None:
    """Write a log of `size` bytes in frames of `count` messages."""
    log, batch = _Writer(data, segment_bytes), _Batch(SUBJECT, count, has_bodies=has_bodies)
    while log.state.end < size:
        log.frame(FrameKind.MESSAGES, SUBJECT, batch.body(log.state.next_sequence.get(SUBJECT, 0)), count)
    log.close()


def write_progress(data: Path, size: int, subjects: int) -> int:
    """Write a log of `size` bytes with single pulls and acks; return the number of progress frames."""
    log, names = _Writer(data, SEGMENT_BYTES // 4), [f"{SUBJECT}.{number}" for number in range(subjects)]
    batches = [_Batch(name, 1) for name in names]
    for name in names:
        log.frame(FrameKind.POSITION, name, encode_progress("billing", "", [(0, 0, 0)]))
    pull, turns = log.state.next_pull(log.state.groups[names[0], "billing"], "c1"), 0
    while log.state.end < size:
        sequence, place = divmod(turns, subjects)
        name, number = names[place], pull + sequence
        log.frame(FrameKind.MESSAGES, name, batches[place].body(sequence), 1)
        log.frame(FrameKind.PULL, name, encode_progress("billing", "c1", [(number, sequence, 1)]))
        log.frame(FrameKind.ACK, name, encode_progress("billing", "c1", [(number, number + 1, 0)]))
        turns += 1
    log.close()
    return 2 * turns + subjects


def _children(of: int) -> set[int]:
    """Return the child processes of `of`, and theirs, from /proc."""
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


def measure(folder: Path, *, copy_bytes: int = COPY_BYTES, count: int = 100, has_bodies: bool = False) -> Figures:
    """Write the logs into `folder`, audit them, return the figures. Raise RuntimeError if there are findings."""
    for name, size in (("small", SMALL_BYTES), ("large", copy_bytes)):
        write_log(folder / name / "master", size, count, has_bodies=has_bodies)
        shutil.copytree(folder / name / "master", folder / name / "slave")
    cores = os.cpu_count() or 1
    spark = start_spark(f"local[{cores}]", "qmq audit benchmark")
    try:
        _cost(spark, folder / "small")  # starts the workers and warms the JVM
        few, _, few_cpu = _cost(spark, folder / "small")
        memory = _WorkerMemory()
        memory.start()
        result, seconds, cpu = _cost(spark, folder / "large")
        memory.stop()
    finally:
        spark.stop()
    less, megabytes = (sum(read["bytes"] for read in side.read.values()) / 1e6 for side in (few, result))
    messages = sum(read["messages"] for read in result.read.values())
    more = (megabytes - less) / (cpu - few_cpu)
    return Figures(
        megabytes / seconds / cores,
        seconds,
        megabytes,
        messages,
        memory.peak / 1e6,
        megabytes / cpu,
        more,
        cpu - megabytes / more,
    )


def _cost(spark: SparkSession, folder: Path) -> tuple[Result, float, float]:
    """Audit two logs; return the answer, its seconds, and its CPU seconds."""
    began, cpu = time.perf_counter(), _cpu_seconds()
    (result,) = _audit_all(spark, [folder])
    return result, time.perf_counter() - began, _cpu_seconds() - cpu


def measure_groups(folder: Path, groups: int) -> float:
    """Return the CPU seconds, of all processes, for one more small broker group."""
    for number in range(groups):
        for copy in ("master", "slave"):
            write_log(folder / f"g{number}" / copy, 20_000, 1)
    folders = [folder / f"g{number}" for number in range(groups)]
    spark = start_spark("local[*]", "qmq audit benchmark")
    try:
        costs = []
        for some in (folders, folders[:1], folders):  # the first one warms up
            cpu = _cpu_seconds()
            _audit_all(spark, some)
            costs.append(_cpu_seconds() - cpu)
    finally:
        spark.stop()
    return (costs[2] - costs[1]) / (groups - 1)


def measure_progress(folder: Path, copy_bytes: int) -> Iterator[Skew]:
    """Yield the costs of progress in one subject, and of as much progress in many. Raise RuntimeError if there are
    findings.
    """
    counted = {}
    for subjects in (1, SPREAD):
        counted[subjects] = write_progress(folder / f"{subjects}" / "master", copy_bytes, subjects)
        shutil.copytree(folder / f"{subjects}" / "master", folder / f"{subjects}" / "slave")
    events = folder / "events"
    events.mkdir()
    logged = {"spark__eventLog__enabled": "true", "spark__eventLog__dir": events.as_uri()}
    plain = {"spark__eventLog__rolling__enabled": "false", "spark__eventLog__compress": "false"}
    spark = start_spark("local[*]", "qmq audit benchmark", **logged, **plain)
    costs: list[tuple[int, float, float, float]] = []
    try:
        _cost(spark, folder / "1")  # starts the workers and warms the JVM
        for subjects in counted:
            began = time.time()
            _, seconds, cpu = _cost(spark, folder / f"{subjects}")
            costs.append((subjects, began, seconds, cpu))
    finally:
        spark.stop()
    for subjects, began, seconds, cpu in costs:
        tasks = [took for launched, took in _task_times(events) if began <= launched <= began + seconds]
        yield Skew(subjects, counted[subjects], seconds, cpu, max(tasks), sum(tasks))


def _task_times(events: Path) -> Iterator[tuple[float, float]]:
    """Yield (launch time, seconds) of each ended task, from Spark's event log, written once the session has ended."""
    for path in events.iterdir():
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["Event"] == "SparkListenerTaskEnd":
                info = event["Task Info"]
                yield info["Launch Time"] / 1000, (info["Finish Time"] - info["Launch Time"]) / 1000


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
    parser.add_argument("--bodies", action="store_true", help="messages have a body instead of a property")
    parser.add_argument("--megabytes", type=int, default=COPY_BYTES >> 20, help="size of each copy, MiB")
    parser.add_argument("--groups", type=int, default=0, help="measure what each of so many small groups costs instead")
    parser.add_argument("--progress", action="store_true", help="measure progress of one subject, and of many, instead")
    options = parser.parse_args()
    if options.progress:
        with tempfile.TemporaryDirectory(prefix="qmq-audit-") as folder:
            for skew in measure_progress(Path(folder), options.megabytes << 20):
                print(", ".join(f"{name} {value:.6g}" for name, value in skew._asdict().items()))
        return 0
    if options.groups:
        with tempfile.TemporaryDirectory(prefix="qmq-audit-") as folder:
            print(f"CPU seconds per broker group {measure_groups(Path(folder), options.groups):.3f}")
        return 0
    wants_json = options.json
    with tempfile.TemporaryDirectory(prefix="qmq-audit-") as folder:
        size = options.megabytes << 20
        figures = measure(Path(folder), copy_bytes=size, count=options.messages, has_bodies=options.bodies)
    if wants_json:
        note = f"{figures.mb_per_cpu_s:.0f} MB per CPU second, worker peak {figures.worker_peak_rss_mb:.0f} MB"
        print(json.dumps(figures._asdict() | {"note": note}))
        return 0
    print(f"{figures.messages} messages, {figures.megabytes:.0f} MB of both copies in {figures.seconds:.2f} s")
    print(f"audit_mb_per_s_core {figures.audit_mb_per_s_core:.0f}")
    print(f"MB per second of CPU time {figures.mb_per_cpu_s:.0f}")
    print(f"of what is more than {SMALL_BYTES >> 20} MiB {figures.more_mb_per_cpu_s:.0f}")
    print(f"CPU seconds for a log of no bytes {figures.fixed_cpu_s:.2f}")
    print(f"peak memory of a Python worker {figures.worker_peak_rss_mb:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
