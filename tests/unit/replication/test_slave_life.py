"""Core. A slave takes from its master what its state allows, and nothing else."""

from __future__ import annotations

from qmq.remoting.commands import Command, offset_header
from qmq.remoting.packet import ONE_WAY, Packet
from qmq.replication.slave import SLAVE, SlaveState
from qmq.types import Role
from tests.unit.broker.test_replication import filled, replace_slave
from tests.unit.broker.world import Client, Group

S = SlaveState


def states(group: Group) -> list[SlaveState]:
    return [move.after for move in group.b.slave.life.history]


def test_hello_waits_for_the_flush():
    group = Group.made().start()
    Client(group.a).produce("m")
    group.a.host.settle()
    group.to_slave()
    group.b.host.turn()
    group.connect()
    assert group.b.slave.life.state is S.AWAITING_FLUSH
    group.settle()
    assert states(group)[-3:] == [S.AWAITING_FLUSH, S.HELLO_SENT, S.FOLLOWING]


def test_following_slave_ignores_a_snapshot():
    illegal, group = SLAVE.illegal, filled()
    group.look_after_logs()
    group.a.drop_oldest_segment()
    replace_slave(group)
    group.settle()
    assert states(group) == [S.AWAITING_FLUSH, S.HELLO_SENT, S.AWAITING_SNAPSHOT, S.FOLLOWING]
    base, _, snapshot = group.a.log.stored.seed_start()
    quarantine, end = group.b.disk.names("quarantine"), group.b.log.end
    body = memoryview(bytes(offset_header(base)) + bytes(snapshot))
    group.b.node.packet_received(group.at_slave, Packet(Command.SNAPSHOT, 0, ONE_WAY, Command.SNAPSHOT, body))
    assert (group.b.disk.names("quarantine"), group.b.log.end) == (quarantine, end)
    assert group.b.node.identity.value.complete and SLAVE.illegal == illegal


def test_slave_follows_after_restoring():
    group = Group.made().start()
    Client(group.a).produce("m")
    group.settle()
    end = group.a.log.end
    group.cut()
    group.a.log.cut(group.a.log.bases[-1] if len(group.a.log.bases) > 1 else 0, "its disk lost it")
    group.a.crash()
    group.a.assign(Role.MASTER)
    group.connect()
    group.settle()
    assert S.RESTORING in states(group) and states(group)[-1] is S.FOLLOWING
    assert group.a.log.end >= end and group.a.node.writable
