"""Shell. Processes are killed or paused, at any moment and in any order."""

from __future__ import annotations

import signal
import time
from functools import partial

from qmq.deploy.chaos.records import SLAVE_STOPPED, Window
from qmq.deploy.chaos.target import Strike, Target
from qmq.deploy.plan import BrokerPlan
from qmq.deploy.processes import Service, suspend


def _kill_master(target: Target, group: str) -> None:
    target.cluster.kill(group, "master")


def _kill_slave(target: Target, group: str) -> None:
    target.cluster.kill(group, "slave")


def _kill_both(target: Target, group: str) -> None:
    first, second = target.rng.sample(["master", "slave"], 2)
    target.cluster.kill(group, first)
    target.pause(0, 0.05)
    target.cluster.kill(group, second)


def _kill_while_starting(target: Target, group: str) -> None:
    role = target.rng.choice(["master", "slave"])
    for _ in range(3):
        service = target.cluster.service(target.cluster.broker(group, role).hostname)
        next_start = service.starts + 1
        target.cluster.kill(group, role)
        target.cluster.wait(partial(_has_begun, service, next_start), f"{service.name} is not started again")
        target.pause(0, 1.5)
    target.cluster.kill(group, role)


def _kill_in_any_order(target: Target, group: str) -> None:
    for _ in range(target.rng.randint(4, 8)):
        target.cluster.kill(group, target.rng.choice(["master", "slave"]))
        target.pause(0, 1.2)


def _kill_metaserver(target: Target, group: str) -> None:
    target.cluster.service("metaserver").kill()


def _kill_metaserver_and_broker(target: Target, group: str) -> None:
    """A broker that starts while the metaserver is away resumes its last role."""
    target.cluster.end("metaserver")
    target.cluster.kill(group, target.rng.choice(["master", "slave"]))
    target.pause(0, 5.0)
    target.cluster.begin("metaserver")


def _stop_master(target: Target, group: str) -> None:
    _stop(target, target.cluster.broker(group, "master"))


def _stop_slave(target: Target, group: str) -> None:
    if (window := _stop(target, target.cluster.broker(group, "slave"))) is not None:
        target.records.append(window)


def _stop(target: Target, broker: BrokerPlan) -> Window | None:
    """Pause a process; return the seconds, or None if the process had ended."""
    service = target.cluster.service(broker.hostname)
    if (pid := service.pid) is None:
        return None
    suspend(pid)
    begin = time.monotonic()
    target.pause(0.5, 5.0)
    end = time.monotonic()
    service.signal(signal.SIGCONT)
    return Window(begin, end, SLAVE_STOPPED, broker.group)


def _has_begun(service: Service, start: int) -> bool:
    return service.starts >= start


STRIKES = {
    "kill master": Strike(_kill_master),
    "kill slave": Strike(_kill_slave),
    "kill both": Strike(_kill_both),
    "kill again while it starts": Strike(_kill_while_starting),
    "kill in any order": Strike(_kill_in_any_order),
    "kill metaserver": Strike(_kill_metaserver),
    "kill metaserver and a broker": Strike(_kill_metaserver_and_broker),
    "stop master": Strike(_stop_master),
    "stop slave": Strike(_stop_slave),
}
