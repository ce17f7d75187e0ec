"""Core. An idle delay server is called seldom, and on the millisecond when its next message is due."""

from __future__ import annotations

import pytest

from qmq.replication.ports import QUIET_MS
from tests.unit.delayserver.world import HOUR_MS, a_group


def quiet(copies):
    copies.run(12_000)
    return copies.a.node.master.due_in_ms()


def test_master_with_later_messages_is_quiet():
    copies, producer = a_group()
    producer.delayed(copies.now_ms + 3 * HOUR_MS, "m")
    assert quiet(copies) == QUIET_MS
    assert copies.b.filing.quiet_ms() == QUIET_MS, "and so is its slave"


@pytest.mark.parametrize("late_ms", [1, 10, 333, 999])
def test_master_is_called_at_the_next_due_time(late_ms):
    copies, producer = a_group()
    assert quiet(copies) == QUIET_MS
    producer.delayed(copies.now_ms + late_ms, "m")
    copies.settle()
    copies.a.beat()
    copies.settle()
    for server in (copies.a, copies.b):
        server.node.tick()
    copies.settle()
    assert copies.a.node.master.due_in_ms() in (0, late_ms), "0 while the acknowledged point is sent to the slave"
    copies.a.node.tick()
    copies.settle()
    copies.a.host.clock_ms += late_ms - 1
    copies.a.beat()
    copies.settle()
    assert copies.senders.delivered() == []
    copies.a.host.clock_ms += 1
    copies.a.beat()
    copies.settle()
    assert copies.senders.delivered() == ["m"]


def test_waiting_message_needs_frequent_calls():
    copies, producer = a_group()
    copies.senders.up["g1"] = False
    producer.delayed(copies.now_ms, "m")
    assert quiet(copies) == 0
    copies.senders.up["g1"] = True
    assert quiet(copies) == QUIET_MS
    assert copies.senders.delivered() == ["m"]


def test_catching_up_clock_needs_frequent_calls():
    copies, _ = a_group()
    assert quiet(copies) == QUIET_MS
    for server in (copies.a, copies.b):
        server.host.wall_skew_ms += 30_000
    copies.run(100)
    assert copies.a.node.master.due_in_ms() == 0


def test_filing_slave_needs_frequent_calls():
    copies, producer = a_group()
    assert quiet(copies) == QUIET_MS
    producer.delayed(copies.now_ms + HOUR_MS, "m")
    copies.settle()
    producer.delayed(copies.now_ms + HOUR_MS, "n")
    copies.settle()
    assert copies.b.filing.quiet_ms() == 0
