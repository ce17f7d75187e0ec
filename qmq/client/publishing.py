"""Shell. Messages that handlers return: the consumer's producer sends them before the ack.

So they are at least once, as the handler's call: if the process ends between the two, the message is handled again and
its messages are sent again, with the same ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, Protocol

from qmq.client.batch import Receipts
from qmq.client.handler import Given, finished
from qmq.client.received import ReceivedMessage
from qmq.errors import InvalidRequest
from qmq.message import Message


class Sends(Protocol):
    """A producer, or a wrapper of one."""

    async def send_many(self, messages: Iterable[Message], /) -> Receipts: ...


class Publishing:
    """Sender of one handler's results.

    Args:
        reply_to: subject of results that are no messages; without it these are ignored.
    """

    def __init__(self, producer: Sends, reply_to: str | None) -> None:
        self._producer = producer
        self.reply_to = reply_to

    async def __call__(self, result: object, given: Given) -> None:
        """Complete a result and send its messages.

        Raises:
            QmqError: a message is not stored, or not known to be: the handler has failed.
        """
        messages = self._messages_of(await finished(result, is_sent=True))
        if not messages:
            return
        if isinstance(given, ReceivedMessage):
            for number, message in enumerate(messages):
                if message.id is None:
                    message.id = _id_of(given, message.subject, number)
        for receipt in await self._producer.send_many(messages):
            receipt.check()

    def _messages_of(self, result: Any) -> list[Message]:
        parts = result if isinstance(result, list | tuple) else [result]
        messages = [part for part in parts if isinstance(part, Message) and not isinstance(part, ReceivedMessage)]
        if messages or result is None or isinstance(result, ReceivedMessage) or self.reply_to is None:
            return messages
        return [Message.of(self.reply_to, result)]


def _id_of(given: ReceivedMessage, subject: str, number: int) -> str:
    """Return the id of a handler's message: the same at each delivery of the message that it handles."""
    parts = (str(given.id), given.group, subject, str(number))
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def check_producer(producer: Sends | None) -> Sends | None:
    """Return the producer of a consumer; raises InvalidRequest."""
    if producer is not None and not callable(getattr(producer, "send_many", None)):
        raise InvalidRequest(f"producer= is a qmq.Producer, not {producer!r:.100}")
    return producer


@asynccontextmanager
async def opened_for(producer: Any) -> AsyncIterator[None]:
    """Keep a consumer's producer open, unless the application opened it."""
    if producer is None or getattr(producer, "is_open", True):
        yield
        return
    async with producer:
        yield
