"""Shell. What a backlog that nobody reads costs, and how long a master with a long log is away when it is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import mean

from benchmarks.figures import Figure
from benchmarks.machine import MIB, Clock, free_disk_bytes, resident_bytes
from benchmarks.speed import GROUP, Sizes, Speed, logs_of
from qmq.deploy.local import Cluster

MESSAGE_BYTES = 1_200
"""What a message with 1,024 bytes of content takes in a log, with its id and its share of the frame; rounded up."""
KEPT_FREE_BYTES = 8 << 30
"""Disk that stays free for everybody else; also more than a broker's own limit."""
STEPS = 20
RESTARTS = 3
SAMPLE_S = 0.1


class Backlog:
    """Fills a fresh cluster's log, watches memory and rate, then kills its master."""

    def __init__(self, cluster: Cluster, sizes: Sizes, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._speed = Speed(cluster, sizes, say)
        free = free_disk_bytes(cluster.run_dir) - KEPT_FREE_BYTES
        self._messages = max(0, min(sizes.backlog, free // (2 * MESSAGE_BYTES))) // STEPS * STEPS
        self.shortened = ""
        if self._messages < sizes.backlog:
            self.shortened = f"only {self._messages:,} messages: {free / (1 << 30):.0f} GiB of disk are free for it. "

    def fill(self) -> list[Figure]:
        """Produce the backlog in steps; the broker's memory is read all the while."""
        rates, elsewhere = [], []
        with self._speed.worker() as client, _Memory(self._speed.pids()) as memory:
            client.run("send_one", subject="backlog", messages=10, size=1024)
            memory.begin()
            clock = Clock(self._speed.pids(client=client))
            for step in range(1, STEPS + 1):
                part = Clock({})
                measured = client.run("produce", subject="backlog", messages=self._messages // STEPS, size=1024)
                rates.append(measured["messages"] / measured["seconds"])
                elsewhere.append(part.spent().elsewhere)
                if step % 4 == 0:
                    self._say(
                        f"backlog of {step * self._messages // STEPS:>11,} messages  {mean(rates[-4:]):>9,.0f}/s  "
                        f"master +{memory.raised('master') / MIB:.0f} MB, slave +{memory.raised('slave') / MIB:.0f} MB"
                    )
            spent = clock.spent()
        cpu = {name: seconds / self._messages * 1e6 for name, seconds in spent.cpu_s.items()}
        first, last = mean(rates[: STEPS // 10]), mean(rates[-STEPS // 10 :])
        tenths = f"{self.shortened}first tenth {first:,.0f}/s, last tenth {last:,.0f}/s"
        raised = {role: memory.raised(role) / MIB for role in ("master", "slave")}
        note = (
            f"{self.shortened}{self._messages:,} messages; master +{raised['master']:.0f} MB, "
            f"slave +{raised['slave']:.0f} MB at most"
        )
        return [
            Figure("backlog_rss_mb", [max(raised.values())], note=note, more_is_better=False),
            Figure("backlog_per_s", rates, elsewhere, cpu, note=tenths),
            Figure("backlog_last_to_first_tenth", [last / first]),
        ]

    def restart(self) -> list[Figure]:
        """From the master's SIGKILL to an acknowledged message; the runner starts it again without a pause."""
        figure = Figure("restart_s", more_is_better=False)
        size = sum(path.stat().st_size for path in logs_of(self._cluster)[0].rglob("*.log"))
        with self._speed.worker() as client:
            for number in range(RESTARTS):
                client.run("send_one", subject="restart", messages=10, size=1024)
                starts, clock, began = self._cluster.starts, Clock({}), time.monotonic()
                self._cluster.kill(GROUP, "master")
                while self._cluster.starts == starts:
                    time.sleep(0.005)
                with self._speed.worker(f"restart{number}") as fresh:
                    fresh.run("send_one", subject="restart", messages=1, size=1024, timeout_s=120.0)
                figure.values.append(time.monotonic() - began)
                figure.elsewhere.append(clock.spent().elsewhere)
                self._say(f"restart_s {figure.values[-1]:>8.2f}")
                self._cluster.wait_writable(GROUP)
        figure.note = f"{self.shortened}log of {size / (1 << 30):.1f} GiB, the newest part of it in the page cache"
        return [figure]


class _Memory:
    """Samples resident memory of processes; `raised` is the highest value since `begin` over the value then."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._base: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self) -> None:
        self._base = {name: resident_bytes(pid) for name, pid in self._pids.items()}
        self._peak = dict(self._base)
        self._thread.start()

    def raised(self, name: str) -> int:
        return self._peak[name] - self._base[name]

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for name, pid in self._pids.items():
                self._peak[name] = max(self._peak[name], resident_bytes(pid))
