"""Shell. Delayed messages and recurring schedules in virtual time, with the delay server's real cores."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import qmq
import qmq.blocking
from qmq import DelayOutcome, Message
from qmq.errors import CallError
from tests.support.waiting import consuming

DAY_S = 86_400.0


@pytest.fixture
def broker(qmq_broker):
    return qmq_broker


@pytest.fixture
async def producer(broker):
    async with qmq.Producer(metaserver=broker.metaserver, app="test", timeout_s=5.0) as producer:
        yield producer


def names(messages):
    return [str(message["n"]) for message in messages]


async def test_delayed_message_arrives_when_due(broker, producer):
    message = Message("s", {"n": "1"}, body=b"\xff\0", content_type="a/b")
    receipt = await producer.send(message, delay=timedelta(minutes=30), key="k")
    assert receipt.is_stored and receipt.broker_group == "test-delay"
    broker.advance(1_790)
    assert broker.messages("s") == [] and names(broker.delayed("s")) == ["1"]
    broker.advance(11)
    assert names(broker.messages("s")) == ["1"] and broker.delayed("s") == []
    assert [(message.body, message.content_type) for message in broker.messages("s")] == [(b"\xff\0", "a/b")]


async def test_delay_starts_at_the_test_clock(broker, producer):
    broker.advance(3_600)
    first = await producer.send(Message("s", {"n": "1"}), delay=600)
    broker.advance(3_600)
    await producer.send(Message("s", {"n": "2"}), delay=600)
    assert await producer.reschedule(first, delay=900) is DelayOutcome.SENT
    broker.advance(590)
    assert names(broker.messages("s")) == ["1"]
    broker.advance(11)
    assert names(broker.messages("s")) == ["1", "2"]


async def test_a_time_too_far_ahead_is_refused(broker, producer):
    receipt = await producer.send(Message("s"), delay=timedelta(days=800))
    assert receipt.outcome is qmq.Outcome.REFUSED and "730" in receipt.reason
    other = await producer.send(Message("s"), delay=timedelta(days=729))
    assert other.is_stored
    with pytest.raises(qmq.QmqError, match="730"):
        await producer.reschedule(other, delay=timedelta(days=731))


async def test_a_consumer_sees_when_a_message_was_due(broker, producer):
    consumer = qmq.Consumer(metaserver=broker.metaserver, app="test")
    async with consumer.pull("s", group="g", start="earliest") as puller:
        receipt = await producer.send(Message("s", {"n": "1"}, tags={"t"}, order_key="o"), delay=60)
        await producer.send(Message("s", {"n": "2"}))
        (first,) = await puller.pull(1, timeout=5)
        broker.advance(60)
        (second,) = await puller.pull(1, timeout=5)
        assert (first["n"], first.due_ms) == ("2", None)
        assert (second["n"], second.due_ms, second.id) == ("1", receipt.due_ms, receipt.message_id)
        assert (second.tags, second.order_key) == ({"t"}, "o")
        await puller.ack([first, second])


async def test_readonly_broker_keeps_due_messages_waiting(broker, producer):
    await producer.send(Message("s", {"n": "1"}), delay=60)
    broker.readonly("s")
    broker.advance(120)
    assert broker.messages("s") == [] and names(broker.delayed("s")) == ["1"]
    broker.writable()
    broker.advance(1)
    assert names(broker.messages("s")) == ["1"]


async def test_faults_lose_no_delayed_message(broker, producer):
    receipts = []
    for n in range(30):
        receipts.append(await producer.send(Message("s", {"n": str(n)}), delay=60 + n))
        if n == 10:
            broker.drop_connections()
        if n == 20:
            broker.swap_roles()
    broker.advance(75)
    broker.swap_roles()
    broker.advance(75)
    assert names(broker.messages("s")) == [str(n) for n in range(30)]
    assert await producer.cancel(receipts[0]) is DelayOutcome.SENT


async def test_long_retry_waits_at_the_delay_group(broker, producer):
    consumer = qmq.Consumer(metaserver=broker.metaserver, app="test")
    tried, others = [], []

    @consumer.listen("s", group="slow", start="earliest", retries_max=3)
    async def handle(message):
        tried.append((message["n"], message.times, message.id))
        raise qmq.RetryLater(1.1 * DAY_S)

    @consumer.listen("s", group="other", start="earliest")
    async def other(message):
        others.append(message["n"])

    async with consuming(consumer):
        await producer.send(Message("s", {"n": "1"}, tags={"t"}, id="one"))
        for times in (1, 2, 3):
            await broker.wait_until_consumed("s", "slow")
            while len(tried) < times:
                await asyncio.sleep(0.01)
            await broker.wait_until_consumed("s", "slow", skip_delays=False)
            assert tried[-1] == ("1", times, "one")
            broker.advance(1.05 * DAY_S)
            assert len(tried) == times, "not early"
            broker.advance(0.1 * DAY_S)
        assert len(tried) == 3 and others == ["1"]
        (dead,) = broker.dead_letters("s", "slow")
        assert dead.id == "one" and dead.tags == {"t"} and "3 times" in str(dead["qmq_deadReason"])


def test_blocking_programs_delay_and_cancel_too(qmq_blocking_broker):
    broker = qmq_blocking_broker
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="test") as producer:
        one = producer.send(Message("s", {"n": "1"}), delay=60)
        future = producer.send_nowait(Message("s", {"n": "2"}), delay=60, key="k")
        assert producer.send_many([Message("s", {"n": "3"}), Message("s", {"n": "4"})], delay=61).all_stored
        assert future.result(5).due_ms is not None
        assert producer.cancel(one) is DelayOutcome.CANCELLED
        assert producer.reschedule(subject="s", key="k", delay=90) is DelayOutcome.RESCHEDULED
        with pytest.raises(qmq.InvalidRequest, match="time zone"):
            producer.send_nowait(Message("s"), at=datetime(2040, 1, 1))
        broker.advance(80)
        assert names(broker.messages("s")) == ["3", "4"]
        broker.advance(80)
        assert names(broker.messages("s")) == ["3", "4", "2"]


# Recurring schedules.

MINUTELY = {"name": "minutely", "cron": "* * * * *", "timezone": "UTC"}


def pass_first(broker, schedule):
    """Advance to half a minute after the first occurrence: no minute begins while the test runs on from there."""
    broker.advance((schedule.next_at - datetime.now(UTC)).total_seconds() + 30)


async def test_each_occurrence_is_one_message(broker, producer):
    before, template = datetime.now(UTC), Message("s", {"n": "1"}, tags={"t"}, order_key="k", body=b"\xff\0")
    schedule = await producer.put_recurring(template, **MINUTELY, owner="ops")
    assert before < schedule.next_at <= datetime.now(UTC) + timedelta(minutes=1)
    pass_first(broker, schedule)
    broker.advance(540)
    messages = broker.messages("s")
    assert len(messages) == 10 and len({message.id for message in messages}) == 10
    for message in messages:
        assert (message["n"], message.body, message["qmq_recurOwner"]) == ("1", b"\xff\0", "ops")
        assert (message.tags, message.order_key) == ({"t"}, "k")
    created = [message.created_ms for message in messages]
    assert created == list(range(schedule.due_ms, schedule.due_ms + 600_000, 60_000))


def test_program_without_event_loop_has_the_same(broker):
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="nightly", timeout_s=5.0) as producer:
        schedule = producer.put_recurring(Message("s"), **MINUTELY)
        assert schedule.owner == "nightly"
        assert [one.name for one in producer.list_recurring(subject="s")] == ["minutely"]
        pass_first(broker, schedule)
        assert len(broker.messages("s")) == 1
        assert producer.delete_recurring(subject="s", name="minutely") is True
        with pytest.raises(CallError, match="Bad minute"):
            producer.put_recurring(Message("s"), **MINUTELY | {"cron": "60 * * * *"})
