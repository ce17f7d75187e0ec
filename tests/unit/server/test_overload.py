"""Core. A producer's connection stops at its window or when memory is short; consumers are never stopped."""

from __future__ import annotations

import pytest

from qmq.client.backlog import GroupBatches, Limits
from qmq.client.batch import Batch
from qmq.codec import join_batch
from qmq.errors import ErrorCode
from qmq.server.overload import (
    BATCH_BYTES,
    LATELY_MS,
    LIMITED_SUBJECTS_MAX,
    QUIET_BYTES,
    QUIETLY_SHARED_BYTES,
    SHARE_BYTES_LEAST,
    SHARED_BYTES,
    SHARES_MS,
    ConnectionState,
    DiskWatch,
    Flow,
    LimitsReached,
    MemoryAlarm,
    Shares,
)
from qmq.server.service import Service
from tests.unit.broker.world import Client, a_group, message

RUNNING, SHARING, FLOW, BLOCKED = ConnectionState
WINDOW, GIB = 1000, 1 << 30


@pytest.mark.parametrize(
    ("produces", "consumes", "was", "unacked", "memory_is_short", "state"),
    [
        pytest.param(True, False, RUNNING, 1000, False, RUNNING, id="a client fills its window"),
        pytest.param(True, False, RUNNING, 1001, False, FLOW, id="more than the window"),
        pytest.param(True, False, FLOW, 501, False, FLOW, id="more than half of it is still full"),
        pytest.param(True, False, FLOW, 500, False, RUNNING, id="half of it was answered"),
        pytest.param(True, False, RUNNING, 0, True, BLOCKED, id="memory is short"),
        pytest.param(True, False, BLOCKED, 700, False, RUNNING, id="memory is there again"),
        pytest.param(True, False, FLOW, 700, True, BLOCKED, id="memory precedes the window"),
        pytest.param(True, True, RUNNING, 1001, True, RUNNING, id="it consumes as well"),
        pytest.param(False, True, RUNNING, 0, True, RUNNING, id="it consumes"),
        pytest.param(False, False, RUNNING, 0, True, RUNNING, id="neither yet"),
    ],
)
def test_connection_state(produces, consumes, was, unacked, memory_is_short, state):
    flow = Flow(WINDOW, produces, consumes, was)
    assert flow.follow(unacked, memory_is_short=memory_is_short) is (state is not was)
    assert flow.state is state


@pytest.mark.parametrize(
    ("consumes", "was", "unacked", "share", "state"),
    [
        pytest.param(False, RUNNING, 100, 100, RUNNING, id="room in its share"),
        pytest.param(False, RUNNING, 101, 100, SHARING, id="its share is full"),
        pytest.param(False, SHARING, 51, 100, SHARING, id="more than half of it is still full"),
        pytest.param(False, SHARING, 50, 100, RUNNING, id="half of it was answered"),
        pytest.param(False, SHARING, 99, None, RUNNING, id="the others are gone"),
        pytest.param(False, SHARING, 1001, 100, FLOW, id="the window is full, too"),
        pytest.param(False, FLOW, 500, 100, SHARING, id="the window is not full any more, its share is"),
        pytest.param(True, RUNNING, 101, 100, RUNNING, id="it consumes as well"),
    ],
)
def test_connection_state_with_a_share(consumes, was, unacked, share, state):
    flow = Flow(WINDOW, True, consumes, was)
    flow.follow(unacked, share_bytes=share, memory_is_short=False)
    assert flow.state is state


def test_producers_of_the_last_ten_seconds_share():
    shares = Shares[str]()
    shares.produced("hot", 1 << 20, 0)
    assert shares.bytes is None, "alone it has its whole window"
    shares.produced("other", 1 << 20, 9_000)
    assert shares.bytes == SHARED_BYTES // 2
    shares.produced("hot", 1 << 20, SHARES_MS)
    shares.produced("hot", 1 << 20, 2 * SHARES_MS - 1)
    assert shares.bytes == SHARED_BYTES // 2, "the other one's last batch is 11 seconds old"
    shares.produced("hot", 1 << 20, 2 * SHARES_MS)
    assert shares.bytes is None
    shares.produced("other", 1 << 20, 2 * SHARES_MS)
    shares.lost("other")
    assert shares.bytes is None
    for name in range(1_000):
        shares.produced(str(name), 1 << 20, 2 * SHARES_MS)
    assert shares.bytes == SHARE_BYTES_LEAST


def test_batches_are_small_beside_quiet_connections():
    shares = Shares[str]()
    shares.produced("quiet", 100, 0)
    assert (shares.bytes, shares.batch_bytes) == (None, None), "it produces alone"
    shares.produced("hot", QUIET_BYTES, 0)
    assert (shares.bytes, shares.batch_bytes) == (QUIETLY_SHARED_BYTES // 2, BATCH_BYTES)
    shares.produced("hot", 100, SHARES_MS)
    shares.lost("quiet")
    shares.produced("other", 1 << 20, SHARES_MS + 1)
    assert (shares.bytes, shares.batch_bytes) == (SHARED_BYTES // 2, None), "a small batch behind large ones"
    shares.produced("other", 1 << 20, 2 * SHARES_MS)
    shares.produced("hot", 100, 2 * SHARES_MS)
    assert (shares.bytes, shares.batch_bytes) == (QUIETLY_SHARED_BYTES // 2, BATCH_BYTES), "it is quiet by now"


def test_producer_alone_after_a_pause_shares_nothing():
    shares = Shares[str]()
    shares.produced("other", 1 << 20, 0)
    shares.produced("hot", 1 << 20, 2 * SHARES_MS)
    assert (shares.bytes, shares.batch_bytes) == (None, None)


def test_memory_alarm_has_hysteresis():
    alarm = MemoryAlarm(1000)
    heard = [(used, alarm.measured(used)) for used in (1000, 1001, 1000, 999, 951, 949, 999, 1001)]
    assert [used for used, changed in heard if changed] == [1001, 949, 1001]


def test_free_space_is_measured_before_it_can_fill():
    watch = DiskWatch(limit_bytes=GIB)
    assert watch.is_due(0, 0)
    watch.measured(41 * GIB, 0, 0)
    assert not watch.is_full and not watch.is_due(9_999, 10 * GIB - 1)
    assert watch.is_due(9_999, 10 * GIB) and watch.is_due(10_000, 0)


def test_free_space_near_the_limit_is_measured_often():
    watch = DiskWatch(limit_bytes=GIB)
    watch.measured(2 * GIB, 0, 0)
    assert not watch.is_full and watch.is_due(100, 0)
    watch.measured(GIB - 1, 100, 0)
    assert watch.is_full and watch.is_due(200, 0)
    watch.measured(GIB, 200, 0)
    assert not watch.is_full


def test_reached_limit_begins_once_per_subject():
    limits = LimitsReached()
    begins = [limits.reached("messagesMax", now_ms, name) for now_ms, name in enumerate(("a", "a", "b", "a", "b"))]
    assert begins == [True, False, True, False, False] and limits.counts == {"messagesMax": 5}
    assert limits.subjects_lately(4) == [("messagesMax", "a"), ("messagesMax", "b")]
    assert limits.is_lately("messagesMax", 4 + LATELY_MS - 1) and not limits.is_lately("messagesMax", 4 + LATELY_MS)
    assert limits.subjects_lately(3 + LATELY_MS) == [("messagesMax", "b")]
    assert limits.reached("messagesMax", 10 + LATELY_MS, "a"), "it begins anew"
    assert limits.reached("bytesMax", 10 + LATELY_MS, "a"), "another limit of it"
    assert [limits.reached("window_bytes", 10 + LATELY_MS) for _ in range(2)] == [True, False]


def test_full_subjects_are_counted_beyond_the_named():
    limits = LimitsReached()
    names = [f"s{number}" for number in range(10 * LIMITED_SUBJECTS_MAX)]
    begins = [limits.reached("messagesMax", now_ms, name) for now_ms in (0, 1, 2) for name in names]
    assert sum(begins) == len(limits.subjects_lately(2)) == LIMITED_SUBJECTS_MAX
    assert limits.counts["messagesMax"] == 3 * len(names) and limits.is_lately("messagesMax", 2)
    assert limits.reached("messagesMax", LATELY_MS + 2, "other"), "those before are over"
    assert limits.subjects_lately(LATELY_MS + 2) == [("messagesMax", "other")]


def test_full_subject_is_logged_once(caplog):
    """The text of a full subject changes with each refusal; for other limits each text is a line."""
    now_ms = [0]
    service = object.__new__(Service)
    service.limits, service._logged, service.monotonic_ms = LimitsReached(), set(), lambda: now_ms[0]
    for number in range(100):
        service.limit_reached("messagesMax", "1.2.3.4:5", f"{number} messages of s wait", "s")
        service.limit_reached("new_subjects_max", "1.2.3.4:5", f"token {number % 2}")
    now_ms[0] = LATELY_MS
    service.limit_reached("messagesMax", "1.2.3.4:5", "7 messages of s wait", "s")
    assert [record.getMessage().partition("5: ")[2] for record in caplog.records] == [
        "0 messages of s wait",
        "token 0",
        "token 1",
        "7 messages of s wait",
    ]


def full(group, what):
    node = group.a.node
    (node.set_disk_full if what == "disk" else node.set_memory_short)(True)


@pytest.mark.parametrize("what", ["disk", "memory"])
def test_full_broker_refuses_producers_and_serves_consumers(what):
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


def test_client_within_its_window_is_running():
    """Client and broker count the same bytes; otherwise Doctor would name clients that keep their window."""
    group, client = a_group()
    body, batches = join_batch([message("s", "m1", 500)]), GroupBatches(16)
    batches.limits = Limits(packet_bytes_max=1 << 20, window_bytes=5 * len(body))
    flow = Flow(batches.limits.window_bytes, produces=True)
    while batches.room_bytes("s"):
        batches.admit(Batch("s", ["m1"], [body], 0, lambda batch: None))
        client.produce("m1", size=500)
        flow.follow(client.link.unacked_bytes, memory_is_short=False)
    assert client.link.unacked_bytes == batches.limits.window_bytes and flow.state is RUNNING


def test_window_counts_unanswered_batches():
    group, client = a_group()
    first, second = client.produce("m1", size=500), client.produce("m2", size=500)
    assert client.link.unacked_bytes > 1000
    group.settle()
    assert client.receipt(first).stored == client.receipt(second).stored == 1
    assert client.link.unacked_bytes == 0


def test_window_is_freed_when_the_mastership_ends():
    group, client = a_group()
    client.produce("m1", size=500)
    group.a.assign(group.a.node.assignment.role, 2)
    assert client.link.unacked_bytes == 0
