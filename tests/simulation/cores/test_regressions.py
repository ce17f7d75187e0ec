"""Faults that the simulator found, each as its shortest story."""

from __future__ import annotations

import contextlib

import pytest

from qmq.errors import CorruptFrame, Diverged
from qmq.log.segments import log_name
from qmq.types import Role
from tests.unit.broker.world import Client
from tests.unit.broker.world import Group as BrokerGroup


def a_group_whose_histories_part_before_damage() -> BrokerGroup:
    """The slave has one long frame where the master, which lost it, wrote short ones; one of these is damaged."""
    group = BrokerGroup.made().start()
    Client(group.a).produce("only the slave keeps it", size=900)
    group.a.host.turn()
    group.to_slave()
    group.b.host.settle()
    group.cut()
    group.a.crash()
    group.a.assign(Role.MASTER)
    group.a.wait(5_000)
    client = Client(group.a)
    ends = []
    for name in ("g0", "g1", "g2"):
        client.subscribe(group=name)
        group.a.host.settle()
        ends.append(group.a.log.end)
    assert ends[1] < group.b.log.end
    group.a.disk.flip(log_name(0), 8 * (ends[1] - 1))
    group.a.crash()
    group.a.assign(Role.MASTER)
    damage = group.a.log.damage
    assert damage is not None and (damage.begin, damage.end) == (ends[0], ends[1])
    return group


def repair_once(group: BrokerGroup) -> None:
    """Run one round of qmq.server.repair, with the other copy's frames."""
    node, other = group.a.node, group.b.log
    wanted = node.repairs.plan(other.start, other.flushed_end)
    if wanted is not None:
        begin, data = other.stored.next_frame(wanted[0]), b""
        while begin is not None and begin + len(data) < min(wanted[1], other.flushed_end):
            try:
                data += other.stored.read(begin + len(data), other.flushed_end, 1).data
            except CorruptFrame as problem:
                data += other.stored.read_damaged(problem.offset)
        with contextlib.suppress(CorruptFrame, Diverged):
            node.repairs.apply(begin if begin is not None and data else wanted[1], data)


def test_damage_within_another_history_is_cut() -> None:
    """No frame of the other copy begins within the damage, so none was ever fetched."""
    group = a_group_whose_histories_part_before_damage()
    repair_once(group)
    repair_once(group)
    assert group.a.log.damage is None
    confirmed_end, confirmed_chain = group.b.log.end, group.b.log.chain
    group.connect()
    group.settle()
    # The slave confirmed its frames, and the master wrote alone there, so the master gives way. Its mastership ended
    # with the link; the next one, at the slave's next hello, takes the slave's frames.
    assert group.at_master is None and not group.a.node.writable and group.a.node.readonly_reasons == ["slave_down"]
    group.connect()
    group.settle()
    assert group.a.log.chain_is(confirmed_end, confirmed_chain) and not group.b.disk.names("quarantine")
    assert [frame.offset for frame in group.a.log.frames("s", 0, 1)] == [136]
    assert (group.a.log.end, group.a.log.chain) == (group.b.log.end, group.b.log.chain) and group.a.node.writable


@pytest.mark.parametrize("before_end", [8, 1040], ids=["body", "header"])
def test_damage_of_both_copies_is_not_cut(before_end: int) -> None:
    group = a_group_whose_histories_part_before_damage()
    group.b.disk.flip(log_name(0), 8 * (group.b.log.end - before_end))
    for _ in range(3):
        repair_once(group)
    assert group.a.log.damage is not None


@pytest.mark.parametrize("found", ["at a start", "when it is read"])
def test_damage_beyond_the_other_copys_end_is_cut(found: str) -> None:
    """The damage covers an acknowledged frame and the next one, which the slave never got. Both counted as lost."""
    group = BrokerGroup.made().start()
    Client(group.a).produce("acknowledged")
    group.settle()
    begin, end = group.a.log.frames("s", 0, 1)[0].offset, group.b.log.end
    group.cut()
    for name in ("g0", "g1"):
        Client(group.a).subscribe(group=name)
        group.a.host.settle()
    for rotten in (end - 1, end + 40):
        group.a.disk.flip(log_name(0), 8 * rotten)
    if found == "at a start":
        group.a.crash()
        group.a.assign(Role.MASTER)
    else:
        group.a.node.found_damage(CorruptFrame(begin, "read"))
    damage = group.a.log.damage
    assert damage is not None and damage.begin == begin < end < damage.end
    for _ in range(3):
        repair_once(group)
    assert group.a.log.damage is None and group.a.log.end == end
    group.connect()
    group.settle()
    assert group.a.log.chain == group.b.log.chain and group.a.node.writable
