"""Core. A node takes the part of a row, keeps it, and leaves it."""

from __future__ import annotations

import pytest

from qmq.errors import CorruptFrame, DiskFailed, Diverged, ErrorCode, IllegalTransition, OperatorError
from qmq.log.frame import FrameKind
from qmq.remoting.commands import Command
from qmq.remoting.packet import Packet
from qmq.replication import follower, shipper
from qmq.replication.agreement import Action, Agreement
from qmq.replication.assignment import Assignment
from qmq.replication.clocks import MASTER, SLAVE
from qmq.replication.follower import FollowerState
from qmq.replication.identity import Point
from qmq.replication.ports import QUIET_MS
from qmq.replication.readonly import Reason
from qmq.types import Epoch, Role
from tests.unit.broker.test_replication import replace_master
from tests.unit.broker.world import Broker, Client, FakeLink, Group
from tests.unit.replication.copies import Copies, group_at_rest, with_messages

# Rows.


def test_rows_older_than_known_epochs_are_ignored():
    group = group_at_rest()
    node, role = group.b.node, group.b.node.role
    node.identity.learn(Epoch(3, 1))
    group.b.assign(Role.MASTER, 2)
    assert node.role is role and node.assignment.term == 1
    group.b.assign(Role.SLAVE, 5)
    group.b.assign(Role.MASTER, 4)
    assert node.slave is not None and node.assignment.term == 5


def test_broker_starts_with_its_remembered_part():
    group = group_at_rest()
    group.b.crash()
    assert group.b.node.group == "g1" and group.b.node.role is None
    assert group.b.node.start_without_metaserver() and group.b.node.slave is not None


@pytest.mark.parametrize("name", ["a", "b"])
def test_copied_directory_needs_the_metaserver(name, caplog):
    group = group_at_rest()
    copied = getattr(group, name).copied()
    assert not copied.node.start_without_metaserver() and copied.node.role is None
    assert "moved or copied" in caplog.text
    copied.assign(Role.SLAVE, 2)
    copied.crash()
    assert copied.node.start_without_metaserver() and copied.node.slave is not None


def test_directory_without_instance_starts_by_itself():
    group = group_at_rest()
    group.b.node.identity.instance = ""
    group.b.assign(Role.SLAVE, 1)
    group.b.crash()
    assert group.b.node.start_without_metaserver()


def test_lost_part_ends_the_role(caplog):
    group = group_at_rest()
    for broker in (group.b, group.a):
        broker.node.lose_part("another process serves as it")
        assert broker.node.role is None and broker.node.assignment is None and not broker.node.readonly_reasons
        broker.wait(1000)
        broker.host.settle()
        assert broker.node.role is None
    assert caplog.text.count("part ends group=g1 term=1: another process serves as it") == 2
    group.a.assign(Role.MASTER, 2)
    assert group.a.node.master is not None
    Broker("new").node.lose_part("it has none")


def test_directory_of_another_group_is_refused():
    group = group_at_rest()
    with pytest.raises(OperatorError, match="belongs to a:.* of g1, not to g2"):
        group.a.node.assign(Assignment("g2", 2, Role.MASTER))
    assert group.a.node.writable


def test_new_part_clears_the_divergence(caplog, monkeypatch):
    group = group_at_rest()
    for _ in range(2):
        group.b.node.agreed(group.at_slave, Diverged("they differ"))
        assert group.b.node.readonly_reasons == [Reason.DIVERGED] and not group.at_slave.is_open
    assert caplog.text.count("copies differ group=g1") == 1
    calls = []
    monkeypatch.setattr(group.b.host, "role_changed", lambda: calls.append(group.b.node.readonly_reasons))
    group.b.assign(Role.SLAVE, 2)
    assert calls == [[]]


def test_agreement_clears_the_divergence():
    group = group_at_rest()
    group.b.node.agreed(group.at_slave, Diverged("they differ"))
    group.cut()
    group.agree()
    assert group.b.node.readonly_reasons == [] and group.a.node.writable


def test_broker_without_a_part_refuses_requests():
    broker = Broker("new")
    client = Client(broker)
    assert not broker.node.is_disk_full and not broker.node.changes.is_held
    assert client.code(client.produce("m")) == ErrorCode.NOT_MASTER and broker.node.quiet_ms() == 0
    broker.node.link_lost(client.link)
    broker.node.found_damage(CorruptFrame(0, "met by who reads what others wrote"))
    broker.wait(100)
    broker.host.settle()
    assert broker.node.role is None and broker.node.readonly_reasons == []


def test_agreement_for_a_former_slave_is_ignored():
    group = group_at_rest()
    for node in (group.a.node, Broker("new").node):
        link, reasons = FakeLink("late"), node.readonly_reasons
        node.agreed(link, Diverged("they differ"))
        assert link.is_open and node.readonly_reasons == reasons


def test_repeated_divergence_is_logged_once(caplog):
    group = group_at_rest()
    seed = Agreement(Epoch(1, 1), Action.SEED, group.b.log.end - 8, 0, group.b.log.end)
    for _ in range(2):
        group.connect()
        group.b.node.agreed(group.at_slave, memoryview(seed.encode()))
        assert group.b.node.readonly_reasons == [Reason.DIVERGED] and not group.at_slave.is_open
    assert caplog.text.count("copies differ group=g1") == 1


def test_slave_unreplayable_after_its_cut_has_no_part():
    group = Group.made(tail_bytes=0).start()
    for id in ("damaged", "kept"):
        group.client().store(id)
    Client(group.a).produce("never acknowledged")
    group.a.host.settle()
    group.cut()
    group.b.alone(2)
    group.a, group.b = group.b, group.a
    (damaged,) = group.a.log.frames("s", 0, 1)
    group.b.flip(damaged.offset + 20)
    group.b.assign(Role.SLAVE, 2)
    group.agree()
    assert group.b.node.role is None and group.b.node.readonly_reasons == [Reason.CORRUPT]
    assert group.b.log.end == damaged.offset


@pytest.mark.parametrize(
    "name, call",
    [
        ("agreed", lambda group: group.b.node.agreed(group.at_slave, memoryview(b""))),
        ("link_lost", lambda group: group.b.node.link_lost(group.at_slave)),
        ("tick", lambda group: group.b.node.tick()),
    ],
)
def test_illegal_transition_restarts_the_role(monkeypatch, name, call):
    group = group_at_rest()
    role = group.b.node.role

    def illegal(*_: object) -> None:
        raise IllegalTransition("a state without this move")

    monkeypatch.setattr(role, name, illegal)
    call(group)
    assert group.b.node.slave is not None and group.b.node.role is not role


def hello_again(group: Group) -> int:
    """Send a hello on the open link; return the code of the answer."""
    group.b.slave.connected(group.at_slave)
    body = memoryview(group.b.host.hellos.pop())
    group.a.node.packet_received(group.at_master, Packet(Command.HELLO, 77, 0, Command.HELLO, body))
    return group.at_master.answers[77][0]


def test_restarting_master_answers_the_hello_first(monkeypatch):
    group = group_at_rest()
    group.b.node.identity.learn(Epoch(1, 7))
    assert hello_again(group) == ErrorCode.FENCED and group.a.master.epoch == Epoch(1, 8)
    group.agree()

    def agree(hello, log, epoch, **_):
        return Agreement(epoch, Action.RESTORE, log.end, log.chain, log.end)

    monkeypatch.setattr(follower, "agree", agree)  # as if a master in sync had frames to restore
    assert hello_again(group) == IllegalTransition.code and group.a.master.epoch == Epoch(1, 9)


def test_waiting_master_is_not_writable():
    copies = Copies().start()
    copies.a.crash()
    copies.start(connected="b")
    assert copies.state("b") is FollowerState.IN_SYNC and not copies.a.master.has_begun
    assert copies.a.node.readonly_reasons == [] and not copies.a.node.writable


# Acknowledged points.


def test_point_write_failure_ends_the_process(monkeypatch):
    group, calls = group_at_rest(), []
    node, host = group.a.node, group.a.host
    group.client().store("n")
    monkeypatch.setattr(host, "write", lambda job, done: calls.append((job, done)))
    group.a.wait(1_000)
    ((job, done),) = calls
    assert node.identity.points.is_newer_than_saved and node.quiet_ms() == 0
    job()
    done(None)
    assert not node.identity.points.is_newer_than_saved and node.quiet_ms() == QUIET_MS
    with pytest.raises(DiskFailed):
        done(DiskFailed("no room"))


@pytest.mark.parametrize("is_slow", [False, True])
def test_ended_mastership_saves_its_point(monkeypatch, is_slow):
    """The point was due half a second later. A master that crashed before that, after a swap, did not have it and cut
    the frames, though the new master's disk had lost its end.
    """
    group, calls = group_at_rest(), []
    if is_slow:  # a thread still writes the previous point
        group.client().store("m2")
        monkeypatch.setattr(group.a.host, "write", lambda job, done: calls.append((job, done)))
        group.a.wait(1_000)
    group.client().store("n")
    point = group.a.master.gate.point
    group.a.assign(Role.SLAVE, 2)
    for job, done in calls:
        monkeypatch.undo()
        done(job())
        group.a.wait(100)
    group.a.crash()
    assert group.a.node.identity.points.own == point and point.end == group.a.log.end


def test_incomplete_copy_is_not_rolled_back():
    group = group_at_rest()
    group.b.node.identity.completed(False)
    group.b.node.remembered_elsewhere([Point(Epoch(1, 1), group.b.log.end + 8, 7)])
    assert group.b.node.readonly_reasons == []


@pytest.mark.parametrize("term, reasons", [(1, [Reason.ROLLED_BACK]), (2, [])])
def test_accepted_loss_clears_the_lacking_point(term, reasons):
    group = group_at_rest()
    lacks = Point(Epoch(1, 1), group.b.log.end + 8, 7)
    group.b.node.remembered_elsewhere([lacks])
    group.b.node.remembered_elsewhere([], loss_accepted_term=term)
    assert group.b.node.readonly_reasons == reasons


@pytest.mark.parametrize("accepted_term, is_given_up", [(0, False), (1, False), (2, True)])
def test_accepted_loss_clears_the_own_point(accepted_term, is_given_up):
    group = group_at_rest()
    lost = Point(Epoch(1, 1), group.b.log.end + 8, 7)
    group.b.node.identity.points.acknowledged(lost)
    group.b.node.remembered_elsewhere([], loss_accepted_term=accepted_term)
    assert group.b.node.identity.points.own == (None if is_given_up else lost)
    assert group.b.node.readonly_reasons == [], "it is compared when a part begins"


def test_only_a_lacking_mastership_restarts():
    group = group_at_rest()
    slave, lacks = group.b.node.role, Point(Epoch(1, 1), group.a.log.end + 800, 7)
    group.b.node.remembered_elsewhere([lacks])
    assert group.b.node.role is slave
    group.cut()
    begun = group.a.master
    group.a.node.remembered_elsewhere([])
    group.a.node.remembered_elsewhere([Point(Epoch(1, 1), group.a.log.end, group.a.log.chain)])
    assert group.a.master is begun
    group.a.node.remembered_elsewhere([lacks])
    anew = group.a.master
    assert anew is not begun
    group.a.node.remembered_elsewhere([lacks])
    assert group.a.master is anew, "it waits"


# A master that yields.


def wrote_alone() -> Group:
    """Return a group with a master that was rolled back and then wrote without its slave."""
    group = Group.made().start()
    older = group.a.disk.copy()
    for number in range(5):
        group.client().store(f"acknowledged {number}")
    group.cut()
    group.a.disk.put_back(older)
    group.a.start()
    group.a.alone()
    return group


def test_master_yields_after_its_write():
    group = wrote_alone()
    group.a.master._mastership.append(FrameKind.EPOCH, "", b"{}      ")
    assert group.a.host.turn() and not group.a.log.is_idle
    group.connect()
    group.b.host.settle()
    group.deliver_hello()
    end = group.a.log.end
    assert group.a.node.role is None and not group.a.disk.names("quarantine")
    assert not group.at_slave.is_open, "the slave sends another hello"
    group.a.assign(Role.MASTER, 1)
    assert group.a.node.role is None and group.a.log.end == end, "not before its end is cut"
    group.a.host.fsync()
    assert group.a.node.role is not None and group.a.log.end < end and group.a.disk.names("quarantine")
    for _ in range(2):
        group.agree()
    assert group.a.node.writable and group.a.log.chain == group.b.log.chain


# Events of the host.


def test_full_disk_and_short_memory_make_readonly(caplog):
    group = group_at_rest()
    for say, reason in ((group.a.node.set_disk_full, Reason.DISK), (group.a.node.set_memory_short, Reason.MEMORY)):
        caplog.clear()
        for is_short in (True, True, False, False):
            say(is_short)
            assert group.a.node.readonly_reasons == ([reason] if is_short else [])
        assert len(caplog.records) == 1
    for say in (group.b.node.set_disk_full, group.b.node.set_memory_short):
        say(True)
    assert group.b.node.is_disk_full and group.b.node.readonly_reasons == []


def test_clock_disagreement_is_logged_once(caplog):
    group = group_at_rest()
    for skew_ms, lines in ((0, 0), (1 << 30, 1), (1 << 30, 1), (0, 2), (0, 2)):
        group.hear_clocks(skew_ms)
        for broker in (group.a, group.b):
            broker.node.decide_retention(broker.keeper)
        texts = [record.message.split(" group=g1")[0] for record in caplog.records]
        assert texts == ["clocks disagree", "clocks disagree", "clocks agree again", "clocks agree again"][: 2 * lines]


def test_broker_without_a_part_ignores_clocks():
    broker = Broker("new")
    broker.node.record_copy_clock(FakeLink("anybody"), broker.host.now_ms(), is_disk_full=True)
    assert broker.node.clocks_ahead_ms() == {} and broker.node.readonly_reasons == []


def test_tick_requests_a_pass():
    group = group_at_rest()
    for broker in (group.a, group.b):
        broker.host.settle()
        broker.node.tick()
        assert broker.host.pass_is_due


def test_frames_arriving_during_a_commit_follow_it():
    group = group_at_rest()
    client = Client(group.a)
    client.produce("n")
    assert group.a.host.turn() and group.a.host.commits
    client.produce("o")
    group.a.host.pass_is_due = False
    group.a.host.fsync()
    assert group.a.host.pass_is_due
    group.settle()
    assert group.a.log.is_idle and group.b.log.end == group.a.log.end


def frames_sent(link: FakeLink) -> int:
    return sum(command == Command.FRAMES for command, _ in link.pushed)


def test_master_ships_when_its_link_is_writable_again():
    group = with_messages()
    group.at_master.writable = False
    Client(group.a).produce("m")
    group.a.host.settle()
    assert not frames_sent(group.at_master)
    group.at_master.writable = True
    group.a.node.writable_again(FakeLink("a client"))
    assert not frames_sent(group.at_master)
    group.a.node.writable_again(group.at_master)
    assert frames_sent(group.at_master)


def with_an_empty_master():
    """Return a group with a new, empty master that its slave restores."""
    group = with_messages()
    replace_master(group)
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
    """Otherwise the slave would treat it as the confirmation of another log."""
    monkeypatch.setattr(shipper, "PACKET_BYTES", 2_000)
    group = with_an_empty_master()
    while not frames_sent(group.at_slave):
        group.b.host.settle()
        assert group.deliver_hello()
    group.to_master()
    group.a.host.turn()  # its commit is under way
    begin = group.a.log.end
    assert begin and not group.a.log.flushed_end
    group.cut()
    group.connect()
    group.b.host.settle()
    assert group.deliver_hello()
    (watch,) = group.a.master.slaves.all
    assert watch.follower.restoring.begin == begin
    group.a.host.settle()
    assert group.a.log.flushed_end == begin and not group.at_master.pushed
    group.settle()
    assert group.a.master.has_begun and group.a.log.chain == group.b.log.chain


def test_writable_link_of_a_follower_sends_nothing():
    group = with_messages()
    group.b.node.writable_again(group.at_slave)
    Broker("new").node.writable_again(FakeLink("anybody"))
    assert not group.at_slave.pushed


def test_clock_readings_count_on_the_own_link_only():
    group = with_messages()
    for broker, link, whose in ((group.a, group.at_master, SLAVE), (group.b, group.at_slave, MASTER)):
        broker.node.record_copy_clock(FakeLink("a stranger"), broker.host.now_ms() - 7, is_disk_full=True)
        assert broker.node.clocks_ahead_ms() == {}
        broker.node.record_copy_clock(link, broker.host.now_ms() - 7, is_disk_full=True)
        assert broker.node.clocks_ahead_ms() == {whose: 7}


def test_full_disk_of_the_slave_makes_readonly():
    group = with_messages()
    for is_full, reasons in ((True, [Reason.DISK]), (False, [])):
        group.a.node.record_copy_clock(group.at_master, group.a.host.now_ms(), is_disk_full=is_full)
        group.a.node.set_disk_full(False)
        assert group.a.node.readonly_reasons == reasons


def test_group_with_a_catching_up_slave_is_busy():
    copies = Copies().start()
    copies.cut("c")
    copies.wait(1_000)
    assert copies.a.master.slaves.are_fully_matched and copies.a.master.quiet_ms() == QUIET_MS
    wire = copies.wires["c"]
    wire.connect()
    assert wire.deliver_hello()
    assert not copies.a.master.slaves.are_fully_matched and copies.a.master.quiet_ms() == 0
    copies.settle()
    copies.wait(1_000)
    assert copies.a.master.slaves.are_fully_matched
    copies.cut("c")  # an absent slave is not waited for
    assert copies.a.master.slaves.are_fully_matched


@pytest.mark.parametrize("is_damaged", [True, False])
def test_master_with_unreadable_common_end_is_damaged(is_damaged):
    """The reason is corrupt, not diverged."""
    group = with_messages(tail_bytes=0)
    group.cut()
    end, base = group.a.log.end, group.a.log.bases[-1]
    (before,) = group.a.log.frames("s", 11, 1)
    assert base <= before.offset and before.offset + before.length == end
    group.a.master._mastership.append(FrameKind.EPOCH, "", b"{}      ")
    group.a.host.settle()
    if is_damaged:
        for at in (before.offset + before.length // 2, end + 20):
            group.a.flip(at)
    group.connect()
    for _ in range(3):
        group.deliver_hello()
    assert ("corrupt" in group.a.node.readonly_reasons) == is_damaged
    assert "diverged" not in group.a.node.readonly_reasons
    assert (group.a.master.slaves.of(group.at_master) is None) == is_damaged
