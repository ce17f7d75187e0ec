"""Shell. The producer: takes messages, encodes them, and hands out receipts; `qmq.client.sender` carries them."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from types import TracebackType
from urllib.parse import urlsplit

from qmq.access import find_token
from qmq.client.batching import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    Batch,
    Done,
    MessageIds,
    Outcome,
    Receipt,
    Receipts,
    SubjectQueue,
    Waiting,
)  # fmt: skip
from qmq.client.encoding import encode_run
from qmq.client.sender import Sender
from qmq.codec import batch_encoder, join_batch
from qmq.errors import ClientClosed, InvalidMessage, InvalidName, InvalidRequest, QueueFull
from qmq.message import Message

READY_BATCHES_MAX = 2
"""Whole batches that `send_many` keeps ready per subject, so that one can leave while the next is encoded."""


class Producer:
    """Sends messages; an async context manager, used on one event loop.

    Args:
        metaserver: HTTP address, for instance "http://127.0.0.1:8080".
        app: name of the application, for the operators.
        token: API token; if it is not given: of the variable QMQ_TOKEN, or the file that QMQ_TOKEN_FILE names.
        timeout_s: how long a message may wait for an answer that tells its outcome, retries included.
        answer_timeout_s: a connection that owes an answer for longer is given up, and the batch repeated on a new one.
        in_flight_max: produce requests in flight per broker group; what arrives meanwhile gathers to the next batch.
        queue_messages_max, queue_bytes_max: single messages that may wait; then `send` waits, `send_nowait` refuses.

    The id of a message without one is made here, and set, so that whoever sends it again sends the same id.
    """

    def __init__(
        self, *, metaserver: str, app: str, token: str | None = None, timeout_s: float = 30.0,
        answer_timeout_s: float = 5.0, in_flight_max: int = 16, queue_messages_max: int = 100_000,
        queue_bytes_max: int = 64 << 20,
    ) -> None:  # fmt: skip
        if not 0 < in_flight_max <= 64:
            raise InvalidRequest("in_flight_max must be 1 to 64: a broker remembers 64 batches of a producer")
        self.id = random.SystemRandom().randrange(1, 1 << 64)
        self._metaserver, self._app = metaserver, app
        self._token = find_token(token)
        self._timeout_ms = int(timeout_s * 1000)
        self._answer_timeout_s = answer_timeout_s
        self._in_flight_max = in_flight_max
        self._queue_messages_max, self._queue_bytes_max = queue_messages_max, queue_bytes_max
        self._ids = MessageIds(_id_prefix(metaserver))
        self._open_sender: Sender | None = None
        self._is_closing = False

    # Opening and closing.

    async def __aenter__(self) -> Producer:
        if self._open_sender is not None or self._is_closing:
            raise ClientClosed("a producer is opened once")
        self._open_sender = Sender(
            metaserver=self._metaserver, token=self._token, app=self._app, producer_id=self.id,
            in_flight_max=self._in_flight_max, answer_timeout_s=self._answer_timeout_s,
        )  # fmt: skip
        self._open_sender.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what waits, wait for its outcome (no longer than `timeout_s`), and disconnect."""
        sender, self._is_closing = self._open_sender, True
        if sender is None:
            return
        try:
            while not sender.is_idle:
                await sender.wait()
        finally:
            self._open_sender = None
            await sender.stop()

    @property
    def _sender(self) -> Sender:
        if self._open_sender is None or self._is_closing:
            raise ClientClosed("the producer is not open")
        return self._open_sender

    # Sending.

    async def send(self, message: Message) -> Receipt:
        """Send one message and wait for its receipt, which says stored, refused or unknown.

        Messages that are sent at the same time travel in one batch. When the queue is full, this waits.

        Raises:
            InvalidName, InvalidMessage: it can never be sent as it is.
            ClientClosed: the producer is not open.
        """
        data = self._encode(message)
        while self._is_full(len(data)):
            await self._sender.wait()
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._enqueue(message, data, lambda receipt: None if future.done() else future.set_result(receipt))
        return await future

    def send_nowait(self, message: Message, on_done: Done) -> None:
        """Queue one message; `on_done(receipt)` is called on the event loop when its outcome is known.

        Raises:
            QueueFull: nothing was queued; send it again later.
            InvalidName, InvalidMessage: it can never be sent as it is.
            ClientClosed: the producer is not open.
        """
        data = self._encode(message)
        if self._is_full(len(data)):
            raise QueueFull(f"{self._sender.queued_messages} messages wait already, {self._sender.queued_bytes} bytes")
        loop = asyncio.get_running_loop()

        def done(receipt: Receipt) -> None:
            try:
                on_done(receipt)
            except Exception as error:  # it concerns this message alone, not the sender that calls it
                loop.call_exception_handler({"message": "on_done of send_nowait failed", "exception": error})

        self._enqueue(message, data, done)

    async def send_many(self, messages: Iterable[Message]) -> Receipts:
        """Send messages and wait for all receipts, which come in the order of the messages.

        The iterable is read as fast as brokers take messages; only a few batches of it are in memory at a time. A
        message that can never be sent gets a refused receipt; the others are not affected. An error of the iterable
        itself is passed on; what was read before the error may have been sent.

        Raises:
            ClientClosed: the producer is not open.
        """
        run = _Run(self._sender, self._ids, self._timeout_ms)
        iterator = iter(messages)
        while chunk := list(islice(iterator, BATCH_MESSAGES_MAX)):
            await run.send(chunk)
        await run.all_resolved()
        return run.receipts

    def _encode(self, message: Message) -> bytes:
        self._sender.queue(message.subject)
        if message.id is None:
            message.id = next(self._ids)
        return batch_encoder(message.subject, _now_ms())(message)

    def _is_full(self, size: int) -> bool:
        sender = self._sender
        return sender.queued_messages >= self._queue_messages_max or (
            sender.queued_messages > 0 and sender.queued_bytes + size > self._queue_bytes_max
        )

    def _enqueue(self, message: Message, data: bytes, done: Done) -> None:
        sender = self._sender
        sender.add(message.subject, Waiting(data, str(message.id), sender.now_ms() + self._timeout_ms, done))


class _Run:
    """One call of `send_many`."""

    def __init__(self, sender: Sender, ids: MessageIds, timeout_ms: int) -> None:
        self.receipts = Receipts()
        self._sender, self._ids, self._timeout_ms = sender, ids, timeout_ms
        self._unresolved = 0

    async def send(self, chunk: list[Message]) -> None:
        subjects = {message.subject for message in chunk}
        try:
            if len(subjects) == 1:
                await self._send_uniform(self._sender.queue(subjects.pop()), chunk)
                return
        except InvalidName:
            pass
        await self._send_mixed(chunk)

    async def all_resolved(self) -> None:
        while self._unresolved:
            await self._sender.wait()

    async def _send_uniform(self, queue: SubjectQueue, chunk: list[Message]) -> None:
        """Send messages of one subject. This is the hot path: nothing here is done per message."""
        begin, now_ms = 0, _now_ms()
        while begin < len(chunk):
            run = encode_run(queue.subject, chunk, begin, ids=self._ids, now_ms=now_ms)
            begin = run.end
            if run.ids:
                self.receipts.add(await self._submit(queue, run.ids, run.blocks))
            if run.error is not None:
                self.receipts.add([_refused(chunk[begin], run.error)])
                begin += 1

    async def _send_mixed(self, chunk: list[Message]) -> None:
        """Send messages of several subjects: a batch for each, receipts in the order given."""
        now_ms = _now_ms()
        makers: list[Callable[[], Receipt]] = []
        by_subject: dict[str, list[tuple[int, str, bytes]]] = {}
        for position, message in enumerate(chunk):
            try:
                self._sender.queue(message.subject)
                if message.id is None:
                    message.id = next(self._ids)
                data = batch_encoder(message.subject, now_ms)(message)
                by_subject.setdefault(message.subject, []).append((position, message.id, data))
                makers.append(_not_sent)
            except (InvalidName, InvalidMessage) as error:
                makers.append(_refused(message, error))
        for subject, entries in by_subject.items():
            for piece in _pieces(entries):
                ids, parts = [id for _, id, _ in piece], [data for _, _, data in piece]
                batch = await self._submit(self._sender.queue(subject), ids, [join_batch(parts)])
                for at, (position, _, _) in enumerate(piece):
                    makers[position] = partial(batch.receipt, at)
        self.receipts.add(makers)

    async def _submit(self, queue: SubjectQueue, ids: list[str], blocks: list[bytes]) -> Batch:
        """Queue a whole batch, once there is room for it."""
        while len(queue.ready) >= READY_BATCHES_MAX:
            await self._sender.wait()
        deadline_ms = self._sender.now_ms() + self._timeout_ms
        batch = Batch(queue.subject, ids, blocks, deadline_ms, self._resolved)
        self._unresolved += 1
        self._sender.add_batch(batch)
        await asyncio.sleep(0)  # let the loop write it and read answers: encoding itself never waits
        return batch

    def _resolved(self, _: Batch) -> None:
        self._unresolved -= 1


def _not_sent() -> Receipt:
    raise InvalidRequest("the message has no outcome yet")


def _refused(message: Message, error: Exception) -> Callable[[], Receipt]:
    receipt = Receipt(Outcome.REFUSED, str(message.id or ""), message.subject, "", -1, None, str(error))
    return lambda: receipt


def _pieces(entries: list[tuple[int, str, bytes]]) -> Iterator[list[tuple[int, str, bytes]]]:
    """Cut entries of one subject into pieces that are small enough for a batch."""
    begin = size = 0
    for at, (_, _, data) in enumerate(entries):
        if size + len(data) > BATCH_BYTES_MAX and at > begin:
            yield entries[begin:at]
            begin, size = at, 0
        size += len(data)
    yield entries[begin:]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _id_prefix(metaserver: str) -> str:
    """Make the part of message ids that no other producer has: `yyMMdd.HHmmss.ip.pid.token`."""
    url = urlsplit(metaserver if "://" in metaserver else f"http://{metaserver}")
    moment = time.strftime("%y%m%d.%H%M%S")
    return f"{moment}.{_own_ip(url.hostname or '127.0.0.1', url.port or 80)}.{os.getpid()}.{secrets.token_hex(4)}-"


def _own_ip(host: str, port: int) -> str:
    """Ask the kernel from which address it would reach the metaserver; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
