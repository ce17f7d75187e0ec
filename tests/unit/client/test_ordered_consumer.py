"""Shell. Decisions on messages with order keys are sent at once: later messages wait for them."""

from __future__ import annotations

import asyncio

import qmq
from qmq.client import group_session
from qmq.codec import batch_encoder
from tests.support.waiting import until_async
from tests.unit.client.world import listening


async def test_slow_message_delays_no_other_key(monkeypatch, consumer, broker):
    monkeypatch.setattr(group_session, "SWEEP_S", 1_000.0)

    encode = batch_encoder("a", 1)
    for number in range(5):
        broker.add("a", encode(qmq.Message("a", {"n": str(number)}, id=f"m{number}", order_key=f"k{number}")))
    gate = asyncio.Event()

    @consumer.listen("a", group="g", start="earliest", concurrency=5)
    async def handle(message: qmq.ReceivedMessage) -> None:
        if message["n"] == "0":
            await gate.wait()

    async with listening(consumer):
        await until_async(lambda: broker.acks and broker.unacked() == [0])
        gate.set()
