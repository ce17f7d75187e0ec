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
STOP_SLAVE = "stop slave"
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

    def strike_within(self, seconds: float, rng: random.Random, only: list[str]) -> None:
        """Strike until the time is over or a message was acknowledged by one copy, at least once.

        The slave of each group is stopped first, if that may be chosen: an acknowledgement without a second copy shows
        within seconds there, and perhaps never elsewhere.
        """
        ends_at = time.monotonic() + seconds
        first = [(STOP_SLAVE, group) for group in self._groups if STOP_SLAVE in only]
        while True:
            self.strike(*first.pop()) if first else self.strike(rng.choice(only))
            alone = next(self.target.history.acknowledged_alone(), None)
            if alone:
                self._say(f"lost-copy: {alone[0]} was acknowledged while the slave was stopped; no more faults")
            if alone or time.monotonic() >= ends_at:
                return

    def strike(self, name: str, group: str = "") -> None:
        """Inject one fault in a broker group, by default a random one; return when the cluster is well again."""
        target, begun = self.target, time.monotonic()
        cluster, group = target.cluster, group or target.rng.choice(self._groups)
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
