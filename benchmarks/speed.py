"""Shell. Speed of one broker group: producing, single messages, consuming, end to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Clock, Figure
from benchmarks.worker import Worker
from qmq.deploy.local import Cluster

GROUP = "g1"
IN_FLIGHT = 256
PACE_PER_S = 1_000
WIDE = 64
"""Concurrent handlers."""
WARM_MESSAGES = 1_000
"""Messages consumed before a process is measured."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements. The quick ones only show that everything works."""

    repetitions: int = 5
    produce_1k: int = 1_000_000
    produce_100b: int = 2_000_000
    send_each: int = 200_000
    send_one: int = 10_000
    consume: int = 1_000_000
    typed: int = 100_000
    e2e_s: int = 15
    subjects: int = 1_000
    groups: int = 100
    members: int = 10
    pairs: int = 5
    phase_s: int = 10
    backlog: int = 10_000_000
    peer: int = 60_000
    peer_one: int = 2_000


QUICK = Sizes(
    repetitions=2,
    produce_1k=100_000,
    produce_100b=200_000,
    send_each=20_000,
    send_one=1_000,
    consume=100_000,
    typed=10_000,
    e2e_s=3,
    subjects=100,
    groups=20,
    pairs=2,
    phase_s=3,
    backlog=400_000,
    peer=10_000,
    peer_one=300,
)


class Speed:
    """Measures one cluster; every repetition has a new subject."""

    def __init__(self, cluster: Cluster, sizes: Sizes, say: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.sizes = sizes
        self.say = say
        self._numbers = itertools.count(1)

    @contextmanager
    def worker(self, name: str = "client") -> Iterator[Worker]:
        log = self.cluster.run_dir / "logs" / f"{name}.log"
        with Worker("benchmarks.client", log, self.cluster.metaserver, token=self.cluster.token) as worker:
            yield worker

    @contextmanager
    def crowd(self) -> Iterator[Worker]:
        """Yield a process of many consumers (`benchmarks.crowd`), connected to the master."""
        port = self.cluster.describe()["groups"][GROUP]["master"]["port"]
        log = self.cluster.run_dir / "logs" / "crowd.log"
        with Worker("benchmarks.crowd", log, str(port), token=self.cluster.token) as worker:
            yield worker

    def pids(self, **clients: Worker) -> dict[str, int]:
        """Processes with counted CPU time."""
        state = self.cluster.describe()
        brokers = {role: state["groups"][GROUP][role]["pid"] for role in ("master", "slave")}
        return {name: worker.pid for name, worker in clients.items()} | brokers | {"meta": state["metaserver_pid"]}

    def produce_1k(self) -> list[Figure]:
        """Send texts and bodies of 1 KiB in turns."""
        texts, bodies = Figure("produce_1k_per_s"), Figure("produce_body_1k_per_s")
        messages = self.sizes.produce_1k
        with self.worker() as client:
            for is_body in (False, True):
                client.run("produce", subject=self.subject(), messages=messages // 10, size=1024, is_body=is_body)
            metered = [(figure, Meter(self.pids(client=client))) for figure in (texts, bodies)]
            for _ in range(self.sizes.repetitions):
                for figure, meter in metered:
                    arguments = {"size": 1024, "is_body": figure is bodies}
                    self._add_rate(figure, meter.run(client, "produce", self.subject(), messages, **arguments))
            for figure, meter in metered:
                meter.account(figure)
        self._say_ratio("produced", bodies, texts)
        return [texts, bodies]

    def produce_100b(self) -> list[Figure]:
        return [self._rate("produce_100b_per_s", "produce", self.sizes.produce_100b, size=100)]

    def send_each(self) -> list[Figure]:
        return [self._rate("send_each_per_s", "send_each", self.sizes.send_each, size=1024, in_flight=IN_FLIGHT)]

    def send_one(self) -> list[Figure]:
        p50, p99 = Figure("send_one_p50_ms", more_is_better=False), Figure("send_one_p99_ms", more_is_better=False)
        rate = Figure("send_one_per_s")
        with self.worker() as client:
            client.run("send_one", subject=self.subject(), messages=self.sizes.send_one // 10, size=1024)
            meter = Meter(self.pids(client=client))
            for _ in range(self.sizes.repetitions):
                measured = meter.run(client, "send_one", self.subject(), self.sizes.send_one, size=1024)
                p50.values.append(measured["p50_ms"])
                p99.values.append(measured["p99_ms"])
                self.say(f"send_one   p50 {measured['p50_ms']:.3f} ms  p99 {measured['p99_ms']:.3f} ms")
                self._add_rate(rate, measured)
        meter.account(p50)
        p99.elsewhere = rate.elsewhere = p50.elsewhere
        return [p50, p99, rate]

    def consume_1k(self) -> list[Figure]:
        """Drain a backlog in three groups: with a puller, a listener, and a listener with many concurrent handlers; and
        one of bodies with a listener.
        """
        names = "consume", "listen", "listen_wide", "listen_body"
        pull, listen, wide, bodies = (Figure(f"{name}_1k_per_s") for name in names)
        messages = self.sizes.consume
        plain: dict[str, Any] = {}
        many, body = {"concurrency": WIDE}, {"is_body": True}
        for _ in range(max(2, self.sizes.repetitions - 2)):
            texts, subject = self.subject(), ""
            with self.worker() as client:
                for subject, more in ((texts, plain), (f"{texts}.body", body)):
                    client.run("produce", subject=subject, messages=messages, size=1024, **more)
                    client.run("produce", subject=f"{subject}.warm", messages=WARM_MESSAGES, size=1024, **more)
            runs = (pull, "drain", plain), (listen, "listen", plain), (bodies, "listen", body), (wide, "listen", many)
            for figure, action, more in runs:
                subject = f"{texts}.body" if figure is bodies else texts
                with self.worker() as client:  # imports at first use are no cost of a message
                    client.run(action, subject=f"{subject}.warm", messages=WARM_MESSAGES, group=figure.name, **more)
                    meter = Meter(self.pids(client=client))
                    measured = meter.run(client, action, subject, messages, group=figure.name, **more)
                    self._add_rate(figure, measured)
                    meter.account(figure)
        self._say_ratio("received", bodies, listen)
        return [pull, listen, wide, bodies]

    def typed(self) -> list[Figure]:
        """Drain orders with eight handlers that get models of pydantic, beside handlers that get the bodies."""
        sends, models, bodies = (Figure(f"{name}_per_s") for name in ("send_typed", "listen_typed", "listen_body"))
        for _ in range(max(2, self.sizes.repetitions - 2)):
            subject = self.subject()
            with self.worker() as client:
                client.run("produce_typed", subject=f"{subject}.warm", messages=self.sizes.typed // 10)
                self._add_rate(sends, Meter({}).run(client, "produce_typed", subject, self.sizes.typed))
            for figure, is_typed in ((bodies, False), (models, True)):
                with self.worker() as client:
                    more: dict[str, Any] = {"group": figure.name, "concurrency": 8, "is_typed": is_typed}
                    client.run("listen_typed", subject=f"{subject}.warm", messages=self.sizes.typed // 10, **more)
                    meter = Meter(self.pids(client=client))
                    self._add_rate(figure, meter.run(client, "listen_typed", subject, self.sizes.typed, **more))
                    meter.account(figure)
        self.say(f"typed / raw bodies   {max(models.values) / max(bodies.values):>12.2f}")
        return [sends, bodies, models]

    def e2e(self) -> list[Figure]:
        """Measure from `send_nowait` in one process to the handler in another, at a steady rate."""
        p50, p99 = Figure("e2e_p50_ms", more_is_better=False), Figure("e2e_p99_ms", more_is_better=False)
        messages, skipped = self.sizes.e2e_s * PACE_PER_S, 2 * PACE_PER_S
        for _ in range(max(2, self.sizes.repetitions - 2)):
            subject = self.subject()
            with self.worker("producer") as producer, self.worker("listener") as listener:
                producer.run("send_one", subject=subject + ".first", messages=10, size=100)
                listener.begin("latency", subject=subject, group="e2e", messages=messages + skipped, skipped=skipped)
                meter = Meter(self.pids(producer=producer, listener=listener))
                meter.run(producer, "pace", subject, messages + skipped, per_second=PACE_PER_S)
                measured = listener.end()
            p50.values.append(measured["p50_ms"])
            p99.values.append(measured["p99_ms"])
            meter.account(p50)
            self.say(f"e2e        p50 {measured['p50_ms']:.3f} ms  p99 {measured['p99_ms']:.3f} ms")
        p99.elsewhere = p50.elsewhere
        return [p50, p99]

    def _rate(self, name: str, action: str, messages: int, **arguments: Any) -> Figure:
        figure = Figure(name)
        with self.worker() as client:
            client.run(action, subject=self.subject(), messages=messages // 10, **arguments)
            meter = Meter(self.pids(client=client))
            for _ in range(self.sizes.repetitions):
                self._add_rate(figure, meter.run(client, action, self.subject(), messages, **arguments))
        meter.account(figure)
        return figure

    def _say_ratio(self, verb: str, bodies: Figure, texts: Figure) -> None:
        self.say(f"bodies / texts {verb} {max(bodies.values) / max(texts.values):>10.2f}")

    def _add_rate(self, figure: Figure, measured: dict[str, Any]) -> None:
        figure.values.append(measured["messages"] / measured["seconds"])
        self.say(f"{figure.name:<20} {figure.values[-1]:>12,.0f}")

    def subject(self) -> str:
        return f"benchmark.{next(self._numbers)}"


class Meter:
    """Adds up the CPU time of processes over repetitions."""

    def __init__(self, pids: dict[str, int], counted: int = 0) -> None:
        """`counted`: number of messages that the CPU time is divided by, if not those of the run."""
        self._pids = pids
        self._counted = counted
        self._cpu_s = dict.fromkeys(pids, 0.0)
        self._messages = 0
        self._elsewhere: list[float] = []

    def run(self, worker: Worker, action: str, subject: str, messages: int, **arguments: Any) -> dict[str, Any]:
        clock = Clock(self._pids)
        measured = worker.run(action, subject=subject, messages=messages, **arguments)
        spent = clock.spent()
        self._messages += self._counted or messages
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
