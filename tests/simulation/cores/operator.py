"""An operator who moves consumer groups in the middle of everything, and remembers what he was told."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from qmq.broker.positions import To
from qmq.errors import NotMaster, NotServed, OperatorError, QmqError

if TYPE_CHECKING:
    from tests.simulation.cores.world import World


class Move(NamedTuple):
    """A position frame that was written: [offset, end) and the chain at its end."""

    offset: int
    end: int
    chain: int


class Operator:
    """Made for some seeds; acts until it is told to stop."""

    def __init__(self, world: World) -> None:
        self._world, self._events = world, world.events
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
            events.count("move told" if error is None else "move not known")
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
