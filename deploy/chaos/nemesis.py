"""Shell. Strikes one fault after the other, and sees to it that the cluster becomes well after each by itself."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from qmq.deploy.chaos.faults import clocks, disks, network, operators, processes
from qmq.deploy.chaos.history import Fault, History
from qmq.deploy.chaos.target import Strike, Target
from qmq.deploy.cluster import Cluster
from qmq.deploy.control import answers

WELL_S = 180.0
CALM_S = 1.0
STRIKES: dict[str, Strike] = processes.STRIKES | operators.STRIKES | disks.STRIKES | network.STRIKES | clocks.STRIKES


def possible() -> list[str]:
    """Return the faults that this machine has all for."""
    return [name for name, strike in STRIKES.items() if not strike.missing()]


class Nemesis:
    """Made for one run; called from one thread."""

    def __init__(self, cluster: Cluster, history: History, rng: random.Random, say: Callable[[str], None]) -> None:
        self.target, self._say = Target(cluster, history, rng), say
        self._groups = sorted({broker.group for broker in cluster.plan.brokers})

    def strike_all(self, stop: threading.Event) -> None:
        """Each fault once, in random order."""
        names = possible()
        self.target.rng.shuffle(names)
        for name in names:
            if not stop.is_set():
                self.strike(name)

    def strike(self, name: str) -> None:
        """One fault, on a random group; returns when the cluster is well again."""
        target = self.target
        cluster, group, begun = target.cluster, target.rng.choice(self._groups), time.monotonic()
        STRIKES[name].hit(target, group)
        faulted = time.monotonic()
        cluster.wait(self._all_run, "a broker is down", WELL_S)  # its master says "writable" until it misses it
        cluster.wait_writable(timeout_s=WELL_S)
        cluster.wait(lambda: answers(f"{cluster.metaserver}/meta/address"), "the metaserver does not answer", WELL_S)
        now = time.monotonic()
        hit = "" if "metaserver" in name else group
        target.history.faults.append(Fault(name, hit, begun, now))
        self._say(f"{name} group={group} fault_s={faulted - begun:.1f} recovery_s={now - faulted:.1f}")
        target.pause(0, CALM_S)

    def _all_run(self) -> bool:
        cluster = self.target.cluster
        return all(cluster.service(broker.hostname).pid is not None for broker in cluster.plan.brokers)
