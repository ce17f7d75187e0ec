"""Core. All slaves of a master: how many a mastership waits for, and when the master yields."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.remoting.commands import Command, offset_header
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.replication import shipper
from qmq.replication.follower import FollowerState
from qmq.replication.quorum import OTHERS_WAIT_MS
from qmq.types import Role
from tests.unit.broker.test_replication import a_master_restoring_in_pieces
from tests.unit.broker.world import SETTINGS, Broker, Client, FakeLink, Group
from tests.unit.replication.copies import Copies

S = FollowerState


def whole_copy() -> Broker:
    """Return a former master of a slave in sync."""
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
def test_slaves_needed_to_begin_early(slaves, min_copies, is_whole, needed):
    """If its own disk may have lost frames, enough that one must have them; otherwise as many as acknowledge."""
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
        pytest.param((None, None), 0, 800, False, id="no slave sent a hello"),
        pytest.param((80, None), 0, 800, False, id="one slave sent no hello"),
        pytest.param((80, 160), 0, 160, True, id="no slave has its frames"),
        pytest.param((80, 160), 0, 152, False, id="one slave has some of its frames"),
        pytest.param((80, 160), 160, 160, True, id="held frames end before it"),
        pytest.param((80, 160), 168, 160, False, id="it is held"),
        pytest.param((0, 0), 0, 0, True, id="no slave has any frame"),
    ],
)
def test_master_may_yield_unheld_frames_of_its_own(shared, held_end, offset, yields):
    slaves = Copies().start(connected="").a.master.slaves
    for name, end in zip("bc", shared, strict=True):
        slaves._watch(name).shared_end = end
    slaves.holds(held_end)
    assert slaves.may_yield(offset) is yields


def test_master_yields_only_unconfirmed_frames_it_wrote():
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


def test_empty_slave_proves_nothing_about_confirmed_frames():
    """It may have confirmed those frames on a disk that was lost."""
    copies = Copies().start()
    Client(copies.a).produce("m1")
    copies.a.host.turn()
    copies.wires["b"].to_slave()
    copies.b.host.settle()  # only the disk of b has it
    copies.begin_alone_twice()
    copies.c = Broker("c", SETTINGS)
    copies.start(connected="")
    for name in "cb":
        copies.wires[name].connect()
        assert copies.wires[name].deliver_hello()
    assert (copies.state("b"), copies.state("c")) == (S.DIVERGED, S.CATCHING_UP)
    assert copies.a.master.yields_from is None


def sends_snapshot(group: Group, link: FakeLink, base: int) -> None:
    """Deliver the slave's snapshot of the segment at `base`."""
    snapshot = group.b.disk.read(f"log/{base:020d}.snap", 0, 1 << 20)
    body = memoryview(bytes(offset_header(base)) + snapshot)
    group.a.node.packet_received(link, Packet(Command.SNAPSHOT, 0, ONE_WAY, Command.SNAPSHOT, body))


def test_unrequested_snapshot_of_a_slave_is_refused():
    for at in (0, 2, None):
        group = a_master_restoring_in_pieces()
        end, bases = group.a.log.end, group.b.log.bases
        assert end == bases[2] < bases[3]
        link = group.at_master if at is not None else FakeLink("a stranger")
        sends_snapshot(group, link, bases[3 if at is None else at])
        assert link.reason == "no slave is restoring from this link: snapshot refused" and group.a.log.end == end
        assert not group.a.disk.names("quarantine")


def test_snapshot_waits_for_writes_of_earlier_links():
    group = a_master_restoring_in_pieces()
    while not group.at_slave.pushed:
        group.b.wait(100)
        group.b.host.settle()
    assert group.to_master() and not group.a.log.is_idle
    end = group.a.log.end
    group.cut()
    while group.b.log.start <= end:
        group.b.drop_oldest_segment()
    group.connect()
    group.b.host.settle()
    assert group.deliver_hello() and group.to_master()
    assert not group.at_master.is_open and "connect again" in group.at_master.reason and group.a.log.end == end
    group.settle()
    group.connect()
    for _ in range(30):
        group.b.wait(100)
        group.settle()
    assert group.a.node.writable and group.a.log.chain == group.b.log.chain


def test_seeded_master_reconnects_its_other_slaves():
    copies = Copies().start()
    client = Client(copies.a)
    while len(copies.a.log.bases) < 4:
        client.produce("m", size=900)
        copies.settle()
    copies.cut()
    copies.a, copies.c = Broker("a", SETTINGS), Broker("c", SETTINGS)
    copies.b.drop_oldest_segment()
    copies.start(term=2, connected="")
    b, c = copies.wires["b"], copies.wires["c"]
    for wire, expected in ((c, S.CATCHING_UP), (b, S.RESTORING)):
        wire.connect()
        wire.b.host.settle()
        assert wire.deliver_hello() and copies.state(wire.b.name) is expected
    assert b.to_master() and copies.a.log.start == copies.b.log.start == copies.a.master.slaves.restored_from
    assert not c.at_master.is_open and copies.state("c") is S.ABSENT and b.at_master.is_open
    copies.settle()
    copies.connect("c")
    assert copies.a.node.writable and copies.a.log.chain == copies.b.log.chain == copies.c.log.chain


def test_mastership_waits_for_its_restoring_slave():
    group = Group.made().start()
    group.wait(100)
    assert group.b.node.identity.points.own is not None  # the slave has stored the point
    Client(group.a).produce("m")
    group.a.host.turn()  # shipped, not yet on its own disk
    group.to_slave()
    group.b.host.settle()
    group.a.crash()
    group.a.assign(Role.MASTER)
    group.connect()
    group.b.host.settle()
    assert group.deliver_hello()
    group.a.wait(2 * SETTINGS.slave_wait_ms)
    assert not group.a.master.has_begun and group.a.node.identity.points.lacks is None
    group.settle()
    assert group.a.node.writable and group.a.log.chain == group.b.log.chain


def test_group_is_fully_matched_with_all_slaves():
    copies = Copies().start()
    Client(copies.a).produce("m")
    copies.wires["b"].settle()
    copies.a.wait(100)
    copies.wires["b"].settle()
    slaves, behind = copies.a.master.slaves, copies.wires["c"].at_master
    assert [watch.is_fully_matched for watch in slaves.all] == [True, False] and not slaves.are_fully_matched
    assert behind.pushed and slaves.confirmed_end < copies.a.log.end
    copies.settle()
    copies.wait(100)
    assert slaves.are_fully_matched and slaves.confirmed_end == copies.a.log.end
    Client(copies.a).produce("m2")
    assert not slaves.are_fully_matched
    three = Copies(min_copies=3).start()
    three.a.wait(100)
    three.settle()
    assert three.a.master.slaves.are_fully_matched
    three.cut("c")
    assert not three.a.master.slaves.are_fully_matched


def test_older_frames_count_with_the_epoch_frame(monkeypatch):
    """Raft, figure 8: before that, a copy without these frames may be chosen."""
    monkeypatch.setattr(shipper, "PACKET_BYTES", 1)
    copies = Copies().start()
    Client(copies.a).produce("m1")
    copies.a.host.settle()
    copies.cut()  # only the disk of a has it
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
    assert high < alone in confirmed and copies.a.master.gate.high_watermark == copies.a.log.end > alone


def test_only_slave_counts_under_any_name():
    """A broker in the place of a group's only slave is that slave."""
    group = Group.made().start()
    group.cut()
    group.b = Broker("another", replace(SETTINGS, serve_port=9))
    group.b.assign(Role.SLAVE)
    group.agree()
    (watch,) = group.a.master.slaves.all
    assert watch.follower.state is S.IN_SYNC and watch.owner == "another:9" and watch.name == ""


def test_absent_slaves_do_not_report_full_disks():
    copies = Copies(min_copies=3).start()
    copies.cut("c")
    copies.a.node.set_disk_full(False)
    assert copies.a.node.readonly_reasons == ["slave_down"], "no disk is full"
    copies.cut("b")
    copies.a.node.set_disk_full(False)
    assert copies.a.node.readonly_reasons == ["slave_down"]
