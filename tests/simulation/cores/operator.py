"""Operators of the cores' world: one moves consumer groups while faults strike, one types RecoverGroup afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from qmq.broker.positions import To
from qmq.errors import NotMaster, NotServed, OperatorError, QmqError
from qmq.metaserver.actions.shapes import broker_json, state_json
from qmq.metaserver.model import Broker, ReplicaState
from qmq.replication.readonly import explain
from qmq.tools.recover_group import ASIDE, Decision, decide, read_copies
from tests.simulation.cores.metaserver import full_state

if TYPE_CHECKING:
    from tests.simulation.cores.machine import Process
    from tests.simulation.cores.many_copies import ManyCopies
    from tests.simulation.cores.world import World


class Move(NamedTuple):
    """Position frame of a move: [offset, end) and the chain at its end."""

    offset: int
    end: int
    chain: int


class Operator:
    """Operator that moves consumer groups until it is stopped."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._events = world.events
        self._is_active = True
        self._again()

    def stop(self) -> None:
        self._is_active = False

    def _again(self) -> None:
        self._events.between(50, 1200, self._act)

    def _act(self) -> None:
        if self._is_active:
            self._again()
            self._move()

    def _move(self) -> None:
        events, rng = self._events, self._events.rng
        process = rng.choice(self._world.machines).process
        subject, group = rng.choice(self._world.swarm.subjects), rng.choice(("g0", "g1"))
        to, share = rng.choice(list(To)), rng.random()
        if process is None:
            return
        value = int(share * process.log.state.next_sequence.get(subject, 0))
        if to == To.TIME:
            value = process.now_ms() - int(share * events.now_ms)
        move: list[Move] = []

        def answered(error: QmqError | None) -> None:
            events.count("move answered" if error is None else "move unanswered")
            if error is None:
                self._world.oracle.moved(move[0])

        def ask() -> None:
            try:
                reset = process.node.acting_master().move_group(
                    subject, group, to, value, dry_run=False, answer=answered
                )
            except (OperatorError, NotMaster, NotServed):
                return events.count("move refused")
            log = process.log
            move.append(Move(log.last_taken, log.end, log.chain))
            events.count("moved")
            events.note(f"{process.name} moves {group} on {subject} from {reset.before} to {reset.after}")

        process.guarded(ask)


PATIENCE = 5
"""Looks, one a second, after which a copy with the missing frames would have refilled the master."""


class Recovery:
    """Operator of a group of more than two copies, after all faults."""

    def __init__(self, world: World, metaserver: ManyCopies) -> None:
        self._world = world
        self._metaserver = metaserver
        self._looks = 0

    def look(self) -> None:
        """Count the looks at which a readonly reason names RecoverGroup; run it after enough of them."""
        self._looks = self._looks + 1 if self._is_named() else 0
        if self._looks > PATIENCE:
            self._looks = 0
            self._recover()

    def _is_named(self) -> bool:
        """Whether `explain`, which Doctor shows, names RecoverGroup for a reason of any broker."""
        processes = [machine.process for machine in self._world.machines]
        reasons = [reason for process in processes if process for reason in process.node.readonly_reasons]
        return all(processes) and any("RecoverGroup" in explain(reason) for reason in reasons)

    def _recover(self) -> None:
        """Take the steps of RecoverGroup: empty disks that it sets aside, stop brokers, accept a loss."""
        decision, world = self._decide(), self._world
        for name in set_aside(decision):
            world.events.note(f"RecoverGroup sets aside {name}")
            self._replace_disk(name)
        if not decision.command or decision.keeps is None:
            return
        world.events.note(f"RecoverGroup: {'; '.join(decision.steps)}; lost: {decision.lost_offsets}")
        for name in _stopped(decision):
            world.machine(name).die("RecoverGroup stops it")
        self._metaserver.accept_loss(decision.keeps.hostname)

    def _replace_disk(self, name: str) -> None:
        machine = self._world.machine(name)
        self._world.events.count("copy set aside")
        machine.die("its disk is replaced", power=True)
        machine.disk.wipe()
        self._metaserver.disk_replaced(name)

    def _decide(self) -> Decision:
        group, points = self._metaserver.group, self._metaserver.known_points().by_incarnation.values()
        brokers = [broker_json(broker) for broker in group.brokers]
        copies = read_copies(brokers, [self._replica(broker) for broker in group.brokers], (), ())
        remembered = max((point.end for point in points), default=0)
        return decide(copies, term=group.term, min_copies=group.min_copies, remembered=remembered)

    def _replica(self, broker: Broker) -> dict[str, Any]:
        """Return the broker's part of ReplicaStatus."""
        process = self._world.machine(broker.hostname).process
        assert process is not None, "all run"
        return {**broker_json(broker), "reachable": True, **state_json(_state(process))}


def _state(process: Process) -> ReplicaState:
    node, log = process.node, process.log
    high = node.master.gate.high_watermark if node.master else log.state.high_watermark
    return replace(full_state(process), high_watermark=high, incomplete=not node.identity.value.complete)


def set_aside(decision: Decision) -> list[str]:
    """Return the hosts with data directories that RecoverGroup sets aside."""
    return [step.removeprefix(ASIDE).partition(":")[0] for step in decision.steps if step.startswith(ASIDE)]


def _stopped(decision: Decision) -> list[str]:
    named = [step.removeprefix("stop ") for step in decision.steps if step.startswith("stop ")]
    return [who.partition(":")[0] for text in named for who in text.split(", ")]
