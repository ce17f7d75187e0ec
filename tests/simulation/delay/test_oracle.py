"""The delay oracle excuses only effects of a fault."""

from __future__ import annotations

import pytest

from qmq.log.delay_frames import Outcome, encode_settled
from qmq.log.frame import Frame
from qmq.types import Epoch
from tests.simulation.delay.world import DelayWorld
from tests.simulation.events import Violation

BATCH, OTHER = (7, 1), (7, 2)


def settled(world: DelayWorld, batch: tuple[int, int]) -> Frame:
    """Let the master settle a batch as stored."""
    process = next(machine.process for machine in world.machines if machine.process and machine.process.node.master)
    frames: list[Frame] = []
    process.run_guarded(lambda: frames.append(process.node.master._decisions.settle([(*batch, Outcome.STORED)])))
    return frames[0]


def until_committed(world: DelayWorld, end: int) -> None:
    assert world.events.run_until(world.events.now_us + 5_000_000, lambda: world.oracle.committed.end >= end)


def test_outcome_is_known_once_both_copies_have_it() -> None:
    """A frame of a master that is alone may be cut. A frame in its place does not make the outcome known."""
    world = DelayWorld(1)
    oracle = world.oracle
    for machine in world.machines:
        machine.start()
    until_committed(world, 500)
    oracle.unknown.add(("g1", *BATCH))
    oracle.places["m"].append(("g1", *BATCH))

    in_its_place = settled(world, OTHER)
    cut = in_its_place._replace(epoch=Epoch(0, 1), chain=in_its_place.chain ^ 1)
    oracle.check_frame(world.machines[0].process.log, cut, encode_settled([(*BATCH, Outcome.STORED)]))
    until_committed(world, cut.end)
    assert oracle._may_repeat("m", ("g2", 8, 1))

    kept = settled(world, BATCH)
    assert oracle._may_repeat("m", ("g2", 8, 1)), "one copy has it"
    until_committed(world, kept.end)
    with pytest.raises(Violation, match="its outcome was known"):
        oracle.stored("m", ("g2", 8, 1))
