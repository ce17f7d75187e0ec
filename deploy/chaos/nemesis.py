"""Shell. Injects one fault after the other, and waits until the cluster has recovered from each by itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle

from qmq.deploy.chaos.faults import STRIKES, Target
from qmq.deploy.chaos.history import History
from qmq.deploy.chaos.records import Fault
from qmq.deploy.cluster import Cluster
from qmq.deploy.control import answers

WELL_S = 180.0
CALM_S = 1.0
STRIKES_MIN = 3
NOTICED_S = 4.0
"""Longer than a master takes to detect a killed slave, also on a busy machine."""
LOSES = frozenset({"replace broker", "lose the master's disk"})
"""Faults that make a slave the master without a check that it has every decision of the master."""
STOP_SLAVE = "stop slave"


def possible() -> list[str]:
    """Return the faults that this machine can inject."""
    return [name for name, strike in STRIKES.items() if not strike.missing()]


class Nemesis:
    """Made for one run; called from one thread.

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
            if name in LOSES:  # the fault's record covers all decisions made without a slave
                time.sleep(NOTICED_S)
                self.target.cluster.wait_writable(timeout_s=WELL_S)
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
        cluster.wait(self._all_run, "a broker is down", WELL_S)  # a master reports "writable" until then
        cluster.wait_writable(timeout_s=WELL_S)
        cluster.wait(lambda: answers(f"{cluster.metaserver}/meta/address"), "the metaserver does not answer", WELL_S)
        now = time.monotonic()
        hit = "" if "metaserver" in name else group
        target.records.append(Fault(begun, now, name, hit, name in LOSES))
        self._say(f"{name} group={group} fault_s={faulted - begun:.1f} recovery_s={now - faulted:.1f}")
        target.pause(0, CALM_S)

    def _all_run(self) -> bool:
        cluster = self.target.cluster
        return all(cluster.service(broker.hostname).pid is not None for broker in cluster.plan.brokers)
