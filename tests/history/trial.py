"""Shell. One trial: a cluster, producers and consumers, faults of all of them; then all is drained and judged."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from math import inf
from pathlib import Path

import qmq
from qmq.deploy.chaos.history import History as Faults
from qmq.deploy.chaos.nemesis import WELL_S, Nemesis
from qmq.deploy.cluster import Cluster
from qmq.subjects import dead_letter_subject
from tests.history.checker import Finding, check
from tests.history.clients import Clients, records_in
from tests.history.history import History
from tests.history.journal import now
from tests.history.records import DeadLetter, Fault, Record
from tests.history.workload import CONSUMERS, FAULTS, LOSES, ROLE_CHANGES
from tests.integration.cluster_world import metrics, running, until

BROKER_GROUPS = ("g1", "g2")
GROUPS = sorted({(one.subject, one.group) for members in CONSUMERS.values() for one in members})
LEASE_S = 2.0
FAULTS_MIN = 3
"""Also where everything is sent before they are over."""
START_S = 180.0
CALM_S = 2.0
NOTICED_S = 4.0
"""A master has noticed by then that its slave was killed, also on a busy machine."""
DRAIN_S = 60.0
"""Who gets nowhere for so long never will."""
DEAD_LETTERS_S = 1.5
SETTINGS = {
    "lease_ms": int(LEASE_S * 1000),
    "slave_lag_ms_max": 2000,
    "segment_bytes": 4 << 20,
    "tail_bytes": 1 << 20,
}
"""Short leases, and a tail so short that whoever is late is served from the disk."""


@dataclass
class Outcome:
    history: History
    findings: list[Finding]

    def summary(self) -> str:
        outcomes = Counter(one.outcome for one in self.history.messages.values())
        handovers = Counter(
            min(len(given), 2) for places in self.history.handovers.values() for given in places.values()
        )
        dead = sum(len(places) for places in self.history.dead.values())
        told = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
        struck = Counter(fault.name for fault in self.history.faults)
        faults = ", ".join(f"{name} {count}" for name, count in sorted(struck.items()))
        return (
            f"sent {len(self.history.messages)} ({told}), handed over {handovers.total()}, {handovers[2]} of them more "
            f"than once, dead letters {dead}, faults {len(self.history.faults)} ({faults}) and "
            f"{len(self.history.befell)} of consumers, findings {len(self.findings)}; {self._rates()}"
        )

    def _rates(self) -> str:
        """How fast it went, while producers sent."""
        sent = [one.sent.at for one in self.history.messages.values() if one.sent]
        seconds = max(sent, default=0.0) - min((one.sending.at for one in self.history.messages.values()), default=0.0)
        if seconds <= 0:
            return "nothing was answered"
        faults = len(self.history.faults) / seconds
        return f"{len(sent) / seconds:.0f} messages/s, {faults:.2f} faults/s, {seconds:.0f} s"


async def attempt(
    folder: Path,
    *,
    messages: int,
    rate: float,
    keys: int,
    seed: int,
    copies: int = 2,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run a trial: so many messages, about `rate` a second, their order keys out of `keys`.

    With more than two `copies` of each group the metaserver makes another one the master by itself.
    """
    metaserver = {"failover": copies > 2}
    with running(
        folder / "cluster", groups=BROKER_GROUPS, copies=copies, restart_s=0.3, metaserver=metaserver, **SETTINGS
    ) as cluster:
        clients = Clients(folder / "clients", metaserver=cluster.metaserver, token=cluster.token, seed=seed)
        faults, stop = Faults(), threading.Event()
        nemesis = Nemesis(cluster, faults, random.Random(f"{seed} nemesis"), say)
        striking = threading.Thread(target=clients.strike, args=(random.Random(f"{seed} clients"), stop, LEASE_S))
        try:
            clients.start_consumers()
            await asyncio.to_thread(until, clients.have_joined, "all consumers begin", START_S)
            clients.start_producers(messages=messages, rate=rate, keys=keys)
            await asyncio.sleep(CALM_S)
            striking.start()
            await asyncio.to_thread(_strike, cluster, nemesis, clients, FAULTS if copies == 2 else ROLE_CHANGES)
            await asyncio.to_thread(until, lambda: clients.was_struck or clients.failed(), "consumers were struck")
            stop.set()
            striking.join()
            began = time.monotonic()
            await asyncio.to_thread(_drain, cluster, clients)
            say(f"drained in {time.monotonic() - began:.1f} s")
            say(f"failovers {await asyncio.to_thread(_failovers, cluster)}")
            clients.leave()
            clients.note(await _dead_letters(cluster))
        finally:
            stop.set()
            if striking.is_alive():
                striking.join()
            clients.kill()
    clients.note(_faults(faults))
    return judge(folder)


def judge(folder: Path) -> Outcome:
    """Judge what a trial left in its folder."""
    gc.disable()  # it would look through millions of records again and again, and find nothing
    try:
        history = History()
        history.read(records_in(folder / "clients"))
        return Outcome(history, check(history))
    finally:
        gc.enable()


def _strike(cluster: Cluster, nemesis: Nemesis, clients: Clients, faults: tuple[str, ...]) -> None:
    for number, fault in enumerate(cycle(faults)):
        if clients.failed() or (number >= FAULTS_MIN and not clients.is_sending):
            return
        if fault in LOSES:  # its record shall tell what it may lose: nothing of a fault before
            time.sleep(NOTICED_S)
            cluster.wait_writable(timeout_s=WELL_S)
        nemesis.strike(fault)


def _failovers(cluster: Cluster) -> int:
    """How often the metaserver chose a master by itself, by its audit trail."""
    count, page = 0, cluster.manage("AuditTrail", name="Failover")
    while page["next"]:
        count, page = count + len(page["rows"]), cluster.manage("AuditTrail", name="Failover", before=page["next"])
    return count + len(page["rows"])


def _drain(cluster: Cluster, clients: Clients) -> None:
    """Wait until every group has settled everything. If nothing goes on any more, the checker says what is missing."""
    least, since = inf, time.monotonic()
    while (left := _left(cluster)) and time.monotonic() < since + DRAIN_S and not clients.failed():
        if left < least:
            least, since = left, time.monotonic()
        time.sleep(0.3)
    assert not clients.failed(), clients.failed()


def _left(cluster: Cluster) -> float:
    """How many messages some group has not settled; infinity while a group is not known everywhere."""
    left, known = 0.0, Counter[tuple[str, str]]()
    for broker_group in BROKER_GROUPS:
        for name, value in metrics(cluster, cluster.broker(broker_group, "master")).items():  # type: ignore[no-untyped-call]
            kind, _, labels = name.partition("{")
            if kind in ("qmq_broker_lag_messages", "qmq_broker_unacked_messages"):
                left += value
                known.update(one for one in GROUPS if f'"{one[0]}"' in labels and f'"{one[1]}"' in labels)
    return left if all(known[one] >= 2 * len(BROKER_GROUPS) for one in GROUPS) else inf


async def _dead_letters(cluster: Cluster) -> list[DeadLetter]:
    """Read the dead letters of all groups."""
    found = []
    for subject, group in GROUPS:
        reader = qmq.Consumer(metaserver=cluster.metaserver, token=cluster.token, app="history", drain_s=5.0)
        letters = dead_letter_subject(subject, group)
        async with reader.pull(letters, group="look", start="earliest") as puller:
            while (messages := await puller.pull(500, timeout=DEAD_LETTERS_S)) or _unread(cluster, letters):
                found += [
                    DeadLetter(
                        now(),
                        subject,
                        group,
                        one.broker_group,
                        int(str(one["qmq_deadSequence"])),
                        str(one.id),
                        int(str(one["qmq_times"])),
                    )
                    for one in messages
                ]
                await puller.ack(messages)
    return found


def _unread(cluster: Cluster, subject: str) -> float:
    """How many of its messages whoever looks at them has not been handed."""
    return sum(
        value
        for broker_group in BROKER_GROUPS
        for name, value in metrics(cluster, cluster.broker(broker_group, "master")).items()  # type: ignore[no-untyped-call]
        if name.startswith("qmq_broker_lag_messages{") and f'"{subject}"' in name and '"look"' in name
    )


def _faults(faults: Faults) -> Iterator[Record]:
    for one in faults.faults:
        yield Fault(one.begin, one.end, one.name, one.group, one.name in LOSES)
