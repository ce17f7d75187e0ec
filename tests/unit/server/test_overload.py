"""A producer's connection stops at its window or when memory is short; who consumes is never stopped."""

from __future__ import annotations

import pytest

from qmq.errors import ErrorCode
from qmq.server.overload import ConnectionState, DiskWatch, Flow, MemoryAlarm
from tests.unit.broker.test_produce import a_group
from tests.unit.broker.world import Client

RUNNING, FLOW, BLOCKED = ConnectionState
WINDOW, GIB = 1000, 1 << 30


@pytest.mark.parametrize(
    ("produces", "consumes", "was", "unacked", "memory_is_short", "state"),
    [
        pytest.param(True, False, RUNNING, 999, False, RUNNING, id="room in the window"),
        pytest.param(True, False, RUNNING, 1000, False, FLOW, id="the window is full"),
        pytest.param(True, False, FLOW, 501, False, FLOW, id="more than half of it is still full"),
        pytest.param(True, False, FLOW, 500, False, RUNNING, id="half of it was answered"),
        pytest.param(True, False, RUNNING, 0, True, BLOCKED, id="memory is short"),
        pytest.param(True, False, BLOCKED, 700, False, RUNNING, id="memory is there again"),
        pytest.param(True, False, FLOW, 700, True, BLOCKED, id="memory goes before the window"),
        pytest.param(True, True, RUNNING, 1000, True, RUNNING, id="it consumes as well"),
        pytest.param(False, True, RUNNING, 0, True, RUNNING, id="it consumes"),
        pytest.param(False, False, RUNNING, 0, True, RUNNING, id="it has done nothing yet"),
    ],
)
def test_state_of_a_connection(produces, consumes, was, unacked, memory_is_short, state):
    flow = Flow(WINDOW, produces, consumes, was)
    assert flow.follow(unacked, memory_is_short=memory_is_short) is (state is not was)
    assert flow.state is state


def test_memory_alarm_ends_by_itself_and_does_not_flutter_at_its_limit():
    alarm = MemoryAlarm(1000)
    heard = [(used, alarm.measured(used)) for used in (1000, 1001, 1000, 999, 951, 949, 999, 1001)]
    assert [used for used, changed in heard if changed] == [1001, 949, 1001]


def test_free_space_is_looked_at_again_before_what_was_written_can_have_filled_it():
    watch = DiskWatch(limit_bytes=GIB)
    assert watch.is_due(0, 0)
    watch.measured(41 * GIB, 0, 0)
    assert not watch.is_full and not watch.is_due(9_999, 10 * GIB - 1)
    assert watch.is_due(9_999, 10 * GIB) and watch.is_due(10_000, 0)


def test_near_the_limit_free_space_is_looked_at_in_every_tick():
    watch = DiskWatch(limit_bytes=GIB)
    watch.measured(2 * GIB, 0, 0)
    assert not watch.is_full and watch.is_due(100, 0)
    watch.measured(GIB - 1, 100, 0)
    assert watch.is_full and watch.is_due(200, 0)
    watch.measured(GIB, 200, 0)
    assert not watch.is_full


def full(group, what):
    node = group.a.node
    (node.set_disk_full if what == "disk" else node.set_memory_short)(True)


@pytest.mark.parametrize("what", ["disk", "memory"])
def test_at_a_limit_producers_are_told_and_consumption_goes_on(what):
    group, client = a_group()
    client.produce("m1", "m2", "m3")
    group.settle()
    full(group, what)
    refused = client.produce("m4")
    assert client.code(refused) == ErrorCode.READ_ONLY and what in client.text(refused)
    consumer = Client(group.a, "consumer")
    group.a.host.settle()
    subscribed = consumer.subscribe()
    group.settle()
    consumer.subscription(subscribed)
    pulled = consumer.pull()
    group.settle()
    assert [id for *_, id in consumer.pulled(pulled)] == ["m1", "m2", "m3"]
    acked = consumer.ack(consumer.pulled(pulled)[0][0], consumer.pulled(pulled)[-1][0] + 1)
    group.settle()
    assert consumer.code(acked) == 0


@pytest.mark.parametrize("what", ["disk", "memory"])
def test_a_new_mastership_knows_the_limit_that_was_reached_before_it(what):
    group, client = a_group()
    full(group, what)
    group.a.assign(group.a.node.assignment.role, 2)
    full(group, what)
    assert what in group.a.node.readonly_reasons


def test_window_counts_what_is_under_way_and_nothing_that_was_answered():
    group, client = a_group()
    first, second = client.produce("m1", size=500), client.produce("m2", size=500)
    assert client.link.unacked_bytes > 1000
    group.settle()
    assert client.receipt(first).stored == client.receipt(second).stored == 1
    assert client.link.unacked_bytes == 0


def test_window_is_given_back_when_a_mastership_ends_without_an_answer():
    group, client = a_group()
    client.produce("m1", size=500)
    group.a.assign(group.a.node.assignment.role, 2)
    assert client.link.unacked_bytes == 0
