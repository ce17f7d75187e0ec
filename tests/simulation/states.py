"""State tables in a simulation: states that each fault met, and illegal moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from qmq.client.batch import BATCH_LIFE
from qmq.log.group import LIFE
from qmq.log.recovery import HEALTH
from qmq.replication.follower import FOLLOWER
from qmq.replication.slave import SLAVE
from qmq.states import TransitionTable
from tests.simulation.events import Met, Violation

if TYPE_CHECKING:
    from qmq.replication.node import Node

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
"""States that no fault can meet, with the reason."""


def states_to_meet(*tables: TransitionTable[Any]) -> list[str]:
    """Name the states of these tables that faults should meet."""
    names = (f"{table.name}.{state.name}" for table in tables for state in type(table.initial))
    return [name for name in names if name not in NOT_MET]


STATES = states_to_meet(FOLLOWER, SLAVE, HEALTH)


def states_of_node(node: Node) -> Iterator[str]:
    """Name the states that one copy is in."""
    yield f"{HEALTH.name}.{node.log.health.state.name}"
    if node.master is not None:
        yield from (f"{FOLLOWER.name}.{watch.follower.state.name}" for watch in node.master.slaves.all)
    elif node.slave is not None:
        yield f"{SLAVE.name}.{node.slave.life.state.name}"


def never_met(met: Met, faults: Iterable[str], states: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name the pairs of fault and state that never met."""
    return ((fault, state) for fault in faults for state in states if not met[fault, state])


_TABLES = FOLLOWER, SLAVE, HEALTH, LIFE, BATCH_LIFE


def illegal_moves() -> int:
    """Return the number of illegal moves. Spelled out, as it runs after every event."""
    return FOLLOWER.illegal + SLAVE.illegal + HEALTH.illegal + LIFE.illegal + BATCH_LIFE.illegal


class Legality:
    """Check of the state tables, made per world: illegal moves before it do not count."""

    def __init__(self) -> None:
        self._before = illegal_moves()

    def check(self, name: str, node: Node) -> None:
        if illegal_moves() != self._before:
            raise Violation(f"states: an illegal move at {name}: {[t.name for t in _TABLES if t.illegal]}")
        if not node.log.health.is_of(node.log.damage):
            raise Violation(f"states: the log of {name} is {node.log.health.state.name}, damage {node.log.damage}")
        if (master := node.master) is not None:
            too_few = len(master.slaves.in_sync) < master.gate.min_copies - 1
            is_legal = True
            for watch in master.slaves.all:
                is_legal &= watch.follower.is_legal
            if too_few != master.gate.too_few_in_sync or not is_legal:
                followers = [watch.follower for watch in master.slaves.all]
                counts = "too few count" if master.gate.too_few_in_sync else "enough count"
                states = [(follower.state.name, follower.now) for follower in followers]
                raise Violation(f"states: {name}'s slaves are {states}, and {counts}")
        elif (slave := node.slave) is not None and not slave.life.is_legal:
            raise Violation(f"states: {name} is {slave.life.state.name}, {slave.life.now}")
