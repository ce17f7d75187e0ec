"""Shell. What goes wrong: processes die or stand still, roles change, disks are emptied, at random moments.

Each fault leaves a cluster that becomes well by itself; `Nemesis.strike` waits for that within a bound.
"""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable

from qmq.deploy.cluster import Cluster
from qmq.deploy.control import answers
from qmq.deploy.plan import HOST, BrokerPlan
from qmq.errors import OperatorError
from tests.chaos.history import Fault, History
from tests.integration.cluster_world import begin, data_of, end, until

WELL_S = 180.0
ROUTES_S = 4.0
"""Clients and brokers hear of a mark within a second, unless they stand still for as long."""


class Nemesis:
    """Made for one run; called from one thread."""

    def __init__(self, cluster: Cluster, history: History, rng: random.Random, say: Callable[[str], None]) -> None:
        self._cluster, self._history, self._rng, self._say = cluster, history, rng, say
        self._groups = sorted({broker.group for broker in cluster.plan.brokers})
        self.faults: dict[str, Callable[[str], None]] = {
            "kill master": self._kill_master,
            "kill slave": self._kill_slave,
            "kill both": self._kill_both,
            "kill again while it starts": self._kill_while_starting,
            "kill in any order": self._kill_in_any_order,
            "kill metaserver": self._kill_metaserver,
            "kill metaserver and a broker": self._kill_metaserver_and_broker,
            "stop master": self._stop_master,
            "stop slave": self._stop_slave,
            "swap roles": self._swap_roles,
            "kill during a swap": self._kill_during_swap,
            "replace broker": self._replace_broker,
            "lose the master's disk": self._lose_master_disk,
            "wipe slave": self._wipe_slave,
            "mark readonly": self._mark_readonly,
        }
        self.refused: list[str] = []

    def strike_all(self, stop: threading.Event) -> None:
        """Each fault once, in random order."""
        names = list(self.faults)
        self._rng.shuffle(names)
        for name in names:
            if not stop.is_set():
                self.strike(name)

    def strike(self, name: str) -> None:
        """One fault, on a random group; returns when the cluster is well again."""
        group, begun = self._rng.choice(self._groups), time.monotonic()
        self.faults[name](group)
        faulted = time.monotonic()
        self._cluster.wait_writable(timeout_s=WELL_S)
        until(lambda: answers(f"{self._cluster.metaserver}/meta/address"), "the metaserver answers", WELL_S)
        now = time.monotonic()
        hit = "" if "metaserver" in name else group
        self._history.faults.append(Fault(name, hit, begun, now))
        self._say(f"{name} group={group} fault_s={faulted - begun:.1f} recovery_s={now - faulted:.1f}")
        time.sleep(self._rng.uniform(0, 1.0))

    def _pause(self, most_s: float) -> None:
        time.sleep(self._rng.uniform(0, most_s))

    # Death.

    def _kill_master(self, group: str) -> None:
        self._cluster.kill(group, "master")

    def _kill_slave(self, group: str) -> None:
        self._cluster.kill(group, "slave")

    def _kill_both(self, group: str) -> None:
        first, second = self._rng.sample(["master", "slave"], 2)
        self._cluster.kill(group, first)
        self._pause(0.05)
        self._cluster.kill(group, second)

    def _kill_while_starting(self, group: str) -> None:
        role = self._rng.choice(["master", "slave"])
        for _ in range(3):
            broker = self._cluster.kill(group, role)
            service = self._cluster.service(broker.hostname)
            until(lambda service=service: service.pid is not None, "it is started again")
            self._pause(1.5)
        self._cluster.kill(group, role)

    def _kill_in_any_order(self, group: str) -> None:
        for _ in range(self._rng.randint(4, 8)):
            self._cluster.kill(group, self._rng.choice(["master", "slave"]))
            self._pause(1.2)

    def _kill_metaserver(self, group: str) -> None:
        self._cluster.service("metaserver").signal(signal.SIGKILL)

    def _kill_metaserver_and_broker(self, group: str) -> None:
        """A broker that starts while the metaserver is away takes up the part it had."""
        end(self._cluster, "metaserver")
        self._cluster.kill(group, self._rng.choice(["master", "slave"]))
        self._pause(5.0)
        begin(self._cluster, "metaserver")

    # Standing still.

    def _stop_master(self, group: str) -> None:
        self._stop(self._cluster.broker(group, "master"))

    def _stop_slave(self, group: str) -> None:
        self._stop(self._cluster.broker(group, "slave"))

    def _stop(self, broker: BrokerPlan) -> None:
        service = self._cluster.service(broker.hostname)
        service.signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.5, 5.0))
        service.signal(signal.SIGCONT)

    # Operators.

    def _swap_roles(self, group: str) -> None:
        self._cluster.swap_roles(group)

    def _kill_during_swap(self, group: str) -> None:
        """The swap may be refused or carried out; either way nothing is lost."""
        broker = self._cluster.broker(group, self._rng.choice(["master", "slave"]))
        delay_s = self._rng.uniform(0, 0.15)
        killer = threading.Timer(delay_s, lambda: self._cluster.service(broker.hostname).signal(signal.SIGKILL))
        killer.start()
        try:
            self._cluster.manage("SwapRoles", brokerGroup=group)
        except OperatorError as error:
            self.refused.append(str(error))
        killer.join()

    def _replace_broker(self, group: str) -> None:
        """QMQ's way: stop both, put the slave in the master's place, then the master in the slave's, start both."""
        master, slave = (self._cluster.broker(group, role) for role in ("master", "slave"))
        end(self._cluster, master.hostname, slave.hostname)
        self._exchange(master, slave)
        begin(self._cluster, slave.hostname, master.hostname)

    def _exchange(self, master: BrokerPlan, slave: BrokerPlan) -> bool:
        try:
            self._place("ReplaceBroker", slave, 0)
        except OperatorError as error:
            self.refused.append(str(error))
            return False
        self._place("ReplaceBroker", master, 1)
        return True

    def _place(self, action: str, broker: BrokerPlan, role: int) -> None:
        self._cluster.manage(
            action, brokerGroup=broker.group, role=role, hostname=broker.hostname, ip=HOST,
            servePort=broker.serve_port, syncPort=broker.sync_port,
        )  # fmt: skip

    def _mark_readonly(self, group: str) -> None:
        self._cluster.manage("MarkReadonlyBrokerGroup", brokerGroup=group)
        begin_s = time.monotonic() + ROUTES_S
        time.sleep(ROUTES_S + self._rng.uniform(0.5, 1.5))
        self._history.marked.append(Fault("mark readonly", group, begin_s, time.monotonic()))
        self._cluster.manage("UnMarkReadonlyBrokerGroup", brokerGroup=group)

    # Disks.

    def _wipe_slave(self, group: str) -> None:
        slave = self._cluster.broker(group, "slave")
        end(self._cluster, slave.hostname)
        shutil.rmtree(data_of(self._cluster, slave))
        self._pause(0.5)
        begin(self._cluster, slave.hostname)

    def _lose_master_disk(self, group: str) -> None:
        """The slave, which stood still until then, is all that is left: it must hold what was acknowledged."""
        master, slave = (self._cluster.broker(group, role) for role in ("master", "slave"))
        self._cluster.service(slave.hostname).signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.3, 1.5))
        end(self._cluster, master.hostname, slave.hostname)
        if self._exchange(master, slave):
            shutil.rmtree(data_of(self._cluster, master))
        begin(self._cluster, slave.hostname, master.hostname)
