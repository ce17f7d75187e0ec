"""Shell. Producer for programs without an event loop: `qmq.Producer`, used from any number of threads."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import datetime, timedelta
from functools import partial
from threading import Condition, Lock
from types import TracebackType
from typing import Any, Final, Self, Unpack, overload

from qmq.blocking import background as process
from qmq.blocking.background import Background, arguments_of, waits_for
from qmq.client.batch import OnReceipt, Receipt, Receipts
from qmq.client.delay import Delay, DelayArguments
from qmq.client.handler import check_callable
from qmq.client.health import CONNECTED, Health, not_connected
from qmq.client.outgoing import ABSENT, Absent, MessageFields, SendFields, payload_and_callback
from qmq.client.producer import Producer as AsyncProducer
from qmq.client.producer import read_delay
from qmq.errors import ClientClosed, InvalidRequest, QueueFull
from qmq.logs import bounded
from qmq.message import Message
from qmq.outbox.relay import LeftBehind

log = bounded(__name__)

CHUNK_MESSAGES_MAX = 10_000
CHUNK_BYTES_MAX = 16 << 20
"""Size of the chunk that `send_many` reads in the caller's thread before it sends. The wait for the chunk's last
receipt, a few milliseconds, is short beside the time to send it.
"""
PASS_MESSAGES_MAX = 1_000
"""Messages per pass of the loop: one batch of the producer."""
AGAIN_S = 0.01
"""Pause before a retry when the producer's queue is full."""
MESSAGE_BYTES = 200
"""Estimated memory of a message beside its texts and body."""
EXIT_S = 5.0
"""Time added to `timeout_s` at the end of a process, because the timeout of messages that wait for room begins late."""


class Producer:
    """Producer for any number of threads, such as the workers of a web server. A context manager, which may be entered
    again after its end.

    It connects on first use. A forked process connects on its own first use, as another producer; messages in flight in
    the parent stay with the parent. The end of the process waits for all outcomes, at most `timeout_s` and five
    seconds, and logs the number of messages that are not stored.

    Args: see `qmq.Producer`.
    """

    @arguments_of(AsyncProducer.__init__)
    def __init__(self, **settings: Any) -> None:
        self._make = partial(AsyncProducer, **settings)
        first = self._make()  # wrong arguments are refused here, not in a worker an hour later
        if getattr(first._outbox_database, "is_async", False):
            raise InvalidRequest("the outbox engine is for coroutines: use qmq.Producer")
        self._app = first._app
        self._outgoing = first._outgoing
        self._timeout_s = first._timeout_ms / 1000
        self._messages_max = first._backlog.messages_max
        self._bytes_max = first._backlog.bytes_max
        self._open: _Session | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        self._is_closed = False
        self._session()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings for a spawned process, which connects by itself."""
        return self.__dict__ | {"_open": None}

    def declare(self, subject: str, payload_type: Any = None, *, about: str = "") -> None:
        """Declare a message that the application sends: see `qmq.Producer.declare`."""
        self._outgoing.declare(subject, payload_type, about)

    @overload
    def send(self, message: Message, **delay: Unpack[DelayArguments]) -> Receipt: ...

    @overload
    def send(self, message: Message, *, session: object) -> Future[Receipt]: ...

    @overload
    def send(self, subject: str, payload: object, /, **fields: Unpack[SendFields]) -> Receipt: ...

    @overload
    def send(
        self, subject: str, payload: object, /, *, session: object, **fields: Unpack[MessageFields]
    ) -> Future[Receipt]: ...

    def send(
        self,
        message: Message | str,
        payload: object | Absent = ABSENT,
        *,
        session: object = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipt | Future[Receipt]:
        """Send one message, or a payload, and return its receipt: see `qmq.Producer.send`."""
        later = read_delay(delay, at, key, session)
        message = self._outgoing.filtered_message(message, payload, fields)
        own = self._session()
        if session is not None:
            (receipt,) = own.stage([message], session)
            return receipt
        return own.background.run(own.producer._send_made(message, later))

    @overload
    def send_many(self, messages: Iterable[Message], **delay: Unpack[DelayArguments]) -> Receipts: ...

    @overload
    def send_many(self, messages: Iterable[Message], *, session: object) -> list[Future[Receipt]]: ...

    @overload
    def send_many(self, subject: str, payloads: Iterable[object], /, **fields: Unpack[SendFields]) -> Receipts: ...

    @overload
    def send_many(
        self, subject: str, payloads: Iterable[object], /, *, session: object, **fields: Unpack[MessageFields]
    ) -> list[Future[Receipt]]: ...

    def send_many(
        self,
        messages: Iterable[Message] | str,
        payloads: Iterable[object] | Absent = ABSENT,
        *,
        session: object = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipts | list[Future[Receipt]]:
        """Send messages, or payloads, and return their receipts in this order: see `qmq.Producer.send_many`.

        The iterable is read in this thread, up to 10,000 messages or 16 MiB ahead.
        """
        later = read_delay(delay, at, key, session)
        messages = self._outgoing.filtered_messages(messages, payloads, fields)
        own = self._session()
        if session is not None:
            return own.stage(messages, session)
        receipts = Receipts()
        for chunk in _chunks(messages):
            receipts.extend(own.background.run(own.producer._send_all(chunk, later)))
        return receipts

    @overload
    def send_nowait(
        self, message: Message, on_done: OnReceipt | None = None, **delay: Unpack[DelayArguments]
    ) -> Future[Receipt]: ...

    @overload
    def send_nowait(
        self, subject: str, payload: object, on_done: OnReceipt | None = None, /, **fields: Unpack[SendFields]
    ) -> Future[Receipt]: ...

    def send_nowait(
        self,
        message: Message | str,
        *rest: Any,
        on_done: OnReceipt | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Future[Receipt]:
        """Queue one message, or a payload, and return a future of its receipt, which cannot be cancelled. A message
        that brokers would refuse sets its error on the future.

        Args:
            on_done: called with the receipt on the background thread, where it must not wait.
            delay, at, key, and those of a payload: see `qmq.Producer.send`.

        Raises:
            QueueFull: nothing was queued; retry later.
            InvalidMessage: the payload cannot be encoded.
            InvalidRequest: the delay is not valid.
            ClientClosed: the producer is closed.
        """
        payload, callback = payload_and_callback(message, rest, on_done, is_optional=True)
        made = self._outgoing.filtered_message(message, payload, fields)
        return self._session().put(made, callback, read_delay(delay, at, key))

    cancel: Final = waits_for(AsyncProducer.cancel)
    reschedule: Final = waits_for(AsyncProducer.reschedule)
    put_recurring: Final = waits_for(AsyncProducer.put_recurring)
    delete_recurring: Final = waits_for(AsyncProducer.delete_recurring)
    list_recurring: Final = waits_for(AsyncProducer.list_recurring)

    @property
    def left_behind(self) -> list[LeftBehind]:
        """Unsent outbox rows of this process: see `qmq.Producer.left_behind`. Empty before the first use."""
        session = self._open_here()
        return session.producer.left_behind if session is not None else []

    @property
    def health(self) -> Health:
        """State of this process's connections and outbox: see `qmq.Producer.health`. Before the first use it is
        "connected", because no connection is needed yet.
        """
        if self._is_closed:
            return not_connected("the producer is closed")
        session = self._open_here()
        return session.producer.health if session is not None else CONNECTED

    def flush(self, timeout: float | None = None) -> None:
        """Wait for the outcomes of all earlier messages of `send_nowait` and of transactions.

        Raises:
            TimeoutError: outcomes are missing after `timeout` seconds; sending continues.
        """
        if (session := self._open_here()) is not None:
            session.flush(timeout)

    def close(self) -> None:
        """Wait for all outcomes (at most `timeout_s`), and disconnect."""
        self._is_closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """Close as `close` does, but connect again on the next use."""
        session, self._open = self._open_here(), None
        if session is not None:
            session.close()

    def flush_at_exit(self) -> None:
        """Flush within limits at the end of the process, and log how many messages are not stored."""
        if (session := self._open_here()) is not None:
            session.flush_at_exit()

    def _open_here(self) -> _Session | None:
        """Return this process's session, or None."""
        session = self._open
        return session if session is not None and session.background is process.current() else None

    def _session(self) -> _Session:
        if (session := self._open_here()) is not None and not self._is_closed:
            return session
        with process.lock:
            if self._is_closed:
                raise ClientClosed("the producer is closed")
            if (session := self._open_here()) is None:
                session = self._open = _Session(self, process.background())
            return session

    def _connect(self) -> AsyncProducer:
        """Open this process's producer now; return it, for coroutines of its loop."""
        return self._session().producer

    def _opened(self) -> tuple[Background, AsyncProducer]:
        session = self._session()
        return session.background, session.producer


class _Session:
    """Session of a producer in one process, made on first use."""

    def __init__(self, owner: Producer, background: Background) -> None:
        self.background = background
        self.producer = owner._make()
        self._owner = owner
        self._lock = Lock()
        self._outbox: deque[_Sent] = deque()
        self._under_way: set[_Sent] = set()
        self._bytes = 0
        self._is_emptying = False
        self._is_given_up = False
        """Whether messages without an outcome were given up at the end of the process."""
        background.run(self.producer.__aenter__())
        background.clients.add(owner)

    def put(self, message: Message, on_done: OnReceipt | None, later: Delay | None) -> Future[Receipt]:
        if on_done is not None:
            check_callable("on_done", on_done)
        sent = _Sent(message, on_done, later)
        with self._lock:
            if len(self._under_way) >= self._owner._messages_max or (
                self._under_way and self._bytes + sent.size > self._owner._bytes_max
            ):
                raise QueueFull(f"{len(self._under_way)} messages have no outcome yet, about {self._bytes} bytes")
            self._under_way.add(sent)
            self._bytes += sent.size
            self._outbox.append(sent)
            wakes, self._is_emptying = not self._is_emptying, True
        if wakes:  # otherwise the loop is about to run `_empty`
            self.background.call_soon(self._empty)
        return sent.future

    def stage(self, messages: Iterable[Message], session: object) -> list[Future[Receipt]]:
        return self.producer.outbox.stage_here(messages, session, self.background.run)

    def _empty(self) -> None:
        """Pass queued messages to the producer, on the loop, some at a time so that other work runs in between."""
        for _ in range(PASS_MESSAGES_MAX):
            with self._lock:
                if not self._outbox:
                    self._is_emptying = False
                    return
                sent = self._outbox.popleft()
            try:
                self.producer._queue_made(sent.message, partial(self._done, sent), sent.later)
            except QueueFull:  # because of the exact size, or of other threads
                self._outbox.appendleft(sent)
                self.background.call_later(AGAIN_S, self._empty)
                return
            except Exception as error:  # affects this message alone
                self._done(sent, error)
        self.background.call_soon(self._empty)

    def _done(self, sent: _Sent, outcome: Receipt | Exception) -> object:
        """Set the receipt and forget the message, on the loop; `flush` waits for both. Return the result of
        `on_done`.
        """
        try:
            if isinstance(outcome, Exception):
                sent.future.set_exception(outcome)
            elif sent.on_done is not None:
                return sent.on_done(outcome)
        except (SystemExit, KeyboardInterrupt) as error:  # otherwise it would end the loop of all clients
            raise RuntimeError(f"on_done raised {error!r}") from error
        finally:
            if isinstance(outcome, Receipt):
                sent.future.set_result(outcome)
            with self._lock:
                self._under_way.discard(sent)
                self._bytes -= sent.size
        return None

    def flush(self, timeout: float | None) -> None:
        self.background.check_may_wait()
        with self._lock:
            futures = [sent.future for sent in self._under_way]
        late = wait(futures, timeout).not_done
        if late:
            raise TimeoutError(f"{len(late)} messages have no outcome after {timeout} s")
        if not self._owner._is_closed:  # otherwise the producer flushes while it closes
            self.background.submit(self.producer.outbox.drain()).result(timeout)
            self.background.submit(self.producer.callbacks_ended()).result(timeout)

    def flush_at_exit(self) -> None:
        """Wait for outcomes and log how many messages are not stored; later calls do not wait for these again."""
        with self._lock:
            sent, timeout = list(self._under_way), 0.0 if self._is_given_up else self._owner._timeout_s + EXIT_S
        until = time.monotonic() + timeout
        wait([message.future for message in sent], timeout)
        draining = self.background.submit(self.producer.outbox.drain())
        is_drained = bool(wait([draining], max(0.0, until - time.monotonic())).done)
        wait([self.background.submit(self.producer.callbacks_ended())], max(0.0, until - time.monotonic()))
        lost = [reason for message in sent if (reason := message.why_not_stored())]
        if lost:
            text = "messages are not known to be stored as the process ends messages=%d app=%s reason=%s"
            log.error(text, len(lost), self._owner._app, lost[0])
        if not is_drained:
            log.warning("messages stay in the outbox as the process ends app=%s", self._owner._app)
        if not is_drained or not all(message.future.done() for message in sent):
            self._is_given_up = True
            draining.cancel()
            with self._lock:
                self._under_way.difference_update(sent)

    def close(self) -> None:
        if not self._is_given_up:
            self.flush(None)
        self.background.run(self._disconnect())
        self.background.clients.discard(self._owner)

    async def _disconnect(self) -> None:
        try:
            async with asyncio.timeout(0 if self._is_given_up else None):
                await self.producer.close()
        except TimeoutError:
            pass


class _Sent:
    """Message of `send_nowait` without an outcome."""

    __slots__ = ("message", "on_done", "later", "future", "size")

    def __init__(self, message: Message, on_done: OnReceipt | None, later: Delay | None) -> None:
        self.message = message
        self.on_done = on_done
        self.later = later
        self.size = _size(message)
        self.future: Future[Receipt] = _Receipt()
        self.future.set_running_or_notify_cancel()

    def why_not_stored(self) -> str:
        """Return the reason why the message is not known to be stored; "" if it is."""
        if not self.future.done():
            return "no outcome in time"
        if (error := self.future.exception()) is not None:
            return str(error)
        receipt = self.future.result()
        return "" if receipt.is_stored else receipt.reason


class _Receipt(Future[Receipt]):
    """Future of a receipt, for the process that sent the message. A forked process must not wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> Receipt:
        self._check_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_process()
        return super().exception(timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            self._condition = Condition()  # a thread of the parent may have held the parent's condition
            if not self.done():
                raise ClientClosed("the parent process sent this message, and only it gets the receipt")


def _size(message: Message) -> int:
    """Return the estimated memory of a message."""
    size = MESSAGE_BYTES + len(message.body or b"")
    for value in message.properties.values():
        size += len(value) if isinstance(value, str) else 8
    return size


def _chunks(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Cut messages into lists of limited length and size."""
    chunk: list[Message] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += _size(message)
        if len(chunk) >= CHUNK_MESSAGES_MAX or size >= CHUNK_BYTES_MAX:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
