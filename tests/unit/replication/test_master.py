"""Core. One mastership: its epoch, a late own disk, a drained log, and its end."""

from __future__ import annotations

import pytest

from qmq.errors import CorruptFrame, ErrorCode
from qmq.remoting.commands import Command
from qmq.replication.identity import SAVE_MS
from qmq.replication.master import Master
from qmq.replication.ports import QUIET_MS
from qmq.replication.readonly import Reason
from qmq.types import Epoch, Role
from tests.unit.broker.world import SETTINGS, Broker, Client, Group
from tests.unit.replication.copies import Copies, with_messages


def test_first_mastership_of_a_term_has_boot_1():
    group = Group.made().start()
    for _ in range(3):
        group.a.crash()
        group.a.alone()
    assert group.a.master.epoch == Epoch(1, 4)
    group.a.assign(Role.MASTER, 2)
    assert group.a.master.epoch == Epoch(2, 1)


@pytest.mark.parametrize("is_flushed", [True, False])
def test_flushed_chain_of_a_new_mastership(is_flushed):
    group = Group.made().start()
    Client(group.a).produce("m")
    group.a.host.settle()
    group.to_slave()
    if is_flushed:
        group.b.host.settle()
    group.b.assign(Role.MASTER, 2)
    gate, log = group.b.master.gate, group.b.log
    assert (gate.flushed_end == log.end) is is_flushed
    assert gate.flushed_chain == (log.chain if is_flushed else None)


def test_own_disk_is_late_after_the_limit():
    group = Group.made().start()
    fresh = Broker("fresh")
    fresh.assign(Role.MASTER)
    fresh.wait(2 * SETTINGS.slave_lag_ms_max)
    assert Reason.DISK_LATE not in fresh.master.readonly
    client = Client(group.a)
    for number in range(2):
        client.produce(f"m{number}")
        group.a.host.turn()
        group.a.wait(100)
        group.a.wait(SETTINGS.slave_lag_ms_max)
        assert Reason.DISK_LATE not in group.a.master.readonly
        group.a.wait(1)
        assert Reason.DISK_LATE in group.a.master.readonly
        group.settle()
        group.a.wait(100)
        assert Reason.DISK_LATE not in group.a.master.readonly


def test_waiting_master_is_not_drained():
    copies = Copies().start()
    copies.store("m")
    copies.wait(SAVE_MS)
    copies.cut()
    copies.a.node.identity.points.save()
    copies.a.crash()
    copies.start(connected="b")
    gate, end = copies.a.master.gate, copies.a.log.end
    assert not gate.too_few_in_sync and copies.a.master.slaves.confirmed_end == gate.high_watermark == end
    assert not copies.a.master.has_begun and not copies.a.master.is_drained_to("")
    assert copies.a.master.slaves.are_fully_matched and Master.quiet_ms(copies.a.master) == 0


def test_master_without_enough_slaves_is_not_drained():
    copies = Copies(min_copies=3).start()
    master, target = copies.a.master, copies.b.node.identity.value.incarnation
    assert master.is_drained_to(target) and not master.is_drained_to("another")
    copies.cut("c")
    assert master.gate.high_watermark == copies.a.log.end and not master.is_drained_to(target)


def test_waiting_pull_gets_not_master_at_mastership_end():
    group = Group.made().start()
    client = group.subscribed()
    stored = client.produce("m")
    waiting, idle = client.pull(timeout_ms=60_000), client.pull(timeout_ms=60_000)
    group.a.host.settle()
    assert group.a.master.gate.waiting == 2
    group.a.assign(Role.SLAVE, 2)
    assert client.code(stored) == ErrorCode.OUTCOME_UNKNOWN, "the next master may have it"
    assert client.code(waiting) == client.code(idle) == ErrorCode.NOT_MASTER


def test_consumer_subscribes_before_anything_is_acknowledged():
    group = Group.made()
    group.a.assign(Role.MASTER)
    group.b.assign(Role.SLAVE)
    group.connect()
    group.deliver_hello()
    assert group.a.master.has_begun
    group.cut()
    client = Client(group.a)
    asked = client.subscribe()
    group.a.host.settle()
    assert group.a.master.gate.high_watermark == 0 and client.subscription(asked)


def test_unknown_command_is_answered_with_its_number():
    group = Group.made().start()
    client = Client(group.a)
    asked = client.send(30_000, b"")
    assert client.code(asked) == ErrorCode.UNKNOWN_COMMAND and "30000" in client.text(asked)
    assert 30_000 not in set(Command)


def test_master_waiting_for_its_disk_is_busy():
    group = Group.made().start()
    group.wait(100)
    assert group.a.master.quiet_ms() == QUIET_MS
    Client(group.a).produce("m")
    group.a.host.turn()
    while group.to_slave():
        group.b.host.settle()
    while group.to_master():
        pass
    master = group.a.master
    assert master.slaves.are_fully_matched and master.gate.waiting == 1 and master.quiet_ms() == 0


def test_ended_mastership_makes_no_progress():
    group = Group.made().start()
    over = group.a.master
    group.a.assign(Role.SLAVE, 2)
    assert over.readonly.reasons == [Reason.FENCED, Reason.SLAVE_DOWN] and not over._mastership.may_progress


def test_mastership_with_a_damaged_log_is_readonly():
    group = with_messages(6, tail_bytes=0)
    (message,) = group.a.log.frames("s", 1, 1)
    group.a.flip(message.offset + message.length // 2)
    group.a.node.found_damage(CorruptFrame(message.offset, "met"))
    group.a.assign(Role.MASTER, 2)
    assert group.a.master.readonly.reasons == [Reason.CORRUPT, Reason.SLAVE_DOWN]
