"""Shell. Delivery limits: a message's own, otherwise its group's, however each delivery ended."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq.codec import encode_message
from qmq.dead_letters import delivered
from qmq.testing import Broker
from tests.support.waiting import until_async
from tests.unit.client.world import listening


@pytest.mark.parametrize("own, expected", [(None, 3), (5, 5), (1, 1)])
async def test_own_retry_limit_applies(own, expected):
    async with Broker() as broker, qmq.Producer(metaserver=broker.metaserver, app="test") as producer:
        await producer.send(qmq.Message("s", {"n": "1"}, retries_max=own))
        consumer, times = qmq.Consumer(metaserver=broker.metaserver, app="test"), []

        @consumer.listen("s", group="g", start="earliest", retries_max=3, retry_delay=0.0)
        async def handle(message: qmq.ReceivedMessage) -> None:
            times.append(message.times)
            raise ValueError("always")

        running = asyncio.create_task(consumer.run())
        await broker.wait_until_consumed("s", "g")
        consumer.stop()
        await running
        assert times == list(range(1, expected + 1))
        (dead,) = broker.dead_letters("s", "g")
        assert dead["qmq_times"] == str(expected)


@pytest.mark.parametrize(
    "own, given, is_handled",
    [(None, 3, True), (None, 4, False), (None, 7, False), (5, 5, True), (5, 6, False), (1, 2, False), (1, 4, False)],
)
async def test_vanished_consumers_count_as_deliveries(own, given, is_handled, consumer, broker):
    """No consumer decided it: the next client checks the limit before a handler begins."""
    broker.add("a", encode_message(qmq.Message("a", {"n": "0"}, id="m", retries_max=own), 0))
    broker.earlier = {0: given - 1}
    handled = []

    @consumer.listen("a", group="g", start="earliest", retries_max=3)
    async def handle(message: qmq.ReceivedMessage) -> None:
        handled.append(message.times)

    async with listening(consumer):
        await until_async(lambda: broker.acks or broker.nacks)
    assert handled == ([given] if is_handled else [])
    reasons = [nack.reason for nack in broker.nacks]
    assert reasons == ([] if is_handled else [f"{delivered(given - 1)}, and never acked"])
    assert [reason for _, reason in broker.dead["a", "g"]] == reasons
