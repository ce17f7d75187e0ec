"""Shell. One trial: a cluster, clients, a nemesis; then the last messages are drained and everything is compared."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qmq.deploy.chaos.checker import Finding, Logs, check
from qmq.deploy.chaos.consumers import Consumers
from qmq.deploy.chaos.history import STORED, History
from qmq.deploy.chaos.nemesis import Nemesis
from qmq.deploy.chaos.senders import Senders
from qmq.deploy.cluster import Cluster
from qmq.deploy.copies import are_equal, read_copy
from qmq.deploy.plan import HTTP_PORT
from qmq.errors import NotServed, QmqError

SUBJECTS = ["order.changed", "flight.departed", "price"]
GROUPS = ("g1", "g2")
CONSUMERS = 3
CALM_S = 2.0
STUCK_S = 40.0
"""What nobody gets while nothing goes on for so long, nobody will get."""
EQUAL_S = 120.0
RESTART_S = 0.3
METASERVER = {"database_timeout_ms": 30_000}
"""A machine with much to do stands still for seconds, and so does its database."""
SETTINGS = {
    "lease_ms": 2000,
    "segment_bytes": 256 << 10,
    "slave_wait_ms": 1000,
    "slave_lag_ms_max": 2000,
    "tail_bytes": 64 << 10,
}
"""Of brokers: short times and small segments, so that much happens in a minute."""
CHOSEN = {"disk_free_limit": 0}
"""Whatever else is asked for: a small disk is filled to the last byte."""


@dataclass
class Outcome:
    history: History
    findings: list[Finding]
    refused: list[str]
    faults: list[str]

    def summary(self) -> str:
        outcomes = Counter(one.outcome for one in self.history.sent)
        deliveries = Counter(one.id for one in self.history.delivered)
        repeated = sum(count - 1 for count in deliveries.values())
        return (
            f"sent {len(self.history.sent)} ({', '.join(f'{name} {n}' for name, n in sorted(outcomes.items()))}), "
            f"delivered {len(deliveries)}, again {repeated}, faults {len(self.faults)}, findings {len(self.findings)}"
        )


async def attempt(
    folder: Path,
    *,
    seed: int,
    strike: Callable[[Nemesis, threading.Event], None],
    settings: Mapping[str, Any] | None = None,
    http_port: int = HTTP_PORT,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run a trial; `strike` is called in a thread and decides which faults there are. The seed chooses all the rest.

    Args:
        settings: of brokers, over `SETTINGS`.
        http_port: where the search for free ports begins.
    """
    broker = {**SETTINGS, **(settings or {}), **CHOSEN}
    with Cluster(
        folder / "cluster",
        groups=GROUPS,
        broker=broker,
        metaserver=METASERVER,
        restart_s=RESTART_S,
        http_port=http_port,
        broker_port=http_port + 2,
    ) as cluster:
        lease_s = float(broker["lease_ms"]) / 1000  # a number: brokers took it
        reach: dict[str, Any] = {"metaserver": cluster.metaserver, "token": cluster.token, "subjects": SUBJECTS}
        history = History(lease_s)
        consumers = Consumers(folder / "consumers", CONSUMERS, lease_s=lease_s, **reach)
        nemesis = Nemesis(cluster, history, random.Random(f"{seed} nemesis"), say)
        senders = Senders(history, seed=seed, **reach)
        findings = await _run(nemesis, consumers, senders, history, strike, seed)
        history.faults += consumers.faults
        consumers.read(history)
        findings += await asyncio.to_thread(_compare, cluster, history)
    return Outcome(history, findings, nemesis.target.refused, [fault.name for fault in history.faults])


async def _run(
    nemesis: Nemesis,
    consumers: Consumers,
    senders: Senders,
    history: History,
    strike: Callable[[Nemesis, threading.Event], None],
    seed: int,
) -> list[Finding]:
    """Let clients work while the cluster is struck, and drain it; return what did not become well."""
    stop, findings = threading.Event(), []
    sending = asyncio.create_task(senders.run())
    consumers.start_all()
    striking = threading.Thread(target=consumers.strike, args=(random.Random(f"{seed} consumers"), stop))
    try:
        await asyncio.sleep(CALM_S)
        striking.start()
        try:
            await asyncio.to_thread(strike, nemesis, stop)
        except QmqError as error:
            findings.append(Finding("not-well", str(error)))
        stop.set()
        await asyncio.sleep(CALM_S)
        senders.stop.set()
        await sending
        striking.join()
        await asyncio.to_thread(_drain, history, consumers)
        if why := consumers.failed():
            findings.append(Finding("consumer-ended", why))
    finally:
        stop.set()
        sending.cancel()
        if striking.is_alive():
            striking.join()
        consumers.end()
    return findings


def _drain(history: History, consumers: Consumers) -> None:
    """Wait until every stored message was given to somebody; what never comes is for the checker to name."""
    stored = {one.id for one in history.sent if one.outcome == STORED}
    left, since = len(stored), time.monotonic()
    while left and time.monotonic() < since + STUCK_S and not consumers.failed():
        time.sleep(0.5)
        if (now_left := len(stored - consumers.delivered_ids())) < left:
            left, since = now_left, time.monotonic()
    time.sleep(2 * history.lease_s)  # what a killed consumer held comes again, and messages of unknown outcome


def _compare(cluster: Cluster, history: History) -> list[Finding]:
    findings = []
    for group in GROUPS:
        try:
            cluster.wait(partial(are_equal, cluster, group), f"the copies of {group} do not become equal", EQUAL_S)
        except NotServed as error:
            findings.append(Finding("not-equal", str(error)))
    folders = {group: [cluster.data(cluster.broker(group, role)) for role in ("master", "slave")] for group in GROUPS}
    cluster.stop()
    try:
        copies = {group: (read_copy(master), read_copy(slave)) for group, (master, slave) in folders.items()}
    except (QmqError, AssertionError) as error:
        return [*findings, Finding("unreadable", str(error))]
    return findings + check(history, Logs(copies))
