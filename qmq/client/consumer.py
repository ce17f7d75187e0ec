"""Shell. Consumer for coroutines: listeners that call handlers, and pullers."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from qmq.access import Token, token_source
from qmq.client.handler import Filter, FilteredHandler, Handler, call_back, check_plain
from qmq.client.health import Health, not_connected, worst
from qmq.client.lifetime import check_loop, check_not_patched, no_pickle, on_sigterm
from qmq.client.listener import PRIORITY_MAX, Listener, Priorities
from qmq.client.membership import Connections, MasterChanged, Membership
from qmq.client.numbers import Sample, register, state_samples
from qmq.client.puller import Puller
from qmq.client.terms import Terms, check_batch, check_concurrency, check_seconds, check_whole, make_terms
from qmq.control_plane import app_name, metaserver_urls
from qmq.errors import ClientClosed, InvalidRequest
from qmq.logs import bounded
from qmq.subjects import check_name

log = bounded(__name__)

H = TypeVar("H", bound=Handler)
C = TypeVar("C", bound=Callable[[MasterChanged], object])
Start = Literal["latest", "earliest"] | datetime
TagMode = Literal["any", "all"]


class Consumer:
    """Consumer for one event loop, with listeners (`listen`, `run`), pullers (`pull`), or both.

    Args:
        metaserver: HTTP address, for instance "http://127.0.0.1:8080"; several as a list or separated by commas. One
            that answers is used, and another one when it fails. By default the value of QMQ_METASERVER.
        app: application name, shown to operators; by default the value of QMQ_APP.
        token: API token; by default the value of QMQ_TOKEN, or the content of the file that QMQ_TOKEN_FILE names. That
            file is read again for each connection.
        consumer_id: unique name of this consumer in its groups. A broadcast uses it as its group, so a fixed id also
            receives the messages of its absence. By default each process gets an id of its own, and its unacked
            messages go to the other consumers when its lease ends.
        drain_s: time for handlers and acks when the consumer stops.
        online: whether it receives at once; otherwise from a call of `online` on.
    """

    def __init__(
        self,
        *,
        metaserver: str | Sequence[str] | None = None,
        app: str | None = None,
        token: Token | None = None,
        consumer_id: str | None = None,
        drain_s: float = 20.0,
        online: bool = True,
    ) -> None:
        check_not_patched()
        self._metaserver = metaserver_urls(metaserver)
        self._app = app_name(app)
        self._token = token_source(token)
        self._id = check_name("consumer id", _default_id() if consumer_id is None else consumer_id)
        self._has_default_id = consumer_id is None
        self._pid = os.getpid()
        self._drain_s = check_seconds("drain_s", drain_s)
        self._is_online = online
        self._listeners: dict[tuple[str, str], Listener] = {}
        self._priorities = Priorities()
        self._members: dict[tuple[str, str], Membership] = {}
        """Listener or puller of each (subject, group), mailboxes included."""
        self._watchers: list[Callable[[MasterChanged], object]] = []
        self._callbacks: set[asyncio.Task[object]] = set()
        self._connections: Connections | None = None
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._stop: asyncio.Event | None = None
        self._running: set[asyncio.Task[None]] = set()

    def __getstate__(self) -> dict[str, Any]:
        if self._loop is not None or self._members:
            raise no_pickle("A consumer with listeners or pullers")
        return self.__dict__

    @property
    def id(self) -> str:
        """Name of this consumer in its groups."""
        self._check_process()
        return self._id

    def _check_process(self) -> None:
        """Give a forked process a consumer id of its own: two consumers with one id replace each other.

        Raises:
            ClientClosed: the parent's consumer is open, on an event loop that the child lacks.
            InvalidRequest: gevent or eventlet replaced the process's threads.
        """
        check_not_patched()
        if self._pid == os.getpid():
            return
        if self._users:
            raise ClientClosed("the consumer was opened before this process was forked: make another one here")
        self._pid = os.getpid()
        if self._has_default_id:
            self._id = _default_id()
            listeners = list(self._listeners.values())
            self._members.clear()
            self._listeners.clear()
            for listener in listeners:
                listener.terms = listener.terms.of_consumer(self._id)
                self._add(listener)
                self._listeners[listener.subject, listener.group] = listener

    # Listening.

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
        retry_delay: float = 5.0,
        most_once: bool = False,
        auto_ack: bool = True,
        filters: Sequence[Filter] = (),
        prefetch_messages: int | None = None,
        prefetch_bytes: int = 8 << 20,
        unacked_max: int = 100_000,
        exclusive: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Callable[[H], H]:
        """Decorate the function that handles messages of `subject` for the consumer group `group`.

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
            retry_delay: seconds, at most a day.
            most_once: ack before the handler is called: a crash loses messages, and none is handled twice.
            auto_ack: False leaves the decision to `ack`, `nack` or `dead_letter` of the message, at any time.
            filters: functions around the handler, the first one outermost (see `qmq.client.handler`). A filter with the
                attribute `needs_auto_ack` is rejected with `most_once` or without `auto_ack`.
            prefetch_messages, prefetch_bytes: limits of messages that wait here or are requested. The default is 1,000
                messages; with `most_once`, one per handler. Slow handlers have about half a second of work ahead.
            unacked_max: unacked messages of a broker group at which pulling stops.
            exclusive: deliver to one consumer of the group at a time, the longest waiting first. The next one follows
                when it has left, or has no unacked messages. All consumers of the group should set this.
            timeout: seconds of a call, filters included, after which its messages fail with a TimeoutError; no limit by
                default. A coroutine function is cancelled. A thread cannot be stopped: it is left to its call, another
                one replaces it, and `Listener.hung_threads` counts it.
            priority: 0 to 9. The handler is not called while messages wait for a listener of this consumer with a
                higher priority. A class of messages is a subject of its own.

        Raises:
            InvalidName: the subject or group breaks the rules of `qmq.subjects`.
            InvalidRequest: another argument is not valid, or this consumer already has a listener or puller for both.
        """
        at_once = check_concurrency(concurrency) * check_batch(batch)
        if prefetch_messages is None:
            prefetch_messages = at_once if most_once else max(1_000, at_once)
        _check_filters(filters, is_batch=batch is not None, acks_after_handler=auto_ack and not most_once)
        terms = make_terms(
            subject=subject,
            group=group,
            consumer=self.id,
            has_id=not self._has_default_id,
            broadcast=broadcast,
            start=start,
            tags=tags,
            tag_mode=tag_mode,
            retries_max=retries_max,
            retry_delay=retry_delay,
            most_once=most_once,
            prefetch_messages=prefetch_messages,
            prefetch_bytes=prefetch_bytes,
            unacked_max=unacked_max,
            exclusive_ms=_now_ms() if exclusive else 0,
        )
        if batch is not None and at_once > prefetch_messages:
            raise InvalidRequest(
                f"{concurrency} handlers of {batch} messages exceed prefetch_messages, {prefetch_messages}"
            )
        check_whole("priority", priority, 0, PRIORITY_MAX)
        if timeout is not None:
            check_seconds("timeout", timeout, is_zero_allowed=False)
        self._check_free(terms)
        return lambda handler: self._register(handler, terms, filters, concurrency, batch, auto_ack, priority, timeout)

    def _register(
        self,
        handler: H,
        terms: Terms,
        filters: Sequence[Filter],
        concurrency: int,
        batch: int | None,
        auto_ack: bool,
        priority: int,
        timeout: float | None,
    ) -> H:
        listener = Listener(
            terms,
            FilteredHandler(handler, filters, is_batch=batch is not None),
            concurrency=concurrency,
            batch=batch,
            auto_ack=auto_ack,
            priorities=self._priorities,
            priority=priority,
            timeout_s=timeout,
            drain_s=self._drain_s,
            is_online=self._is_online,
        )
        self._add(listener)
        self._listeners[terms.subject, terms.group] = listener
        if self._stop is not None:
            self._start(listener)
        return handler

    @property
    def listeners(self) -> Mapping[tuple[str, str], Listener]:
        """Listeners by subject and group: to stop and resume them, and to change their concurrency."""
        return MappingProxyType(self._listeners)

    @property
    def cut_off(self) -> str:
        """Reason why a listener or puller is connected to no broker group, since its start or for ten seconds; "" while
        all are. For health checks, from any thread.
        """
        reasons = ((member, member.cut_off) for member in dict.fromkeys(list(self._members.values())))
        return "; ".join(f"{member.subject}: {reason}" for member, reason in reasons if reason)

    @property
    def health(self) -> Health:
        """State of all listeners and pullers, with the reason; from any thread."""
        if not self._users:
            return not_connected("the consumer does not run")
        return worst(member.health for member in dict.fromkeys(list(self._members.values())))

    def numbers(self) -> Iterator[Sample]:
        """Return the numbers of all listeners and pullers, for `qmq.client.numbers`."""
        for member in dict.fromkeys(list(self._members.values())):
            yield from member.numbers(self._app)
        yield from state_samples(self._app, "consumer", self.health)

    async def run(self) -> None:
        """Call handlers until `stop`, SIGTERM or cancellation; then finish running handlers, send acks, return the
        rest.

        SIGTERM is handled in the main thread, unless the application has a handler of its own.

        Raises:
            AccessError: the token is rejected.
            QmqError: a subscription ended, for instance because another process uses the consumer id.
            SystemExit, KeyboardInterrupt: a coroutine handler raised it; its message has failed.
        """
        self._check_process()
        if not self._listeners:
            raise InvalidRequest("nothing to run: decorate a handler with listen() first")
        if self._stop is not None:
            raise InvalidRequest("this consumer runs already")
        self._stop = stop = asyncio.Event()
        take_back = on_sigterm(self._end_run)
        self._acquire()
        running = self._running = set()
        try:
            for listener in self._listeners.values():
                self._start(listener)
            await stop.wait()
        finally:
            self._end_run()
            self._stop = None
            try:
                ends = await asyncio.gather(*running, return_exceptions=True)
            finally:
                take_back()
                await self._release()
        for error in [*(listener.exit_with for listener in self._listeners.values()), *ends]:
            if error is not None:
                raise error

    def stop(self) -> None:
        """End `run` as SIGTERM does; may be called from any thread, returns at once."""
        if threading.get_ident() == self._thread:
            self._end_run()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_run)

    def _end_run(self) -> None:
        if self._stop is not None:
            self._stop.set()
            for listener in self._listeners.values():
                listener.end()

    def _start(self, listener: Listener) -> None:
        assert self._connections is not None and self._stop is not None
        listener.exit_with = None
        task = listener.start(self._connections)
        self._running.add(task)
        task.add_done_callback(lambda _: self._end_run())

    # Pulling.

    def pull(
        self,
        subject: str,
        *,
        group: str | None = None,
        broadcast: bool = False,
        tags: Iterable[str] = (),
        tag_mode: TagMode = "any",
        start: Start = "latest",
        retries_max: int = 32,
        retry_delay: float = 5.0,
        most_once: bool = False,
        prefetch_messages: int = 8_000,
        prefetch_bytes: int = 16 << 20,
        unacked_max: int = 1_000_000,
        exclusive: bool = False,
    ) -> Puller:
        """Return a puller for `async with`; the arguments are those of `listen`.

        With `most_once`, `pull` returns messages after their acks are stored. The default of `prefetch_messages` suits
        a fast consumer: pulls of 2,000 messages cost both sides a quarter less per message than pulls of 1,000. Use
        less where several pullers share few slow messages.
        """
        terms = make_terms(
            subject=subject,
            group=group,
            consumer=self.id,
            has_id=not self._has_default_id,
            broadcast=broadcast,
            start=start,
            tags=tags,
            tag_mode=tag_mode,
            retries_max=retries_max,
            retry_delay=retry_delay,
            most_once=most_once,
            prefetch_messages=prefetch_messages,
            prefetch_bytes=prefetch_bytes,
            unacked_max=unacked_max,
            exclusive_ms=_now_ms() if exclusive else 0,
        )
        self._check_free(terms)
        return Puller(terms, self, drain_s=self._drain_s, is_online=self._is_online)

    def entered(self, puller: Puller) -> Connections:
        """Register a puller that is entered."""
        puller.terms = puller.terms.of_consumer(self.id)
        self._check_free(puller.terms)
        self._add(puller)
        puller.set_online(self._is_online)
        return self._acquire()

    async def left(self, puller: Puller) -> None:
        """Unregister a puller that was left."""
        for key in _keys(puller.terms):
            self._members.pop(key, None)
        await self._release()

    # Together.

    def offline(self) -> None:
        """Leave all groups for now: running handlers finish, waiting messages go back to the groups.

        May be called from any thread, returns at once.
        """
        self._set_online(False)

    def online(self) -> None:
        """Join the groups again."""
        self._set_online(True)

    @property
    def is_online(self) -> bool:
        return self._is_online

    def _set_online(self, is_online: bool) -> None:
        self._is_online = is_online
        for member in list(self._members.values()):
            member.set_online(is_online)

    def on_master_changed(self, callback: C) -> C:
        """Call `callback` with each `MasterChanged`, on the event loop; also a decorator.

        Messages delivered by the old master whose acks it did not store may be delivered again.

        Raises:
            InvalidRequest: `callback` is a coroutine function.
        """
        self._watchers.append(check_plain("the callback", callback))
        return callback

    def _master_changed(self, event: MasterChanged) -> None:
        for callback in self._watchers:
            call_back(callback, event, partial(_callback_failed, event), self._callbacks)

    def _check_free(self, terms: Terms) -> None:
        """Raise InvalidRequest if a listener or puller has this place: a second one would replace the first."""
        for key in _keys(terms):
            if key in self._members:
                raise InvalidRequest(
                    f"this consumer has a listener or puller for {key[0]!r} and group {key[1]!r} already"
                )

    def _add(self, member: Membership) -> None:
        self._check_free(member.terms)
        for key in _keys(member.terms):
            self._members[key] = member

    def _acquire(self) -> Connections:
        """Return the connections, opened by their first user and closed after the last."""
        if self._connections is not None:
            check_loop("the consumer", self._loop)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if self._connections is None:
            self._connections = Connections(
                metaserver=self._metaserver,
                token=self._token,
                app=self._app,
                client_id=self.id,
                on_master_changed=self._master_changed,
            )
            register(self)
        self._users += 1
        return self._connections

    async def _release(self) -> None:
        self._users -= 1
        if self._users == 0 and self._connections is not None:
            connections, self._connections = self._connections, None
            await connections.close()


def _callback_failed(event: MasterChanged, error: BaseException) -> None:
    log.error("callback failed broker_group=%s term=%d", event.broker_group, event.term, exc_info=error)


def _keys(terms: Terms) -> list[tuple[str, str]]:
    return [(subject, terms.group) for subject in (terms.subject, terms.mailbox) if subject is not None]


def _default_id() -> str:
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _check_filters(filters: Sequence[Filter], *, is_batch: bool, acks_after_handler: bool) -> None:
    if is_batch and filters:
        raise InvalidRequest("filters take single messages: leave out filters, or batch")
    for filter_ in filters:
        if getattr(filter_, "needs_auto_ack", False) and not acks_after_handler:
            name = type(filter_).__name__
            raise InvalidRequest(f"{name} needs acks after the handler: leave out most_once, keep auto_ack")
