"""Shell. One trial: a cluster, clients, faults; then everything is drained and checked.

The nemesis injects one fault after the other, and waits until the cluster has recovered from each by itself.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from math import inf
from pathlib import Path
from typing import Any

import qmq
from qmq.deploy.chaos.checker import Finding, check
from qmq.deploy.chaos.clients import CONSUMERS, Clients, history_in, now
from qmq.deploy.chaos.faults import STRIKES, Target
from qmq.deploy.chaos.history import History
from qmq.deploy.chaos.records import DeadLetter, Fault
from qmq.deploy.cluster import Cluster
from qmq.deploy.control import Copy, metrics, read_copy, state
from qmq.deploy.plan import HOST, HTTP_PORT
from qmq.errors import NotServed, QmqError
from qmq.subjects import dead_letter_subject
from qmq.types import Endpoint

BROKER_GROUPS = ("g1", "g2")
GROUPS = sorted({(member.subject, member.group) for members in CONSUMERS.values() for member in members})
START_S = 180.0
CALM_S = 2.0
DRAIN_S = 60.0
"""A message not delivered within this silence counts as lost."""
EQUAL_S = 120.0
RESTART_S = 0.3
DEAD_LETTERS_S = 1.5
TICK_S = 0.3
METASERVER = {"database_timeout_ms": 30_000}
"""A busy machine pauses for seconds, and so does its database."""
SETTINGS = {
    "lease_ms": 2000,
    "segment_bytes": 256 << 10,
    "slave_wait_ms": 1000,
    "slave_lag_ms_max": 2000,
    "tail_bytes": 64 << 10,
}
"""Settings of brokers: short times, small segments, and a tail so short that late consumers are served from the
disk.
"""
CHOSEN = {"disk_free_limit": 0}
"""Overrides all other settings: a fault fills a small disk to the last byte."""
RECOVERY_S = 180.0
"""Longest recovery of the cluster from a fault."""
BETWEEN_S = 1.0
STRIKES_MIN = 3
NOTICED_S = 4.0
"""Longer than a master takes to detect a killed slave, also on a busy machine."""
LOSING_FAULTS = frozenset({"replace broker", "lose the master's disk"})
"""Faults that make a slave the master without a check that it has every decision of the master."""
STOP_SLAVE = "stop slave"


def possible() -> list[str]:
    """Return the faults that this machine can inject."""
    return [name for name, strike in STRIKES.items() if not strike.missing()]


class Nemesis:
    """Injector of faults. Made for one run; called from one thread.

    Args:
        read: returns the clients' records so far.
        say: receives a line for each fault.
    """

    def __init__(
        self, cluster: Cluster, rng: random.Random, read: Callable[[], History], say: Callable[[str], None]
    ) -> None:
        self.target = Target(cluster, rng)
        self._read = read
        self._say = say
        self._groups = sorted({broker.group for broker in cluster.plan.brokers})

    def strike_all(self, is_over: Callable[[], bool]) -> None:
        """Inject each fault once, in random order."""
        names = possible()
        self.target.rng.shuffle(names)
        for name in names:
            if not is_over():
                self.strike(name)

    def strike_in_order(self, names: Sequence[str], is_over: Callable[[], bool]) -> None:
        """Inject these faults repeatedly until `is_over`, and at least `STRIKES_MIN` times."""
        for number, name in enumerate(cycle(names)):
            if number >= STRIKES_MIN and is_over():
                return
            if name in LOSING_FAULTS:  # the fault's record covers all decisions made without a slave
                time.sleep(NOTICED_S)
                self.target.cluster.wait_writable(timeout_s=RECOVERY_S)
            self.strike(name)

    def strike_within(self, seconds: float, rng: random.Random, names: Sequence[str]) -> None:
        """Inject faults until the time is over, or one copy alone acknowledged a message; at least one fault.

        If "stop slave" is among the names, it comes first in each group: an acknowledgement by one copy shows there
        within seconds, and elsewhere perhaps never.
        """
        ends_at = time.monotonic() + seconds
        first = [(STOP_SLAVE, group) for group in self._groups if STOP_SLAVE in names]
        while True:
            name, group = first.pop() if first else (rng.choice(names), "")
            self.strike(name, group)
            if name == STOP_SLAVE and (message := self._acknowledged_by_one_copy()):
                self._say(f"lost-copy: {message} was acknowledged while the slave was stopped; no more faults")
                return
            if time.monotonic() >= ends_at:
                return

    def _acknowledged_by_one_copy(self) -> str:
        history = self._read()
        history.read(self.target.records)
        return next((str(message) for message, _ in history.acknowledged_by_one_copy()), "")

    def strike(self, name: str, group: str = "") -> None:
        """Inject one fault in a broker group, by default a random one; return once the cluster has recovered."""
        target, begun = self.target, time.monotonic()
        cluster, group = target.cluster, group or target.rng.choice(self._groups)
        STRIKES[name].hit(target, group)
        faulted = time.monotonic()
        cluster.wait(self._all_run, "a broker is down", RECOVERY_S)  # a master reports "writable" until then
        cluster.wait_writable(timeout_s=RECOVERY_S)
        cluster.wait_metaserver(RECOVERY_S)
        now = time.monotonic()
        hit = "" if "metaserver" in name else group
        target.records.append(Fault(begun, now, name, hit, name in LOSING_FAULTS))
        self._say(f"{name} group={group} fault_s={faulted - begun:.1f} recovery_s={now - faulted:.1f}")
        target.pause(0, BETWEEN_S)

    def _all_run(self) -> bool:
        cluster = self.target.cluster
        return all(cluster.service(broker.hostname).pid is not None for broker in cluster.plan.brokers)


Strike = Callable[[Nemesis, Callable[[], bool]], None]
"""Injects faults until its argument returns true: all messages are sent, or a client failed."""


@dataclass(frozen=True)
class Load:
    """Load of the producers: `messages` (0: until the faults end), `rate` a second, with order keys out of `keys`."""

    messages: int = 0
    rate: float = 600.0
    keys: int = 3_000


@dataclass
class Outcome:
    """Result of one trial."""

    history: History
    findings: list[Finding]
    refused: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [fault.name for fault in self.history.faults]

    def summary(self) -> str:
        history = self.history
        outcomes = Counter(message.outcome for message in history.messages.values())
        counts = [len(deliveries) for places in history.deliveries.values() for deliveries in places.values()]
        dead = sum(len(places) for places in history.dead.values())
        return (
            f"sent {len(history.messages)} ({', '.join(f'{name} {n}' for name, n in sorted(outcomes.items()))}), "
            f"delivered {len(counts)}, {sum(count > 1 for count in counts)} of them again, dead letters {dead}, "
            f"faults {len(history.faults)} of brokers and {len(history.consumer_faults)} of consumers, "
            f"findings {len(self.findings)}"
        )


async def attempt(
    folder: Path,
    *,
    seed: int,
    strike: Strike,
    load: Load = Load(),
    copies: int = 2,
    settings: Mapping[str, Any] | None = None,
    http_port: int = HTTP_PORT,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run a trial; `strike` runs in a thread and chooses the faults. The seed chooses everything else.

    Args:
        copies: of each group; with more than two, the metaserver makes another copy the master by itself.
        settings: of brokers, over `SETTINGS`.
        http_port: where the search for free ports begins.
    """
    broker = {**SETTINGS, **(settings or {}), **CHOSEN}
    findings: list[Finding] = []
    with Cluster(
        folder / "cluster",
        groups=BROKER_GROUPS,
        copies=copies,
        broker=broker,
        metaserver=METASERVER | {"failover": copies > 2},
        restart_s=RESTART_S,
        http_port=http_port,
        broker_port=http_port + 2,
    ) as cluster:
        clients = Clients(folder / "clients", metaserver=cluster.metaserver, token=cluster.token, seed=seed)
        nemesis = Nemesis(cluster, random.Random(f"{seed} nemesis"), partial(history_in, folder / "clients"), say)
        lease_s = float(broker["lease_ms"]) / 1000  # the brokers have accepted this number
        try:
            await _run(cluster, clients, nemesis, strike, load, random.Random(f"{seed} clients"), lease_s, findings)
            clients.note(await _dead_letters(cluster, findings))
        finally:
            clients.kill()
        clients.note(nemesis.target.records)
        logs = await asyncio.to_thread(_stop_and_read, cluster, findings)
    gc.disable()  # millions of records without cycles
    try:
        history = history_in(folder / "clients")
        return Outcome(history, findings + check(history, logs), nemesis.target.refused)
    finally:
        gc.enable()


async def _run(
    cluster: Cluster,
    clients: Clients,
    nemesis: Nemesis,
    strike: Strike,
    load: Load,
    rng: random.Random,
    lease_s: float,
    findings: list[Finding],
) -> None:
    """Let clients work during the faults, then drain the cluster; add a finding if it does not recover."""
    stop = threading.Event()
    striking = threading.Thread(target=clients.strike, args=(rng, stop, lease_s))

    def is_over() -> bool:
        return bool(clients.failed()) or not clients.is_sending

    try:
        clients.start_consumers()
        await asyncio.to_thread(cluster.wait, clients.have_begun, "not all consumers have begun", START_S)
        clients.start_producers(messages=load.messages, rate=load.rate, keys=load.keys)
        await asyncio.to_thread(cluster.wait, clients.have_begun, "not all producers have begun", START_S)
        await asyncio.sleep(CALM_S)
        striking.start()
        try:
            await asyncio.to_thread(strike, nemesis, is_over)
        except QmqError as error:
            findings.append(Finding("not-well", str(error)))
        stop.set()
        await asyncio.sleep(CALM_S)
        await asyncio.to_thread(clients.stop_sending)
        striking.join()
        left = await asyncio.to_thread(_drain, cluster, clients)
        if why := clients.failed():
            findings.append(Finding("client-ended", why))
        elif left:
            findings.append(Finding("not-drained", f"no change for {DRAIN_S:.0f} s: {left}"))
        clients.leave()
    finally:
        stop.set()
        if striking.is_alive():
            striking.join()


def _drain(cluster: Cluster, clients: Clients) -> dict[str, float]:
    """Wait until every group has settled everything, or nothing changes for `DRAIN_S`; return the rest."""
    least, since = inf, time.monotonic()
    while (left := _left(cluster)) and time.monotonic() < since + DRAIN_S and not clients.failed():
        if (total := sum(left.values())) < least:
            least, since = total, time.monotonic()
        time.sleep(TICK_S)
    return left


def _left(cluster: Cluster) -> dict[str, float]:
    """Return the numbers of unsettled messages by broker group and metric; infinity for a group not yet reported."""
    left, reported = dict[str, float](), Counter[tuple[str, str]]()
    for broker_group in BROKER_GROUPS:
        for name, value in _metrics(cluster, broker_group).items():
            kind, _, labels = name.partition("{")
            if kind in ("qmq_broker_lag_messages", "qmq_broker_unacked_messages"):
                left[f"{broker_group} {name}"] = value
                reported.update(pair for pair in GROUPS if f'"{pair[0]}"' in labels and f'"{pair[1]}"' in labels)
    left |= {f"{pair} at some master": inf for pair in GROUPS if reported[pair] < 2 * len(BROKER_GROUPS)}
    return {name: value for name, value in left.items() if value}


def _metrics(cluster: Cluster, broker_group: str) -> dict[str, float]:
    """Return the metrics of a master; none while it does not answer."""
    try:
        return metrics(f"http://{Endpoint(HOST, cluster.broker(broker_group, 'master').metrics_port)}", cluster.token)
    except OSError:
        return {}


async def _dead_letters(cluster: Cluster, findings: list[Finding]) -> list[DeadLetter]:
    """Read the dead letters of all groups; those that no master delivers for `DRAIN_S` become a finding."""
    found = []
    for subject, group in GROUPS:
        reader = qmq.Consumer(metaserver=cluster.metaserver, token=cluster.token, app="chaos", drain_s=5.0)
        letters, until = dead_letter_subject(subject, group), time.monotonic() + DRAIN_S
        async with reader.pull(letters, group="look", start="earliest") as puller:
            while (messages := await _pull(puller)) or (unread := _unread(cluster, letters)):
                if messages:
                    until = time.monotonic() + DRAIN_S
                elif time.monotonic() > until:
                    findings.append(Finding("dead-unread", f"no master delivers {unread:g} messages of {letters}"))
                    break
                found += [
                    DeadLetter(
                        now(),
                        subject,
                        group,
                        message.broker_group,
                        int(str(message["qmq_deadSequence"])),
                        str(message.id),
                        int(str(message["qmq_times"])),
                    )
                    for message in messages
                ]
                await puller.ack(messages)
    return found


async def _pull(puller: qmq.Puller) -> list[qmq.ReceivedMessage]:
    """Return the next dead letters; none while no broker group is connected."""
    try:
        return await puller.pull(500, timeout=DEAD_LETTERS_S)
    except NotServed:
        return []


def _unread(cluster: Cluster, letters: str) -> float:
    """Return the number of dead letters that the group `look` has not received."""
    return sum(
        value
        for broker_group in BROKER_GROUPS
        for name, value in _metrics(cluster, broker_group).items()
        if name.startswith("qmq_broker_lag_messages{") and f'"{letters}"' in name and '"look"' in name
    )


def _stop_and_read(cluster: Cluster, findings: list[Finding]) -> dict[str, list[Copy]] | None:
    """Stop the cluster once the copies of each group are equal; return all copies, or None."""
    for group in BROKER_GROUPS:
        try:
            cluster.wait(lambda: len(_ends(cluster, group)) == 1, f"the copies of {group} do not become equal", EQUAL_S)  # noqa: B023
        except NotServed as error:
            findings.append(Finding("not-equal", str(error)))
    folders = {
        group: [cluster.data(plan) for plan in cluster.plan.brokers if plan.group == group] for group in BROKER_GROUPS
    }
    cluster.stop()
    try:
        return {group: [read_copy(folder) for folder in of_group] for group, of_group in folders.items()}
    except (QmqError, AssertionError) as error:
        findings.append(Finding("unreadable", str(error)))
        return None


def _ends(cluster: Cluster, group: str) -> set[object]:
    """Return the different log ends and chains of a group's copies; None of a copy that does not answer."""
    states = [state(cluster, plan) for plan in cluster.plan.brokers if plan.group == group]
    return {(state.log_end, state.chain) if state else None for state in states}
