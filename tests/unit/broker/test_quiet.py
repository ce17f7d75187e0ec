"""Core. An idle broker is ticked seldom, and never later than its next event."""

from __future__ import annotations

import pytest

from qmq.broker import group_status
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.replication.ports import QUIET_MS
from qmq.types import Role
from tests.unit.broker.world import Client, Group


def a_group(**settings) -> tuple[Group, Client]:
    group = Group.made(**settings).start()
    client = group.client()
    client.produce("m0")
    client.join()
    settled(group)
    return group, client


def settled(group: Group) -> None:
    """Points are saved, and the slave has them."""
    for _ in range(20):
        for broker in (group.a, group.b):
            broker.wait(100)
        group.settle()


def test_master_and_slave_are_quiet_when_nothing_waits():
    group, _ = a_group()
    assert group.a.node.quiet_ms() == group.b.node.quiet_ms() == QUIET_MS


def test_master_is_ticked_often_while_an_answer_waits_for_a_disk():
    group, client = a_group()
    client.produce("m1")
    assert group.a.node.quiet_ms() == 0
    group.settle()
    settled(group)
    assert group.a.node.quiet_ms() == QUIET_MS


def test_a_slave_is_ticked_often_while_its_disk_writes():
    group, client = a_group()
    client.produce("m1")
    group.a.host.turn()
    assert group.to_slave() and group.b.node.quiet_ms() == 0
    assert group.b.host.turn() and group.b.node.quiet_ms() == 0
    group.settle()
    settled(group)
    assert group.b.node.quiet_ms() == QUIET_MS


def test_master_is_ticked_often_without_its_slave():
    group, _ = a_group()
    group.a.node.link_lost(group.a.master.slaves.all[0].follower.connected.shipper.link)
    assert group.a.node.quiet_ms() == 0


def test_master_is_ticked_when_a_pull_has_waited_long_enough():
    group, client = a_group()
    first = client.pull()
    group.settle()
    assert client.answered(first)
    waiting = client.pull(timeout_ms=2_300)
    group.settle()
    settled_for = 0
    while not client.answered(waiting):
        quiet_ms = group.a.node.quiet_ms()
        group.a.wait(max(quiet_ms, 100))
        group.settle()
        settled_for += max(quiet_ms, 100)
    assert 2_300 <= settled_for <= 2_400


def test_master_is_ticked_when_a_message_comes_again():
    group, client = a_group()
    client.take()
    first = client.first
    client.nack(first, first + 1, delay_ms=3_000)
    waiting = client.pull(timeout_ms=60_000)
    group.settle()
    settled(group)
    while not client.answered(waiting):
        before = group.a.master._mastership.retry_ms()
        group.a.wait(max(group.a.node.quiet_ms(), 100))
        group.settle()
    due_ms = group.a.log.state.retry_ms + 3_000
    assert before < due_ms <= group.a.master._mastership.retry_ms() < due_ms + 100


def test_master_is_ticked_when_a_lease_ends():
    group, client = a_group(lease_ms=10_000)
    client.pull()
    group.settle()
    settled(group)
    seen = group.a.master._delivery.consumption._seen
    end_ms = min(seen.values()) + 10_000
    while seen:
        now_ms = group.a.host.clock_ms
        group.a.wait(max(group.a.node.quiet_ms(), 100))
    assert now_ms <= end_ms + 100


def test_clock_of_a_short_lease_is_looked_at_often():
    """A second between two ticks would count as a pause of the process."""
    group, _ = a_group(lease_ms=4_000)
    assert group.a.node.quiet_ms() == 0


def test_master_is_ticked_often_while_its_roles_are_being_swapped():
    group, _ = a_group()
    group.a.node.changes.prepare_swap(1, 5_000)
    assert group.a.node.quiet_ms() == 0


def test_master_is_ticked_often_while_a_rate_slows_a_group():
    group, client = a_group()
    group.a.assign(Role.MASTER, limits=(OperatorLimits("s", "g", per_second=5),))
    client.produce(*(f"n{number}" for number in range(10)))
    client.pull(most=100)
    group.settle()
    settled(group)
    assert group.a.master._delivery.quiet_ms() == QUIET_MS
    for _ in range(2):
        client.pull(most=100, timeout_ms=60_000)
    group.settle()
    assert group.a.master._delivery.quiet_ms() == 0


def test_expiry_is_checked_every_second():
    group, _ = a_group()
    group.a.assign(Role.MASTER, limits=(OperatorLimits("s", OF_SUBJECT, expires_after_s=60),))
    group.wait(1_000)
    settled(group)
    pruned_ms = group.a.master._delivery.pruning._pruned_ms
    assert group.a.node.quiet_ms() == pruned_ms + 1_000 - group.a.host.clock_ms


@pytest.mark.parametrize(("exclusive_ms", "quiet_ms"), [(0, QUIET_MS), (5, 0)])
def test_master_is_ticked_often_while_an_exclusive_consumer_waits_for_its_turn(exclusive_ms, quiet_ms):
    group, _ = a_group()
    one = group.subscribed("e", group="e", start="latest", exclusive_ms=exclusive_ms)
    one.pull(timeout_ms=60_000)
    group.settle()
    settled(group)
    assert group.a.node.quiet_ms() == quiet_ms


def test_master_is_ticked_often_while_a_message_is_read_to_become_a_dead_letter():
    group, client = a_group(tail_bytes=0)
    client.take()
    first = client.first
    group.a.host.holds_reads = True
    client.nack(first, first + 1, dead=True)
    group.settle()
    settled(group)
    assert group.a.node.quiet_ms() == 0
    group.a.host.holds_reads = False
    group.settle()
    settled(group)
    assert group.a.node.quiet_ms() == QUIET_MS


def test_unwritten_scan_position_needs_ticks():
    group, client = a_group()
    one = group.subscribed("e", group="e", tags=["pay"])
    one.pull(timeout_ms=60_000)
    group.settle()
    assert group.a.master._delivery.quiet_ms() == 0 == group.a.log.state.groups["s", "e"].position
    settled(group)
    assert group.a.node.quiet_ms() == QUIET_MS and group.a.log.state.groups["s", "e"].position == 1


@pytest.mark.parametrize(("most", "quiet_ms"), [(2, QUIET_MS), (1, 0)])
def test_master_is_ticked_often_while_it_has_more_groups_than_are_looked_at_in_a_tick(most, quiet_ms, monkeypatch):
    monkeypatch.setattr(group_status, "LOOKED_AT_ONCE", most)
    group, _ = a_group()
    group.subscribed("e", group="e")
    settled(group)
    assert group.a.node.quiet_ms() == quiet_ms


def test_causes_need_no_retry_clock_before_the_mastership():
    """It continues from the last time in the log, and the slave may still restore some of that."""
    group, _ = a_group()
    group.cut()
    group.a.crash()
    group.a.assign(Role.MASTER)
    assert group.a.node.quiet_ms() == 0
    group.a.wait(100)
    assert group.a.master.causes.of(("s", "g")) and group.a.master._mastership.retry_begin_ms is None
