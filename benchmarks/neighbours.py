"""Shell. `make bench-neighbours`: effect of each noisy neighbour on a quiet group that shares its brokers.

One broker group and one delay group of two copies each, on this machine. A producer sends to the quiet subject at a
slow, steady pace, and its one listener records the age of each message. That is measured alone and beside each
neighbour, in turns. A neighbour is a process of its own, with low priority, as it stands for one on another machine:
the quiet clients pay for the brokers' work for it and not for its Python.

The control is the same neighbour at another installation on the same machine: its cost in cores and disk, without
shared brokers. On a machine of few cores that is most of its cost, and brokers can do nothing about it. So the judged
figure is the p99 beside it over the p99 with it elsewhere: the median of some rounds. The ratio to the p99 alone is
shown, too: it reveals a neighbour that costs both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import qmq
from benchmarks.figures import percentile
from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import write_atomically

PORTS = 25_200
PACE_PER_S = 100
"""Messages of the quiet subject: enough for a p99, too few to load anything."""
READY = "ready"
"""A neighbour's line when it begins to be noisy."""
GOAL = 1.2
"""Goal for the p99 beside a neighbour over the p99 with it elsewhere."""
SETTLED_S = 2.0
"""Pause after a neighbour was killed, until its connections are closed and its deliveries are over."""
DIRTY_BYTES_MAX, DIRTY_S_MAX = 32 << 20, 60.0
"""Maximum of unwritten bytes when a phase begins, as they would slow the next one; and maximum wait for that."""
READ_BYTES, WRITTEN_S = 256 << 20, 5.0
"""Size of the log that is read repeatedly, and time for brokers and disks to finish writing it."""

LOG_BYTES = 3 << 30
"""Retention of each copy: a hot subject writes ten GiB and more into each, and a full disk makes a group readonly."""


@dataclass(frozen=True)
class Sizes:
    """Rounds of three phases: without a neighbour, with it elsewhere, with it here."""

    rounds: int = 9
    phase_s: float = 8.0


QUICK = Sizes(rounds=3, phase_s=4.0)


class Noise:
    """One noisy neighbour: prepares, reports that it is ready, and goes on until killed."""

    def __init__(self, metaserver: str, token: str, port: int) -> None:
        self._client: dict[str, Any] = {"metaserver": metaserver, "token": token, "app": "noise"}
        self._subject = f"noise.{os.getpid()}"
        """Own subject, unaffected by other neighbours' remains."""
        self._port = port

    def _producer(self) -> qmq.Producer:
        return qmq.Producer(**self._client, timeout_s=60.0)

    async def _backlog(self, messages: int, size: int = 1024) -> None:
        async with self._producer() as producer:
            receipts = await producer.send_many(qmq.Message(self._subject, {"x": "x" * size}) for _ in range(messages))
            assert receipts.all_stored

    async def hot_subject(self) -> None:
        """One subject at one producer's full speed."""
        async with self._producer() as producer:
            print(READY, flush=True)
            while True:
                await producer.send_many(qmq.Message(self._subject, {"x": "x" * 1024}) for _ in range(10_000))

    async def giant_backlog(self) -> None:
        """A consumer that takes a backlog at full speed, repeatedly."""
        await self._backlog(200_000)
        print(READY, flush=True)
        for number in range(1_000):
            async with qmq.Consumer(**self._client).pull(self._subject, group=f"n{number}", start="earliest") as puller:
                while messages := await puller.pull(10_000, timeout=1):
                    await puller.ack(messages)

    async def retries(self) -> None:
        """10,000 messages that each request redelivery a second later."""
        await self._backlog(10_000, 100)
        print(READY, flush=True)
        async with qmq.Consumer(**self._client).pull(self._subject, group="retries", start="earliest") as puller:
            while True:
                for message in await puller.pull(1_000, timeout=1):
                    message.nack_nowait("not yet", delay=1.0)

    async def slow_consumer(self) -> None:
        """200 handlers that take 100 ms each, before a backlog."""
        await self._backlog(100_000, 100)
        print(READY, flush=True)
        consumer = qmq.Consumer(**self._client)

        async def slow(message: qmq.ReceivedMessage) -> None:
            await asyncio.sleep(0.1)

        consumer.listen(self._subject, group="slow", start="earliest", concurrency=200)(slow)
        await consumer.run()

    async def reconnects(self) -> None:
        """Twenty consumers that join and leave constantly."""
        await self._backlog(1_000, 100)
        print(READY, flush=True)

        async def come_and_go(number: int) -> None:
            while True:
                consumer = qmq.Consumer(**self._client)
                async with consumer.pull(self._subject, group=f"n{number}", start="earliest") as puller:
                    await puller.ack(await puller.pull(10, timeout=1))

        await asyncio.gather(*map(come_and_go, range(20)))

    async def huge_messages(self) -> None:
        """Messages of 3 MiB, one after the other."""
        async with self._producer() as producer:
            print(READY, flush=True)
            while True:
                await producer.send(qmq.Message(self._subject, {"x": "x" * (3 << 20)}))

    async def broken_clients(self) -> None:
        """Connections that send garbage, or nothing at all."""
        print(READY, flush=True)
        silent: list[socket.socket] = []
        while True:
            with suppress(OSError):
                idle = socket.create_connection(("127.0.0.1", self._port), timeout=1)
                idle.sendall(b"GET / HTTP/1.1\r\n\r\n")
                idle.close()
                silent.append(socket.create_connection(("127.0.0.1", self._port), timeout=1))
            for old in silent[:-200]:
                old.close()
            del silent[:-200]
            await asyncio.sleep(0.002)

    async def cancels(self) -> None:
        """Delayed messages of one moment, each cancelled by its receipt."""
        async with self._producer() as producer:
            print(READY, flush=True)
            while True:
                due = time.time() + 3_600
                receipts = await producer.send_many(
                    (qmq.Message(self._subject, {"x": "x" * 100}) for _ in range(5_000)), delay=due - time.time()
                )
                for begin in range(0, len(receipts), 50):
                    await asyncio.gather(*(producer.cancel(receipt) for receipt in receipts[begin : begin + 50]))

    async def audit(self) -> None:
        """The nightly job, which reads both copies of everything, repeatedly, at the priority of its unit."""
        from qmq.audit.data_source import start_spark
        from qmq.audit.group import audit_groups  # only this neighbour needs Spark
        from qmq.audit.places import find_places
        from qmq.audit.results import Group
        from qmq.audit.wave import Options

        os.nice(10)
        await self._backlog(300_000)
        spark = start_spark("local[*]", "noise")
        groups = [Group(*place) for place in find_places(self._client["metaserver"], self._client["token"]).items()]
        audit_groups(spark, groups, Options())  # starts the workers and warms the JVM
        print(READY, flush=True)
        while True:
            audit_groups(spark, groups, Options())

    async def audit_reads(self) -> None:
        """The broker's part of an audit, without Spark: the logs of both copies are read at full speed and discarded.

        It uses one core, as an audit belongs on another machine: give the rest another core (`taskset -c 1`).
        """
        from qmq.audit.places import find_places

        os.sched_setaffinity(0, {0})
        places = find_places(self._client["metaserver"], self._client["token"])["g1"].values()
        if not all(map(_is_long, places)):  # the cost of writing a backlog is not that of reading it
            await self._backlog(300_000)
            await asyncio.sleep(WRITTEN_S)
        print(READY, flush=True)
        await asyncio.gather(*(asyncio.to_thread(_read_on, place) for place in places))


def _is_long(place: dict[str, str]) -> bool:
    """Return whether a broker's log is large enough."""
    from qmq.audit.copies import open_copy

    with closing(open_copy(place)) as copy:
        return copy.describe().end > READ_BYTES


def _read_on(place: dict[str, str]) -> None:
    """Read a broker's log from its start to its end, repeatedly."""
    from qmq.audit.copies import open_copy

    while True:
        with closing(open_copy(place)) as copy:
            at = 0
            while data := copy.window(at, 4 << 20):
                at += len(data)


NEIGHBOURS: dict[str, Callable[[Noise], Awaitable[None]]] = {
    "hot_subject": Noise.hot_subject,
    "giant_backlog": Noise.giant_backlog,
    "retries": Noise.retries,
    "slow_consumer": Noise.slow_consumer,
    "reconnects": Noise.reconnects,
    "huge_messages": Noise.huge_messages,
    "broken_clients": Noise.broken_clients,
    "cancels": Noise.cancels,
    "audit": Noise.audit,
    "audit_reads": Noise.audit_reads,
}


class Quiet:
    """The quiet group: one producer, one listener, one message in ten milliseconds."""

    def __init__(self, producer: qmq.Producer) -> None:
        self._producer = producer
        self._ages_ms: list[float] = []

    async def on_message(self, message: qmq.ReceivedMessage) -> None:
        self._ages_ms.append((time.monotonic() - float(str(message["at"]))) * 1000)

    def _sent(self, receipt: qmq.Receipt) -> None:
        assert receipt.is_stored, receipt

    async def p99_ms(self, seconds: float) -> float:
        """Send for some seconds and return the p99 from `send` to the handler."""
        self._ages_ms = []
        messages = int(seconds * PACE_PER_S)
        begin = time.monotonic()
        for number in range(messages):
            await asyncio.sleep(max(0.0, begin + number / PACE_PER_S - time.monotonic()))
            self._producer.send_nowait(qmq.Message("quiet", {"at": repr(time.monotonic())}), self._sent)
        async with asyncio.timeout(60):
            while len(self._ages_ms) < messages:
                await asyncio.sleep(0.01)
        return percentile(sorted(self._ages_ms), 0.99)


async def measure(cluster: Cluster, elsewhere: Cluster, names: list[str], sizes: Sizes) -> dict[str, dict[str, float]]:
    client: dict[str, Any] = {"metaserver": cluster.metaserver, "token": cluster.token, "app": "quiet"}
    found: dict[str, dict[str, float]] = {}
    async with qmq.Producer(**client) as producer, asyncio.TaskGroup() as tasks:
        quiet, consumer = Quiet(producer), qmq.Consumer(**client)
        consumer.listen("quiet", group="quiet", start="earliest")(quiet.on_message)
        tasks.create_task(consumer.run())
        await quiet.p99_ms(1.0)
        for name in names:
            found[name] = figure = await _compared(cluster, elsewhere, quiet, name, sizes)
            print(f"{name:16} {_shown(figure)}", flush=True)
        consumer.stop()
    return found


async def _compared(cluster: Cluster, elsewhere: Cluster, quiet: Quiet, name: str, sizes: Sizes) -> dict[str, float]:
    """Measure phases without a neighbour, with it elsewhere and with it here, in turns; return medians, as the machine
    has other load.
    """
    alone: list[float] = []
    control: list[float] = []
    beside: list[float] = []
    for number in range(sizes.rounds):
        alone.append(await quiet.p99_ms(sizes.phase_s))
        turns = [(control, elsewhere), (beside, cluster)]
        for found, where in turns if number % 2 else reversed(turns):  # drift affects both alike
            found.append(await _beside(where, quiet, name, sizes))
    of_control = sorted(after / before for before, after in zip(control, beside, strict=True))
    return {
        "alone_p99_ms": median(alone),
        "elsewhere_p99_ms": median(control),
        "beside_p99_ms": median(beside),
        "ratio": median(after / before for before, after in zip(alone, beside, strict=True)),
        "ratio_to_elsewhere": median(of_control),
        "quarter_below": of_control[len(of_control) // 4],
        "quarter_above": of_control[-1 - len(of_control) // 4],
    }


async def _beside(cluster: Cluster, quiet: Quiet, name: str, sizes: Sizes) -> float:
    """Return the quiet group's p99 while a neighbour is noisy at `cluster`."""
    neighbour = await asyncio.to_thread(_begin, cluster, name)
    try:
        return await quiet.p99_ms(sizes.phase_s)
    finally:
        neighbour.send_signal(signal.SIGKILL)
        neighbour.wait()
        await asyncio.sleep(SETTLED_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(DIRTY_S_MAX):
                while _dirty_bytes() > DIRTY_BYTES_MAX:
                    await asyncio.sleep(0.2)


def _dirty_bytes() -> int:
    """Return the bytes that the kernel has not written yet."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("Dirty", "Writeback"))


def _shown(figure: dict[str, float]) -> str:
    alone, control, beside, ratio, of_control, below, above = figure.values()
    return (
        f"p99 {alone:8.2f} ms alone {control:8.2f} ms with it elsewhere {beside:8.2f} ms beside it "
        f"{ratio:6.2f} of alone {of_control:6.2f} of elsewhere ({below:.2f} to {above:.2f})"
    )


def _begin(cluster: Cluster, name: str) -> subprocess.Popen[str]:
    """Start a neighbour; return once it is about to be noisy."""
    where = [cluster.metaserver, cluster.token, str(cluster.broker("g1", "master").serve_port)]
    command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.neighbours", "--noise", name, *where]
    neighbour = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    _stand_back(neighbour.pid)
    assert neighbour.stdout is not None
    if neighbour.stdout.readline().strip() != READY:
        neighbour.kill()
        raise RuntimeError(f"{name} ended before it began")
    return neighbour


def _stand_back(pid: int) -> None:
    """Lower the priority of a process' session.

    Linux shares cores among sessions first (autogroups), and each broker has its own; plain `nice` counts only within
    one.
    """
    with suppress(FileNotFoundError):  # a kernel without autogroups
        Path(f"/proc/{pid}/autogroup").write_text("19")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__)
    parser.add_argument("--only", default=",".join(NEIGHBOURS), help="which ones, separated by commas")
    parser.add_argument("--quick", action="store_true", help="short phases, few of them")
    parser.add_argument("--read-log-mib", type=int, default=0, help="MiB/s at which brokers let their logs be read")
    parser.add_argument("--noise", nargs=4, metavar=("NAME", "METASERVER", "TOKEN", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    if options.noise:
        name, metaserver, token, port = options.noise
        asyncio.run(_noise(name, Noise(metaserver, token, int(port))))
        return 0
    with (
        TemporaryDirectory(prefix="qmq-bench-") as directory,
        _installation(Path(directory, "here"), PORTS, options.read_log_mib) as cluster,
        _installation(Path(directory, "elsewhere"), PORTS + 100, options.read_log_mib) as elsewhere,
    ):
        cluster.wait_writable()
        elsewhere.wait_writable()
        found = asyncio.run(measure(cluster, elsewhere, options.only.split(","), QUICK if options.quick else Sizes()))
    missed = [name for name, figure in found.items() if figure["ratio_to_elsewhere"] > GOAL]
    print(f"above {GOAL} times what it costs elsewhere: {', '.join(missed) or 'none'}")
    Path(".run").mkdir(exist_ok=True)
    write_atomically(Path(".run/bench-neighbours.json"), json.dumps(found, indent=1))
    return 0


def _installation(directory: Path, ports: int, read_log_mib: int) -> Cluster:
    directory.mkdir()
    settings: dict[str, Any] = {"retention_bytes": LOG_BYTES}
    settings |= {"read_log_bytes_per_s": read_log_mib << 20} if read_log_mib else {}
    groups, delay_groups = ("g1",), ("d1",)
    return Cluster(
        directory, groups=groups, delay_groups=delay_groups, broker=settings, http_port=ports, broker_port=ports + 2
    )


async def _noise(name: str, noise: Any) -> None:
    await NEIGHBOURS[name](noise)


if __name__ == "__main__":
    sys.exit(main())
