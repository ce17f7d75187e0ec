"""Shell. `make bench-idle`: CPU use of idle processes, in thousandths of a core.

A whole cluster on this machine: a metaserver, two broker groups, a delay group with messages due in hours, a watchdog,
and a process with an idle producer, which also sent delayed messages, and an idle consumer. Once all are quiet, /proc
gives the CPU time of each process in a minute, all threads, user and system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import qmq
from benchmarks.figures import Clock
from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import write_atomically

PORTS = 24_900
LIMIT = 0.003
"""Goal for an idle process, as a fraction of a core."""
DELAYED = 1000
HOUR_S = 3600.0


async def clients(metaserver: str, token: str) -> None:
    """Run idle clients: the consumer has received its message, the producers have sent theirs."""
    consumer = qmq.Consumer(metaserver=metaserver, token=token, app="bench")
    got = asyncio.Event()

    @consumer.listen("idle", group="bench", start="earliest")
    async def handle(message: qmq.Message) -> None:
        got.set()

    async with qmq.Producer(metaserver=metaserver, token=token, app="bench") as producer, asyncio.TaskGroup() as tasks:
        await producer.send(qmq.Message("idle", {"x": "x"}))
        await producer.send_many((qmq.Message("idle.later", {"x": "x"}) for _ in range(DELAYED)), delay=HOUR_S)
        tasks.create_task(consumer.run())
        await got.wait()
        print("idle", flush=True)


def processes(cluster: Cluster, client: int) -> dict[str, int]:
    """Return the pid of each process by its role."""
    described = cluster.describe()
    pids = {"metaserver": described["metaserver_pid"], "watchdog": described["watchdog"]["pid"], "client": client}
    for kind, groups in (("broker", described["groups"]), ("delay server", described["delay_groups"])):
        for group, copies in groups.items():
            pids |= {f"{kind} {group} {role}": copy["pid"] for role, copy in copies.items()}
    return pids


def measure(directory: Path, settle_s: float, seconds: float) -> dict[str, float]:
    """Return each process's share of a core."""
    cluster = Cluster(
        directory, delay_groups=("d1",), watchdog=True, http_port=PORTS, broker_port=PORTS + 2, refresh_s=HOUR_S
    )
    with cluster:
        command = [sys.executable, "-m", "benchmarks.idle", "--clients", cluster.metaserver, cluster.token]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "idle\n", "the clients did not come up"
            time.sleep(settle_s)
            clock = Clock(processes(cluster, client.pid))
            time.sleep(seconds)
            spent = clock.spent()
            client.kill()
    print(f"in {spent.seconds:.0f} s; other programs kept {spent.elsewhere:.2f} cores busy meanwhile")
    return {name: cpu_s / spent.seconds for name, cpu_s in spent.cpu_s.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.add_argument("--settle", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", nargs=2, metavar=("METASERVER", "TOKEN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    if options.clients:
        asyncio.run(clients(*options.clients))
    with TemporaryDirectory(prefix="qmq-bench-") as directory:
        shares = measure(Path(directory), options.settle, options.seconds)
    for name, share in shares.items():
        print(f"{name:24} {share * 100:6.2f} %  {'' if share < LIMIT else 'above the limit'}")
    Path(".run").mkdir(exist_ok=True)
    write_atomically(Path(".run/bench-idle.json"), json.dumps(shares, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
