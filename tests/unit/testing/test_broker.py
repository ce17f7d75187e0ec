"""The in-memory broker behaves as a broker, and serves a test's requests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import pytest

import qmq
import qmq.blocking
from qmq.client.batch import Outcome
from qmq.errors import InvalidMessage, NotServed, OutcomeUnknown, Overloaded
from qmq.testing import BlockingBroker, Broker
from qmq.testing.copies import Copies
from tests.support.waiting import consuming, until_async

APP = {"app": "test"}


@pytest.fixture
def broker(qmq_broker):
    return qmq_broker


def message(n, subject="s", **more):
    return qmq.Message(subject, {"n": str(n)}, **more)


def numbers(messages):
    return [int(message["n"]) for message in messages]


def producing(broker, **more):
    return qmq.Producer(metaserver=broker.metaserver, **APP, **more)


@asynccontextmanager
async def listening(broker, handler, **more):
    consumer = qmq.Consumer(metaserver=broker.metaserver, **APP)
    consumer.listen("s", group="g", start="earliest", **more)(handler)
    async with consuming(consumer):
        yield consumer


# Clients at the top of an application's modules, as in each of these tests again.

PRODUCER = qmq.Producer(metaserver="http://metaserver.invalid:8080", app="shop")
CONSUMER = qmq.Consumer(metaserver="http://metaserver.invalid:8080", app="shop")
BLOCKING = qmq.blocking.Producer(metaserver="http://metaserver.invalid:8080", app="shop")
HANDLED = []


@CONSUMER.listen("s", group="g", start="earliest")
async def on_message(message):
    HANDLED.append(message["n"])


@pytest.mark.parametrize("n", ["1", "2"])
async def test_clients_of_modules_reach_the_broker(broker, n):
    HANDLED.clear()
    async with consuming(CONSUMER), PRODUCER:
        await PRODUCER.send(message(n))
        await broker.wait_until_consumed("s", "g")
    assert HANDLED == [n]


@pytest.mark.parametrize("n", [1, 2])
def test_blocking_clients_of_modules_reach_the_broker(qmq_blocking_broker, n):
    BLOCKING.send_nowait(message(n))
    assert numbers(qmq_blocking_broker.wait_until_stored("s")) == [n]


def test_redirected_clients_return_to_their_address(monkeypatch):
    monkeypatch.setattr(BLOCKING, "_make", partial(BLOCKING._make, timeout_s=0.3))
    with BlockingBroker() as broker, broker.redirected():
        assert BLOCKING.send(message(1)).is_stored
    assert "metaserver.invalid" in BLOCKING.send(message(2)).reason
    BLOCKING.disconnect()


# Stored messages.


async def test_wait_until_stored_counts_all_messages(broker):
    async with producing(broker) as producer:
        with pytest.raises(TimeoutError, match="not 1 stored within 0.05 s; subject 's' has 0 messages"):
            await broker.wait_until_stored("s", timeout=0.05)
        waiting = asyncio.create_task(broker.wait_until_stored("s", 3))
        await producer.send_many(message(n) for n in (1, 2, 3))
        assert numbers(await waiting) == [1, 2, 3]


async def test_messages_are_stored_with_all_that_they_carry(broker):
    async with producing(broker) as producer:
        receipt = await producer.send(message(1, tags={"a", "b"}, id="own", order_key="k"))
        assert (receipt.broker_group, receipt.sequence) == ("test", 0)
        await producer.send_many([message(2), message(3, "other")])
    first, second = broker.messages("s")
    assert (first.id, first.tags, first.order_key, first["n"]) == ("own", {"a", "b"}, "k", "1")
    assert second["n"] == "2"
    assert numbers(broker.messages("other")) == [3]
    assert broker.messages("unknown") == []


async def test_old_messages_are_still_returned(broker):
    async with producing(broker) as producer:
        receipts = await producer.send_many(
            qmq.Message("s", {"n": str(n)} | {f"part{i}": "x" * 30_000 for i in range(100)}) for n in range(14)
        )
        assert receipts.all_stored  # 42 MB
    assert numbers(broker.messages("s")) == list(range(14))


async def test_each_broker_is_empty_in_the_beginning(broker):
    async with Broker(group="mine") as another, producing(another) as producer:
        assert (await producer.send(message(1))).broker_group == "mine"
        assert (broker.messages("s"), numbers(another.messages("s"))) == ([], [1])


# Consuming.


async def test_tags_filter_messages(broker):
    seen = []

    async def handle(message):
        seen.append(int(message["n"]))

    async with producing(broker) as producer, listening(broker, handle, tags=["red"]):
        await producer.send_many([message(1, tags=["red"]), message(2, tags=["blue"]), message(3)])
        await broker.wait_until_consumed("s", "g")
        await producer.send(message(4, tags=["red", "blue"]))
        await broker.wait_until_consumed("s", "g")
    assert seen == [1, 4]


async def test_delays_are_skipped_as_far_as_needed(broker):
    seen = []

    async def handle(message):
        seen.append(message.times)
        if message.times < 3:
            raise qmq.RetryLater(3600)

    async with producing(broker) as producer, listening(broker, handle):
        await producer.send(message(1))
        await broker.wait_until_delayed("s", "g")
        broker.advance(3500)
        with pytest.raises(TimeoutError, match="1 wait for their retry"):
            await broker.wait_until_consumed("s", "g", timeout=0.3, skip_delays=False)
        assert seen == [1]
        broker.advance(100)
        await broker.wait_until_consumed("s", "g")
    assert seen == [1, 2, 3]


async def test_ended_wait_does_not_advance_the_clock(broker):
    gate, times = asyncio.Event(), []

    async def handle(message):
        times.append(message.times)
        await gate.wait()
        raise qmq.RetryLater(3600)

    async with producing(broker) as producer, listening(broker, handle):
        await producer.send(message(0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(broker.wait_until_consumed("s", "g"), 0.1)
        gate.set()
        await broker.wait_until_delayed("s", "g", timeout=3)
        await asyncio.sleep(0.05)
    assert times == [1]


async def test_retry_subject_counts_as_unsettled(broker):
    seen, release = [], asyncio.Event()

    async def handle(message):
        await release.wait()
        seen.append((message.subject, int(message["n"])))

    async with producing(broker) as producer, listening(broker, handle):
        await broker.wait_until_subscribed("s", "g")
        await producer.send(message(1, "%RETRY%s%g"))
        with pytest.raises(TimeoutError):
            await broker.wait_until_consumed("s", "g", 0.3)
        release.set()
        await broker.wait_until_consumed("s", "g")
        assert seen == [("s", 1)]


def test_vanished_consumer_loses_its_messages(broker):
    def pulling(consumer_id):
        consumer = qmq.Consumer(metaserver=broker.metaserver, consumer_id=consumer_id, **APP)
        return consumer.pull("s", group="g", start="earliest", unacked_max=1)

    async def take(puller):
        await puller.__aenter__()
        return await puller.pull(1, timeout=5)

    async def stay():
        async with producing(broker) as producer:
            await producer.send_many(message(n) for n in range(2))
        async with pulling("stays") as puller:
            held = await puller.pull(1, timeout=5)
            gone = await asyncio.to_thread(other.run, take(vanishing))  # that loop never runs again
            assert sorted(numbers(held + gone)) == [0, 1]
            broker.drop_connections()
            await broker.wait_until_subscribed("s", "g")
            broker.advance(24 * 3600)
            await puller.ack(held)
            await puller.flush()  # refused, if the lease had ended
            (again,) = await puller.pull(1, timeout=5)
            assert (again["n"], again.times, again.is_suspected) == (gone[0]["n"], 1, True)  # it may not have begun it
            await puller.ack([again])

    vanishing = pulling("vanishes")
    with asyncio.Runner() as other:
        asyncio.run(stay())
        other.run(vanishing.__aexit__(None, None, None))


async def test_progress_outlives_a_change_of_masters(broker):
    seen, events = [], []

    async def handle(message):
        seen.append(int(message["n"]))

    async with producing(broker) as producer, listening(broker, handle) as consumer:
        consumer.on_master_changed(events.append)
        for n in range(5):
            assert (await producer.send(message(n))).is_stored
            await broker.wait_until_consumed("s", "g")
            broker.swap_roles()
        assert (await producer.send(message(5))).sequence == 5
        await broker.wait_until_consumed("s", "g")
    assert seen == list(range(6))
    assert events and {event.broker_group for event in events} == {"test"}
    assert numbers(broker.messages("s")) == list(range(6))


# Planted faults.


async def test_readonly_applies_to_its_subject(broker):
    async with producing(broker, timeout_s=3.0) as producer:
        broker.readonly("s")
        refused, stored = await asyncio.gather(producer.send(message(1)), producer.send(message(2, "other")))
        assert (refused.outcome, stored.outcome) == (Outcome.REFUSED, Outcome.STORED)
        broker.readonly()
        assert not (await producer.send(message(3, "other"))).is_stored
        broker.writable()
        assert (await producer.send(message(4))).is_stored


async def test_refusal_follows_its_class(broker):
    async with producing(broker) as producer:
        broker.refuse_next(InvalidMessage("too green"))
        receipt = await producer.send(message(1))
        assert (receipt.outcome, receipt.reason) == (Outcome.REFUSED, "too green")
        for n, error in enumerate((Overloaded("busy"), NotServed("away"), OutcomeUnknown("who knows")), 2):
            broker.refuse_next(error, count=2)
            assert (await producer.send(message(n))).is_stored
    assert numbers(broker.messages("s")) == [2, 3, 4]


# Timeouts.


async def test_timeout_reports_the_progress(broker):
    release = asyncio.Event()

    async def handle(message):
        if message["n"] == "1":
            await release.wait()
        raise qmq.RetryLater(60)

    async with producing(broker) as producer:
        await producer.send_many(message(n) for n in range(2))
        with pytest.raises(TimeoutError, match="not consumed within 0.05 s; group 'g' of subject 's': no consumer has"):
            await broker.wait_until_consumed("s", "g", 0.05)
        async with listening(broker, handle):
            await broker.wait_until_delayed("s", "g")
            expected = r"0 messages .*, 1 wait .* for (60|5\d)\.\d s, 1 are held by its 1 "
            with pytest.raises(TimeoutError, match=expected):
                await broker.wait_until_consumed("s", "g", 0.2)
            with pytest.raises(TimeoutError, match="not 2 consumers subscribed"):
                await broker.wait_until_subscribed("s", "g", 2, 0.05)
            release.set()


async def test_a_month_takes_a_few_ticks(broker, monkeypatch):
    ticks, tick = [], Copies.tick
    monkeypatch.setattr(Copies, "tick", lambda self: [ticks.append(self.group), tick(self)])

    async def handle(message):
        raise qmq.RetryLater(3600)

    async with producing(broker) as producer, listening(broker, handle):
        await producer.send(message(1))
        await broker.wait_until_delayed("s", "g")
        ticks.clear()
        broker.advance(3500)
        assert ticks.count("test") < 10
        broker.advance(30 * 86_400)
        assert ticks.count("test") < 20  # it ticks by itself, too; in steps of 7.5 s there were 345,000
        await broker.wait_until_delayed("s", "g", timeout=120.0)  # its consumer has to subscribe again


async def test_time_does_not_go_back(broker):
    with pytest.raises(qmq.InvalidRequest):
        broker.advance(-1)


# Lifetime of a broker.


def test_broker_opens_once():
    broker = BlockingBroker()
    with pytest.raises(qmq.ClientClosed):
        broker.messages("s")
    with broker:
        assert broker.messages("s") == []
    with pytest.raises(qmq.ClientClosed):
        _ = broker.metaserver
    with pytest.raises(qmq.ClientClosed), broker:
        pass


def test_core_bug_reaches_the_test(monkeypatch):
    with pytest.raises(RuntimeError, match="bug of qmq"), BlockingBroker() as broker:
        monkeypatch.setattr("qmq.replication.node.Node.tick", lambda self: 1 / 0)
        broker.wait_until_subscribed("s", "g", timeout=5)


SERVER_ONLY = (
    "alembic",
    "cryptography",
    "fastapi",
    "numpy",
    "prometheus_client",
    "sqlalchemy",
    "uvicorn",
    "zlib_ng",
    "pytest",
)


def test_broker_needs_client_packages_only():
    code = f"""
import sys
for name in {SERVER_ONLY}:
    sys.modules[name] = None
import qmq, qmq.blocking, qmq.testing
with qmq.testing.BlockingBroker() as broker:
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="test") as producer:
        print(producer.send(qmq.Message("s", {{}})).outcome)
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="test", timeout_s=3.0) as producer:
        print("numpy: install qmq[testing]" in producer.send(qmq.Message("s"), delay=1).reason)
"""
    quiet = os.environ | {"GRPC_VERBOSITY": "NONE"}  # gRPC may report that the broker closed the producer's watch
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=quiet)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "stored\nTrue\n", "")


def test_the_plugin_alone_loads_neither_client_nor_broker():
    code = "import sys, qmq.testing.plugin; print({'grpc', 'broker', 'qmq.client'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ran.stdout, ran.stderr) == ("set()\n", "")


@pytest.mark.parametrize("compress", [None, 100], ids=["plain", "zstd"])
async def test_body_arrives_unchanged(broker, compress):
    """Sent alone and by `send_many`, delivered twice, and stored as a dead letter."""
    body, seen = b"\xff\0body" * 50, []

    async def handler(message):
        seen.append((message.body, message.content_type))
        raise ValueError("no use")

    async with (
        producing(broker, compress_bytes_min=compress) as producer,
        listening(broker, handler, retries_max=2, retry_delay=0.01),
    ):
        receipt = await producer.send(qmq.Message("s", {"n": 1}, body=body, content_type="a/b"))
        receipts = await producer.send_many([qmq.Message("s", body=body, content_type="a/b")])
        assert receipt.is_stored and receipts.all_stored
        await until_async(lambda: len(broker.dead_letters("s", "g")) == 2)
    assert seen == [(body, "a/b")] * 4
    for message in (*broker.messages("s"), *broker.dead_letters("s", "g")):
        assert (message.body, message.content_type) == (body, "a/b")
