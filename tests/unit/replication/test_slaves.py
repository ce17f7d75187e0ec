"""Core. A master's slaves together: how many of them a mastership waits for, and when the master gives way to one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.remoting.commands import Command, offset_header
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.replication import shipper
from qmq.replication.follower import FollowerState
from qmq.replication.slaves import OTHERS_WAIT_MS
from qmq.types import Role
from tests.unit.broker.test_replication import a_master_that_takes_back_piece_by_piece
from tests.unit.broker.world import SETTINGS, Broker, Client, Group
from tests.unit.replication.test_many_copies import Copies

S = FollowerState


def whole_copy() -> Broker:
    """One that was master of a slave in sync."""
    group = Group.made().start()
    group.cut()
    return group.a


@pytest.mark.parametrize(
    ("slaves", "min_copies", "is_whole", "needed"),
    [
        (1, 2, True, 1),
        (2, 2, True, 1),
        (2, 3, True, 2),
        (4, 3, True, 2),
        (2, 2, False, 2),
        (2, 3, False, 2),
        (4, 2, False, 4),
        (4, 3, False, 3),
        (4, 4, False, 3),
    ],
)
def test_a_mastership_begins_early_with_as_many_slaves_as_one_of_must_have_what_was_acknowledged(
    slaves, min_copies, is_whole, needed
):
    """If its own disk may have lost it; else with as many as acknowledge."""
    master, row = whole_copy(), {"slaves": slaves, "min_copies": min_copies}
    master.node.identity.completed(is_whole)
    master.assign(Role.MASTER, 2, **row)
    for number in range(needed):
        assert not master.master.has_begun
        slave = Broker(f"b{number}")
        slave.assign(Role.SLAVE, 2, **row)
        wire = Group(master, slave)
        wire.connect()
        wire.deliver_hello()
        if number < needed - 1:
            master.master.tick(master.host.monotonic_ms() + OTHERS_WAIT_MS)
    assert master.master.has_begun == (needed == slaves)
    master.wait(OTHERS_WAIT_MS - 1)
    assert master.master.has_begun == (needed == slaves)
    master.wait(1)
    assert master.master.has_begun


@pytest.mark.parametrize(
    ("shared", "held_end", "offset", "yields"),
    [
        pytest.param((None, None), 0, 800, False, id="nobody said"),
        pytest.param((80, None), 0, 800, False, id="one did not say"),
        pytest.param((80, 160), 0, 160, True, id="all have nothing of it"),
        pytest.param((80, 160), 0, 152, False, id="one has some of it"),
        pytest.param((80, 160), 160, 160, True, id="what is held stands before it"),
        pytest.param((80, 160), 168, 160, False, id="it is held"),
    ],
)
def test_one_of_several_slaves_gets_its_way_if_nobody_has_what_the_master_wrote(shared, held_end, offset, yields):
    slaves = Copies().start(connected="").a.master.slaves
    for name, end in zip("bc", shared, strict=True):
        slaves._watch(name).shared_end = end
    slaves.holds(held_end)
    assert slaves.may_yield(offset) is yields


def test_a_master_of_several_slaves_gives_up_what_its_own_mastership_wrote_and_nobody_confirmed():
    master = whole_copy()
    master.assign(Role.MASTER, 2, slaves=2)
    begin = master.log.end
    master.wait(SETTINGS.slave_wait_ms)
    slaves = master.master.slaves
    assert master.master.has_begun and master.log.end > begin
    assert [slaves.may_yield(offset) for offset in (begin - 8, begin, begin + 8)] == [False, True, True]
    slaves.holds(begin)
    assert slaves.may_yield(begin)
    slaves.holds(begin + 8)
    slaves.holds(begin)
    assert [slaves.may_yield(offset) for offset in (begin, begin + 8)] == [False, True]


def test_a_slave_whose_disk_is_empty_does_not_say_that_it_had_nothing():
    """It may have confirmed what stood there, on a disk that it lost."""
    copies = Copies().start()
    Client(copies.a).produce("m1")
    copies.a.host.turn()
    copies.wires["b"].to_slave()
    copies.b.host.settle()  # it is on the disk of b alone
    for _ in range(2):
        copies.a.crash()
        copies.start(connected="")
        copies.a.wait(SETTINGS.slave_wait_ms)
        copies.a.host.settle()
    copies.a.crash()
    copies.c = Broker("c", SETTINGS)
    copies.start(connected="c")
    copies.connect("b")
    assert copies.state("b") is S.DIVERGED and copies.a.master.yields_from is None


def test_a_snapshot_that_a_slave_sends_takes_no_place_of_what_the_master_has():
    group = a_master_that_takes_back_piece_by_piece()
    base, _, snapshot = group.b.log.seed_start()
    end = group.a.log.end
    for offset in (base, end):
        body = memoryview(bytes(offset_header(offset)) + bytes(snapshot))
        group.a.node.packet_received(group.at_master, Packet(Command.SNAPSHOT, 0, ONE_WAY, Command.SNAPSHOT, body))
        assert group.at_master.reason == "nobody asked for this snapshot" and group.a.log.end == end


def test_frames_of_an_older_epoch_count_with_the_whole_epoch_frame_only(monkeypatch):
    """Raft, figure 8: until then a copy that lacks them may still be chosen."""
    monkeypatch.setattr(shipper, "PACKET_BYTES", 1)
    copies = Copies().start()
    copies.cut()
    Client(copies.a).produce("m1")  # on a's disk alone
    copies.a.host.settle()
    high, alone = copies.a.master.gate.high_watermark, copies.a.log.end
    copies.start(connected="", term=2)
    wire = copies.wires["b"]
    wire.connect()
    copies.a.wait(OTHERS_WAIT_MS)
    confirmed = set()
    while copies.a.master.gate.high_watermark == high:
        copies.a.host.settle()
        copies.b.host.settle()
        assert wire.deliver_hello() or wire.to_slave() or wire.to_master()
        confirmed.add(copies.a.master.slaves.confirmed_end)
    assert alone in confirmed and copies.a.master.gate.high_watermark == copies.a.log.end > alone


def test_settings_of_a_row_with_one_slave_hold_whatever_that_slave_is_called():
    """The only slave of a group is the only one: a broker in its place is no second one."""
    group = Group.made().start()
    group.cut()
    group.b = Broker("another", replace(SETTINGS, serve_port=9))
    group.b.assign(Role.SLAVE)
    group.connect()
    group.settle()
    (watch,) = group.a.master.slaves.all
    assert watch.follower.state is S.IN_SYNC and watch.owner == "another:9" and watch.name == ""
