"""Which fault met which state of which table: of every copy, whenever something goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from qmq.log.health import HEALTH
from qmq.replication.follower import FOLLOWER
from qmq.replication.slave import SLAVE
from qmq.states import TransitionTable

if TYPE_CHECKING:
    from qmq.replication.node import Node
    from tests.simulation.cores.machine import Machine

_BY_HAND = "no group of the simulations waits until an operator has its slaves filled"
_OVER = "it is over: nothing is under way any more that a fault could meet"
NOT_MET = {
    "FollowerState.UNFILLED": _BY_HAND,
    "SlaveState.UNFILLED": _BY_HAND,
    "SessionState.CLOSED": _OVER,
    "SessionState.DRAINING": "a consumer leaves within milliseconds; unit tests cover that state",
    "BatchState.STORED": _OVER,
    "BatchState.NOT_STORED": _OVER,
    "BatchState.GIVEN_UP": _OVER,
}
"""States that no fault can meet, with the reason. Any other may be met by each: a fault meets those of all copies."""


def states_to_meet(*tables: TransitionTable[Any]) -> list[str]:
    """Name the states of these tables that faults should meet."""
    names = (f"{table.name}.{state.name}" for table in tables for state in type(table.initial))
    return [name for name in names if name not in NOT_MET]


STATES = states_to_meet(FOLLOWER, SLAVE, HEALTH)

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
