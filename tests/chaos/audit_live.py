"""Shell. Audits of a working cluster: clients run, and faults strike a broker group during each audit. An audit may
fail to read; every finding is a false one.

    python -m tests.chaos.audit_live --runs 20

Runs cycle through the strikes below, two at a time, in a seeded order. The run after a failed read has no strikes, and
must prove all groups equal. Every third run reads everything, the others continue from a ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import qmq
from qmq.audit.copies import CannotRead
from qmq.audit.group import audit_groups
from qmq.audit.places import GroupStatus, find_group_status, find_places
from qmq.audit.results import Group, Result
from qmq.audit.wave import Options
from qmq.deploy.chaos import faults
from qmq.deploy.chaos.faults import Target
from qmq.deploy.cluster import Cluster
from qmq.errors import QmqError
from qmq.ledger import Ledger
from tests.support.ports import run_of_ports
from tests.support.spark import local_spark

GROUP, DELAYS, ORDERS, FLIGHTS = "g1", "d1", "order.changed", "flight.departed"
SETTINGS = {
    "segment_bytes": 256 << 10,
    "retention_bytes": 1 << 20,
    "read_log_bytes_per_s": 3 << 20,
    "slave_wait_ms": 1000,
    "lease_ms": 5000,
    "disk_free_limit": 0,
}
"""Retention deletes everything that is not held; reading takes seconds, long enough for a strike."""
FULL_EVERY = 3
WARM_UP_S = 10.0
ROLES_S = 60.0
POLL_S = 0.02


def fail_over(target: Target, group: str) -> None:
    """The master stays down until its slave, if complete, is promoted."""
    target.cluster.wait_writable(group)
    master, _ = target.copies(group)
    target.cluster.end(master.hostname)
    try:
        target.cluster.wait(lambda: target.copies(group)[0].hostname != master.hostname, "no failover", ROLES_S)
    finally:
        target.cluster.begin(master.hostname)


def restart_both(target: Target, group: str) -> None:
    """Restarts of both brokers forget the hold, so retention continues."""
    for broker in target.copies(group):
        target.cluster.kill(group, "master" if broker == target.copies(group)[0] else "slave")


Strike = Callable[[Target, str], None]
STRIKES: dict[str, Strike] = {
    "swap": faults.STRIKES["swap roles"].hit,
    "failover": fail_over,
    "seeding": faults.STRIKES["wipe slave"].hit,
    "restart of the slave": faults.STRIKES["kill slave"].hit,
    "restart of both": restart_both,
    "restart of the metaserver": faults.STRIKES["kill metaserver"].hit,
}


class Clients(threading.Thread):
    """Send, consume with tags, fail and delay messages until `end`."""

    def __init__(self, metaserver: str, token: str) -> None:
        super().__init__(name="clients")
        self._reach: dict[str, Any] = {"metaserver": metaserver, "token": token, "app": "live"}
        self._ended = threading.Event()
        self.stored = 0

    def run(self) -> None:
        asyncio.run(self._work())

    def end(self) -> None:
        self._ended.set()
        self.join()

    async def _work(self) -> None:
        rng, consumer = random.Random(1), qmq.Consumer(**self._reach, consumer_id="c1", drain_s=5.0)

        @consumer.listen(ORDERS, group="billing", start="earliest", retries_max=2, retry_delay=0.2)
        async def bill(message: qmq.ReceivedMessage) -> None:
            if message.sequence % 40 == 7:
                raise ValueError("no such order")

        @consumer.listen(ORDERS, group="odd", start="earliest", tags=["odd"])
        async def count(message: qmq.ReceivedMessage) -> None: ...

        @consumer.listen(FLIGHTS, group="boards", start="earliest", batch=50)
        async def show(messages: list[qmq.ReceivedMessage]) -> None: ...

        async with qmq.Producer(**self._reach, timeout_s=10.0) as producer, asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.run())
            for number in itertools.count():
                if self._ended.is_set():
                    break
                await self._send(producer, rng, number)
                await asyncio.sleep(0.1)
            consumer.stop()

    async def _send(self, producer: qmq.Producer, rng: random.Random, number: int) -> None:
        messages = [
            qmq.Message(subject, {"n": f"{number}.{at}", "x": "x" * rng.randint(0, 800)}, tags=tags)
            for at, (subject, tags) in enumerate(rng.choices([(ORDERS, ("odd",)), (ORDERS, ()), (FLIGHTS, ())], k=5))
        ]
        with suppress(QmqError):
            self.stored += sum(receipt.is_stored for receipt in await producer.send_many(messages))
            if number % 10 == 0:
                await producer.send(qmq.Message(FLIGHTS, {"n": str(number)}), delay=rng.uniform(0.5, 3))


class Struck(threading.Thread):
    """Strikes against the broker group during an audit; `done` lists them with their times."""

    def __init__(self, spark: SparkSession, target: Target, names: Iterable[str]) -> None:
        super().__init__(name="strikes")
        self._spark, self._target, self._names = spark, target, list(names)
        self._is_over = threading.Event()
        self.began = time.monotonic()
        self.done: list[str] = []
        self.strikes = 0

    def end(self) -> None:
        """The audit has ended; drop the remaining strikes."""
        self._is_over.set()
        self.join()

    def run(self) -> None:
        for number, name in enumerate(self._names):
            share = (number + self._target.rng.random()) / len(self._names)
            while not has_done(self._spark, share):
                if self._is_over.wait(POLL_S):
                    self.done.append(f"no {name}: the audit had ended")
                    return
            at = time.monotonic() - self.began
            self.strikes += 1
            try:
                STRIKES[name](self._target, GROUP)
                self.done.append(f"{name} at {at:.1f} s")
            except QmqError as error:
                self.done.append(f"{name} at {at:.1f} s ({str(error).splitlines()[0]})")


def has_done(spark: SparkSession, share: float) -> bool:
    """Return whether Spark works at a stage with this share of its tasks done, in whole tasks."""
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
    return any(
        stage and stage.numActiveTasks and stage.numCompletedTasks >= int(share * stage.numTasks) for stage in stages
    )


def _answers(cluster: Cluster) -> bool:
    try:
        return bool(find_places(cluster.metaserver, cluster.token))
    except CannotRead:
        return False


def audit(spark: SparkSession, cluster: Cluster, ledger: Ledger | None) -> list[Result]:
    found, standing = (
        find_places(cluster.metaserver, cluster.token),
        find_group_status(cluster.metaserver, cluster.token),
    )
    groups = [Group(name, places, *standing.get(name, GroupStatus())) for name, places in found.items()]
    return audit_groups(spark, groups, Options(piece_bytes=1 << 20, ledger=ledger))


def tell(number: int, results: list[Result], struck: Struck | None, seconds: float) -> None:
    read = sum(side["bytes"] for result in results for side in result.read.values()) / 1e6
    texts = [
        f"{result.group} " + (f"not read ({result.unreadable})" if result.unreadable else str(result.found))
        for result in results
    ]
    done = "; ".join(struck.done) if struck else "nothing"
    print(f"run {number}: {seconds:.1f} s, {read:.1f} MB; {done} | {'; '.join(texts)}", flush=True)
    for result in results:
        for note in result.notes:
            print("   ", result.group, note, flush=True)
        for row in result.findings[:20]:
            print("   ", {name: value for name, value in row.items() if value is not None}, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.audit_live", description="Audit a cluster that works.")
    parser.add_argument("--runs", type=int, default=20, help="number of runs with a fault; others do not count")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    logging.getLogger("qmq").setLevel(logging.ERROR)  # handlers fail on purpose
    rng, first = random.Random(options.seed), run_of_ports()
    with tempfile.TemporaryDirectory(prefix="qmq-live-") as name, local_spark("live") as spark:
        ports = {"http_port": first, "broker_port": first + 2}
        settings = {"broker": SETTINGS, "delay_server": {"disk_free_limit": 0}, "metaserver": {"failover": True}}
        folder, groups = Path(name), {"groups": (GROUP,), "delay_groups": (DELAYS,)}
        with Cluster(folder / "cluster", **groups, **settings, **ports) as cluster:  # type: ignore[arg-type]
            cluster.wait_writable(GROUP, DELAYS)
            clients = Clients(cluster.metaserver, cluster.token)
            clients.start()
            try:
                time.sleep(WARM_UP_S)
                wrong = sum(_runs(spark, cluster, Ledger(folder / "ledger"), rng, options.runs))
            finally:
                clients.end()
    print(f"{options.runs} struck runs, {clients.stored} messages stored meanwhile, {wrong} with findings or not well")
    return 1 if wrong or not clients.stored else 0


def _runs(spark: SparkSession, cluster: Cluster, ledger: Ledger, rng: random.Random, runs: int) -> Iterable[bool]:
    """Yield for each run whether it was wrong, until enough runs were struck, as an audit may end before its strike."""
    target = Target(cluster, rng)
    twos = list(itertools.permutations(STRIKES, 2))
    rng.shuffle(twos)
    turns, is_calm = itertools.cycle(twos), False
    number = struck_runs = 0
    while struck_runs < runs:
        number += 1
        cluster.wait(lambda: _answers(cluster), "the metaserver does not answer")  # the last strike may have killed it
        struck = None if is_calm else Struck(spark, target, next(turns))
        began = time.monotonic()
        if struck is not None:
            struck.start()
        results = audit(spark, cluster, None if number % FULL_EVERY == 0 else ledger)
        seconds = time.monotonic() - began
        if struck is not None:
            struck.end()
            struck_runs += struck.strikes > 0
        tell(number, results, struck, seconds)
        cluster.wait_writable(GROUP, DELAYS)
        yield any(result.status == 1 or (is_calm and result.status) for result in results)
        is_calm = any(result.unreadable for result in results)


if __name__ == "__main__":
    sys.exit(main())
