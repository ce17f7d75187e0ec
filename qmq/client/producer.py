"""Shell. Producer for coroutines: encodes messages, queues them at the sender, and returns receipts."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload
from urllib.parse import urlsplit

from qmq import zstd
from qmq.access import Token, token_source
from qmq.client.backlog import Backlog, QueuedMessage, SubjectQueue
from qmq.client.batch import MessageIds, OnReceipt, Outcome, Receipt, Receipts, unstored
from qmq.client.bulk import BulkSend
from qmq.client.delay import (
    Delay,
    DelayArguments,
    DelayGroups,
    DelayOutcome,
    delay_of,
    due_of_call,
    schedule_request,
    target_of,
)
from qmq.client.handler import after_commit, call_back, check_callable
from qmq.client.health import Health, degraded, not_connected, worst
from qmq.client.journal import Journal, JournalWriter
from qmq.client.lifetime import check_loop, check_not_patched, closed, no_pickle, opened
from qmq.client.numbered_sender import NumberedSender
from qmq.client.numbers import Sample, register, state_samples
from qmq.client.outgoing import (
    ABSENT,
    Absent,
    MessageFields,
    Outgoing,
    OutgoingFilter,
    SendFields,
    payload_and_callback,
)
from qmq.client.sender import Sender, Senders
from qmq.client.terms import check_seconds, check_whole
from qmq.codec import batch_encoder, label_of_message
from qmq.control_plane import app_name, metaserver_urls
from qmq.errors import ClientClosed, InvalidRequest, QueueFull
from qmq.message import Message, not_a_message
from qmq.outbox.courier import Courier, find_database
from qmq.outbox.relay import LeftBehind, Relays
from qmq.outbox.table import DEFAULT_TABLE, table_name
from qmq.plain import plain
from qmq.remoting.commands import RecurringSchedule
from qmq.types import GroupKind

if TYPE_CHECKING:
    from qmq.payloads import Codec


class Producer:
    """Producer for one event loop; an async context manager, which may be entered again after its end.

    A message without an id gets one, and keeps it when the application sends it again.

    Args:
        metaserver: HTTP address, for instance "http://127.0.0.1:8080"; several as a list or separated by commas. One
            that answers is used, and another one when it fails. By default the value of QMQ_METASERVER.
        app: application name, shown to operators; by default the value of QMQ_APP.
        token: API token; by default the value of QMQ_TOKEN, or the content of the file that QMQ_TOKEN_FILE names. That
            file is read again for each connection.
        timeout_s: time until a message without an outcome is given up, retries included.
        readonly_wait_s: time until a message is refused while all broker groups of its subject are readonly; 0 refuses
            at once. The default is `timeout_s`, because most readonly reasons end without an operator.
        answer_timeout_s: time without an answer, and without a byte read by the broker, until a connection is closed
            and its batches are repeated on a new one.
        in_flight_max: produce requests in flight per subject and broker group. Messages that arrive meanwhile form the
            next batch. A broker group has at most 64 requests in flight over all subjects.
        queue_messages_max, queue_bytes_max: limits of the single messages of one subject that wait. At a limit, `send`
            waits and `send_nowait` raises QueueFull. All subjects together may have an eighth more, in fair shares. A
            `send_many` reads no further messages while `queue_bytes_max` bytes of it have no outcome.
        outbox: database of the application's outbox: an engine, the alias of a Django database, or a function that
            opens a DB-API connection. Rows of earlier processes are sent from the start on; without this argument, from
            the first message with a `session` on (docs/outbox.md).
        outbox_table: table in the databases of `session`s, "table" or "schema.table".
        outbox_age_s: age after which any producer of the database sends a row. It exceeds the `timeout_s` of all these
            producers; the default is 60, or twice `timeout_s` if that is more.
        journal: local files of acknowledged messages, for the audit; none by default.
        compress_bytes_min: smallest body that is compressed with zstd, if that makes it smaller (extra `zstd`, for
            consumers also); None for no compression.
        codec: codec of payloads; by default the codec of their type (docs/payloads.md).
        filters: plain functions that get each message before it is sent, in order, and return the one to send.
    """

    def __init__(
        self,
        *,
        metaserver: str | Sequence[str] | None = None,
        app: str | None = None,
        token: Token | None = None,
        timeout_s: float = 30.0,
        answer_timeout_s: float = 5.0,
        in_flight_max: int = 16,
        queue_messages_max: int = 100_000,
        queue_bytes_max: int = 64 << 20,
        outbox: object = None,
        outbox_table: str = DEFAULT_TABLE,
        outbox_age_s: float | None = None,
        journal: Journal | None = None,
        readonly_wait_s: float | None = None,
        compress_bytes_min: int | None = None,
        codec: Codec | None = None,
        filters: Sequence[OutgoingFilter] = (),
    ) -> None:
        check_not_patched()
        if not 0 < in_flight_max <= 64:
            raise InvalidRequest("in_flight_max must be 1 to 64: a broker remembers 64 batches of a producer")
        if readonly_wait_s is not None and not readonly_wait_s >= 0:
            raise InvalidRequest("readonly_wait_s must be 0 or more; leave it out to wait for timeout_s")
        self.id: int = 0
        self._metaserver = metaserver_urls(metaserver)
        self._app = app_name(app)
        self._token = token_source(token)
        self._timeout_ms = int(check_seconds("timeout_s", timeout_s, is_zero_allowed=False) * 1000)
        self._answer_timeout_s = check_seconds("answer_timeout_s", answer_timeout_s, is_zero_allowed=False)
        self._readonly_wait_ms = None if readonly_wait_s is None else int(min(readonly_wait_s, timeout_s) * 1000)
        self._in_flight_max = in_flight_max
        self._backlog = Backlog(queue_messages_max, queue_bytes_max)
        self._outbox_table = table_name(outbox_table)
        self._outbox_messages_max = queue_messages_max
        self._outbox_age_ms = max(60_000, 2 * self._timeout_ms)
        if outbox_age_s is not None:
            self._outbox_age_ms = int(check_seconds("outbox_age_s", outbox_age_s, is_zero_allowed=False) * 1000)
        if self._outbox_age_ms <= self._timeout_ms:
            raise InvalidRequest("outbox_age_s must exceed timeout_s: until then the row's own producer sends it")
        self._outbox_database = find_database(outbox) if outbox is not None else None
        self._outbox: Courier | None = None
        self._relays: Relays | None = None
        self._journal_place = journal
        if compress_bytes_min is not None:
            check_whole("compress_bytes_min", compress_bytes_min, 1)
            zstd.library()
        self._compress_bytes_min = compress_bytes_min
        self._outgoing = Outgoing(codec, filters)
        self._journal: JournalWriter | None = None
        self._callbacks: set[asyncio.Task[object]] = set()
        self._open_senders: Senders | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = self._is_parents = False

    def __getstate__(self) -> dict[str, Any]:
        if self.id:
            raise no_pickle("An opened producer")
        return self.__dict__

    # Opening and closing.

    async def __aenter__(self) -> Producer:
        if self._open_senders is not None:
            raise ClientClosed("the producer is open already: make another one for a second event loop or task")
        if self._is_parents:
            raise self._not_open()
        check_not_patched()
        self._is_closing = False
        self._backlog = Backlog(self._backlog.messages_max, self._backlog.bytes_max)
        self._outbox = self._relays = self._journal = None
        self._callbacks = set()
        self._loop = asyncio.get_running_loop()
        # The id is made here: workers forked from a process that made the producer would share an earlier id, and
        # brokers would take the first batch of each worker for a repeat.
        self.id = random.SystemRandom().randrange(1, 1 << 64)
        self._ids = MessageIds(_id_prefix(self._metaserver))
        if self._journal_place is not None:
            self._journal = JournalWriter(self._journal_place, f"{self._app}-{self.id:016x}")
        self._open_senders = Senders(self._new_sender)
        self._outbox = Courier(
            self._send_committed,
            table=self._outbox_table,
            id_prefix=_id_prefix(self._metaserver),
            messages_max=self._outbox_messages_max,
            used=self._open_relays().use,
            left=self._open_relays().left,
        )
        if self._outbox_database is not None:
            self._open_relays().use(self._outbox_database, wait_s=0.0)
        opened(self)
        register(self)
        return self

    def _open_relays(self) -> Relays:
        if self._relays is None:
            self._relays = Relays(
                new_sender=partial(
                    NumberedSender,
                    metaserver=self._metaserver,
                    token=self._token,
                    app=self._app,
                    answer_timeout_s=self._answer_timeout_s,
                ),
                table=self._outbox_table,
                timeout_ms=self._timeout_ms,
                age_ms=self._outbox_age_ms,
                under_way=lambda database: self._outbox.under_way(database) if self._outbox is not None else set(),
            )
        return self._relays

    @property
    def left_behind(self) -> list[LeftBehind]:
        """Databases with rows that are parked or older than `timeout_s`, with row count, oldest age and reason. Empty
        if all rows are sent.
        """
        return self._relays.left_behind if self._relays is not None and not self._is_parents else []

    @property
    def health(self) -> Health:
        """State of the connections and of the outbox, with the reason; from any thread."""
        senders = self._open_senders
        if senders is None or self._is_closing:
            return not_connected(str(self._not_open()))
        return worst((senders.health, *(degraded(str(left)) for left in self.left_behind if left.is_degraded)))

    def numbers(self) -> Iterator[Sample]:
        """Return the numbers of an opened producer, for `qmq.client.numbers`."""
        if (senders := self._open_senders) is None or self._is_parents:
            return
        backlog, left = self._backlog, self.left_behind
        gauges = {
            "open_messages": senders.open_messages,
            "queue_messages": backlog.messages,
            "queue_bytes": backlog.bytes,
            "requests_in_flight": senders.requests_in_flight,
            "repeats": backlog.repeats,
            "outbox_rows": sum(entry.rows for entry in left),
            "outbox_parked": sum(entry.parked for entry in left),
            "outbox_oldest_seconds": max((entry.oldest_s for entry in left), default=0.0),
        }
        yield from (Sample(name, (self._app,), value) for name, value in gauges.items())
        yield from (Sample("outcomes", (self._app, str(which)), count) for which, count in backlog.outcomes.items())
        yield from state_samples(self._app, "producer", self.health)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def flush(self) -> None:
        """Wait for the outcomes of all earlier messages (at most `timeout_s`) and for their callbacks.

        This includes messages of committed transactions and the deletion of their rows.

        Raises:
            ClientClosed: the producer is not open.
        """
        senders = self._senders
        await self.outbox.drain()
        await senders.flush()
        await self.callbacks_ended()

    async def callbacks_ended(self) -> None:
        """Wait at most `timeout_s` for the coroutines of callbacks."""
        if others := self._callbacks - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=self._timeout_ms / 1000)

    async def close(self) -> None:
        """Reject new messages, wait for all outcomes (at most `timeout_s`), and disconnect.

        If this call is cancelled, it disconnects at once: unsent messages are refused, sent ones have an unknown
        outcome.
        """
        if self._open_senders is not None and not self._is_parents:
            check_loop("the producer", self._loop)
        senders, self._is_closing = self._open_senders, True
        if senders is None or self._is_parents:
            return
        try:
            if self._relays is not None:
                await self._relays.close()
            while self._outbox is not None and self._outbox.is_busy:
                await self._outbox.drain()
            while not senders.is_idle:
                await senders.wait()
            await self.callbacks_ended()
        finally:
            if self._outbox is not None:
                self._outbox.stop()
            self._open_senders = None
            closed(self)
            await senders.stop()
            if self._journal is not None:
                self._journal.close()

    def _new_sender(self, kind: GroupKind) -> Sender:
        return Sender(
            metaserver=self._metaserver,
            token=self._token,
            app=self._app,
            producer_id=self.id,
            in_flight_max=self._in_flight_max,
            answer_timeout_s=self._answer_timeout_s,
            backlog=self._backlog,
            kind=kind,
            journal=self._journal,
            readonly_wait_ms=self._readonly_wait_ms,
        )

    @property
    def _senders(self) -> Senders:
        if self._open_senders is None or self._is_closing:
            raise self._not_open()
        check_loop("the producer", self._loop)
        return self._open_senders

    @property
    def outbox(self) -> Courier:
        """Queue of messages of transactions, for any thread; `send` and `send_many` with a `session` use it."""
        if self._outbox is None or self._is_closing:
            raise self._not_open()
        return self._outbox

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._open_senders is not None and not self._is_closing

    def inherited(self) -> None:
        """Close this copy in a forked process, which lacks the parent's event loop."""
        self._is_closing = self._is_parents = True

    @property
    def open_messages(self) -> int:
        """Number of messages without an outcome."""
        return 0 if self._open_senders is None else self._open_senders.open_messages

    def _not_open(self) -> ClientClosed:
        if self._is_parents:
            return ClientClosed("the producer was opened before this process was forked: open another one here")
        if self._is_closing:
            return ClientClosed("the producer was closed: use it within `async with producer:`")
        return ClientClosed("the producer is not open: use it within `async with producer:`")

    # Sending.

    def declare(self, subject: str, payload_type: Any = None, *, about: str = "") -> None:
        """Declare a message that the application sends, for `qmq asyncapi` (docs/payloads.md).

        From then on a payload for this subject is of this type, or of another declared one. Elements of lists are not
        checked.

        Args:
            payload_type: as in the annotation of a handler; None for a message of properties.
            about: a sentence about the message.

        Raises:
            InvalidName: the subject breaks the rules of `qmq.subjects`.
            InvalidRequest: `payload_type` is no type, or `about` is no text.
        """
        self._outgoing.declare(subject, payload_type, about)

    @overload
    async def send(
        self,
        message: Message,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
    ) -> Receipt: ...

    @overload
    async def send(self, message: Message, *, session: object) -> asyncio.Future[Receipt]: ...

    @overload
    async def send(self, subject: str, payload: object, /, **fields: Unpack[SendFields]) -> Receipt: ...

    @overload
    async def send(
        self, subject: str, payload: object, /, *, session: object, **fields: Unpack[MessageFields]
    ) -> asyncio.Future[Receipt]: ...

    async def send(
        self,
        message: Message | str,
        payload: object | Absent = ABSENT,
        *,
        session: object = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipt | asyncio.Future[Receipt]:
        """Send one message and return its receipt: stored, refused or unknown.

        `send(subject, payload, …)` encodes a payload as the body of a message; its other arguments follow:
        `properties`, `tags`, `id`, `order_key`, `retries_max`, `expires_after`, and the `codec` (docs/payloads.md).

        Messages sent at the same time share a batch. The call waits while the queue is full.

        Args:
            session: transaction of the application's database (docs/outbox.md). The message is written with it and sent
                after its commit. The call then returns a future of the receipt, which the application may ignore.
            delay, at: deliver the message after so many seconds (or a timedelta), or at a datetime with time zone. A
                delay server keeps it until then (docs/delay.md), and "stored" means stored there.
            key: key chosen by the application, by which `cancel` and `reschedule` find a delayed message.

        Raises:
            InvalidName, InvalidMessage: the message is not valid; do not retry.
            InvalidRequest: `session` is no session, the delay is not valid, or another event loop opened the producer.
            ClientClosed: the producer is not open.
        """
        later = read_delay(delay, at, key, session)
        message = self._outgoing.filtered_message(message, payload, fields)
        if session is not None:
            (receipt,) = await self.outbox.stage([message], session)
            return after_commit(asyncio.wrap_future(receipt))
        return await self._send_made(message, later)

    async def _send_made(self, message: Message, later: Delay | None) -> Receipt:
        """Send a message that the filters have passed."""
        senders = self._senders
        sender = senders.of(is_delayed=later is not None)
        queue, data, label = self._encode(sender, message, later)
        deadline_ms = sender.now_ms() + self._timeout_ms
        if not self._backlog.has_room(queue, len(data), label):
            room = await sender.room(message.subject, label, len(data), deadline_ms)
            if isinstance(room, QueueFull):
                sender.count_refused()
                return _due(unstored(Outcome.REFUSED, str(message.id), message.subject, "", room), later)
            queue = room
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        flight = senders.board()

        def done(receipt: Receipt) -> None:
            flight.open -= 1
            if not future.done():  # its task was cancelled
                future.set_result(_due(receipt, later))

        sender.add(queue, QueuedMessage(data, str(message.id), deadline_ms, done, label))
        return await future

    @overload
    def send_nowait(self, message: Message, on_done: OnReceipt, **delay: Unpack[DelayArguments]) -> None: ...

    @overload
    def send_nowait(
        self, subject: str, payload: object, on_done: OnReceipt, /, **fields: Unpack[SendFields]
    ) -> None: ...

    def send_nowait(
        self,
        message: Message | str,
        *rest: Any,
        on_done: Any = ABSENT,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> None:
        """Queue one message; `on_done(receipt)` runs on the event loop when the outcome is known.

        `send_nowait(message, on_done)`, or `send_nowait(subject, payload, on_done, …)` as in `send`.

        Args:
            on_done: a plain function, or a coroutine function that `flush` and `close` wait for.
            delay, at, key: see `send`.

        Raises:
            QueueFull: nothing was queued; retry later.
            InvalidName, InvalidRequest: the message is not valid, or a call of `on_done` would not run its body.
            ClientClosed: the producer is not open.
        """
        payload, on_done = payload_and_callback(message, rest, on_done)
        check_callable("on_done", on_done)
        self._queue_made(self._outgoing.filtered_message(message, payload, fields), on_done, read_delay(delay, at, key))

    def _queue_made(self, message: Message, on_done: OnReceipt, later: Delay | None) -> None:
        """Queue a message that the filters have passed; see `send_nowait`."""
        senders = self._senders
        sender = senders.of(is_delayed=later is not None)
        queue, data, label = self._encode(sender, message, later)
        if not self._backlog.has_room(queue, len(data), label):
            raise self._backlog.full()
        loop, flight = asyncio.get_running_loop(), senders.board()

        def failed(error: BaseException) -> None:  # affects this message alone, not the sender
            loop.call_exception_handler({"message": "on_done of send_nowait failed", "exception": error})

        def done(receipt: Receipt) -> None:
            flight.open -= 1
            call_back(on_done, _due(receipt, later), failed, self._callbacks)

        sender.add(queue, QueuedMessage(data, str(message.id), sender.now_ms() + self._timeout_ms, done, label))

    @overload
    async def send_many(
        self,
        messages: Iterable[Message],
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
    ) -> Receipts: ...

    @overload
    async def send_many(self, messages: Iterable[Message], *, session: object) -> list[asyncio.Future[Receipt]]: ...

    @overload
    async def send_many(
        self, subject: str, payloads: Iterable[object], /, **fields: Unpack[SendFields]
    ) -> Receipts: ...

    @overload
    async def send_many(
        self, subject: str, payloads: Iterable[object], /, *, session: object, **fields: Unpack[MessageFields]
    ) -> list[asyncio.Future[Receipt]]: ...

    async def send_many(
        self,
        messages: Iterable[Message] | str,
        payloads: Iterable[object] | Absent = ABSENT,
        *,
        session: object = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipts | list[asyncio.Future[Receipt]]:
        """Send messages and return their receipts, in the order of the messages.

        `send_many(subject, payloads, …)` sends payloads, with the arguments of `send` for all of them.

        The iterable is read as fast as brokers store messages, a few batches ahead. A message that is not valid gets a
        refused receipt; the others are not affected. If the iterable raises, the error is passed on, and messages read
        before may have been sent.

        Args:
            session: see `send`. With it, an invalid message raises and nothing is written.
            delay, at, key: see `send`; for all these messages.

        Raises:
            InvalidRequest: the delay is not valid.
            ClientClosed: the producer is not open.
        """
        later = read_delay(delay, at, key, session)
        messages = self._outgoing.filtered_messages(messages, payloads, fields)
        if session is not None:
            staged = await self.outbox.stage(messages, session)
            return [after_commit(asyncio.wrap_future(receipt)) for receipt in staged]
        if self._is_closing:
            raise self._not_open()
        return await self._send_all(messages, later)

    async def _send_committed(self, messages: Iterable[Message]) -> Receipts:
        """Send rows of a committed transaction with one deadline: after it, other producers send these rows."""
        return await self._send_all(messages, timeout_ms=self._timeout_ms)

    async def _send_all(
        self, messages: Iterable[Message], later: Delay | None = None, timeout_ms: int | None = None
    ) -> Receipts:
        """Send messages that the filters have passed. Also works while the producer is closing, for rows committed by
        then.

        Args:
            timeout_ms: common time limit of all messages; None gives each batch the producer's timeout, which begins
                when there is room for it.
        """
        if (senders := self._open_senders) is None:
            raise self._not_open()
        check_loop("the producer", self._loop)
        sender = senders.of(is_delayed=later is not None)
        until_ms = None if timeout_ms is None else sender.now_ms() + timeout_ms
        many = BulkSend(sender, self._ids, self._timeout_ms, senders.board, later, until_ms, self._compress_bytes_min)
        await many.send(messages)
        await many.all_resolved()
        return many.receipts

    # Delayed messages.

    @property
    def _delay_groups(self) -> DelayGroups:
        sender = self._senders.of(is_delayed=True)
        return DelayGroups(sender, timeout_ms=self._timeout_ms, answer_timeout_s=self._answer_timeout_s)

    async def cancel(
        self,
        receipt: Receipt | None = None,
        *,
        subject: str | None = None,
        id: str | None = None,
        key: str | None = None,
    ) -> DelayOutcome:
        """Cancel a delayed message: by receipt, by subject and id, or by subject and key.

        A key selects all its waiting messages. A receipt names the delay group; without a receipt, all delay groups get
        the request.

        Returns:
            `CANCELLED`: it will not be delivered. `SENT`: too late. `UNKNOWN`: no delay group has it. Each is final.

        Raises:
            NotServed: a delay group that may have the message did not answer within `timeout_s`; retry.
            InvalidRequest: the arguments select no message, or one without a delay.
            ClientClosed: the producer is not open.
        """
        return await self._delay_groups.cancel(target_of(receipt, subject, id, key))

    async def reschedule(
        self,
        receipt: Receipt | None = None,
        *,
        subject: str | None = None,
        id: str | None = None,
        key: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
    ) -> DelayOutcome:
        """Give a delayed message another due time: `delay` from now, or `at`.

        Returns:
            `RESCHEDULED`, `SENT` (too late), `CANCELLED` (before) or `UNKNOWN`.

        Raises: see `cancel`; also CallError if the delay server does not accept the time.
        """
        target, due_ms = target_of(receipt, subject, id, key), due_of_call(delay, at, now_ms=_now_ms())
        return await self._delay_groups.reschedule(target, due_ms)

    async def put_recurring(
        self, message: Message, *, name: str, cron: str, timezone: str, owner: str | None = None
    ) -> RecurringSchedule:
        """Store a recurring schedule: a copy of `message` is sent at each time of a cron expression.

        A schedule with the same name and subject is replaced. Storing the same schedule again changes nothing.

        Args:
            cron: five fields: minute, hour, day of the month, month, day of the week; "0 8 * * MON-FRI".
            timezone: time zone of the expression: "UTC", or a name such as "Europe/Berlin".
            owner: person or team to contact; by default the application's name.

        Returns:
            The schedule with its next due time, fsynced on both copies.

        Raises:
            CallError: an argument or the message is not valid; the text names the remedy.
            NotServed: a delay group did not answer within `timeout_s`; retry.
            BrokerReadOnly: all delay groups are readonly.
            ClientClosed: the producer is not open.
        """
        recur = schedule_request(
            self._outgoing.filtered_message(message, ABSENT, {}),
            name=name,
            cron=cron,
            timezone=timezone,
            owner=self._app if owner is None else owner,
        )
        return await self._delay_groups.put_schedule(recur)

    async def delete_recurring(self, *, subject: str, name: str) -> bool:
        """Delete a recurring schedule; return whether it existed. Occurrences that were due before are still sent.

        Raises: see `put_recurring`.
        """
        return await self._delay_groups.delete_schedule(subject, name)

    async def list_recurring(self, *, subject: str) -> list[RecurringSchedule]:
        """Return the recurring schedules of a subject, by name.

        Raises: see `put_recurring`.
        """
        return await self._delay_groups.list_schedules(subject)

    def _encode(self, sender: Sender, message: Message, later: Delay | None) -> tuple[SubjectQueue, bytes, int]:
        """Return the queue, bytes and label of a message; sets its id."""
        try:
            subject = message.subject
        except AttributeError:
            raise not_a_message(message) from None
        if subject.__class__ is not str:
            message.subject = subject = plain(subject)
        queue = sender.queue(subject)
        message.id = next(self._ids) if message.id is None else plain(message.id)
        now_ms, compress = _now_ms(), self._compress_bytes_min
        if later is None:
            data = batch_encoder(subject, now_ms, compress)(message)
        else:
            data = later.encode(message, now_ms, compress)
        if not message.tags and message.order_key is None:
            return queue, data, 0
        label = label_of_message(message)
        return sender.queue(subject, label), data, label


def read_delay(
    delay: float | timedelta | None = None, at: datetime | None = None, key: str | None = None, session: object = None
) -> Delay | None:
    """Return the delay of a call, counted from now, or None; raises InvalidRequest."""
    if delay is None and at is None:
        if key is None:
            return None
        raise InvalidRequest(
            "key= is for cancelling a delayed message and needs delay= or at=. Messages of one order have order_key="
        )
    if session is not None:
        raise InvalidRequest("a message of a session is sent after the commit: leave out delay, at and key")
    return delay_of(delay, at, key, now_ms=_now_ms())


def _due(receipt: Receipt, later: Delay | None) -> Receipt:
    return receipt if later is None else receipt._replace(due_ms=later.due_ms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _id_prefix(metaserver: str) -> str:
    """Return the prefix of a producer's message ids: `yyMMdd.HHmmss.ip.pid.` and ten random digits.

    With a counter appended, it has the form of QMQ's ids.
    """
    url = urlsplit(metaserver.partition(",")[0])
    own_ip, digits = _own_ip(url.hostname or ""), secrets.randbelow(9 * 10**9) + 10**9
    return f"{time.strftime('%y%m%d.%H%M%S')}.{own_ip}.{os.getpid()}.{digits}"


ANY_HOST = "192.0.2.1"
"""Address for documentation (RFC 5737), reached by the default route. Connecting a datagram socket sends nothing."""


def _own_ip(host: str) -> str:
    """Return the IPv4 address from which the kernel would reach `host`, or any host if that is a name.

    A name is not looked up: a silent name server would stop the event loop for 40 seconds.
    """
    try:
        target = str(ipaddress.IPv4Address(host))
    except ValueError:
        target = ANY_HOST
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 80))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
