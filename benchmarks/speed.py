"""Shell. The speed of one broker group: producing, single messages, consuming, end to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.machine import Clock
from benchmarks.worker import Worker
from deploy.local import Cluster

GROUP = "g1"
IN_FLIGHT = 256
PACE_PER_S = 1_000


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The quick ones only show that everything works."""

    repetitions: int = 5
    produce_1k: int = 1_000_000
    produce_100b: int = 2_000_000
    send_each: int = 200_000
    send_one: int = 10_000
    consume: int = 1_000_000
    e2e_s: int = 15
    backlog: int = 10_000_000
    peer: int = 60_000
    peer_one: int = 2_000


QUICK = Sizes(
    repetitions=2, produce_1k=100_000, produce_100b=200_000, send_each=20_000, send_one=1_000, consume=100_000,
    e2e_s=3, backlog=400_000, peer=10_000, peer_one=300,
)  # fmt: skip


class Speed:
    """Measures one cluster; every repetition has a subject of its own, as the first one."""

    def __init__(self, cluster: Cluster, sizes: Sizes, say: Callable[[str], None]) -> None:
        self._cluster, self._sizes, self._say = cluster, sizes, say
        self._numbers = itertools.count(1)

    @contextmanager
    def worker(self, name: str = "client") -> Iterator[Worker]:
        log = self._cluster.run_dir / "logs" / f"{name}.log"
        with Worker("benchmarks.client", log, self._cluster.metaserver, token=self._cluster.token) as worker:
            yield worker

    def pids(self, **clients: Worker) -> dict[str, int]:
        """Processes whose CPU time is counted."""
        state = self._cluster.describe()
        brokers = {role: state["groups"][GROUP][role]["pid"] for role in ("master", "slave")}
        return {name: worker.pid for name, worker in clients.items()} | brokers | {"meta": state["metaserver_pid"]}

    def produce_1k(self) -> list[Figure]:
        return [self._rate("produce_1k_per_s", "produce", self._sizes.produce_1k, size=1024)]

    def produce_100b(self) -> list[Figure]:
        return [self._rate("produce_100b_per_s", "produce", self._sizes.produce_100b, size=100)]

    def send_each(self) -> list[Figure]:
        return [self._rate("send_each_per_s", "send_each", self._sizes.send_each, size=1024, in_flight=IN_FLIGHT)]

    def send_one(self) -> list[Figure]:
        p50, p99 = Figure("send_one_p50_ms", more_is_better=False), Figure("send_one_p99_ms", more_is_better=False)
        with self.worker() as client:
            client.run("send_one", subject=self._subject(), messages=self._sizes.send_one // 10, size=1024)
            meter = _Meter(self.pids(client=client))
            for _ in range(self._sizes.repetitions):
                measured = meter.run(client, "send_one", self._subject(), self._sizes.send_one, size=1024)
                p50.values.append(measured["p50_ms"])
                p99.values.append(measured["p99_ms"])
                self._say(f"send_one   p50 {measured['p50_ms']:.3f} ms  p99 {measured['p99_ms']:.3f} ms")
        meter.account(p50)
        p99.elsewhere = p50.elsewhere
        return [p50, p99]

    def consume_1k(self) -> list[Figure]:
        """Drain a backlog twice, in two groups: with a puller and with a listener."""
        pull, listen = Figure("consume_1k_per_s"), Figure("listen_1k_per_s")
        messages = self._sizes.consume
        for _ in range(max(2, self._sizes.repetitions - 2)):
            subject = self._subject()
            with self.worker() as client:
                client.run("produce", subject=subject, messages=messages, size=1024)
            for figure, action in ((pull, "drain"), (listen, "listen")):
                with self.worker() as client:
                    meter = _Meter(self.pids(client=client))
                    measured = meter.run(client, action, subject, messages, group=action)
                    self._add_rate(figure, measured)
                    meter.account(figure)
        return [pull, listen]

    def e2e(self) -> list[Figure]:
        """From `send_nowait` in one process to the handler in another, with a steady rate."""
        p50, p99 = Figure("e2e_p50_ms", more_is_better=False), Figure("e2e_p99_ms", more_is_better=False)
        messages, skipped = self._sizes.e2e_s * PACE_PER_S, 2 * PACE_PER_S
        for _ in range(max(2, self._sizes.repetitions - 2)):
            subject = self._subject()
            with self.worker("producer") as producer, self.worker("listener") as listener:
                producer.run("send_one", subject=subject + ".first", messages=10, size=100)
                listener.begin("latency", subject=subject, group="e2e", messages=messages + skipped, skipped=skipped)
                meter = _Meter(self.pids(producer=producer, listener=listener))
                meter.run(producer, "pace", subject, messages + skipped, per_second=PACE_PER_S)
                measured = listener.end()
            p50.values.append(measured["p50_ms"])
            p99.values.append(measured["p99_ms"])
            meter.account(p50)
            self._say(f"e2e        p50 {measured['p50_ms']:.3f} ms  p99 {measured['p99_ms']:.3f} ms")
        p99.elsewhere = p50.elsewhere
        return [p50, p99]

    def _rate(self, name: str, action: str, messages: int, **arguments: Any) -> Figure:
        figure = Figure(name)
        with self.worker() as client:
            client.run(action, subject=self._subject(), messages=messages // 10, **arguments)
            meter = _Meter(self.pids(client=client))
            for _ in range(self._sizes.repetitions):
                self._add_rate(figure, meter.run(client, action, self._subject(), messages, **arguments))
        meter.account(figure)
        return figure

    def _add_rate(self, figure: Figure, measured: dict[str, Any]) -> None:
        figure.values.append(measured["messages"] / measured["seconds"])
        self._say(f"{figure.name:<20} {figure.values[-1]:>12,.0f}")

    def _subject(self) -> str:
        return f"benchmark.{next(self._numbers)}"


class _Meter:
    """Adds up the CPU time of processes over repetitions."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._cpu_s = dict.fromkeys(pids, 0.0)
        self._messages = 0
        self._elsewhere: list[float] = []

    def run(self, worker: Worker, action: str, subject: str, messages: int, **arguments: Any) -> dict[str, Any]:
        clock = Clock(self._pids)
        measured = worker.run(action, subject=subject, messages=messages, **arguments)
        spent = clock.spent()
        self._messages += messages
        self._elsewhere.append(spent.elsewhere)
        for name, seconds in spent.cpu_s.items():
            self._cpu_s[name] += seconds
        return measured

    def account(self, figure: Figure) -> None:
        figure.elsewhere += self._elsewhere
        figure.cpu_us = {name: seconds / self._messages * 1e6 for name, seconds in self._cpu_s.items()}


def logs_of(cluster: Cluster) -> list[Path]:
    """Data directories of the group's two copies."""
    group = cluster.describe()["groups"][GROUP]
    return [Path(group[role]["data"]) for role in ("master", "slave")]
