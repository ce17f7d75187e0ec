"""Core. A slave carries out the agreement with its master; refused packets change nothing."""

from __future__ import annotations

import contextlib

import pytest

from qmq.errors import CorruptFrame, DiskFailed, ErrorCode
from qmq.remoting import commands
from qmq.remoting.commands import Command, Confirmation
from qmq.remoting.packet import Packet
from qmq.replication.agreement import Action, Agreement
from qmq.replication.identity import Point
from qmq.replication.ports import QUIET_MS
from qmq.replication.slave import SlaveState
from qmq.types import Epoch, Role
from tests.unit.broker.test_replication import (
    a_master_restoring_in_pieces,
    equal,
    filled,
    settle_slowly,
    swapped_with_a_tail,
)
from tests.unit.broker.world import SETTINGS, Broker, Client, FakeLink, Group
from tests.unit.replication.copies import Copies, with_messages


def stored() -> Group:
    group = Group.made().start()
    group.client().store("m")
    return group


def sent(broker: Broker, link: FakeLink, command: Command, body: bytes) -> int:
    """Deliver a packet; return the code of the answer, 0 without one."""
    broker.node.packet_received(link, Packet(command, 1, 0, command, memoryview(body)))
    code, _ = link.answers.pop(1, (0, b""))
    return code


@pytest.mark.parametrize(
    ("action", "taken"),
    [
        pytest.param(Action.FOLLOW, {Command.FRAMES, Command.ACKNOWLEDGED}, id="it follows"),
        pytest.param(None, {Command.PARTED}, id="it has sent a hello"),
        pytest.param(Action.WAIT, set(), id="it waits for an order to fill"),
        pytest.param(Action.SEED, {Command.SNAPSHOT}, id="it is seeded"),
        pytest.param(Action.RESTORE, {Command.CONFIRM}, id="it restores its master"),
    ],
)
def test_slave_refuses_packets_of_other_states(action, taken):
    group = stored()
    end, chain, epoch = group.b.log.end, group.b.log.chain, group.a.master.epoch
    if action is not Action.FOLLOW:
        group.connect()
    if action not in (None, Action.FOLLOW):
        agreement = Agreement(epoch, action, end, chain, end)
        group.b.node.agreed(group.at_slave, memoryview(agreement.encode()))
    confirmation = commands.encode_confirmation(Confirmation(epoch, end, chain))
    base, _, snapshot = group.a.log.stored.seed_start()
    state = group.b.slave.life.state
    packets = {
        Command.FRAMES: bytes(commands.offset_header(end)),
        Command.ACKNOWLEDGED: confirmation,
        Command.CONFIRM: confirmation,
        Command.SNAPSHOT: bytes(commands.offset_header(base)) + bytes(snapshot),
        Command.PARTED: bytes(commands.offset_header(end)),
        Command.HELLO: b"",
    }
    for command in sorted(set(packets) - taken):
        assert sent(group.b, group.at_slave, command, packets[command]) == ErrorCode.INVALID_REQUEST
        assert group.b.slave.life.state is state
    assert (group.b.log.end, group.b.log.chain) == (end, chain) and not group.b.disk.names("quarantine")
    for command in taken:
        assert sent(group.b, group.at_slave, command, packets[command]) == 0


@pytest.mark.parametrize(
    ("boot", "more", "is_noted"),
    [
        pytest.param(1, 0, True, id="its flushed end"),
        pytest.param(1, -8, True, id="below its flushed end"),
        pytest.param(1, 8, False, id="above its flushed end"),
        pytest.param(0, 0, False, id="of another epoch"),
    ],
)
def test_slave_notes_acknowledged_points_of_flushed_frames(boot, more, is_noted):
    group = stored()
    points, confirmation = group.b.node.identity.points, Confirmation(Epoch(1, boot), group.b.log.flushed_end + more, 7)
    points.own = None
    sent(group.b, group.at_slave, Command.ACKNOWLEDGED, commands.encode_confirmation(confirmation))
    assert points.own == (Point(confirmation.epoch, confirmation.matched_end, 7) if is_noted else None)


def test_refused_follow_leaves_confirmed_end_unchanged():
    """It was a master that wrote alone: it confirmed those frames to no copy."""
    group = stored()
    group.cut()
    broker, link = group.b, FakeLink("master")
    broker.alone(2)
    end, points = broker.log.end, broker.node.identity.points
    kept = points.keeps(broker.log)
    assert kept < end
    broker.assign(Role.SLAVE, 3)
    broker.slave.connected(link)
    wrong = Agreement(Epoch(3, 1), Action.FOLLOW, end, broker.log.chain ^ 1, end)
    broker.node.agreed(link, memoryview(wrong.encode()))
    assert not link.is_open and "diverged" in broker.node.readonly_reasons
    assert points.keeps(broker.log) == kept and broker.log.end == end and not link.pushed


def test_refused_seeding_leaves_the_copy_whole():
    group = stored()
    group.connect()
    end = group.b.log.end
    seed = Agreement(group.a.master.epoch, Action.SEED, end - 8, 0, end)
    group.b.node.agreed(group.at_slave, memoryview(seed.encode()))
    assert not group.at_slave.is_open
    assert group.b.slave.has_matched and group.b.node.identity.value.complete


def is_deleting(broker: Broker) -> None:
    """Drop the oldest segment; the disk has not deleted it yet."""
    broker.log.drop_oldest_segment()
    broker.node.end_of_pass()
    assert not broker.log.is_idle


def test_slave_cuts_only_after_its_deletion():
    """The process ended here once."""
    group = swapped_with_a_tail(filled())
    end = group.b.log.end
    is_deleting(group.b)
    group.deliver_hello()
    assert not group.at_slave.is_open and group.b.log.end == end
    group.settle()
    group.agree()
    assert group.a.node.writable and equal(group) and group.b.disk.names("quarantine")


def test_slave_is_seeded_only_after_its_deletion():
    """The process ended here once."""
    group = filled()
    group.connect()
    group.b.host.hellos.clear()
    end, chain = group.b.log.end, group.b.log.chain
    seed = Agreement(group.a.master.epoch, Action.SEED, end, chain, end)
    group.b.node.agreed(group.at_slave, memoryview(seed.encode()))
    is_deleting(group.b)
    sent(group.b, group.at_slave, Command.SNAPSHOT, bytes(commands.offset_header(end)))
    assert not group.at_slave.is_open and group.b.log.end == end
    group.settle()
    group.connect()
    settle_slowly(group)
    assert group.a.node.writable and equal(group)


def test_only_a_restoring_slave_has_deadlines():
    group = a_master_restoring_in_pieces()
    assert group.b.slave.quiet_ms() == 0
    for _ in range(30):
        group.b.wait(100)
        group.settle()
    assert group.b.slave.is_following and group.b.slave.quiet_ms() == QUIET_MS


@pytest.mark.parametrize("is_master", [True, False])
def test_damage_repaired_meanwhile_is_ignored(is_master):
    group = stored()
    broker = group.a if is_master else group.b
    broker.node.found_damage(CorruptFrame(broker.log.start, "read while it was repaired"))
    assert broker.log.damage is None and broker.node.readonly_reasons == []


def test_stepped_down_slave_confirms_nothing():
    group = stored()
    link = group.at_slave
    Client(group.a).produce("m2")
    group.a.host.settle()
    group.to_slave()
    group.b.slave.step_down()
    group.b.host.settle()
    assert not link.is_open and not link.pushed
    assert group.b.slave.life.state is SlaveState.DISCONNECTED
    group.b.slave.step_down()


@pytest.mark.parametrize("is_late", [True, False])
def test_answer_to_an_earlier_hello_is_ignored(is_late):
    group = stored()
    slave, end = group.b.slave, group.b.log.end
    if not is_late:
        group.connect()
    follow = Agreement(Epoch(1, 9), Action.FOLLOW, end, group.b.log.chain, end)
    state, link = slave.life.state, group.at_slave if is_late else FakeLink("an earlier connection")
    group.b.node.agreed(link, memoryview(follow.encode()))
    assert group.b.slave is slave and slave.life.state is state and slave.life.link is group.at_slave
    assert group.b.node.identity.value.epoch == Epoch(1, 1)


@pytest.mark.parametrize(
    ("more", "is_complete", "slaves", "says_so"),
    [
        pytest.param(8, True, 1, True, id="it lacks it"),
        pytest.param(0, True, 1, False, id="it has it"),
        pytest.param(None, True, 1, False, id="the master has no point"),
        pytest.param(8, False, 1, False, id="it was never complete"),
        pytest.param(8, True, 2, False, id="others have it"),
    ],
)
def test_slave_below_the_acknowledged_point_is_rolled_back(more, is_complete, slaves, says_so):
    group = stored()
    group.cut()
    group.b.assign(Role.SLAVE, 2, slaves=slaves)
    group.b.node.identity.completed(is_complete)
    group.connect()
    end, chain = group.b.log.end, group.b.log.chain
    point = None if more is None else Point(Epoch(2, 1), end + more, chain)
    wait = Agreement(Epoch(2, 1), Action.WAIT, end, chain, end + 800, point)
    group.b.node.agreed(group.at_slave, memoryview(wait.encode()))
    assert group.b.node.identity.points.lacks == (point if says_so else None)


def test_fully_matched_copy_lacks_nothing():
    group = stored()
    group.cut()
    lacked = Point(group.a.master.epoch, group.a.log.end, group.a.log.chain)
    group.b.log.set_aside("test")
    group.b.crash()
    group.b.node.identity.points.rolled_back(lacked)
    assert group.b.log.is_tail_cut
    group.b.assign(Role.SLAVE)
    group.connect()
    assert group.deliver_hello() and group.b.log.is_tail_cut and group.b.node.identity.points.lacks == lacked
    group.settle()
    assert not group.b.log.is_tail_cut and group.b.node.identity.points.lacks is None and group.a.node.writable


def test_seeded_copy_begins_at_the_agreed_offset():
    copies = Copies().start()
    copies.c.node.identity.points.own = Point(Epoch(1, 1), copies.c.log.end, copies.c.log.chain)
    assert copies.c.slave.has_matched
    copies.cut("c")
    copies.outgrow(copies.a, copies.c, segments=5)
    wire, c, end = copies.wires["c"], copies.c, copies.c.log.end

    def agreed() -> None:
        wire.connect()
        c.host.settle()
        wire.deliver_hello()
        assert c.slave.life.state is SlaveState.AWAITING_SNAPSHOT

    agreed()
    known, points = c.node.identity.points.own, c.node.identity.points
    assert not c.slave.has_matched and not c.node.identity.value.complete and known is not None
    other = copies.a.log.bases[1]
    snapshot = copies.a.disk.read(f"log/{other:020d}.snap", 0, 1 << 20)
    wire.at_master.pushed[0] = (Command.SNAPSHOT, bytes(commands.offset_header(other)) + snapshot)
    assert wire.to_slave() and not wire.at_slave.is_open and c.log.end == end and points.own == known
    wire.cut()
    agreed()
    assert wire.to_slave() and c.log.start == copies.a.log.start and points.own is None
    assert [command for command, _ in wire.at_slave.pushed] == [Command.CONFIRM]
    copies.settle()
    assert c.slave.has_matched and c.log.chain == copies.a.log.chain


def an_old_master_that_is_to_be_seeded() -> tuple[Copies, Group]:
    """Return copies of which a wrote a message alone and was absent until the log began behind the common frames."""
    copies = Copies().start()
    copies.store("kept")
    Client(copies.a).produce("never acknowledged")
    copies.a.host.settle()
    copies.cut()
    copies.start(term=2, master=copies.b, connected="c")
    copies.b.wait(SETTINGS.slave_wait_ms)
    copies.settle()
    assert copies.b.node.writable
    copies.outgrow(copies.b, copies.a, segments=5)
    return copies, copies.wires["a"]


def test_old_master_is_seeded_after_any_crash():
    """It used to claim that it had confirmed the frames it wrote alone, and an operator had to decide."""
    copies, wire = an_old_master_that_is_to_be_seeded()
    old, calls = copies.a, 0

    def agreed() -> SlaveState:
        wire.connect()
        old.host.settle()
        wire.deliver_hello()
        return old.slave.life.state

    assert agreed() is SlaveState.AWAITING_SNAPSHOT
    wire.cut()
    while (state := agreed()) is SlaveState.AWAITING_SNAPSHOT:
        old.disk.fail_after(calls)
        with contextlib.suppress(DiskFailed):
            assert wire.to_slave()
        calls += 1
        old.disk.heal()
        wire.cut()
        old.crash()
        old.assign(Role.SLAVE, 2, slaves=2)
    assert state is SlaveState.FOLLOWING and calls > 3 and old.log.start == copies.b.log.start
    wire.cut()
    copies.connect("a")
    assert old.log.chain == copies.b.log.chain and old.slave.has_matched
    assert not old.node.readonly_reasons and not copies.b.node.readonly_reasons


@pytest.mark.parametrize("action", [Action.FOLLOW, Action.RESTORE])
@pytest.mark.parametrize("is_damaged", [True, False])
def test_unreadable_agreed_end_is_damage(action, is_damaged):
    """The reason is corrupt, not diverged."""
    group = with_messages(6, tail_bytes=0)
    group.cut()
    b, at = group.b, group.b.log.end
    b.alone(2)
    assert b.log.bases[-1] < at < b.log.end
    chain = b.log.stored.read(0, at, 1 << 20).chain if b.log.bases == [0] else b.log.state.epochs[-1].chain
    b.assign(Role.SLAVE, 3)
    b.slave.connected(link := FakeLink("master"))
    if is_damaged:
        (before,) = b.log.frames("s", 5, 1)
        for inside in (before.offset + before.length // 2, at + 20):
            b.flip(inside)
    agreement = Agreement(Epoch(3, 1), action, at, chain if is_damaged else chain ^ 1, at)
    b.node.agreed(link, memoryview(agreement.encode()))
    assert b.node.readonly_reasons == (["corrupt"] if is_damaged else ["diverged"])
    assert not link.is_open and not link.pushed and not b.disk.names("quarantine")


def test_agreement_below_the_log_start_is_refused():
    group = Group.made(tail_bytes=0).start()
    b = group.b
    while len(b.log.bases) < 3:
        group.client().store("m", size=900)
    b.drop_oldest_segment()
    group.connect()
    follow = Agreement(group.a.master.epoch, Action.FOLLOW, 0, 0, b.log.end)
    b.node.agreed(group.at_slave, memoryview(follow.encode()))
    assert not group.at_slave.is_open and b.node.readonly_reasons == ["diverged"] and not b.slave.is_following


def test_slave_damaged_before_a_cut_confirms_nothing():
    group = Group.made(tail_bytes=0).start()
    group.client().store("m0", size=900)
    group.cut()
    b, at, chain = group.b, group.b.log.end, group.b.log.chain
    b.alone(2)
    assert at < b.log.end
    b.assign(Role.SLAVE, 3)
    b.slave.connected(link := FakeLink("master"))
    (message,) = b.log.frames("s", 0, 1)
    b.flip(message.offset + message.length // 2)
    b.node.agreed(link, memoryview(Agreement(Epoch(3, 1), Action.FOLLOW, at, chain, at).encode()))
    assert not link.is_open and not link.pushed and b.log.end < at


def test_damaged_slave_follows_from_its_end_uncut():
    group = with_messages(6, tail_bytes=0)
    (message,) = group.b.log.frames("s", 1, 1)
    group.b.flip(message.offset + message.length // 2)
    group.b.node.found_damage(CorruptFrame(message.offset, "met"))
    damage = group.b.log.damage
    assert damage is not None
    group.agree()
    assert group.b.slave.is_following and group.b.log.damage is damage and not group.b.disk.names("quarantine")


def test_loss_of_another_link_is_ignored():
    group = stored()
    group.b.node.link_lost(FakeLink("a client"))
    assert group.b.slave.is_following
    group.b.node.link_lost(group.at_slave)
    assert group.b.slave.life.state is SlaveState.DISCONNECTED


def test_crash_before_seeding_keeps_copy_rolled_back():
    lacked, survived, calls = Point(Epoch(1, 1), 800, 7), False, 0
    while not survived:
        broker, link = Broker("b"), FakeLink("master")
        broker.assign(Role.SLAVE)
        broker.node.identity.completed(True)
        broker.node.identity.points.rolled_back(lacked)
        broker.slave.connected(link)
        seed = Agreement(Epoch(1, 1), Action.SEED, 800, 7, 800)
        broker.disk.fail_after(calls)
        try:
            broker.node.agreed(link, memoryview(seed.encode()))
            survived = True
        except DiskFailed:
            calls += 1
        broker.disk.heal()
        broker.crash()
        identity = broker.node.identity
        assert not identity.value.complete or identity.points.lacks == lacked, f"call {calls}"
    assert calls > 1 and not identity.value.complete and identity.points.lacks == lacked


def states(group: Group) -> list[SlaveState]:
    return [move.after for move in group.b.slave.life.history]


def test_hello_waits_for_the_flush():
    group = Group.made().start()
    Client(group.a).produce("m")
    group.a.host.settle()
    group.to_slave()
    group.b.host.turn()
    group.connect()
    assert group.b.slave.life.state is SlaveState.AWAITING_FLUSH
    group.settle()
    assert states(group)[-3:] == [SlaveState.AWAITING_FLUSH, SlaveState.HELLO_SENT, SlaveState.FOLLOWING]
