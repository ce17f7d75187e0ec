"""Faults that the simulator found, each as its shortest story."""

from __future__ import annotations

import contextlib

import pytest

from qmq.errors import CorruptFrame, Diverged, ErrorCode
from qmq.log.segments import log_name
from qmq.types import Role
from tests.unit.broker.world import Client
from tests.unit.broker.world import Group as BrokerGroup
from tests.unit.log.logs import Copy


def test_full_pull_ends_within_its_frame() -> None:
    group = BrokerGroup.made().start()
    client = Client(group.a)
    client.produce("big0", "big1", size=300)
    client.produce("small")
    client.subscribe()
    group.settle()
    client.subscription(1 + 2)
    pulled = client.pull(bytes_max=500)
    group.settle()
    assert [identity for _, _, identity in client.pulled(pulled)] == ["big0"]


def test_cut_tail_is_remembered_over_restarts() -> None:
    copy = Copy()
    copy.begin_epoch()
    copy.messages("m0")
    copy.flush()
    copy.disk.flip(log_name(0), 8 * (copy.log.end - 1))
    assert copy.reopen().is_tail_cut and copy.reopen().is_tail_cut
    copy.log.tail_is_whole()
    assert not copy.reopen().is_tail_cut


def test_damaged_segment_is_dropped_with_the_other_copys() -> None:
    group = BrokerGroup.made().start()
    client = Client(group.a)
    while len(group.a.log.bases) < 4:
        client.produce("m", size=500)
        group.settle()
    log = group.a.log
    second = log.bases[1]
    log.damaged_at(CorruptFrame(log.bases[1], "a bit flipped"))
    assert group.a.node.repairs.plan(0, log.flushed_end), "the other copy has it: fetch"
    assert not group.a.node.repairs.plan(log.bases[2], log.flushed_end)
    assert log.damage is None and log.start == log.bases[0] > 0
    aside = "quarantine/00000000000000000000-{:020d}-damaged-and-not-at-the-other-copy-0"
    assert group.a.disk.names(aside.format(second)) == [f"{0:020d}.log"], "no retention frame covers it"


def test_damaged_frames_of_one_copy_alone_are_cut() -> None:
    group = BrokerGroup.made().start()
    client = Client(group.a)
    client.produce("kept")
    group.settle()
    group.cut()
    end = group.a.log.end
    client.subscribe()
    group.a.host.settle()
    group.a.log.damaged_at(CorruptFrame(end, "a bit flipped"))
    assert not group.a.node.repairs.plan(0, end)
    assert group.a.log.damage is None and group.a.log.end == end and group.a.node.role is not None


def test_own_damage_is_not_divergence() -> None:
    group = BrokerGroup.made(tail_bytes=0).start()
    client = Client(group.a)
    client.produce("m0")
    group.settle()
    group.cut()
    group.b.assign(Role.SLAVE)
    client.subscribe()
    group.a.host.settle()
    group.a.log._tail.clear()
    group.a.disk.flip(log_name(0), 8 * (group.b.log.end + 40))
    group.connect()
    group.settle()
    assert group.a.log.damage is not None
    assert "diverged" not in group.a.node.readonly_reasons


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


def test_consumer_of_a_deposed_master_starts_again() -> None:
    """A master that is alone delivers safe messages; its pull sequences must not hide other messages."""
    group = BrokerGroup.made().start()
    client = Client(group.a)
    client.produce("m0", "m1", "m2", "m3")
    client.subscribe("c")
    group.settle()
    first = client.pull(most=2)
    group.settle()
    group.cut()
    second = client.pull(most=2)
    group.a.host.settle()
    held_end = client.pulled(second)[-1][0] + 1
    group.b.assign(Role.MASTER, 2)
    group.b.wait(5_000)
    group.b.host.settle()
    group.swap(2)
    again = Client(group.a)
    refused = again.subscribe("c", held_end=held_end)
    assert again.code(refused) == ErrorCode.INVALID_ACK
    fresh = again.subscribe("c")
    group.settle()
    again.subscription(fresh)
    pulled = again.pull()
    group.settle()
    got = [identity for _, _, identity in again.pulled(pulled)]
    assert got == ["m0", "m1", "m2", "m3"] and client.pulled(first)


def a_group_whose_retention_took_messages() -> tuple[BrokerGroup, Client]:
    """Return a group and its client, whose consumer group was delivered none of these messages."""
    group = BrokerGroup.made().start()
    client = Client(group.a)
    subscribed = client.subscribe("c")
    group.settle()
    client.subscription(subscribed)
    client.produce("gone 0", "gone 1", size=900)
    while len(group.a.log.bases) < 3:
        client.produce("filler", subject="other", size=900)
        group.settle()
    group.a.drop_oldest_segment()
    assert not group.a.log.frames("s", 0, 1)
    return group, client


def test_messages_deleted_by_retention_are_skipped_once() -> None:
    group, client = a_group_whose_retention_took_messages()
    for _ in range(3):
        pulled = client.pull()
        group.settle()
        assert client.code(pulled) == ErrorCode.NO_MESSAGE
    progress = group.b.log.state.groups["s", "g"]
    assert progress.position == 2 and not progress.consumers, "the other copy has it too"
    assert group.a.master.skipped == {("s", "g"): 2}


@pytest.mark.parametrize("acked", [0, 1])
def test_deleted_unacked_messages_are_counted_once(
    acked: int,
) -> None:
    group = BrokerGroup.made().start()
    client = Client(group.a)
    client.produce("gone 0", "gone 1", size=900)
    client.produce("filler", subject="other", size=900)
    subscribed = client.subscribe("c")
    group.settle()
    client.subscription(subscribed)
    pulled = client.pull()
    group.settle()
    first = client.pulled(pulled)[0][0]
    if acked:
        client.ack(first, first + 1)
    while len(group.a.log.bases) < 3:
        client.produce("filler", subject="other", size=900)
        group.settle()
    group.a.drop_oldest_segment()
    for held_end in (first + 1, first, 0):
        again = Client(group.a, f"holds {held_end}")
        subscribed = again.subscribe("c", held_end=held_end)
        group.settle()
        again.subscription(subscribed)
        nothing = again.pull()
        group.settle()
        assert again.code(nothing) == ErrorCode.NO_MESSAGE
    assert group.a.master.skipped == {("s", "g"): 2 - acked}
    assert not group.a.log.state.groups["s", "g"].consumers["c"].unacked
