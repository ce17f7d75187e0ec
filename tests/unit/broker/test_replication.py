"""Core. Two brokers become and stay one group (design, section 4)."""

from __future__ import annotations

from qmq.errors import ErrorCode
from qmq.types import Role
from tests.unit.broker.world import Broker, Client, Group


def a_group(**settings) -> tuple[Group, Client]:
    group = Group.made(**settings).start()
    return group, Client(group.a)


def filled(frames: int = 80, **settings) -> Group:
    """A group with a log of several segments."""
    group, client = a_group(**settings)
    for i in range(frames):
        client.produce(f"m{i}", size=200)
        group.settle()
    assert len(group.a.log.bases) > 4
    return group


def replace_slave(group: Group, term: int = 1) -> None:
    """The slave's disk is gone; a new broker takes its place."""
    group.cut()
    group.b = Broker("new", group.a.settings)
    group.b.assign(Role.SLAVE, term)
    group.connect()


def settle_slowly(group: Group) -> None:
    for _ in range(100):
        group.a.wait(100)
        group.settle()


def equal(group: Group) -> bool:
    a, b = group.a.log, group.b.log
    return (a.end, a.chain, a.state) == (b.end, b.chain, b.state)


def test_new_slave_is_seeded_from_the_oldest_segment_kept():
    group = filled(tail_bytes=0)
    group.a.log.drop_oldest_segment()
    group.a.log.drop_oldest_segment()
    replace_slave(group)
    settle_slowly(group)
    assert group.a.node.readonly_reasons == [] and equal(group)
    assert group.b.log.start == group.a.log.start > 0


def test_new_slave_is_seeded_from_the_next_segment_if_the_oldest_snapshot_is_damaged():
    group = filled(tail_bytes=0)
    group.a.log.drop_oldest_segment()
    first, second = group.a.log.bases[:2]
    group.a.disk.flip(f"log/{first:020d}.snap", 100)
    replace_slave(group)
    settle_slowly(group)
    assert group.a.node.writable and equal(group)
    assert group.b.log.start == second


def test_snapshot_damaged_on_its_way_does_not_cost_the_slave_its_copy():
    group = filled(tail_bytes=0)
    group.cut()
    client = Client(group.a)
    client.subscribe()
    group.a.host.settle()
    while len(group.a.log.bases) > 1:
        group.a.log.drop_oldest_segment()
    old = Broker("old", group.a.settings)
    old.assign(Role.SLAVE)
    group.b = old
    group.connect()
    group.deliver_hello()
    command, body = group.at_master.told[0]
    group.at_master.told[0] = (command, body[:-1] + bytes([body[-1] ^ 1]))
    group.to_slave()
    assert not group.at_slave.is_open
    assert old.disk.names("quarantine") == [] and old.log.end == 0


def test_master_with_an_empty_disk_takes_back_all_of_a_log_that_begins_late():
    group = filled(tail_bytes=0)
    while len(group.b.log.bases) > 2:
        group.b.log.drop_oldest_segment()
    group.cut()
    lost_end, group.a = group.b.log.end, Broker("new master", group.a.settings)
    group.a.assign(Role.MASTER, 2)
    group.b.assign(Role.SLAVE, 2)
    group.connect()
    for _ in range(20):
        group.b.wait(100)
        group.settle()
    assert group.a.node.writable and equal(group)
    assert group.a.log.end > lost_end and group.a.log.start == group.b.log.start > 0


def test_master_with_an_empty_disk_takes_back_a_bare_snapshot():
    group = filled(tail_bytes=0)
    base = group.b.log.bases[-1]
    snapshot = group.b.disk.read(f"log/{base:020d}.snap", 0, 1 << 20)
    group.cut()
    group.b.log.cut(base, "test")
    group.b.log.seed(base, snapshot, "test")
    group.a = Broker("new master", group.a.settings)
    group.a.assign(Role.MASTER, 2)
    group.b.assign(Role.SLAVE, 2)
    group.connect()
    group.settle()
    assert group.a.node.writable and equal(group) and group.a.log.start == base


def test_slave_gives_up_nothing_acknowledged_for_a_seed_of_another_history():
    group = filled()
    group.cut()
    stranger = Group.made().start()
    client = Client(stranger.a)
    for i in range(40):
        client.produce(f"x{i}", size=200)
        stranger.settle()
    while len(stranger.a.log.bases) > 1:
        stranger.a.log.drop_oldest_segment()
    assert stranger.a.log.start < group.b.log.state.high_watermark
    stranger.cut()
    end, group.a = group.b.log.end, stranger.a
    group.connect()
    group.settle()
    assert (group.b.log.end, group.b.disk.names("quarantine")) == (end, [])
    assert "diverged" in group.b.node.readonly_reasons


def test_group_is_readonly_from_the_moment_another_slave_begins_to_join():
    group, client = a_group()
    assert group.a.node.writable
    group.connect()
    group.deliver_hello()
    refused = client.produce("m")
    assert client.code(refused) == ErrorCode.READ_ONLY
    group.settle()
    stored = client.produce("m")
    group.settle()
    assert client.receipt(stored).stored == 1


def test_slave_that_says_hello_again_counts_for_nothing_before_it_matched():
    group, client = a_group()
    stored = client.produce("m")
    group.a.host.settle()
    group.to_slave()
    group.b.host.settle()
    group.at_slave.told.clear()
    group.b.slave.connected(group.at_slave)
    group.deliver_hello()
    assert group.a.master.gate.alone and not client.answered(stored)
    group.settle()
    assert client.receipt(stored).stored == 1 and equal(group)
