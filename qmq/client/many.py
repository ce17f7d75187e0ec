"""Shell. One call of `send_many`: reads the messages, puts them into batches, and keeps the receipts in their order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from qmq.client.batching import (
    BATCH_MESSAGES_MAX,
    Batch,
    MessageIds,
    Outcome,
    Receipt,
    Receipts,
    refused,
    unstored,
    with_labels,
)
from qmq.client.delaying import Delay
from qmq.client.encoding import encode_run
from qmq.client.queues import SubjectQueue, Waiting
from qmq.client.sender import Sender
from qmq.client.senders import Flight
from qmq.codec import batch_encoder, join_batch, label_of_message
from qmq.errors import InvalidMessage, InvalidName, InvalidRequest, QmqError
from qmq.message import Message, not_a_message
from qmq.plain import plain

READY_BATCHES_MAX = 2
"""Whole batches that are kept ready per subject, so that one can leave while the next is encoded."""
CHUNK_MESSAGES = BATCH_MESSAGES_MAX
"""Messages that are read from the iterable at once."""


class _Encoded(NamedTuple):
    """A message of a mixed chunk; `position` is its place there."""

    position: int
    id: str
    data: bytes
    label: int


class ManySend:
    """Made by a producer for each call; ends when all is resolved.

    Args:
        timeout_ms: from when there is room for a message.
        until_ms: when all of them are given up, by the sender's clock, also those that wait for room.
    """

    def __init__(
        self,
        sender: Sender,
        ids: MessageIds,
        timeout_ms: int,
        flight: Callable[[], Flight],
        delay: Delay | None = None,
        until_ms: int | None = None,
    ) -> None:
        self.receipts = Receipts()
        self._delay, self._due_ms = delay, delay.due_ms if delay else None
        self._sender, self._ids, self._timeout_ms, self._flight = sender, ids, timeout_ms, flight
        self._until_ms, self._unresolved = until_ms, 0
        self._stuck: set[str] = set()
        """Subjects whose last batch waited until its deadline: the rest need not wait as long again."""

    async def send(self, chunk: list[Message]) -> None:
        try:
            subjects = {message.subject for message in chunk}
        except AttributeError:
            raise next(not_a_message(one) for one in chunk if not isinstance(one, Message)) from None
        try:
            if len(subjects) == 1 and (self._delay is None or self._delay.key is None):
                await self._send_uniform(self._sender.queue(subjects.pop()), chunk)
                return
        except InvalidName:
            pass
        await self._send_mixed(chunk)

    async def all_resolved(self) -> None:
        while self._unresolved:
            await self._sender.wait()

    async def _send_uniform(self, queue: SubjectQueue, chunk: list[Message]) -> None:
        """Send messages of one subject. This is the hot path: nothing here is done per message without order key."""
        begin, now_ms = 0, _now_ms()
        while begin < len(chunk):
            run = encode_run(
                queue.subject,
                chunk,
                begin,
                ids=self._ids,
                now_ms=now_ms,
                due_ms=self._due_ms,
                bytes_max=self._sender.batch_bytes_max(queue.subject),
            )
            begin = run.end
            if run.ids:
                self.receipts.add(await self._submit(queue, run.ids, run.blocks, run.flags))
            if run.error is not None:
                self.receipts.add([self._refused(chunk[begin], run.error)])
                begin += 1
            elif begin < len(chunk) and chunk[begin].order_key is not None:
                end = next((at for at in range(begin, len(chunk)) if chunk[at].order_key is None), len(chunk))
                await self._send_mixed(chunk[begin:end])
                begin = end

    async def _send_mixed(self, chunk: list[Message]) -> None:
        """Send messages of several subjects: a batch for each, and one by one what has an order key."""
        now_ms = _now_ms()
        makers: list[Callable[[], Receipt]] = []
        by_subject: dict[str, list[_Encoded]] = {}
        for position, message in enumerate(chunk):
            try:
                self._sender.queue(message.subject)
                message.id = next(self._ids) if message.id is None else plain(message.id)
                delay = self._delay
                data = delay.encode(message, now_ms) if delay else batch_encoder(message.subject, now_ms)(message)
                encoded = _Encoded(position, message.id, data, label_of_message(message))
                if message.order_key is not None:
                    makers.append(await self._send_in_order(message.subject, encoded))
                    continue
                by_subject.setdefault(message.subject, []).append(encoded)
                makers.append(_not_sent)
            except (InvalidName, InvalidMessage) as error:
                makers.append(self._refused(message, error))
        for subject, messages in by_subject.items():
            for piece in _pieces(messages, self._sender.batch_bytes_max(subject)):
                blocks, flags = with_labels(join_batch([one.data for one in piece]), [one.label for one in piece])
                batch = await self._submit(self._sender.queue(subject), [one.id for one in piece], blocks, flags)
                for at, one in enumerate(piece):
                    makers[one.position] = partial(batch.receipt, at)
        self.receipts.add(makers)

    async def _send_in_order(self, subject: str, one: _Encoded) -> Callable[[], Receipt]:
        """Queue a message with an order key, once there is room: its batch is made when its broker group is known."""
        deadline_ms = self._deadline_ms()
        queue = await self._sender.room(subject, one.label, len(one.data), deadline_ms)
        if isinstance(queue, QmqError) or self._is_over():
            error = queue if isinstance(queue, QmqError) else self._sender.too_late(subject)
            receipt = unstored(Outcome.REFUSED, one.id, subject, "", error, self._due_ms)
            return lambda: receipt
        later, flight = _Later(), self._flight()
        self._unresolved += 1

        def done(receipt: Receipt) -> None:
            later.receipt = receipt if self._due_ms is None else receipt._replace(due_ms=self._due_ms)
            self._unresolved -= 1
            flight.open -= 1

        self._sender.add(queue, Waiting(one.data, one.id, deadline_ms, done, one.label))
        return later

    async def _submit(self, queue: SubjectQueue, ids: list[str], blocks: list[bytes], flags: int) -> Batch:
        """Queue a whole batch, once there is room for it."""
        while len(queue.ready) >= READY_BATCHES_MAX and not self._is_over():
            await self._sender.wait()
        deadline_ms, flight = self._deadline_ms(), self._flight()
        batch = Batch(queue.subject, ids, blocks, deadline_ms, partial(self._resolved, flight), flags, self._due_ms)
        self._unresolved += 1
        if self._is_over():
            batch.resolve(refused("", self._sender.too_late(queue.subject)))
        else:
            self._sender.add_batch(queue, batch)
            if queue.subject in self._stuck:
                self._sender.refuse_stuck(queue, batch)
        await asyncio.sleep(0)  # let the loop write it and read answers: encoding itself never waits
        return batch

    def _deadline_ms(self) -> int:
        return self._sender.now_ms() + self._timeout_ms if self._until_ms is None else self._until_ms

    def _is_over(self) -> bool:
        return self._until_ms is not None and self._sender.now_ms() >= self._until_ms

    def _refused(self, message: Message, error: QmqError) -> Callable[[], Receipt]:
        receipt = unstored(Outcome.REFUSED, str(message.id or ""), message.subject, "", error, self._due_ms)
        return lambda: receipt

    def _resolved(self, flight: Flight, batch: Batch) -> None:
        self._unresolved -= 1
        flight.open -= 1
        if batch.was_answered:
            self._stuck.discard(batch.subject)
        else:
            self._stuck.add(batch.subject)


class _Later:
    """A receipt that is there when everything is resolved."""

    __slots__ = ("receipt",)
    receipt: Receipt

    def __call__(self) -> Receipt:
        return self.receipt


def _not_sent() -> Receipt:
    raise InvalidRequest("the message has no outcome yet")


def _pieces(messages: list[_Encoded], bytes_max: int) -> Iterator[list[_Encoded]]:
    """Cut messages of one subject into pieces of so many bytes, or one message."""
    begin = size = 0
    for at, one in enumerate(messages):
        if size + len(one.data) > bytes_max and at > begin:
            yield messages[begin:at]
            begin, size = at, 0
        size += len(one.data)
    yield messages[begin:]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
