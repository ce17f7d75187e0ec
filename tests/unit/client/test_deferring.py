"""Shell. Retries of more than a day: what becomes of them with and without a delay group."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq import Message
from qmq.client import deferring
from qmq.codec import decode_message, due_of, encode_message
from qmq.errors import InvalidRequest
from tests.support.waiting import until_async
from tests.unit.client.fakes import TOKEN, delay_cluster
from tests.unit.client.test_producer import run

DAY_S, DAY_MS = 86_400, 86_400_000
MAILBOX = "%RETRY%a%g"


def consumer_of(metaserver):
    return qmq.Consumer(metaserver=metaserver.url, app="test", token=TOKEN)


def test_a_long_retry_is_stored_by_the_delay_group_and_then_acked():
    async def test():
        async with delay_cluster("d1") as (metaserver, broker, [server]):
            broker.add("a", encode_message(Message("a", {"n": 1}, tags={"t"}, id="one"), 7))
            async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
                (message,) = await puller.pull(1, timeout=10)
                await message.nack("next week", delay=7 * DAY_S)
                assert message.is_decided
                await puller.flush()
                assert message.is_settled and broker.acks and not broker.nacks
            (data,) = server.subjects[MAILBOX]
            copy = decode_message(data)
            assert (copy.id, copy.tags, copy.created_ms) == ("one", {"t"}, 7)
            assert copy.properties == {"n": "1", "qmq_times": "2"}
            assert due_of(data) > 6 * DAY_MS

    run(test())


def test_the_count_goes_on_in_the_mailbox():
    async def test():
        async with delay_cluster("d1") as (metaserver, broker, [server]):
            message = Message("a", {"n": 1}, id="one")
            data = deferring.delayed_copy(encode_message(message, 7), 0, {"qmq_times": "5"})
            broker.add(MAILBOX, data)
            async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
                (got,) = await puller.pull(1, timeout=10)
                assert (got.source, got.times) == (MAILBOX, 5)
                await got.nack(delay=2 * DAY_S)
                await puller.flush()
            assert decode_message(server.subjects[MAILBOX][0])["qmq_times"] == "6"

    run(test())


def test_without_a_delay_group_the_broker_keeps_it_for_a_day_and_the_log_says_why(monkeypatch, caplog):
    monkeypatch.setattr(deferring, "TIMEOUT_MS", 200)

    async def test():
        async with delay_cluster() as (metaserver, broker, _):
            broker.add("a", encode_message(Message("a", {"n": 1}, id="one"), 7))
            broker.add("a", encode_message(Message("a", {"n": 2}, id="two"), 7))
            handled = []
            consumer = consumer_of(metaserver)

            @consumer.listen("a", group="g", start="earliest")
            async def handle(message):
                handled.append(message.id)
                if message.id == "one":
                    raise qmq.RetryLater(7 * DAY_S)

            task = asyncio.create_task(consumer.run())
            await until_async(lambda: broker.nacks)
            assert handled == ["one", "two"], "no worker waits"
            (entry,) = broker.nacks[0].entries
            assert DAY_MS - 1_000 < entry.delay_ms <= DAY_MS and not broker.dead
            consumer.stop()
            await task

    run(test())
    assert "AddBroker" in caplog.text and "id=one" in caplog.text


@pytest.mark.parametrize("arguments", [{"broadcast": True}, {"group": "g"}], ids=["broadcast", "dead letters"])
def test_who_has_no_mailbox_is_refused_more_than_a_day(arguments):
    async def test():
        async with delay_cluster("d1") as (metaserver, broker, _):
            subject = "a" if "broadcast" in arguments else "%DEAD_RETRY%a%g"
            broker.add(subject, encode_message(Message(subject, {"n": 1}, id="one"), 7))
            async with consumer_of(metaserver).pull(subject, start="earliest", **arguments) as puller:
                (message,) = await puller.pull(1, timeout=10)
                with pytest.raises(InvalidRequest, match="86400"):
                    await message.nack(delay=2 * DAY_S)
                await message.nack(delay=DAY_S)

    run(test())
