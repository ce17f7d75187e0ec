"""Shell. Retries of more than a day, or above a broker's limit, with and without a delay group."""

from __future__ import annotations

import time

import pytest

import qmq
from qmq import Message
from qmq.broker import group_status
from qmq.client import group_session, subscription
from qmq.codec import decode_message, due_of, encode_message
from qmq.errors import InvalidRequest
from qmq.testing import Broker
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import consumer_of, pull_all

DAY_S, DAY_MS = 86_400, 86_400_000
MAILBOX = "%RETRY%a%g"


async def test_long_retry_goes_to_the_delay_group(metaserver, broker, server):
    for id in ("one", "two"):
        broker.add("a", encode_message(Message("a", {"n": "1"}, tags={"t"}, id=id), 7))
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        message, other = await pull_all(puller, 2)
        await message.nack("next week", delay=7 * DAY_S)
        assert message.is_decided
        await puller.flush()
        assert message.is_settled and broker.acks and not broker.nacks
        await other.nack("tomorrow", delay=DAY_S)
        await puller.flush()
        assert [entry.delay_ms for entry in broker.nacks[0].entries] == [pytest.approx(DAY_MS, abs=1_000)]
    (data,) = server.subjects[MAILBOX]
    copy = decode_message(data)
    assert (copy.id, copy.tags, copy.created_ms) == ("one", {"t"}, 7)
    assert copy.properties == {"n": "1", "qmq_times": "2"}
    assert due_of(data) > 6 * DAY_MS


async def test_the_count_goes_on_in_the_mailbox(metaserver, broker, server):
    message = Message("a", {"n": "1"}, id="one")
    data = subscription.delayed_copy(encode_message(message, 7), 0, {"qmq_times": "5"})
    broker.add(MAILBOX, data)
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        (got,) = await puller.pull(1, timeout=10)
        assert (got.source, got.times) == (MAILBOX, 5)
        await got.nack(delay=2 * DAY_S)
        await puller.flush()
    assert decode_message(server.subjects[MAILBOX][0])["qmq_times"] == "6"


async def test_without_delay_group_broker_keeps_a_day(monkeypatch, caplog, broker, consumer):
    monkeypatch.setattr(subscription, "TIMEOUT_MS", 200)
    for id in ("one", "two"):
        broker.add("a", encode_message(Message("a", {"n": "1"}, id=id), 7))
    handled = []

    @consumer.listen("a", group="g", start="earliest")
    async def handle(message):
        handled.append(message.id)
        if message.id == "one":
            raise qmq.RetryLater(7 * DAY_S)

    async with consuming(consumer):
        await until_async(lambda: broker.nacks)
        assert handled == ["one", "two"], "no worker waits"
        (entry,) = broker.nacks[0].entries
        assert DAY_MS - 1_000 < entry.delay_ms <= DAY_MS and not broker.dead["a", "g"]
    assert "AddBroker" in caplog.text and "id=one" in caplog.text


@pytest.mark.parametrize("arguments", [{"broadcast": True}, {"group": "g"}], ids=["broadcast", "dead letters"])
async def test_long_retry_needs_a_mailbox(arguments, metaserver, broker, server):
    subject = "a" if "broadcast" in arguments else "%DEAD_RETRY%a%g"
    broker.add(subject, encode_message(Message(subject, {"n": "1"}, id="one"), 7))
    async with consumer_of(metaserver).pull(subject, start="earliest", **arguments) as puller:
        (message,) = await puller.pull(1, timeout=10)
        with pytest.raises(InvalidRequest, match="86400"):
            await message.nack(delay=2 * DAY_S)
        await message.nack(delay=DAY_S)


def add(broker, **ids):
    for id, order_key in ids.items():
        broker.add("a", encode_message(Message("a", {"n": id}, id=id, order_key=order_key), 7))


async def test_refused_postponement_goes_to_delay_group(monkeypatch, metaserver, broker, server):
    """A message with an order key stays in its place, and a retry that is due soon is not worth a copy."""
    monkeypatch.setattr(group_session, "RETRY_S_MAX", 0.05)

    broker.postpones = False
    add(broker, long=None, soon=None, keyed="k")
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        long, soon, keyed = await puller.pull(3, timeout=10)
        await long.nack("busy", delay=3_600)
        await soon.nack("busy", delay=1)
        await keyed.nack("busy", delay=3_600)
        await until_async(lambda: long.is_settled)
        (data,) = server.subjects[MAILBOX]
        copy = decode_message(data)
        assert (copy.id, copy.properties) == ("long", {"n": "long", "qmq_times": "2"})
        assert 3_590_000 < due_of(data) - time.time() * 1000 <= 3_600_000
        await until_async(lambda: broker.refused > 3)
        assert not keyed.is_settled
        await until_async(lambda: soon.is_settled)
        assert [entry.delay_ms for nack in broker.nacks for entry in nack.entries] == [0], "its time is over"
        broker.postpones = True
        await puller.flush()
        assert keyed.is_settled and len(server.subjects[MAILBOX]) == 1


async def test_refused_postponement_stays_without_delay_group(monkeypatch, caplog, metaserver, broker):
    monkeypatch.setattr(subscription, "TIMEOUT_MS", 200)
    monkeypatch.setattr(group_session, "RETRY_S_MAX", 0.05)

    broker.postpones = False
    add(broker, one=None, two=None)
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        one, two = await puller.pull(2, timeout=10)
        await one.nack("busy", delay=3_600)
        await two.nack("busy", delay=0)
        await until_async(lambda: two.is_settled)
        await until_async(lambda: "not stored by a delay group" in caplog.text)
        asked = broker.refused
        await until_async(lambda: broker.refused > asked + 3)
        assert caplog.text.count("not stored by a delay group") == 1, "the delay group is not asked each time"
        broker.postpones = True
        await puller.flush()
        assert one.is_settled


async def test_a_group_that_postpones_everything_gets_everything(monkeypatch):
    """Regression: above the limit, postponed messages stayed with their consumer, which got nothing new at
    `unacked_max`.
    """
    monkeypatch.setattr(group_status, "REQUEUED_RANGES_MAX", 20)

    async with Broker() as broker, qmq.Producer(metaserver=broker.metaserver, app="t") as producer:
        seen, consumer = set(), qmq.Consumer(metaserver=broker.metaserver, app="t", drain_s=0.1)

        @consumer.listen("s", group="g", start="earliest", unacked_max=50)
        async def handle(message):
            seen.add(int(message["n"]))
            raise qmq.RetryLater(3_600 + int(message["n"]))

        async with consuming(consumer):
            for number in range(200):
                assert (await producer.send(Message("s", {"n": str(number)}))).is_stored
            await until_async(lambda: len(seen) == 200)
