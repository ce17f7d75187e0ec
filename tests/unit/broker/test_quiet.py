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
    """Let the points be saved and reach the slave."""
    group.settle()
    for _ in range(20):
        for broker in (group.a, group.b):
            broker.wait(100)
        group.settle()


def quiet_ms(group: Group) -> int:
    return group.a.node.quiet_ms()


def tick_when_due(group: Group) -> int:
    """Let the time pass until the next tick; return it."""
    ms = max(quiet_ms(group), 100)
    group.wait(ms)
    return ms


def test_idle_master_and_slave_are_quiet():
    group, _ = a_group()
    assert group.a.node.quiet_ms() == group.b.node.quiet_ms() == QUIET_MS


def exclusive_pull(group: Group, client: Client, exclusive_ms: int = 5) -> None:
    waiting = group.subscribed("e", group="e", start="latest", exclusive_ms=exclusive_ms)
    waiting.pull(timeout_ms=60_000)
    settled(group)


OFTEN = {
    "an answer waits for a disk": lambda group, client: client.produce("m1"),
    "the slave is missing": lambda group, client: group.cut(),
    "roles are swapped": lambda group, client: group.a.node.changes.prepare_swap(1, 5_000),
    "an exclusive consumer waits": exclusive_pull,
}


@pytest.mark.parametrize("why", OFTEN)
def test_master_is_ticked_often(why):
    group, client = a_group()
    OFTEN[why](group, client)
    assert quiet_ms(group) == 0


def test_waiting_consumer_that_shares_needs_no_ticks():
    group, client = a_group()
    exclusive_pull(group, client, exclusive_ms=0)
    assert quiet_ms(group) == QUIET_MS


def test_slave_is_ticked_often_while_its_disk_writes():
    group, client = a_group()
    client.produce("m1")
    group.a.host.turn()
    assert group.to_slave() and group.b.node.quiet_ms() == 0
    assert group.b.host.turn() and group.b.node.quiet_ms() == 0
    settled(group)
    assert group.b.node.quiet_ms() == quiet_ms(group) == QUIET_MS


def test_waiting_pull_ends_in_time():
    group, client = a_group()
    client.take()
    waiting, waited = client.pull(timeout_ms=2_300), 0
    group.settle()
    while not client.answered(waiting):
        waited += tick_when_due(group)
    assert 2_300 <= waited <= 2_400


def test_requeued_message_is_redelivered_in_time():
    group, client = a_group()
    client.take()
    client.nacked("m0", delay_ms=3_000)
    waiting = client.pull(timeout_ms=60_000)
    settled(group)
    while not client.answered(waiting):
        before = group.a.master._mastership.retry_ms()
        tick_when_due(group)
    due_ms = group.a.log.state.retry_ms + 3_000
    assert before < due_ms <= group.a.master._mastership.retry_ms() < due_ms + 100


def test_slowed_group_needs_ticks():
    group, client = a_group()
    group.a.assign(Role.MASTER, limits=(OperatorLimits("s", "g", per_second=5),))
    client.produce(*(f"n{number}" for number in range(10)))
    client.pull(most=100)
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
    assert quiet_ms(group) == pruned_ms + 1_000 - group.a.host.clock_ms


def test_unfinished_dead_letter_needs_ticks():
    group, client = a_group(tail_bytes=0)
    client.take()
    group.a.host.holds_reads = True
    client.nack(client.first, client.first + 1, dead=True)
    settled(group)
    assert quiet_ms(group) == 0
    group.a.host.holds_reads = False
    settled(group)
    assert quiet_ms(group) == QUIET_MS


def test_unwritten_scan_position_needs_ticks():
    group, _ = a_group()
    filtered = group.subscribed("e", group="e", tags=["pay"])
    filtered.pull(timeout_ms=60_000)
    group.settle()
    assert group.a.master._delivery.quiet_ms() == 0 == group.a.log.state.groups["s", "e"].position
    settled(group)
    assert quiet_ms(group) == QUIET_MS and group.a.log.state.groups["s", "e"].position == 1


@pytest.mark.parametrize(("most", "expected"), [(2, QUIET_MS), (1, 0)])
def test_unfinished_round_over_groups_needs_ticks(most, expected, monkeypatch):
    monkeypatch.setattr(group_status, "LOOKED_AT_ONCE", most)
    group, _ = a_group()
    group.subscribed("e", group="e")
    settled(group)
    assert quiet_ms(group) == expected


def test_causes_need_no_retry_clock_before_the_mastership():
    """The retry clock continues from the last time in the log, and the slave may still restore some frames."""
    group, _ = a_group()
    group.cut()
    group.a.crash()
    group.a.assign(Role.MASTER)
    assert quiet_ms(group) == 0
    group.a.wait(100)
    assert group.a.master.causes.of(("s", "g")) and group.a.master._mastership.retry_begin_ms is None
