"""What the simulator found, as short as it can be told. Each of these was red before its mending."""

from __future__ import annotations

import contextlib

import pytest

from broker import retention
from qmq.errors import CorruptFrame, Diverged
from qmq.log.fold import EpochStart, Group, State
from qmq.log.frame import FrameKind
from qmq.log.segments import log_name
from qmq.types import Epoch, Role
from tests.unit.broker.world import Client
from tests.unit.broker.world import Group as BrokerGroup
from tests.unit.log.logs import Copy


def test_a_pull_that_is_full_ends_within_its_frame_although_the_next_one_is_smaller() -> None:
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


def test_two_histories_never_give_one_pull_sequence_to_two_messages() -> None:
    """As many reigns, and a consumer that was handed messages by the one that got lost."""
    lost = State(epochs=[EpochStart(Epoch(1, 1), 0, 0), EpochStart(Epoch(1, 2), 100, 7)])
    kept = State(epochs=[EpochStart(Epoch(1, 1), 0, 0), EpochStart(Epoch(2, 1), 100, 7)])
    group = Group(position=0)
    assert lost.next_pull(group, "c") + 1_000_000 < kept.next_pull(group, "c")


def test_a_consumer_that_comes_back_gets_numbers_of_its_own() -> None:
    state = State(epochs=[EpochStart(Epoch(1, 1), 0, 0)])
    given = state.next_pull(Group(position=0), "c") + 5
    assert state.next_pull(Group(position=5, floor=given), "c") == given


def test_a_cut_tail_is_known_after_any_number_of_restarts_until_the_other_copy_was_asked() -> None:
    copy = Copy()
    copy.office()
    copy.messages("m0")
    copy.flush()
    copy.disk.flip(log_name(0), 8 * (copy.log.end - 1))
    assert copy.reopen().is_tail_cut and copy.reopen().is_tail_cut
    copy.log.tail_is_whole()
    assert not copy.reopen().is_tail_cut


def test_an_ack_that_one_copy_alone_has_lets_no_segment_go() -> None:
    copy = Copy()
    copy.office()
    frame = copy.messages("m0", "m1")
    copy.progress(FrameKind.POSITION, "", (0, 0, 0))
    copy.progress(FrameKind.PULL, "c", (5, 0, 2))
    consumed = retention.Consumed()
    consumed.needed_from(copy.log)
    copy.progress(FrameKind.ACK, "c", (5, 7, 0))
    for i in range(4):
        copy.messages(f"alone{i}", high_watermark=frame.end)
        copy.flush()
        assert consumed.needed_from(copy.log) <= frame.offset
    for i in range(4):
        copy.messages(f"both{i}", high_watermark=copy.log.end)
        copy.flush()
        consumed.needed_from(copy.log)
    assert consumed.needed_from(copy.log) > frame.offset


def test_a_damaged_segment_that_the_other_copy_dropped_is_dropped_too() -> None:
    group = BrokerGroup.made().start()
    client = Client(group.a)
    while len(group.a.log.bases) < 4:
        client.produce("m", size=500)
        group.settle()
    log = group.a.log
    log.damaged_at(log.bases[1], "a bit flipped")
    assert group.a.node.mend(0, log.flushed_end), "the other copy has it: fetch"
    assert not group.a.node.mend(log.bases[2], log.flushed_end)
    assert log.damage is None and log.start == log.bases[0] > 0


def test_what_only_a_damaged_copy_had_is_cut_and_the_group_goes_on() -> None:
    group = BrokerGroup.made().start()
    client = Client(group.a)
    client.produce("kept")
    group.settle()
    group.cut()
    end = group.a.log.end
    client.subscribe()
    group.a.host.settle()
    group.a.log.damaged_at(end, "a bit flipped")
    assert not group.a.node.mend(0, end)
    assert group.a.log.damage is None and group.a.log.end == end and group.a.node.role is not None


def test_our_own_damage_is_not_called_divergence() -> None:
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
    """The slave has one long frame where the master, which lost it, wrote short ones; one of those rotted."""
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


def mend_once(group: BrokerGroup) -> None:
    """What broker.repair does in a round, by the other copy's frames."""
    node, other = group.a.node, group.b.log
    wanted = node.mend(other.start, other.flushed_end)
    if wanted is not None:
        begin, data = other.next_frame(wanted[0]), b""
        while begin is not None and begin + len(data) < min(wanted[1], other.flushed_end):
            try:
                data += other.read(begin + len(data), other.flushed_end, 1).data
            except CorruptFrame as problem:
                data += other.read_damaged(problem.offset)
        with contextlib.suppress(CorruptFrame, Diverged):
            node.repair(begin if begin is not None and data else wanted[1], data)


def test_damage_where_the_other_copy_has_one_frame_of_another_history_is_cut() -> None:
    """No frame of the other copy begins within the damage, so nothing was ever fetched."""
    group = a_group_whose_histories_part_before_damage()
    mend_once(group)
    mend_once(group)
    assert group.a.log.damage is None
    group.connect()
    group.settle()
    assert (group.a.log.end, group.a.log.chain) == (group.b.log.end, group.b.log.chain) and group.a.node.writable


@pytest.mark.parametrize("before_end", [8, 1040], ids=["body", "header"])
def test_damage_is_not_cut_while_the_other_copy_is_damaged_there_as_well(before_end: int) -> None:
    group = a_group_whose_histories_part_before_damage()
    group.b.disk.flip(log_name(0), 8 * (group.b.log.end - before_end))
    for _ in range(3):
        mend_once(group)
    assert group.a.log.damage is not None
