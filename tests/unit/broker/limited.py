"""Core. Consumer groups under operators' limits, for tests of expiry, lengths and rates."""

from __future__ import annotations

from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.types import Role
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")
HOUR = OperatorLimits("s", OF_SUBJECT, expires_after_s=3600)


def started(*limits: OperatorLimits, **settings) -> tuple[Group, Client]:
    """Return a group with these limits, and its consumer c."""
    group = Group.made(**{"lease_ms": 7_200_000} | settings).start()
    group.a.assign(Role.MASTER, limits=limits)
    return group, group.subscribed("c")


def hours_pass(group: Group, hours: float = 1.1) -> None:
    for broker in (group.a, group.b):
        broker.host.clock_ms += int(hours * 3_600_000)
    group.hear_clocks()
    group.a.node.tick()
    group.settle()
