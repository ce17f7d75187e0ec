"""Shell. The producer: takes messages, encodes them, and hands out receipts; `qmq.client.sender` carries them."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import time
from collections.abc import Iterable
from itertools import islice
from types import TracebackType
from typing import overload
from urllib.parse import urlsplit

from qmq.access import find_token
from qmq.client.batching import Done, MessageIds, Outcome, Receipt, Receipts, unstored
from qmq.client.flights import Flights
from qmq.client.many import CHUNK_MESSAGES, ManySend
from qmq.client.queues import Backlog, SubjectQueue, Waiting
from qmq.client.sender import Sender
from qmq.codec import batch_encoder, label_of_message
from qmq.errors import ClientClosed, InvalidRequest, QueueFull
from qmq.message import Message
from qmq.outbox.courier import Courier
from qmq.outbox.table import DEFAULT_TABLE, table_name


class Producer:
    """Sends messages; an async context manager, used on one event loop.

    Args:
        metaserver: HTTP address, for instance "http://127.0.0.1:8080".
        app: name of the application, for the operators.
        token: API token; if it is not given: of the variable QMQ_TOKEN, or the file that QMQ_TOKEN_FILE names.
        timeout_s: how long a message may wait for an answer that tells its outcome, retries included.
        answer_timeout_s: a connection that owes an answer for longer is given up, and the batch repeated on a new one.
        in_flight_max: produce requests in flight per broker group; what arrives meanwhile gathers to the next batch.
        queue_messages_max, queue_bytes_max: single messages of one subject that may wait; then `send` waits,
            `send_nowait` refuses. All subjects together may have an eighth more, in fair shares.
        outbox_table: the table in the databases of `session`s, "table" or "schema.table".

    The id of a message without one is made here, and set, so that whoever sends it again sends the same id.
    """

    def __init__(
        self, *, metaserver: str, app: str, token: str | None = None, timeout_s: float = 30.0,
        answer_timeout_s: float = 5.0, in_flight_max: int = 16, queue_messages_max: int = 100_000,
        queue_bytes_max: int = 64 << 20, outbox_table: str = DEFAULT_TABLE,
    ) -> None:  # fmt: skip
        if not 0 < in_flight_max <= 64:
            raise InvalidRequest("in_flight_max must be 1 to 64: a broker remembers 64 batches of a producer")
        self.id = random.SystemRandom().randrange(1, 1 << 64)
        self._metaserver, self._app = metaserver, app
        self._token = find_token(token)
        self._timeout_ms = int(timeout_s * 1000)
        self._answer_timeout_s = answer_timeout_s
        self._in_flight_max = in_flight_max
        self._backlog = Backlog(queue_messages_max, queue_bytes_max)
        self._outbox_table, self._outbox_messages_max = table_name(outbox_table), queue_messages_max
        self._outbox: Courier | None = None
        self._flights = Flights()
        self._ids = MessageIds(_id_prefix(metaserver))
        self._open_sender: Sender | None = None
        self._is_closing = False

    # Opening and closing.

    async def __aenter__(self) -> Producer:
        if self._open_sender is not None or self._is_closing:
            raise ClientClosed("a producer is opened once")
        self._open_sender = Sender(
            metaserver=self._metaserver, token=self._token, app=self._app, producer_id=self.id,
            in_flight_max=self._in_flight_max, answer_timeout_s=self._answer_timeout_s, backlog=self._backlog,
        )  # fmt: skip
        self._open_sender.start()
        self._outbox = Courier(
            self._send_all, table=self._outbox_table, id_prefix=_id_prefix(self._metaserver),
            messages_max=self._outbox_messages_max,
        )  # fmt: skip
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def flush(self) -> None:
        """Wait until everything that was given before has its outcome (no longer than `timeout_s`), and was told it.

        Messages of transactions that are committed are given with the commit; their rows are deleted, too.

        Raises:
            ClientClosed: the producer is not open.
        """
        await self.outbox.drain()
        sender, flights = self._sender, self._flights.depart()
        while any(flight.open for flight in flights):
            await sender.wait()

    async def close(self) -> None:
        """Take nothing more, send what waits, wait for its outcome (no longer than `timeout_s`), and disconnect.

        Cancelled, it disconnects at once: then what has no outcome yet is refused, or unknown if it was sent.
        """
        sender, self._is_closing = self._open_sender, True
        if sender is None:
            return
        try:
            if self._outbox is not None:
                await self._outbox.drain()
            while not sender.is_idle:
                await sender.wait()
        finally:
            if self._outbox is not None:
                self._outbox.stop()
            self._open_sender = None
            await sender.stop()

    @property
    def _sender(self) -> Sender:
        if self._open_sender is None or self._is_closing:
            raise ClientClosed("the producer is not open")
        return self._open_sender

    @property
    def outbox(self) -> Courier:
        """What takes messages of transactions, from any thread: `send` and `send_many` with a `session` use it."""
        if self._outbox is None or self._is_closing:
            raise ClientClosed("the producer is not open")
        return self._outbox

    # Sending.

    @overload
    async def send(self, message: Message) -> Receipt: ...

    @overload
    async def send(self, message: Message, *, session: object) -> asyncio.Future[Receipt]: ...

    async def send(self, message: Message, *, session: object = None) -> Receipt | asyncio.Future[Receipt]:
        """Send one message and wait for its receipt, which says stored, refused or unknown.

        Messages that are sent at the same time travel in one batch. When the queue is full, this waits.

        Args:
            session: a transaction of the application's database (docs/outbox.md). The message is written with it, and
                sent after its commit. Returned is a future of the receipt then; nobody needs to wait for it.

        Raises:
            InvalidName, InvalidMessage: it can never be sent as it is.
            InvalidRequest: nobody knows such a session.
            ClientClosed: the producer is not open.
        """
        if session is not None:
            (receipt,) = await self.outbox.stage([message], session)
            return asyncio.wrap_future(receipt)
        sender = self._sender
        queue, data, label = self._encode(sender, message)
        deadline_ms = sender.now_ms() + self._timeout_ms
        if not self._backlog.has_room(queue, len(data)):
            room = await sender.room(message.subject, label, len(data), deadline_ms)
            if isinstance(room, QueueFull):
                return unstored(Outcome.REFUSED, str(message.id), message.subject, "", room)
            queue = room
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        flight = self._flights.board()

        def done(receipt: Receipt) -> None:
            flight.open -= 1
            if not future.done():  # whoever was cancelled need not hear of it
                future.set_result(receipt)

        self._sender.add(queue, Waiting(data, str(message.id), deadline_ms, done, label))
        return await future

    def send_nowait(self, message: Message, on_done: Done) -> None:
        """Queue one message; `on_done(receipt)` is called on the event loop when its outcome is known.

        Raises:
            QueueFull: nothing was queued; send it again later.
            InvalidName, InvalidMessage: it can never be sent as it is.
            ClientClosed: the producer is not open.
        """
        sender = self._sender
        queue, data, label = self._encode(sender, message)
        if not self._backlog.has_room(queue, len(data)):
            raise self._backlog.full()
        loop, flight = asyncio.get_running_loop(), self._flights.board()

        def done(receipt: Receipt) -> None:
            flight.open -= 1
            try:
                on_done(receipt)
            except Exception as error:  # it concerns this message alone, not the sender that calls it
                loop.call_exception_handler({"message": "on_done of send_nowait failed", "exception": error})

        sender.add(queue, Waiting(data, str(message.id), sender.now_ms() + self._timeout_ms, done, label))

    @overload
    async def send_many(self, messages: Iterable[Message]) -> Receipts: ...

    @overload
    async def send_many(self, messages: Iterable[Message], *, session: object) -> list[asyncio.Future[Receipt]]: ...

    async def send_many(
        self, messages: Iterable[Message], *, session: object = None
    ) -> Receipts | list[asyncio.Future[Receipt]]:
        """Send messages and wait for all receipts, which come in the order of the messages.

        The iterable is read as fast as brokers take messages; only a few batches of it are in memory at a time. A
        message that can never be sent gets a refused receipt; the others are not affected. An error of the iterable
        itself is passed on; what was read before the error may have been sent.

        Args:
            session: see `send`. Then a message that can never be sent raises, and nothing is written.

        Raises:
            ClientClosed: the producer is not open.
        """
        if session is not None:
            return [asyncio.wrap_future(receipt) for receipt in await self.outbox.stage(messages, session)]
        if self._is_closing:
            raise ClientClosed("the producer is not open")
        return await self._send_all(messages)

    async def _send_all(self, messages: Iterable[Message]) -> Receipts:
        """Also while the producer is closing: what is committed by then is sent."""
        if (sender := self._open_sender) is None:
            raise ClientClosed("the producer is not open")
        many = ManySend(sender, self._ids, self._timeout_ms, self._flights.board)
        iterator = iter(messages)
        while chunk := list(islice(iterator, CHUNK_MESSAGES)):
            await many.send(chunk)
        await many.all_resolved()
        return many.receipts

    def _encode(self, sender: Sender, message: Message) -> tuple[SubjectQueue, bytes, int]:
        """Return where a message waits, its bytes and its label; sets its id."""
        queue = sender.queue(message.subject)
        if message.id is None:
            message.id = next(self._ids)
        data = batch_encoder(message.subject, _now_ms())(message)
        if not message.tags and message.order_key is None:
            return queue, data, 0
        label = label_of_message(message)
        return sender.queue(message.subject, label), data, label


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _id_prefix(metaserver: str) -> str:
    """Make the part of message ids that no other producer has: `yyMMdd.HHmmss.ip.pid.` and ten random digits.

    With a count behind it, it has the form of QMQ's ids.
    """
    url = urlsplit(metaserver if "://" in metaserver else f"http://{metaserver}")
    own_ip, digits = _own_ip(url.hostname or "127.0.0.1", url.port or 80), secrets.randbelow(9 * 10**9) + 10**9
    return f"{time.strftime('%y%m%d.%H%M%S')}.{own_ip}.{os.getpid()}.{digits}"


def _own_ip(host: str, port: int) -> str:
    """Ask the kernel from which address it would reach the metaserver; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
