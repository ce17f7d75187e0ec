"""The judge excuses what a fault explains, and no more."""

from __future__ import annotations

from qmq.log.segments import log_name
from tests.simulation.machine import Process
from tests.simulation.oracle import Committed
from tests.simulation.world import World


def master_that_wrote(world: World) -> Process:
    for machine in world.machines:
        machine.start()
    world.events.run_until(5_000_000, lambda: world.oracle.committed.end > 2_000)
    process = next(machine.process for machine in world.machines if machine.process and machine.process.node.master)
    assert process.log.end > 2_000
    return process


def test_a_flipped_bit_excuses_only_a_history_that_it_hides() -> None:
    world = World(1)
    process = master_that_wrote(world)
    oracle, log = world.oracle, process.log
    assert oracle.has_it_again(log)
    oracle.committed = Committed(log.end - 1, chain=1)
    process.machine.disk.flip(log_name(log.start), 8 * 50)
    assert not oracle.has_it_again(log), "no frame of this log ends there"
    log.frame_bytes.clear()
    assert log.hides(log.end - 1) and not oracle.has_it_again(log), "nobody can read where its frames end"
    assert not log.hides(log.end + 1)
