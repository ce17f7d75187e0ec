"""Core. Links between copies: they take more again, and carry the other end's clock and the state of its disk."""

from __future__ import annotations

import pytest

from qmq.log.frame import FrameKind
from qmq.remoting.commands import Command
from qmq.replication import shipper
from qmq.replication.clocks import MASTER, SLAVE
from qmq.replication.ports import QUIET_MS
from qmq.replication.readonly import Reason
from qmq.types import Role
from tests.unit.broker.world import Broker, Client, FakeLink, Group
from tests.unit.replication.test_many_copies import Copies


def stored(**changes) -> Group:
    group = Group.made(**changes).start()
    for number in range(12):
        Client(group.a).produce(f"m{number}", size=900)
        group.settle()
    return group


def frames_told(link: FakeLink) -> int:
    return sum(command == Command.FRAMES for command, _ in link.told)


def test_master_ships_when_its_link_is_writable_again():
    group = stored()
    group.at_master.writable = False
    Client(group.a).produce("m")
    group.a.host.settle()
    assert not frames_told(group.at_master)
    group.at_master.writable = True
    group.a.node.writable_again(FakeLink("a client"))
    assert not frames_told(group.at_master)
    group.a.node.writable_again(group.at_master)
    assert frames_told(group.at_master)


def with_an_empty_master():
    """The slave has messages that the new master takes from it."""
    group = stored()
    group.cut()
    group.a = Broker("new master", group.a.settings)
    group.a.assign(Role.MASTER, 2)
    group.b.assign(Role.SLAVE, 2)
    group.connect()
    return group


def test_restoring_slave_sends_when_link_is_writable_again():
    group = with_an_empty_master()
    group.at_slave.writable = False
    group.settle()
    assert not group.a.log.end and group.b.log.end
    group.at_slave.writable = True
    group.b.node.writable_again(group.at_slave)
    group.settle()
    assert group.a.master.has_begun and group.a.log.chain == group.b.log.chain


def test_restored_frames_of_an_earlier_link_stay_unconfirmed(monkeypatch):
    """It would take that for the confirmation of another log."""
    monkeypatch.setattr(shipper, "PACKET_BYTES", 2_000)
    group = with_an_empty_master()
    while not frames_told(group.at_slave):
        group.b.host.settle()
        assert group.deliver_hello()
    group.to_master()
    group.a.host.turn()  # its commit is on its way to the disk
    begin = group.a.log.end
    assert begin and not group.a.log.flushed_end
    group.cut()
    group.connect()
    group.b.host.settle()
    assert group.deliver_hello()
    (watch,) = group.a.master.slaves.all
    assert watch.follower.restoring.begin == begin
    group.a.host.settle()
    assert group.a.log.flushed_end == begin and not group.at_master.told
    group.settle()
    assert group.a.master.has_begun and group.a.log.chain == group.b.log.chain


def test_writable_link_of_a_follower_sends_nothing():
    group = stored()
    group.b.node.writable_again(group.at_slave)
    Broker("new").node.writable_again(FakeLink("anybody"))
    assert not group.at_slave.told


def test_clock_readings_count_on_the_own_link_only():
    group = stored()
    for broker, link, whose in ((group.a, group.at_master, SLAVE), (group.b, group.at_slave, MASTER)):
        broker.node.record_copy_clock(FakeLink("a stranger"), broker.host.now_ms() - 7, is_disk_full=True)
        assert broker.node.clocks_ahead_ms() == {}
        broker.node.record_copy_clock(link, broker.host.now_ms() - 7, is_disk_full=True)
        assert broker.node.clocks_ahead_ms() == {whose: 7}


def test_full_disk_of_the_slave_makes_readonly():
    group = stored()
    for is_full, reasons in ((True, [Reason.DISK]), (False, [])):
        group.a.node.record_copy_clock(group.at_master, group.a.host.now_ms(), is_disk_full=is_full)
        group.a.node.set_disk_full(False)
        assert group.a.node.readonly_reasons == reasons


def test_group_with_a_catching_up_slave_is_busy():
    copies = Copies().start()
    copies.cut("c")
    copies.a.wait(1_000)
    copies.settle()
    assert copies.a.master.slaves.are_fully_matched and copies.a.master.quiet_ms() == QUIET_MS
    wire = copies.wires["c"]
    wire.connect()
    assert wire.deliver_hello()
    assert not copies.a.master.slaves.are_fully_matched and copies.a.master.quiet_ms() == 0
    copies.settle()
    copies.a.wait(1_000)
    copies.settle()
    assert copies.a.master.slaves.are_fully_matched
    copies.cut("c")  # of one that is away nothing is to be waited for
    assert copies.a.master.slaves.are_fully_matched


@pytest.mark.parametrize("is_damaged", [True, False])
def test_master_with_unreadable_common_end_is_damaged(is_damaged):
    """It says so, and does not call the slave's log another one."""
    group = stored(tail_bytes=0)
    group.cut()
    end, base = group.a.log.end, group.a.log.bases[-1]
    (before,) = group.a.log.frames("s", 11, 1)
    assert base <= before.offset and before.offset + before.length == end
    group.a.master._mastership.append(FrameKind.EPOCH, "", b"{}      ")
    group.a.host.settle()
    if is_damaged:
        for offset, at in ((before.offset, before.length // 2), (end, 20)):
            group.a.disk.flip(f"log/{base:020d}.log", 8 * (offset - base + at))
    group.connect()
    for _ in range(3):
        group.deliver_hello()
    assert ("corrupt" in group.a.node.readonly_reasons) == is_damaged
    assert "diverged" not in group.a.node.readonly_reasons
    assert (group.a.master.slaves.of(group.at_master) is None) == is_damaged
