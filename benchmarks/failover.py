"""Shell. `make bench-failover`: downtime of a group after its master is killed or falls silent.

One group of two copies, then one of three, two of which acknowledge, on this machine; with constant producers and a
consumer with a backlog. Once all copies are in sync, each round ends the master: with SIGKILL, followed by a restart as
from a service manager, or with SIGSTOP, which closes no connection. Measured are the times until the consumer gets a
message from the new master, and until a producer gets the next acknowledgement. With two copies, that also needs the
restarted copy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import qmq
from benchmarks.figures import percentile
from qmq.deploy.cluster import Cluster
from qmq.deploy.control import broker_state
from qmq.deploy.plan import write_atomically

PORTS = 24_800
RESTART_S = 0.5
BACKLOG = 400_000
PULLED = 10
PACE_S = 0.01
SENDERS = 4
ROUND_S = 60.0
SETTLED_S = 1.0
"""Pause between two rounds once the group is writable: the brokers' reports of each second are stored by then."""


@dataclass
class Load:
    """Constant clients. `begun`: time of the first message of each mastership, by epoch."""

    begun: dict[int, float] = field(default_factory=dict)
    acknowledged_at: float = 0.0
    is_over: bool = False

    async def send(self, sender: qmq.Producer) -> None:
        while not self.is_over:
            receipt = await sender.send(qmq.Message("load", {"x": "x" * 100}))
            assert receipt.is_stored, receipt
            self.acknowledged_at = time.monotonic()

    async def consume(self, client: qmq.Consumer) -> None:
        async with client.pull("backlog", group="bench", start="earliest", prefetch_messages=PULLED) as puller:
            while not self.is_over:
                if messages := await puller.pull(PULLED, timeout=0.5):
                    epoch = messages[-1]._piece.begin >> 32  # messages that waited here belong to an older one
                    self.begun.setdefault(epoch, time.monotonic())
                    await puller.ack(messages)
                await asyncio.sleep(PACE_S)

    async def delivered(self, masterships: int) -> float:
        """Return the time of the first message of the next mastership, after `masterships` of them."""
        async with asyncio.timeout(ROUND_S):
            while len(self.begun) <= masterships:
                await asyncio.sleep(0.001)
        return max(self.begun.values())

    async def acknowledged(self, since: float) -> float:
        """Return the time of the first acknowledgement after `since`."""
        async with asyncio.timeout(ROUND_S):
            while self.acknowledged_at <= since:
                await asyncio.sleep(0.001)
        return self.acknowledged_at


def wait_in_sync(cluster: Cluster) -> None:
    """Wait until the group is writable and each slave is in sync."""
    cluster.wait_writable()
    deadline, slaves = time.monotonic() + ROUND_S, len(cluster.plan.brokers) - 1
    while time.monotonic() < deadline:
        state = broker_state(f"127.0.0.1:{cluster.broker('g1', 'master').control_port}", cluster.token)
        if state is not None and len(state.in_step) == slaves:
            return
        time.sleep(0.05)
    raise TimeoutError("a slave is not in sync")


async def measure(cluster: Cluster, kills: int, stops: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"kill to delivery": [], "kill to acknowledgement": [], "silence to delivery": []}
    metaserver, token = cluster.metaserver, cluster.token
    async with qmq.Producer(metaserver=metaserver, token=token, app="bench", timeout_s=2 * ROUND_S) as sender:
        await sender.send_many(qmq.Message("backlog", {"x": "x" * 100}) for _ in range(BACKLOG))
        load = Load()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SENDERS):
                tasks.create_task(load.send(sender))
            consuming = tasks.create_task(load.consume(qmq.Consumer(metaserver=metaserver, token=token, app="bench")))
            for number in range(kills + stops):
                await asyncio.sleep(SETTLED_S)
                await asyncio.to_thread(wait_in_sync, cluster)
                await asyncio.sleep(SETTLED_S)
                is_kill = number < kills
                master = await asyncio.to_thread(cluster.broker, "g1", "master")
                masterships, ended = len(load.begun), time.monotonic()
                cluster.service(master.hostname).signal(signal.SIGKILL if is_kill else signal.SIGSTOP)
                delivered = await load.delivered(masterships)
                if not is_kill:
                    cluster.service(master.hostname).signal(signal.SIGCONT)
                acknowledgement_s = await load.acknowledged(delivered) - ended
                delivery_s = delivered - ended
                if is_kill:
                    found["kill to delivery"].append(delivery_s)
                    found["kill to acknowledgement"].append(acknowledgement_s)
                else:
                    found["silence to delivery"].append(delivery_s)
                print(f"{number + 1:4}  {delivery_s * 1000:8.0f} ms  {acknowledgement_s * 1000:8.0f} ms", flush=True)
            load.is_over = True
            await consuming
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--copies", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    figures = {f"{copies} copies": run(copies, options.kills, options.stops) for copies in options.copies}
    Path(".run").mkdir(exist_ok=True)
    write_atomically(Path(".run/bench-failover.json"), json.dumps(figures, indent=1))
    return 0


def run(copies: int, kills: int, stops: int) -> dict[str, dict[str, int]]:
    print(f"{copies} copies; per round, until the next delivery and the next acknowledgement:")
    with (
        TemporaryDirectory(prefix="qmq-bench-") as directory,
        Cluster(
            Path(directory),
            groups=("g1",),
            copies=copies,
            metaserver={"failover": True},
            restart_s=RESTART_S,
            http_port=PORTS,
            broker_port=PORTS + 2,
        ) as cluster,
    ):
        found = asyncio.run(measure(cluster, kills, stops))
    figures = {
        name: {f"p{part}_ms": round(percentile(sorted(times), part / 100) * 1000) for part in (50, 99)}
        for name, times in found.items()
        if times
    }
    for name, figure in figures.items():
        print(f"{name:26} p50 {figure['p50_ms']:6} ms   p99 {figure['p99_ms']:6} ms   of {len(found[name])}")
    return figures


if __name__ == "__main__":
    sys.exit(main())
