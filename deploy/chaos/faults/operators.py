"""Shell. Operators change roles and mark groups, some of them at the wrong moment."""

from __future__ import annotations

import signal
import threading
import time

from qmq.deploy.chaos.records import MARKED, Window
from qmq.deploy.chaos.target import Strike, Target
from qmq.deploy.plan import HOST, BrokerPlan

ROUTES_S = 4.0
"""A mark reaches clients and brokers within a second, or after a stall of as long."""


def _swap_roles(target: Target, group: str) -> None:
    target.cluster.swap_roles(group)


def _kill_during_swap(target: Target, group: str) -> None:
    """The swap may be refused or carried out; either way nothing is lost."""
    service = target.cluster.service(target.any_copy(group).hostname)
    killer = threading.Timer(target.rng.uniform(0, 0.15), lambda: service.signal(signal.SIGKILL))
    killer.start()
    target.command("SwapRoles", brokerGroup=group)
    killer.join()


def _replace_broker(target: Target, group: str) -> None:
    """QMQ's way: stop both, put the slave in the master's place, then the master in the slave's, start both."""
    master, slave = target.copies(group)
    target.cluster.end(master.hostname, slave.hostname)
    exchange(target, master, slave)
    target.cluster.begin(slave.hostname, master.hostname)


def exchange(target: Target, master: BrokerPlan, slave: BrokerPlan) -> bool:
    """Put each broker in the other's place; return whether both commands were accepted."""
    if not target.command("ReplaceBroker", **_place(slave, 0)):
        return False
    target.cluster.manage("ReplaceBroker", **_place(master, 1))
    return True


def _place(broker: BrokerPlan, role: int) -> dict[str, object]:
    return {
        "brokerGroup": broker.group,
        "role": role,
        "hostname": broker.hostname,
        "ip": HOST,
        "servePort": broker.serve_port,
        "syncPort": broker.sync_port,
    }


def _mark_readonly(target: Target, group: str) -> None:
    target.cluster.manage("MarkReadonlyBrokerGroup", brokerGroup=group)
    begin = time.monotonic() + ROUTES_S
    target.pause(ROUTES_S + 0.5, ROUTES_S + 1.5)
    target.records.append(Window(begin, time.monotonic(), MARKED, group))
    target.cluster.manage("UnMarkReadonlyBrokerGroup", brokerGroup=group)


STRIKES = {
    "swap roles": Strike(_swap_roles),
    "kill during a swap": Strike(_kill_during_swap),
    "replace broker": Strike(_replace_broker),
    "mark readonly": Strike(_mark_readonly),
}
