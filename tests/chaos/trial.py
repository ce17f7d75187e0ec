"""Shell. One trial: a cluster, clients, a nemesis; then the last messages are drained and everything is compared."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qmq.deploy.cluster import Cluster
from tests.chaos.checker import Finding, Logs, check
from tests.chaos.consumers import LEASE_S, Consumers
from tests.chaos.history import STORED, History
from tests.chaos.nemesis import Nemesis
from tests.chaos.senders import Senders
from tests.integration.cluster_world import are_equal, data_of, read_copy, running, until

SUBJECTS = ["order.changed", "flight.departed", "price"]
GROUPS = ("g1", "g2")
CONSUMERS = 3
CALM_S = 2.0
DRAIN_S = 240.0


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
    folder: Path, *, seed: int, strike: Callable[[Nemesis, threading.Event], None],
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:  # fmt: skip
    """Run a trial; `strike` is called in a thread and decides which faults there are. The seed chooses all the rest."""
    settings = {"lease_ms": int(LEASE_S * 1000), "slave_lag_ms_max": 2000, "tail_bytes": 64 * 1024}
    with running(folder / "cluster", groups=GROUPS, restart_s=0.3, **settings) as cluster:
        reach: dict[str, Any] = {"metaserver": cluster.metaserver, "token": cluster.token, "subjects": SUBJECTS}
        history = History()
        consumers = Consumers(folder / "consumers", CONSUMERS, **reach)
        nemesis = Nemesis(cluster, history, random.Random(f"{seed} nemesis"), say)
        senders = Senders(history, seed=seed, **reach)
        stop = threading.Event()
        sending = asyncio.create_task(senders.run())
        consumers.start_all()
        striking = threading.Thread(target=consumers.strike, args=(random.Random(f"{seed} consumers"), stop))
        try:
            await asyncio.sleep(CALM_S)
            striking.start()
            await asyncio.to_thread(strike, nemesis, stop)
            stop.set()
            await asyncio.sleep(CALM_S)
            senders.stop.set()
            await sending
            striking.join()
            await asyncio.to_thread(_drain, history, consumers)
        finally:
            stop.set()
            sending.cancel()
            if striking.is_alive():
                striking.join()
            consumers.end()
        history.faults += consumers.faults
        consumers.read(history)
        findings = await asyncio.to_thread(_compare, cluster, history)
    return Outcome(history, findings, nemesis.refused, [fault.name for fault in history.faults])


def _drain(history: History, consumers: Consumers) -> None:
    """Wait until every stored message was given to somebody; what never comes is for the checker to name."""
    stored = {one.id for one in history.sent if one.outcome == STORED}
    deadline = time.monotonic() + DRAIN_S
    while stored - consumers.delivered_ids() and time.monotonic() < deadline and not consumers.failed():
        time.sleep(0.5)
    assert not consumers.failed(), consumers.failed()
    time.sleep(2 * LEASE_S)  # what consumers hold that were killed last comes again, and messages of unknown outcome


def _compare(cluster: Cluster, history: History) -> list[Finding]:
    for group in GROUPS:
        until(lambda group=group: are_equal(cluster, group), f"the copies of {group} become equal")
    folders = {
        group: tuple(data_of(cluster, cluster.broker(group, role)) for role in ("master", "slave")) for group in GROUPS
    }
    cluster.stop()
    copies = {group: (read_copy(master), read_copy(slave)) for group, (master, slave) in folders.items()}
    return check(history, Logs(copies))
