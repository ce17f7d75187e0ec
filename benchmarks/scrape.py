"""Shell. `make bench-scrape`: cost of a page of metrics at a broker with many subjects, each with a consumer group.

One group of two copies on this machine. Every subject has messages, and a consumer group with some delivered and none
acked. Measured at the master: time of a page over HTTP, its size, its CPU time, and the time of a producer's lone
`send` while pages are requested one after the other, and while none is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

import qmq
from benchmarks.figures import cpu_seconds, percentile
from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import write_atomically
from qmq.remoting import commands
from qmq.remoting.commands import Command, Pull
from qmq.remoting.connection import Connection, connect
from qmq.remoting.packet import Packet
from qmq.types import Endpoint

PORTS = 24_950
SUBJECTS = 10_000
MESSAGES = 3
PAGES = 20
ASKED_AT_ONCE = 200


class _Consumers:
    """Consumers on one connection, each of a group of its own."""

    def packet_received(self, connection: Connection, packet: Packet) -> None: ...

    def connection_lost(self, connection: Connection, reason: str) -> None: ...

    def writable_again(self, connection: Connection) -> None: ...

    async def join(self, port: int, token: str, subjects: list[str]) -> Connection:
        connection, _ = await connect(
            Endpoint("127.0.0.1", port),
            handler=self,
            token=token,
            app="bench",
            packet_bytes_max=1 << 24,
            timeout_s=10.0,
        )
        for begin in range(0, len(subjects), ASKED_AT_ONCE):
            await asyncio.gather(
                *(self._take_one(connection, subject) for subject in subjects[begin : begin + ASKED_AT_ONCE])
            )
        return connection

    async def _take_one(self, connection: Connection, subject: str) -> None:
        body = commands.encode_subscribe(subject=subject, group="bench", consumer="bench", start="earliest")
        answer = commands.decode_json(await connection.request(Command.SUBSCRIBE, body), subscription=int)
        pull = Pull(answer["subscription"], 1, 1 << 20, 5_000)
        await connection.request(Command.PULL, commands.encode_pull(pull))


def page(port: int, token: str) -> tuple[float, bytes]:
    """Return the seconds of a page, and the page."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"X-Api-Token": token})
    began = time.monotonic()
    with urllib.request.urlopen(request) as answer:
        text = answer.read()
    return time.monotonic() - began, text


async def sends(producer: qmq.Producer, until: asyncio.Event) -> list[float]:
    """Send one message after the other; return the milliseconds of each."""
    times = []
    while not until.is_set():
        began = time.monotonic()
        await producer.send(qmq.Message("lone", {"x": "x"}))
        times.append((time.monotonic() - began) * 1000)
        await asyncio.sleep(0.001)
    return sorted(times)


async def measure(cluster: Cluster, subjects: int) -> dict[str, float]:
    names = [f"business.unit.orders.changed.{number:05d}" for number in range(subjects)]
    master = cluster.broker("g1", "master")
    pid = cluster.describe()["groups"]["g1"]["master"]["pid"]
    async with qmq.Producer(
        metaserver=cluster.metaserver, token=cluster.token, app="bench", timeout_s=600.0
    ) as producer:
        await producer.send_many(qmq.Message(name, {"x": "x"}) for name in names * MESSAGES)
        connection = await _Consumers().join(master.serve_port, cluster.token, names)
        is_over = asyncio.Event()
        sending = asyncio.create_task(sends(producer, is_over))
        await asyncio.sleep(5.0)
        is_over.set()
        alone = await sending
        is_over = asyncio.Event()
        sending = asyncio.create_task(sends(producer, is_over))
        cpu_s = cpu_seconds(pid)
        found = [await asyncio.to_thread(page, master.metrics_port, cluster.token) for _ in range(PAGES)]
        cpu_s = cpu_seconds(pid) - cpu_s
        is_over.set()
        beside = await sending
        connection.close()
    seconds = sorted(took for took, _ in found)
    return {
        "page_p50_ms": seconds[len(seconds) // 2] * 1000,
        "page_max_ms": seconds[-1] * 1000,
        "page_kb": len(found[-1][1]) / 1000,
        "page_series": sum(not line.startswith(b"#") for line in found[-1][1].splitlines()),
        "page_and_sends_cpu_ms": cpu_s / PAGES * 1000,
        "send_p99_ms": percentile(alone, 0.99),
        "send_beside_pages_p99_ms": percentile(beside, 0.99),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scrape", description=__doc__)
    parser.add_argument("--subjects", type=int, default=SUBJECTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    with (
        TemporaryDirectory(prefix="qmq-bench-") as directory,
        Cluster(Path(directory), groups=("g1",), http_port=PORTS, broker_port=PORTS + 2) as cluster,
    ):
        figures = asyncio.run(measure(cluster, options.subjects))
    for name, figure in figures.items():
        print(f"{name:26} {figure:10.1f}")
    Path(".run").mkdir(exist_ok=True)
    write_atomically(Path(".run/bench-scrape.json"), json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
