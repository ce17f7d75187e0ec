"""Shell. The consumer: listeners that are called with messages, pullers that ask for them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import TypeVar

from qmq.access import find_token
from qmq.client.feed import Terms
from qmq.client.holding import HeldPiece, ReceivedMessage
from qmq.client.link import Link
from qmq.client.route_watch import RouteWatch
from qmq.client.routing import Routing, SubjectRoute
from qmq.client.subscription import Subscription
from qmq.errors import ClientClosed, InvalidRequest, QmqError
from qmq.remoting.commands import Command
from qmq.subjects import check_name

log = logging.getLogger(__name__)

Handler = Callable[[ReceivedMessage], Awaitable[object]]
H = TypeVar("H", bound=Handler)

HANDLED_IN_A_ROW = 64
"""A handler that never waits for anything would keep the loop from reading; after so many it has its turn."""
AGAIN_S_MIN, AGAIN_S_MAX = 0.1, 60.0
"""How long a message rests after its handler raised: doubled each time."""


class Consumer:
    """Receives messages; used on one event loop, for listeners (`listen`, `run`) or pullers (`pull`), or both.

    Args:
        metaserver: HTTP address, for instance "http://127.0.0.1:8080".
        app: name of the application, for the operators.
        token: API token; if it is not given: of the variable QMQ_TOKEN, or the file that QMQ_TOKEN_FILE names.
        consumer_id: name of this consumer in its groups, unique among those that run. One that comes back with the
            same id gets at once what it had not acked; by default each process has its own, and what it leaves
            behind goes to the others when its lease has ended.
        drain_s: how long the end waits for handlers and acks.
    """

    def __init__(
        self, *, metaserver: str, app: str, token: str | None = None, consumer_id: str | None = None,
        drain_s: float = 30.0,
    ) -> None:  # fmt: skip
        self._metaserver, self._app = metaserver, app
        self._token = find_token(token)
        self.id = check_name("consumer id", consumer_id or _default_id())
        self._drain_s = drain_s
        self._listeners: list[tuple[_Options, Handler]] = []
        self._session: _Session | None = None
        self._users = 0

    def listen(
        self, subject: str, *, group: str, concurrency: int = 1, start: str = "latest", prefetch_messages: int = 1_000,
        prefetch_bytes: int = 8 << 20, unacked_max: int = 100_000,
    ) -> Callable[[H], H]:  # fmt: skip
        """Decorate the coroutine function that handles messages of `subject` for the consumer group `group`.

        A message whose handler returns is acked; one whose handler raises stays un-acked and is handed to it again
        after 0.1 s, doubled each time, up to a minute.

        Args:
            concurrency: handlers that run at the same time. With 1, messages of a broker group come in order.
            start: where a new group begins: "latest", or "earliest" for all that is stored.
            prefetch_messages, prefetch_bytes: what may wait here or be on its way.
            unacked_max: messages handed out by a broker group and not acked; when so many wait for one that fails
                again and again, pulling stops.
        """
        options = _Options(subject, group, start, prefetch_messages, prefetch_bytes, unacked_max, concurrency)

        def register(handler: H) -> H:
            is_async = inspect.iscoroutinefunction(handler)  # a name, or the type checker narrows the handler's type
            if not is_async:
                raise InvalidRequest("a handler is a coroutine function: async def")
            self._listeners.append((options, handler))
            return handler

        return register

    def pull(
        self, subject: str, *, group: str, start: str = "latest", prefetch_messages: int = 4_000,
        prefetch_bytes: int = 16 << 20, unacked_max: int = 1_000_000,
    ) -> Puller:  # fmt: skip
        """Return a puller for `async with`; the arguments are those of `listen`."""
        options = _Options(subject, group, start, prefetch_messages, prefetch_bytes, unacked_max, 1)
        return Puller(self, options)

    async def run(self) -> None:
        """Call handlers until cancelled or SIGTERM; then finish those that run, send acks, give the rest back.

        Raises:
            QmqError: a subscription cannot go on, for instance because another process uses the consumer id.
        """
        if not self._listeners:
            raise InvalidRequest("nothing to run: decorate a handler with listen() first")
        stop = asyncio.Event()
        remove_signal = _on_sigterm(stop)
        session = self._acquire()
        subscriptions = [session.subscribe(self._terms(options)) for options, _ in self._listeners]
        workers = [
            asyncio.create_task(_work(subscription, handler))
            for subscription, (options, handler) in zip(subscriptions, self._listeners)
            for _ in range(options.concurrency)
        ]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopped, *workers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await self._drain(subscriptions, workers)
            remove_signal()
            await self._release()
        for subscription in subscriptions:
            if subscription.error is not None:
                raise subscription.error

    async def _drain(self, subscriptions: list[Subscription], workers: list[asyncio.Task[None]]) -> None:
        for subscription in subscriptions:
            subscription.stop()
        _, late = await asyncio.wait(workers, timeout=self._drain_s)
        for worker in late:
            log.warning("handler does not end and is cancelled app=%s", self._app)
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await asyncio.gather(*(subscription.close(self._drain_s) for subscription in subscriptions))

    def _terms(self, options: _Options) -> Terms:
        return Terms(
            options.subject, options.group, self.id, options.start, options.prefetch_messages, options.prefetch_bytes,
            options.unacked_max,
        )  # fmt: skip

    def _acquire(self) -> _Session:
        """The session with metaserver and brokers begins with its first user and ends with the last."""
        if self._session is None:
            self._session = _Session(metaserver=self._metaserver, token=self._token, app=self._app, client_id=self.id)
        self._users += 1
        return self._session

    async def _release(self) -> None:
        self._users -= 1
        if self._users == 0 and self._session is not None:
            session, self._session = self._session, None
            await session.close()


class _Options:
    """Checked arguments of `listen` and `pull`."""

    def __init__(
        self, subject: str, group: str, start: str, prefetch_messages: int, prefetch_bytes: int, unacked_max: int,
        concurrency: int,
    ) -> None:  # fmt: skip
        self.subject, self.group = check_name("subject", subject), check_name("consumer group", group)
        if start not in ("latest", "earliest"):
            raise InvalidRequest(f'start is "latest" or "earliest", not {start!r}')
        if min(prefetch_messages, prefetch_bytes, unacked_max, concurrency) < 1:
            raise InvalidRequest("prefetch, unacked_max and concurrency are at least 1")
        self.start, self.concurrency = start, concurrency
        self.prefetch_messages, self.prefetch_bytes, self.unacked_max = prefetch_messages, prefetch_bytes, unacked_max


class Puller:
    """Asks for messages; made by `Consumer.pull`, an async context manager. On leaving, acks are sent and messages that
    were not acked go back to the group at once."""

    def __init__(self, consumer: Consumer, options: _Options) -> None:
        self._consumer, self._options = consumer, options
        self._opened: Subscription | None = None

    async def __aenter__(self) -> Puller:
        if self._opened is not None:
            raise ClientClosed("a puller is opened once")
        self._opened = self._consumer._acquire().subscribe(self._consumer._terms(self._options))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._subscription.close(self._consumer._drain_s)
        finally:
            await self._consumer._release()

    @property
    def _subscription(self) -> Subscription:
        if self._opened is None:
            raise ClientClosed("the puller is not open: use it with `async with`")
        return self._opened

    async def pull(self, messages_max: int, *, timeout: float) -> list[ReceivedMessage]:
        """Return up to `messages_max` messages; waits up to `timeout` seconds for the first one, then returns none.

        Raises:
            QmqError: the subscription ended, for instance because another process uses the consumer id.
        """
        subscription = self._subscription
        if messages := subscription.take(messages_max):
            await asyncio.sleep(0)  # whoever pulls without a pause must not keep the loop from reading
            return messages
        try:
            async with asyncio.timeout(timeout):
                while not messages and not subscription.is_closing:
                    await subscription.wait()
                    messages = subscription.take(messages_max)
        except TimeoutError:
            pass
        if subscription.is_closing:
            raise subscription.error or ClientClosed("the puller is closed")
        return messages

    async def ack(self, messages: Iterable[ReceivedMessage]) -> None:
        """Mark messages as done, in any order. The acks travel in the background; `flush` waits for them."""
        piece: HeldPiece | None = None
        for message in messages:
            if message._piece is not piece:
                piece = message._piece
                piece.acker.done(piece)
            piece.mark(message._at)

    async def flush(self) -> None:
        """Wait until brokers keep the acks: of each broker group, up to the first message that is not acked."""
        await self._subscription.flush()


class _Session:
    """A consumer's watch on routes, its links and heartbeats."""

    def __init__(self, *, metaserver: str, token: str, app: str, client_id: str) -> None:
        self._token, self._app = token, app
        self._routing = Routing()
        self._links: dict[str, Link] = {}
        self._subscriptions: list[Subscription] = []
        self._watch = RouteWatch(
            metaserver=metaserver, token=token, app=app, client_id=client_id, produces=False,
            on_routes=self._routes_changed,
        )  # fmt: skip
        self._tasks = [asyncio.create_task(self._watch.run()), asyncio.create_task(self._beat())]

    def subscribe(self, terms: Terms) -> Subscription:
        subscription = Subscription(terms, self._watch)
        self._subscriptions.append(subscription)
        self._watch.watch(terms.subject)
        self._feed(subscription)
        return subscription

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _routes_changed(self, routes: list[SubjectRoute]) -> None:
        for name in self._routing.update(routes):
            if name in self._links:
                self._links[name].route_changed()
            else:
                self._links[name] = Link(
                    name, owner=self, routing=self._routing, token=self._token, app=self._app
                )
                self._tasks.append(asyncio.create_task(self._links[name].run()))
        for subscription in self._subscriptions:
            self._feed(subscription)

    def _feed(self, subscription: Subscription) -> None:
        """Pull from every group that may hold messages, writable or not."""
        for group in self._routing.groups_of(subscription.terms.subject):
            if not subscription.is_closing:
                subscription.feed(self._links[group.broker_group])

    async def _beat(self) -> None:
        """Renew the leases of all connections, three times in each lease."""
        owed: dict[str, asyncio.Future[memoryview]] = {}
        while True:
            leases = []
            for name, link in self._links.items():
                lease_ms = [lease for one in self._subscriptions if (lease := one.lease_ms(name))]
                if not lease_ms or link.connection is None:
                    owed.pop(name, None)
                    continue
                leases += lease_ms
                if name in owed and not owed[name].done():
                    link.drop("no answer to a heartbeat")
                    continue
                owed[name] = link.connection.request(Command.HEARTBEAT)
                owed[name].add_done_callback(asyncio.Future.exception)
            await asyncio.sleep(min(leases, default=1_000) / 3_000)

    # Told by links.

    def link_opened(self, link: Link) -> None:
        for subscription in self._subscriptions:
            subscription.link_opened(link)

    def link_lost(self, link: Link, reason: str) -> None:
        for subscription in self._subscriptions:
            subscription.link_lost(link)
        self._watch.refresh()

    def link_failed(self, link: Link, error: QmqError) -> None:
        self._watch.refresh()

    def link_writable(self, link: Link) -> None: ...


async def _work(subscription: Subscription, handler: Handler) -> None:
    """One worker of a listener: a message at a time, from the buffer to the handler."""
    handled = 0
    while not subscription.is_closing:
        message = subscription.take_one()
        if message is None:
            await subscription.wait()
            continue
        try:
            await handler(message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the drain ran out of patience; the message is given back
            _again(subscription, message, "cancelled")
        except Exception as error:
            _again(subscription, message, repr(error))
        else:
            message._done()
        handled += 1
        if handled % HANDLED_IN_A_ROW == 0:
            await asyncio.sleep(0)


def _again(subscription: Subscription, message: ReceivedMessage, reason: str) -> None:
    message.attempts += 1
    wait_s = min(AGAIN_S_MIN * 2 ** min(message.attempts - 1, 20), AGAIN_S_MAX)
    log.warning(
        "handler failed, message comes again subject=%s sequence=%d broker_group=%s attempts=%d after_s=%.1f error=%s",
        message.subject, message.sequence, message.broker_group, message.attempts, wait_s, reason,
    )  # fmt: skip
    asyncio.get_running_loop().call_later(wait_s, subscription.hand_again, message)


def _on_sigterm(stop: asyncio.Event) -> Callable[[], object]:
    """Set `stop` at SIGTERM, if signals are ours to handle; return what ends that."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    try:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    except NotImplementedError:  # Windows
        return lambda: None
    return lambda: loop.remove_signal_handler(signal.SIGTERM)


def _default_id() -> str:
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
