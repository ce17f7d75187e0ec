"""Core. A master's view of one slave: states, lag, filling, and when it counts again."""

from __future__ import annotations

import json

import pytest

from qmq.errors import ErrorCode, IllegalTransition
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.replication import follower, shipper
from qmq.replication.agreement import Action, Agreement
from qmq.replication.follower import FOLLOWER, Absent, CatchingUp, Follower, FollowerEvent, FollowerState, Restoring
from qmq.replication.readonly import Reason
from qmq.types import Epoch, Role
from tests.unit.broker.test_replication import a_master_restoring_in_pieces, filled, replace_master, replace_slave
from tests.unit.broker.world import SETTINGS, Broker, Client, FakeLink, Group
from tests.unit.replication.copies import Copies

S = FollowerState


def states(group: Group) -> list[FollowerState]:
    return [move.after for move in group.a.master.slaves.all[0].follower.history]


def test_confirmation_of_another_log_is_divergence():
    group = Group.made().start()
    gate, slave = group.a.master.gate, group.b.slave
    Client(group.a).produce("m")
    group.a.host.settle()
    slave._confirm(group.a.log.end, 0xBAD)
    group.to_master()
    assert group.a.master.slaves.all[0].follower.state is S.DIVERGED and gate.too_few_in_sync
    assert group.a.master.readonly.reasons == [Reason.DIVERGED, Reason.SLAVE_DOWN]
    group.agree()
    assert group.a.master.slaves.all[0].follower.state is S.IN_SYNC and not group.a.master.readonly.reasons


def test_matched_slave_clears_the_divergence():
    copies = Copies(min_copies=3).start()
    copies.cut("c")
    copies.b.slave._confirm(copies.a.log.end, 0xBAD)
    copies.wires["b"].to_master()
    assert copies.a.node.readonly_reasons == [Reason.DIVERGED, Reason.SLAVE_DOWN]
    copies.wires["b"].agree()
    assert copies.state("b") is S.IN_SYNC and copies.a.node.readonly_reasons == [Reason.SLAVE_DOWN]


def test_follower_states_have_their_own_fields():
    follower = Follower()
    with pytest.raises(IllegalTransition):
        follower.enter(FollowerEvent.MATCHED, Absent(), at_ms=0)
    follower.enter(FollowerEvent.RESTORES, Restoring(object(), 7, 0), at_ms=0)
    assert follower.restoring.begin == 7 and follower.connected is None and follower.is_legal
    follower.now = CatchingUp(object(), "b")
    assert not follower.is_legal


def state(group: Group) -> FollowerState:
    (watch,) = group.a.master.slaves.all
    return watch.follower.state


def unconfirmed(group: Group) -> None:
    """Ship a message that the slave does not confirm."""
    Client(group.a).produce("m")
    group.a.host.settle()


@pytest.mark.parametrize(
    ("ms", "expected", "is_open"),
    [
        pytest.param(1_000, S.IN_SYNC, True, id="at the limit"),
        pytest.param(1_001, S.LAGGING, True, id="over the limit"),
        pytest.param(2_000, S.LAGGING, True, id="at twice the limit"),
        pytest.param(2_001, S.LAGGING, False, id="over twice the limit"),
    ],
)
def test_silent_slave_lags_and_is_disconnected(ms, expected, is_open):
    group = Group.made(slave_lag_ms_max=1_000).start()
    unconfirmed(group)
    group.a.wait(100)
    group.a.wait(ms)
    assert (state(group), group.at_master.is_open) == (expected, is_open)


@pytest.mark.parametrize(("less", "expected"), [(0, S.IN_SYNC), (1, S.LAGGING)])
def test_slave_too_many_bytes_behind_lags(less, expected):
    measured = Group.made().start()
    before = measured.a.log.end
    unconfirmed(measured)
    group = Group.made(slave_lag_bytes_max=measured.a.log.end - before - less).start()
    unconfirmed(group)
    group.a.wait(100)
    assert state(group) is expected
    group.a.wait(100)
    assert state(group) is expected, "until it confirms"
    group.settle()
    assert state(group) is S.IN_SYNC


def test_confirmed_frames_do_not_count_as_lag():
    group = Group.made(slave_lag_ms_max=1_000).start()
    unconfirmed(group)
    group.a.wait(100)
    group.wait(900)
    unconfirmed(group)
    for _ in range(2):
        group.a.wait(900)
        assert state(group) is S.IN_SYNC
    group.a.wait(101)
    assert state(group) is S.LAGGING


def filling() -> tuple[Broker, Broker]:
    """Return sender and receiver while a new slave is filled."""
    group = filled(tail_bytes=0, catch_up_bytes_per_s=20_000)
    replace_slave(group)
    group.settle()
    return group.a, group.b


def restoring() -> tuple[Broker, Broker]:
    group = filled(tail_bytes=0, catch_up_bytes_per_s=20_000)
    replace_master(group)
    group.settle()
    return group.b, group.a


@pytest.mark.parametrize("begun", [filling, restoring])
def test_disk_reads_resume_when_the_rate_allows(begun):
    sender, receiver = begun()
    owed = receiver.log.end - 2_000  # catching up begins with a tenth of a second's bytes
    assert owed > 0
    for _ in range(owed // 20):  # bytes per millisecond
        sender.wait(1)
        assert not sender.host.reads
    sender.wait(1)
    assert sender.host.reads


def test_newer_connection_replaces_the_older():
    group = Group.made().start()
    older = group.at_master
    group.connect()
    group.deliver_hello()
    assert not older.is_open and group.at_master.is_open
    same = group.at_master
    group.b.slave.connected(group.at_slave)
    group.deliver_hello()
    assert same.is_open


def test_copied_slave_is_refused_beside_the_original(caplog):
    """Otherwise the confirmations of both would count, though neither has the other's frames."""
    group = Group.made().start()
    slave, copied = group.b, group.b.copied()
    group.b = copied
    copied.assign(Role.SLAVE, 1)
    older = (group.at_master, group.at_slave)
    group.connect()
    group.deliver_hello()
    assert (
        older[0].is_open
        and not group.at_slave.is_open
        and "another process of the slave refused group=g1" in caplog.text
    )
    Client(group.a).produce("m")
    group.b, (group.at_master, group.at_slave) = slave, older
    group.settle()
    assert group.a.node.writable and slave.log.end == group.a.log.end > copied.log.end
    group.cut()
    group.b = copied
    group.agree()
    assert group.a.node.writable and copied.log.end == group.a.log.end


def test_begun_mastership_refuses_frames_of_slaves():
    group = a_master_restoring_in_pieces()
    end = group.a.log.end
    group.a.master._mastership.has_begun = True  # as if it had not waited
    while not group.at_slave.pushed:
        group.b.wait(100)
        group.b.host.settle()
    group.to_master()
    assert not group.at_master.is_open and group.a.log.end == end


def test_restarted_mastership_reconnects_its_restoring_slave():
    """Otherwise the slave would wait for ever for a confirmation of frames sent to the former mastership."""
    copies = with_a_new_master()
    wire = copies.wires["b"]
    wire.connect()
    wire.b.host.settle()
    wire.deliver_hello()
    copies.b.host.settle()
    while wire.to_master():
        pass
    assert copies.state("b") is S.RESTORING and copies.a.log.end == copies.b.log.end
    link = wire.at_master
    copies.c.node.identity.learn(Epoch(2, 7))  # the master's disk was rolled back
    copies.wires["c"].connect()
    copies.wires["c"].deliver_hello()
    assert copies.a.master.epoch.boot == 8 and not link.is_open
    copies.settle()
    copies.connect("bc")
    assert copies.a.node.writable and copies.a.log.chain == copies.b.log.chain == copies.c.log.chain


def test_loss_of_foreign_links_is_ignored():
    group = Group.made().start()
    for link in (FakeLink("a client"), group.at_slave):
        group.a.node.link_lost(link)
        assert state(group) is S.IN_SYNC


def count_of(link: FakeLink, command: Command) -> int:
    return sum(each == command for each, _ in link.pushed)


def test_catching_up_continues_with_each_confirmation(monkeypatch):
    copies = Copies().start()
    copies.cut("c")
    for number in range(8):
        copies.store(f"m{number}", size=200)
    monkeypatch.setattr(shipper, "WINDOW_BYTES", 1)
    monkeypatch.setattr(shipper, "PACKET_BYTES", 1)
    wire = copies.wires["c"]
    wire.connect()
    wire.deliver_hello()
    copies.a.host.settle()
    assert count_of(wire.at_master, Command.FRAMES) == 1
    while wire.to_slave():
        copies.c.host.settle()
        while wire.to_master():
            pass
    assert copies.c.log.end == copies.a.log.end and copies.state("c") is S.IN_SYNC


def test_restoring_continues_with_each_confirmation(monkeypatch):
    monkeypatch.setattr(shipper, "WINDOW_BYTES", 1_000)
    monkeypatch.setattr(shipper, "PACKET_BYTES", 1)
    group = filled()
    end = group.a.log.end
    replace_master(group)
    group.settle()
    assert group.a.node.writable and group.a.log.end == group.b.log.end > end


@pytest.mark.parametrize(("less", "expected"), [(0, S.IN_SYNC), (1, S.CATCHING_UP)])
def test_slave_joins_within_the_catch_up_limit(monkeypatch, less, expected):
    group = Group.made().start()
    unconfirmed(group)
    group.cut()
    group.connect()
    monkeypatch.setattr(follower, "CAUGHT_UP_BYTES", group.a.log.end - group.b.log.end - less)
    assert group.deliver_hello() and group.to_master()
    assert state(group) is expected


def test_slave_receives_points_it_confirmed():
    copies = Copies().start()
    Client(copies.a).produce("m")
    copies.wires["b"].settle()  # packets to c stay under way
    copies.a.wait(100)
    links = [copies.wires[name].at_master for name in "bc"]
    assert [count_of(link, Command.ACKNOWLEDGED) for link in links] == [1, 0]
    copies.settle()
    copies.a.wait(100)
    assert [count_of(link, Command.ACKNOWLEDGED) for link in links] == [0, 1]


def rolled_back() -> Group:
    """Return a group with a master's disk that is older than a point that its slave stored."""
    group = Group.made().start()
    older = group.a.disk.copy()
    group.client().store("m")
    group.wait(100)
    assert group.b.node.identity.points.own.end == group.a.log.end
    group.cut()
    group.a.disk.put_back(older)
    group.a.start()
    group.a.assign(Role.MASTER)
    group.connect()
    return group


def test_slaves_point_shows_a_rolled_back_master():
    group = rolled_back()
    point = group.b.node.identity.points.own
    assert group.deliver_hello() and group.a.node.identity.points.lacks == point
    assert state(group) is S.RESTORING and Reason.ROLLED_BACK in group.a.node.readonly_reasons
    group.settle()
    assert group.a.node.writable and group.a.node.identity.points.lacks is None


def test_master_with_the_slaves_point_lacks_nothing():
    group = Group.made().start()
    group.client().store("m")
    group.wait(100)
    group.connect()
    assert group.deliver_hello() and group.a.node.identity.points.lacks is None


def test_rolled_back_master_refuses_a_rolled_back_slave():
    group = rolled_back()
    lacked = group.b.node.identity.points.own
    group.b.log.cut(group.a.log.end, "test")
    group.b.node.identity.points.own = None
    group.a.node.identity.points.rolled_back(lacked)
    group.connect()
    group.b.host.settle()
    body = memoryview(group.b.host.hellos.pop())
    group.a.node.packet_received(group.at_master, Packet(Command.HELLO, 1, 0, Command.HELLO, body))
    assert group.at_master.answers[1][0] == ErrorCode.ROLLED_BACK
    group.a.wait(2 * SETTINGS.slave_wait_ms)
    assert not group.a.master.has_begun and group.a.node.identity.points.lacks == lacked


def with_a_new_master() -> Copies:
    """Return copies after their master lost its directory; b and c have its frames and sent no hello yet."""
    copies = Copies().start()
    copies.store("m1")
    copies.cut()
    copies.a = Broker("a", SETTINGS)
    return copies.start(term=2, connected="")


def said_hello(copies: Copies, name: str) -> int:
    """Deliver a hello; return the code of the answer."""
    wire = copies.wires[name]
    wire.connect()
    wire.b.host.settle()
    body = memoryview(wire.b.host.hellos[-1])
    copies.a.node.packet_received(wire.at_master, Packet(Command.HELLO, 1, 0, Command.HELLO, body))
    code, _ = wire.at_master.answers.pop(1)
    return code


def test_one_slave_restores_at_a_time():
    copies = with_a_new_master()
    assert said_hello(copies, "b") == 0 and copies.state("b") is S.RESTORING
    assert said_hello(copies, "c") == ErrorCode.NOT_SERVED and copies.state("c") is S.ABSENT
    copies.cut()
    copies.connect("bc")
    assert copies.a.node.writable and copies.a.log.chain == copies.b.log.chain == copies.c.log.chain


def test_empty_slave_follows_while_another_restores():
    copies = with_a_new_master()
    copies.c = Broker("c", SETTINGS)
    copies.c.assign(Role.SLAVE, 2, slaves=2)
    copies.wires["c"].b = copies.c
    copies.a.node.identity.completed(True)
    assert said_hello(copies, "b") == said_hello(copies, "c") == 0
    assert (copies.state("b"), copies.state("c")) == (S.RESTORING, S.CATCHING_UP)
    copies.a.wait(2 * SETTINGS.slave_wait_ms)
    assert not copies.a.master.has_begun


def test_restored_frames_of_another_link_are_refused():
    copies = with_a_new_master()
    assert said_hello(copies, "b") == 0
    stranger, data = FakeLink("stranger"), copies.b.log.stored.read(0, copies.b.log.end, 1 << 20).data
    for command in (Command.FRAMES, Command.SNAPSHOT):
        body = memoryview(bytes(commands.offset_header(0)) + data)
        copies.a.node.packet_received(stranger, Packet(command, 0, ONE_WAY, command, body))
    assert (
        not stranger.is_open
        and stranger.reason == "no slave is restoring from this link: frames refused"
        and copies.a.log.end == 0
    )


def test_slaves_of_older_versions_have_incarnation_names():
    copies = Copies(min_copies=3).start(connected="")
    for wire in copies.wires.values():
        wire.connect()
        fields = json.loads(wire.b.host.hellos[-1])
        del fields["owner"]
        wire.b.host.hellos[-1] = json.dumps(fields).encode()
    copies.settle()
    assert [watch.owner for watch in copies.a.master.slaves.all] == ["b-1", "c-1"]
    assert len(copies.a.master.in_sync) == 2


def test_illegal_follower_transition_restarts_the_mastership(monkeypatch):
    group = Group.made().start()
    epoch, illegal = group.a.master.epoch, FOLLOWER.illegal

    def agree(hello, log, epoch, **_):
        return Agreement(epoch, Action.RESTORE, log.end, log.chain, log.end)

    with monkeypatch.context() as patch:
        patch.setattr(follower, "agree", agree)  # as if a master in sync had frames to restore
        group.connect()
        group.deliver_hello()
    assert FOLLOWER.illegal == illegal + 1 and group.a.master.epoch > epoch
    group.agree()
    assert states(group) == [S.CATCHING_UP, S.IN_SYNC] and group.a.node.writable


def test_unsafe_pull_waits_while_enough_slaves_are_left():
    copies = Copies().start()
    client = Client(copies.a, settle=copies.settle)
    client.join()
    client.produce("m")
    waiting = client.pull(timeout_ms=60_000)
    copies.a.host.settle()
    assert copies.a.master.gate.waiting == 2
    copies.cut("c")
    assert not client.answered(waiting)
    copies.cut("b")
    assert client.code(waiting) == ErrorCode.NOT_SERVED
