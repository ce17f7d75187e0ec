"""Shell. Helpers for tests of listeners and pullers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import qmq
from qmq.codec import batch_encoder
from qmq.message import Message
from tests.unit.client.fakes import TOKEN, FakeBroker, FakeMetaserver


def consumer_of(metaserver: FakeMetaserver, **options: Any) -> qmq.Consumer:
    return qmq.Consumer(metaserver=metaserver.url, app="test", token=TOKEN, **options)


def fill(broker: FakeBroker, numbers: Iterable[int], subject: str = "a") -> None:
    encode = batch_encoder(subject, 1)
    for number in numbers:
        broker.add(subject, encode(Message(subject, {"n": number}, id=f"{broker.name}-{number}")))


async def pull_all(puller: qmq.Puller, count: int) -> list[qmq.ReceivedMessage]:
    messages: list[qmq.ReceivedMessage] = []
    while len(messages) < count:
        messages += await puller.pull(count - len(messages), timeout=10)
    return messages


def ns(messages: Iterable[Message]) -> list[int]:
    return [int(message["n"]) for message in messages]


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def subscribes(broker: FakeBroker, subject: str = "a") -> list[dict[str, Any]]:
    """Return the fields of the SUBSCRIBE for `subject`."""
    return [fields for fields in broker.subscribes if fields["subject"] == subject]


@asynccontextmanager
async def listening(consumer: qmq.Consumer) -> AsyncIterator[asyncio.Task[None]]:
    """Run a consumer; stop it at the end, and raise its errors."""
    task = asyncio.create_task(consumer.run())
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        consumer.stop()
        await task
