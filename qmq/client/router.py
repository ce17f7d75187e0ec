"""Shell. Registration of handlers: `listen`, for consumers and routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal, Protocol, TypeVar

from qmq.client.handler import Filter, FilteredHandler, Handler
from qmq.client.listener import PRIORITY_MAX
from qmq.client.terms import Terms, check_batch, check_concurrency, check_seconds, check_whole, make_terms
from qmq.errors import InvalidRequest
from qmq.subjects import check_subject

H = TypeVar("H", bound=Handler)
Start = Literal["latest", "earliest"] | datetime
TagMode = Literal["any", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Arguments of `listen`."""

    subject: str
    group: str | None
    broadcast: bool
    tags: Iterable[str]
    tag_mode: TagMode
    concurrency: int
    batch: int | None
    start: Start
    retries_max: int
    retry_delay: float | timedelta
    most_once: bool
    auto_ack: bool
    filters: Sequence[Filter]
    prefetch_messages: int | None
    prefetch_bytes: int
    unacked_max: int
    exclusive: bool
    priority: int
    timeout: float | None
    reply_to: str | None

    def check(self) -> None:
        """Raise InvalidName or InvalidRequest if an argument is not valid, for any consumer."""
        at_once = check_concurrency(self.concurrency) * check_batch(self.batch)
        acks_after_handler = self.auto_ack and not self.most_once
        _check_filters(self.filters, is_batch=self.batch is not None, acks_after_handler=acks_after_handler)
        self.terms(consumer="consumer", has_id=True, now_ms=1)
        if self.batch is not None and self.prefetch_messages is not None and at_once > self.prefetch_messages:
            raise InvalidRequest(
                f"{self.concurrency} handlers of {self.batch} messages exceed prefetch_messages, "
                f"{self.prefetch_messages}"
            )
        check_whole("priority", self.priority, 0, PRIORITY_MAX)
        if self.timeout is not None:
            check_seconds("timeout", self.timeout, is_zero_allowed=False)
        if self.reply_to is not None:
            check_subject(self.reply_to)

    def terms(self, *, consumer: str, has_id: bool, now_ms: int) -> Terms:
        """Return the terms for one consumer; raises InvalidName or InvalidRequest."""
        at_once = self.concurrency * (self.batch or 1)
        prefetch_messages = self.prefetch_messages
        if prefetch_messages is None:
            prefetch_messages = at_once if self.most_once else max(1_000, at_once)
        return make_terms(
            subject=self.subject,
            group=self.group,
            consumer=consumer,
            has_id=has_id,
            broadcast=self.broadcast,
            start=self.start,
            tags=self.tags,
            tag_mode=self.tag_mode,
            retries_max=self.retries_max,
            retry_delay=self.retry_delay,
            most_once=self.most_once,
            prefetch_messages=prefetch_messages,
            prefetch_bytes=self.prefetch_bytes,
            unacked_max=self.unacked_max,
            exclusive_ms=now_ms if self.exclusive else 0,
        )


class Registers(Protocol):
    """Registration of a handler with a consumer; returns the handler."""

    def __call__(self, handler: H, listening: Listening, /) -> H: ...


class Listens:
    """Object with `listen`: a consumer or a router."""

    def listen(
        self,
        subject: str,
        *,
        group: str | None = None,
        broadcast: bool = False,
        tags: Iterable[str] = (),
        tag_mode: TagMode = "any",
        concurrency: int = 1,
        batch: int | None = None,
        start: Start = "latest",
        retries_max: int = 32,
        retry_delay: float | timedelta = 5.0,
        most_once: bool = False,
        auto_ack: bool = True,
        filters: Sequence[Filter] = (),
        prefetch_messages: int | None = None,
        prefetch_bytes: int = 8 << 20,
        unacked_max: int = 100_000,
        exclusive: bool = False,
        priority: int = 0,
        timeout: float | None = None,
        reply_to: str | None = None,
    ) -> Callable[[H], H]:
        """Decorate the function that handles messages of `subject` for the consumer group `group`.

        The annotations of its parameters select the arguments: the payload, decoded as its type, the
        `qmq.ReceivedMessage`, or both (`qmq.client.parameters`). A body that does not validate becomes a dead letter.

        A coroutine function runs on the event loop, a plain function in a thread. When it returns, the message is
        acked. When it raises, the message is delivered again after `retry_delay`, to any consumer of the group; after
        `retries_max` deliveries it becomes a dead letter. `RetryLater` and `DeadLetter` override this.

        Args:
            broadcast: deliver every message to every consumer, each in a group of its own; the default without `group`.
            tags, tag_mode: deliver only messages with any, or all, of these tags.
            concurrency: handlers that run at the same time. With 1, messages of a broker group are handled in order.
            batch: call the handler with a list of 1 to `batch` messages; a suspected message is alone. The result of
                the call applies to all its messages that the handler did not decide (`nack_nowait`, …). Filters are
                rejected.
            start: first message of a new group: "latest", "earliest", or a datetime with time zone. It applies once,
                when the group first appears. On a broker group that joins the subject later, the group starts at the
                first message.
            retries_max: delivery attempts in all, at least one; a message may carry a limit of its own.
            retry_delay: seconds or a timedelta, at most a day.
            most_once: ack before the handler is called. A crash may lose messages, and none is handled twice.
            auto_ack: False leaves the decision to `ack`, `nack` or `dead_letter` of the message, at any time.
            filters: functions around the handler, the first one outermost (see `qmq.client.handler`). A filter with the
                attribute `needs_auto_ack` is rejected with `most_once` or without `auto_ack`.
            prefetch_messages, prefetch_bytes: limits of messages that wait here or are requested. The default is 1,000
                messages; with `most_once`, one per handler. Slow handlers have about half a second of work ahead.
            unacked_max: unacked messages of a broker group at which pulling stops.
            exclusive: deliver to one consumer of the group at a time, the longest waiting first. The next one follows
                when it has left, or has no unacked messages. All consumers of the group should set this.
            timeout: seconds of a call, filters included, after which its messages fail with a TimeoutError; no limit by
                default. A coroutine function is cancelled. A thread cannot be stopped: it continues its call, another
                thread replaces it, and `Listener.hung_threads` counts it.
            priority: 0 to 9. The handler is not called while messages wait for a listener of this consumer with a
                higher priority. Messages of each priority need a subject of their own.

            reply_to: subject to which the consumer's producer sends the result of the handler, before the ack.

        Raises:
            InvalidName: the subject or group breaks the rules of `qmq.subjects`.
            InvalidRequest: another argument is not valid, or this consumer already has a listener or puller for this
                subject and group.
        """
        listening = Listening(
            subject=subject,
            group=group,
            broadcast=broadcast,
            tags=tags if isinstance(tags, str) else tuple(tags),
            tag_mode=tag_mode,
            concurrency=concurrency,
            batch=batch,
            start=start,
            retries_max=retries_max,
            retry_delay=retry_delay,
            most_once=most_once,
            auto_ack=auto_ack,
            filters=filters,
            prefetch_messages=prefetch_messages,
            prefetch_bytes=prefetch_bytes,
            unacked_max=unacked_max,
            exclusive=exclusive,
            priority=priority,
            timeout=timeout,
            reply_to=reply_to,
        )
        self._check_listening(listening)
        return partial(self._register, listening=listening)

    def _check_listening(self, listening: Listening) -> object:
        raise NotImplementedError

    def _register(self, handler: H, listening: Listening) -> H:
        """Register a handler with checked arguments; return it."""
        raise NotImplementedError


class Router(Listens):
    """Handlers of one module, registered by `Consumer.include`.

    router = qmq.Router()

    @router.listen("order.changed", group="billing")
    async def on_order(order: Order) -> None: ...
    """

    def __init__(self) -> None:
        self._handlers: list[tuple[Handler, Listening]] = []
        self._consumers: list[Registers] = []

    def _check_listening(self, listening: Listening) -> None:
        listening.check()

    def _register(self, handler: H, listening: Listening) -> H:
        FilteredHandler(handler, listening.filters, is_batch=listening.batch is not None)  # checks it here
        for register in self._consumers:
            register(handler, listening)
        self._handlers.append((handler, listening))
        return handler

    def _included_by(self, register: Registers) -> None:
        """Register all handlers with a consumer, also those that come later."""
        for handler, listening in self._handlers:
            register(handler, listening)
        self._consumers.append(register)


def _check_filters(filters: Sequence[Filter], *, is_batch: bool, acks_after_handler: bool) -> None:
    if is_batch and filters:
        raise InvalidRequest("filters take single messages: leave out filters, or batch")
    for filter_ in filters:
        if getattr(filter_, "needs_auto_ack", False) and not acks_after_handler:
            name = type(filter_).__name__
            raise InvalidRequest(f"{name} needs acks after the handler: leave out most_once, keep auto_ack")
