"""After every event: each machine of states (qmq.states) moved as its table says, and what depends on it agrees."""

from __future__ import annotations

from qmq.client.batch import BATCH_LIFE
from qmq.log.health import HEALTH
from qmq.log.message_life import LIFE
from qmq.replication.follower import FOLLOWER
from qmq.replication.node import Node
from qmq.replication.slave import SLAVE
from tests.simulation.events import Violation

_TABLES = FOLLOWER, SLAVE, HEALTH, LIFE, BATCH_LIFE


def illegal_moves() -> int:
    """Count them; written out, for it is asked after every event."""
    return FOLLOWER.illegal + SLAVE.illegal + HEALTH.illegal + LIFE.illegal + BATCH_LIFE.illegal


class Legality:
    """Made for each world: illegal moves before it are not its own."""

    def __init__(self) -> None:
        self._before = illegal_moves()

    def check(self, name: str, node: Node) -> None:
        if illegal_moves() != self._before:
            raise Violation(f"states: a move at {name} that its table lacks: {[t.name for t in _TABLES if t.illegal]}")
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
