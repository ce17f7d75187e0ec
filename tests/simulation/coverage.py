"""Which fault met which state of which table: of every copy, whenever something goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from qmq.log.health import HEALTH
from qmq.replication.follower import FOLLOWER, FollowerState
from qmq.replication.slave_life import SLAVE, SlaveState

if TYPE_CHECKING:
    from qmq.replication.node import Node
    from tests.simulation.machine import Machine

BY_HAND = FollowerState.UNFILLED, SlaveState.UNFILLED
"""No group of the simulations waits until an operator has its slaves filled."""
STATES = [
    f"{table.name}.{state.name}"
    for table in (FOLLOWER, SLAVE, HEALTH)
    for state in type(table.initial)
    if state not in BY_HAND
]

Met = Counter[tuple[str, str]]
"""(fault, state) -> how often."""


def states_of(machine: Machine) -> Iterator[str]:
    """Name the states that one copy is in; none while no process runs."""
    if machine.process is not None:
        yield from states_of_node(machine.process.node)


def states_of_node(node: Node) -> Iterator[str]:
    yield f"{HEALTH.name}.{node.log.health.state.name}"
    if node.master is not None:
        yield from (f"{FOLLOWER.name}.{watch.follower.state.name}" for watch in node.master.slaves.all)
    elif node.slave is not None:
        yield f"{SLAVE.name}.{node.slave.life.state.name}"


def never_met(met: Met, faults: Iterable[str], states: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name the (fault, state) that never met."""
    return ((fault, state) for fault in faults for state in states if not met[fault, state])
