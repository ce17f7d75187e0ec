"""Shell. Consumer for coroutines: listeners that call handlers, and pullers."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, Unpack

from qmq.access import Token, token_source
from qmq.client.handler import (
    FilteredHandler,
    Handler,
    Publishing,
    Sends,
    call_back,
    check_plain,
    check_producer,
    opened_for,
)
from qmq.client.health import Health, not_connected, worst
from qmq.client.lifetime import check_loop, check_not_patched, no_pickle, on_sigterm
from qmq.client.listener import Listener, Priorities
from qmq.client.membership import Connections, MasterChanged, Membership
from qmq.client.numbers import Sample, register, state_samples
from qmq.client.puller import Puller
from qmq.client.received import ReceivedMessage
from qmq.client.router import Listening, Listens, Router, Start, TagMode
from qmq.client.terms import Terms, check_seconds, make_terms
from qmq.control_plane import app_name, metaserver_urls
from qmq.errors import ClientClosed, InvalidRequest
from qmq.logs import bounded
from qmq.subjects import check_name

log = bounded(__name__)

H = TypeVar("H", bound=Handler)
C = TypeVar("C", bound=Callable[[MasterChanged], object])


class PullArguments(TypedDict, total=False):
    """Arguments of `Consumer.pull`, for functions that pass them on."""

    group: str | None
    broadcast: bool
    tags: Iterable[str]
    tag_mode: TagMode
    start: Start
    retries_max: int
    retry_delay: float | timedelta
    most_once: bool
    prefetch_messages: int
    prefetch_bytes: int
    unacked_max: int
    exclusive: bool


class Consumer(Listens):
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
        producer: sends the messages that handlers return, and their replies, before the ack. `run` opens and closes it,
            unless the application has opened it.
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
        producer: Sends | None = None,
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
        self._producer = check_producer(producer)
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
        self._streams: set[Puller] = set()

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

    def _check_listening(self, listening: Listening) -> Terms:
        """Return the terms of a listener; raises InvalidName or InvalidRequest."""
        listening.check()
        if listening.reply_to is not None and self._producer is None:
            raise InvalidRequest("reply_to needs a producer that sends the replies: Consumer(producer=…)")
        terms = listening.terms(consumer=self.id, has_id=not self._has_default_id, now_ms=_now_ms())
        self._check_free(terms)
        return terms

    def _register(self, handler: H, listening: Listening) -> H:
        terms = self._check_listening(listening)
        publish = None if self._producer is None else Publishing(self._producer, listening.reply_to)
        listener = Listener(
            terms,
            FilteredHandler(handler, listening.filters, is_batch=listening.batch is not None, publish=publish),
            concurrency=listening.concurrency,
            batch=listening.batch,
            auto_ack=listening.auto_ack,
            priorities=self._priorities,
            priority=listening.priority,
            timeout_s=listening.timeout,
            drain_s=self._drain_s,
            is_online=self._is_online,
        )
        self._add(listener)
        self._listeners[terms.subject, terms.group] = listener
        if self._stop is not None:
            self._start(listener)
        return handler

    def include(self, router: Router) -> None:
        """Register the listeners of a router, also those that it gets later; several consumers may include it.

        Raises: see `listen`.
        """
        if not isinstance(router, Router):
            raise InvalidRequest(f"include takes a qmq.Router, not {router!r:.100}")
        router._included_by(self._register)

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
        async with opened_for(self._producer):
            await self._run()

    async def _run(self) -> None:
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
        """End `run` and streams as SIGTERM does; may be called from any thread, returns at once."""
        if threading.get_ident() == self._thread:
            self._end_run()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_run)

    def _end_run(self) -> None:
        for puller in self._streams:
            puller.end()
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
        retry_delay: float | timedelta = 5.0,
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

    def stream(self, subject: str, **options: Unpack[PullArguments]) -> AsyncIterator[ReceivedMessage]:
        """Return the messages of `subject` for `async for`, until `stop`, SIGTERM or `break`.

        The next step of the loop acks a message. If its step raises or ends by `break`, it is delivered again, unless
        the application has decided it. The arguments are those of `pull`; the default of `prefetch_messages` is 1,000.
        """
        wanted: PullArguments = {"prefetch_messages": 1_000, **options}
        return self._stream(self.pull(subject, **wanted))

    async def _stream(self, puller: Puller) -> AsyncIterator[ReceivedMessage]:
        async with puller:
            self._streams.add(puller)
            take_back = on_sigterm(puller.end)
            try:
                async for message in puller:
                    yield message
            finally:
                take_back()
                self._streams.discard(puller)

    def entered(self, puller: Puller) -> Connections:
        """Register a puller that the application enters; return the connections."""
        puller.terms = puller.terms.of_consumer(self.id)
        self._check_free(puller.terms)
        self._add(puller)
        puller.set_online(self._is_online)
        return self._acquire()

    async def left(self, puller: Puller) -> None:
        """Unregister a puller that the application left."""
        for key in _keys(puller.terms):
            self._members.pop(key, None)
        await self._release()

    # Together.

    def offline(self) -> None:
        """Leave all groups for now: running handlers finish, waiting messages return to the groups.

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
        """Raise InvalidRequest if a listener or puller has this subject and group: a second one would replace it."""
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
