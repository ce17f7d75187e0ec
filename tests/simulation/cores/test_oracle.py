"""The oracle excuses only effects of a fault."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from qmq.errors import CorruptFrame
from qmq.log.segments import log_name
from qmq.types import Epoch
from tests.simulation.cores.clients import order_key
from tests.simulation.cores.machine import Process
from tests.simulation.cores.oracle import Committed
from tests.simulation.cores.world import World
from tests.simulation.events import Violation


def master_that_wrote(world: World) -> Process:
    for machine in world.machines:
        machine.start()
    world.events.run_until(5_000_000, lambda: world.oracle.committed.end > 2_000)
    process = next(machine.process for machine in world.machines if machine.process and machine.process.node.master)
    assert process.log.end > 2_000
    return process


def test_flipped_bit_excuses_only_the_history_it_hides() -> None:
    world = World(1)
    process = master_that_wrote(world)
    oracle, log = world.oracle, process.log
    assert oracle.has_it_again(log)
    oracle.committed = Committed(log.end - 1, chain=1)
    process.machine.disk.flip(log_name(log.start), 8 * 50)
    assert not oracle.has_it_again(log), "no frame of this log ends there"
    log.frame_bytes.clear()
    assert log.hides(log.end - 1) and not oracle.has_it_again(log), "the ends of its frames are unreadable"
    assert not log.hides(log.end + 1)


@pytest.mark.parametrize(
    "copies, row_hears, is_one_waited_for, forgets",
    [(3, True, False, True), (3, False, True, True), (3, False, False, False), (2, False, False, True)],
)
def test_lying_disk_loses_bytes_once_others_have_them(copies, row_hears, is_one_waited_for, forgets) -> None:
    """With several copies: the point, which only the row remembers (decision 43), or an awaited slave that has
    everything.

    Chance decides which bytes a lying disk loses, so several worlds run.
    """
    worlds = (World(seed, copies=copies) for seed in range(1, 9))
    assert any(lie_came_true(world, row_hears, is_one_waited_for) for world in worlds) == forgets


def lie_came_true(world: World, row_hears: bool, is_one_waited_for: bool) -> bool:
    process = master_that_wrote(world)
    events, oracle, metaserver, end = world.events, world.oracle, world.metaserver, world.oracle.committed.end
    process.machine.disk.system.is_lying, metaserver.is_up = True, row_hears
    assert events.run_until(events.now_us + 1_000_000, lambda: oracle.committed.end > end)
    if not is_one_waited_for:
        metaserver.group = replace(metaserver.group, slaves=())
    events.run_until(events.now_us + 5_000_000, lambda: metaserver.may_forget(process.name))
    process.machine.die("power", power=True)
    return process.machine.is_put_back


def test_master_without_acknowledged_frames_does_not_begin() -> None:
    """With two copies it may: the other one makes it give way, and no other copy confirms frames."""
    for copies, is_excused in ((2, True), (3, False)):
        world = World(1, copies=copies)
        process = master_that_wrote(world)
        process.machine.is_put_back = True
        world.oracle.committed = Committed(process.log.end + 8, chain=1)
        with contextlib.nullcontext() if is_excused else pytest.raises(Violation, match="I1"):
            world.oracle.beginning(process.log, Epoch(9, 1))


def test_chosen_copy_may_lack_only_known_damage() -> None:
    world = World(1)
    log, oracle = master_that_wrote(world).log, world.oracle
    oracle.committed = Committed(log.end + 8, chain=1)
    with pytest.raises(Violation, match="I25"):
        oracle.chosen(log)
    log.damaged_at(CorruptFrame(log.start, "a bit flipped"))
    oracle.chosen(log)


@pytest.mark.parametrize("is_dead", [True, False])
def test_order_is_excused_only_by_a_dead_letter(is_dead) -> None:
    """A consumer may finish late after its lease, or get the message again."""
    oracle = World(1).oracle
    oracle.is_ordered = True
    earlier, later = [f"m{n}" for n in range(100) if order_key(f"m{n}") == "k1"][:2]
    oracle.delivered |= {("s", 4): earlier, ("s", 9): later}
    oracle._dead |= {("g", "s", 4): {800}} if is_dead else {("g", "s", 9): {800}, ("h", "s", 4): {800}}
    oracle.finished("g", "s", 9)
    with contextlib.nullcontext() if is_dead else pytest.raises(Violation, match="I24"):
        oracle.finished("g", "s", 4)
