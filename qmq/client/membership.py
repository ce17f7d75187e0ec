"""Shell. A consumer's membership in its groups: connections, leases, joining and leaving while it runs."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from qmq.access import Token
from qmq.client.backlog import Backlog
from qmq.client.health import Health, degraded, not_connected
from qmq.client.lifetime import logged_task, no_pickle
from qmq.client.link import Link
from qmq.client.numbers import Handled, Sample
from qmq.client.received import ReceivedMessage
from qmq.client.route_watch import RouteWatch
from qmq.client.routes import Routing, SubjectRoute
from qmq.client.sender import Sender
from qmq.client.subscription import DelayedRetries, Subscription
from qmq.client.terms import Terms
from qmq.errors import AccessError, QmqError
from qmq.remoting.commands import Command
from qmq.types import Endpoint, GroupKind

BEATS_IN_LEASE = 3
DEFERS_IN_FLIGHT = 4
ANSWER_TIMEOUT_S = 5.0
"""Time for a delay server to answer that it stored a retry."""


@dataclass(frozen=True, slots=True)
class MasterChanged:
    """Event: a broker group has a new master. Messages with acks that the old master lacks may be delivered again."""

    broker_group: str
    term: int


ANNOUNCE_S = 1.0
"""Time for the broker to store that a handler begins. After it, the handler begins and the attempt may go uncounted."""


class Connections:
    """Connections of a running consumer: its route watch, a link per broker group, leases. Used on its event loop."""

    def __init__(
        self,
        *,
        metaserver: str,
        token: Token,
        app: str,
        client_id: str,
        on_master_changed: Callable[[MasterChanged], None],
    ) -> None:
        self._metaserver = metaserver
        self._token = token
        self._app = app
        self._on_master_changed = on_master_changed
        self._routing = Routing()
        self._masters: dict[str, tuple[Endpoint, int]] = {}
        self._links: dict[str, Link] = {}
        self._subscriptions: list[Subscription] = []
        self._lease_came = asyncio.Event()
        self._next_beat_s = math.inf
        self._delayed_retries = DelayedRetries(self._new_sender)
        self._watch = RouteWatch(
            metaserver=metaserver,
            token=token,
            app=app,
            client_id=client_id,
            produces=False,
            on_routes=self._routes_changed,
            on_idle=self._forget,
            on_rejected=self._token_rejected,
        )
        self._tasks = [logged_task(asyncio.create_task(work)) for work in (self._watch.run(), self._beat())]

    def subscribe(self, terms: Terms, on_failed: Callable[[], None]) -> Subscription:
        """Begin to receive; the caller closes the subscription with `leave`."""
        subscription = Subscription(terms, self._watch, self._delayed_retries, self._leased, on_failed)
        self._subscriptions.append(subscription)
        self._watch.watch(terms.subject)
        self._open_sessions(subscription)
        return subscription

    async def leave(self, subscription: Subscription, flush_s: float) -> None:
        """Close a subscription: send its decisions and release the rest.

        When its coroutine raises, `asyncio.run` cancels all tasks, also those of the connections. Then no answer can
        come.
        """
        is_cut = any(task.cancelling() or task.cancelled() for task in self._tasks)
        try:
            await subscription.close(0.0 if is_cut else flush_s)
        finally:
            self._subscriptions.remove(subscription)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._delayed_retries.stop()

    def _new_sender(self) -> Sender:
        return Sender(
            metaserver=self._metaserver,
            token=self._token,
            app=self._app,
            producer_id=random.SystemRandom().randrange(1, 1 << 64),
            in_flight_max=DEFERS_IN_FLIGHT,
            answer_timeout_s=ANSWER_TIMEOUT_S,
            backlog=Backlog(1 << 30, 1 << 40),
            kind=GroupKind.DELAY,
        )

    def _routes_changed(self, routes: list[SubjectRoute]) -> None:
        for name in self._routing.update(routes):
            if name in self._links:
                self._links[name].route_changed()
            else:
                self._links[name] = Link(name, owner=self, routing=self._routing, token=self._token, app=self._app)
                self._tasks.append(logged_task(asyncio.create_task(self._links[name].run())))
        subjects = {route.subject for route in routes}
        for subscription in self._subscriptions:
            if subscription.terms.subject in subjects:
                self._open_sessions(subscription)
        self._report_masters(routes)

    def _token_rejected(self, error: AccessError) -> None:
        for subscription in list(self._subscriptions):
            if subscription.error is None:
                subscription.failed(error)

    def _forget(self, idle: set[str]) -> set[str]:
        gone = idle - {subscription.terms.subject for subscription in self._subscriptions}
        self._routing.forget(gone)
        return gone

    def _report_masters(self, routes: list[SubjectRoute]) -> None:
        """Report masters that changed. A group without a master keeps its last one for the comparison."""
        for group in (group for route in routes for group in route.groups):
            known = self._masters.get(group.broker_group)
            if group.master is None or (known is not None and group.term < known[1]):
                continue
            self._masters[group.broker_group] = now = group.master, group.term
            if known is not None and known != now:
                self._on_master_changed(MasterChanged(group.broker_group, group.term))

    def _open_sessions(self, subscription: Subscription) -> None:
        """Open a session with every group that may hold messages, writable or not."""
        if not subscription.is_closing:
            joins = subscription.sessions_count > 0
            for group in self._routing.groups_of(subscription.terms.subject):
                subscription.open_session(self._links[group.broker_group], joins=joins)

    def _leased(self, lease_ms: int) -> None:
        """Wake the heartbeat if a lease is too short for its next round."""
        if asyncio.get_running_loop().time() + _beat_s(lease_ms) < self._next_beat_s:
            self._lease_came.set()

    async def _beat(self) -> None:
        """Renew the leases of all connections, three times per lease."""
        loop = asyncio.get_running_loop()
        owed: dict[str, asyncio.Future[memoryview]] = {}
        beaten_s: dict[str, float] = {}
        while True:
            self._lease_came.clear()
            self._next_beat_s, now_s = math.inf, loop.time()
            for name, link in self._links.items():
                lease_ms = [lease for subscription in self._subscriptions if (lease := subscription.lease_ms(name))]
                if not lease_ms or link.connection is None:
                    owed.pop(name, None)
                    continue
                wait_s = _beat_s(min(lease_ms))
                if beaten_s.get(name, -math.inf) + wait_s <= now_s:
                    if name in owed and not owed[name].done():
                        link.drop("no answer to a heartbeat")
                        continue
                    owed[name] = link.connection.request(Command.HEARTBEAT)
                    owed[name].add_done_callback(asyncio.Future.exception)
                    beaten_s[name] = now_s
                self._next_beat_s = min(self._next_beat_s, beaten_s[name] + wait_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_beat_s if self._next_beat_s < math.inf else None):
                    await self._lease_came.wait()

    # Called by links.

    def link_opened(self, link: Link) -> None:
        for subscription in self._subscriptions:
            subscription.link_opened(link)

    def link_lost(self, link: Link, reason: str) -> None:
        for subscription in self._subscriptions:
            subscription.link_lost(link)
        self._watch.refresh()

    def link_failed(self, link: Link, error: QmqError) -> None:
        self._watch.link_failed(error)

    def link_writable(self, link: Link) -> None: ...


def _beat_s(lease_ms: int) -> float:
    return lease_ms / 1_000 / BEATS_IN_LEASE


FLUSH_S_MIN = 1.0
"""Time left to send decisions after handlers took all of `drain_s`."""


class Membership:
    """Membership of a listener or puller in its consumer group.

    The member is in the group while the application (`stop`, `resume`), the consumer (`set_online`) and its owner
    (`end`) all want it. These methods may be called from any thread and return at once. On leaving, messages that were
    not begun return to the group as never delivered.
    """

    def __init__(self, terms: Terms, *, drain_s: float, is_online: bool) -> None:
        self.terms = terms
        self.drain_s = drain_s
        self.is_stopped: bool = False
        self._is_online = is_online
        self._is_ended = False
        self._subscription: Subscription | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._changed = asyncio.Event()
        self.handled: Handled = Handled()

    def __getstate__(self) -> None:
        raise no_pickle(f"A {type(self).__name__.lower()}")

    @property
    def subject(self) -> str:
        return self.terms.subject

    @property
    def group(self) -> str:
        """Consumer group; of a broadcast, the consumer's own."""
        return self.terms.group

    @property
    def trouble(self) -> str:
        """Reasons why messages of some or all broker groups do not come now; "" while all are connected."""
        return self._subscription.trouble if self._subscription is not None else ""

    @property
    def cut_off(self) -> str:
        """Reason why no broker group is connected: since the start, or for ten seconds; "" otherwise."""
        return self._subscription.cut_off if self._subscription is not None else ""

    @property
    def health(self) -> Health:
        """State of the connections to broker groups, from any thread."""
        if self._is_ended:
            return not_connected(f"{self.subject}: it leaves its group")
        if not self._is_wanted:
            return degraded(f"{self.subject}: stopped by the application")
        if reason := self.cut_off if self._subscription is not None else "it has not joined its group yet":
            return not_connected(f"{self.subject}: {reason}")
        return degraded(f"{self.subject}: {reason}" if (reason := self.trouble) else "")

    def numbers(self, app: str) -> Iterator[Sample]:
        """Return the numbers of this listener or puller, from any thread."""
        labels, subscription = (app, self.subject, self.group), self._subscription
        gauges: dict[str, float] = {"delivered": self.handled.delivered}
        if subscription is not None:
            gauges |= {
                "delivered": self.handled.delivered + subscription.arrived_messages,
                "waiting_messages": subscription.waiting_messages,
                "unacked_messages": subscription.taken_open,
                "prefetch_messages": subscription.prefetch_messages,
                "lag_seconds": subscription.lag_s(time.time()),
            }
        return (Sample(name, labels, value) for name, value in gauges.items())

    def stop(self) -> None:
        """Take no more messages. Running handlers finish; waiting messages return to the group."""
        self.is_stopped = True
        self._change()

    def resume(self) -> None:
        """Resume receiving."""
        self.is_stopped = False
        self._change()

    def set_online(self, is_online: bool) -> None:
        self._is_online = is_online
        self._change()

    def end(self) -> None:
        """Leave for good."""
        self._is_ended = True
        self._change()

    def _change(self) -> None:
        """Check the wanted state: at once on the event loop's thread, otherwise soon."""
        if threading.get_ident() == self._thread:
            self._look()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._changed.set()
        if self._subscription is not None and not self._is_wanted:
            self._subscription.stop()

    @property
    def _is_wanted(self) -> bool:
        return self._is_online and not self.is_stopped and not self._is_ended

    def start(self, connections: Connections) -> asyncio.Task[None]:
        """Return the task that joins and leaves the group until the end; it raises QmqError if the subscription
        fails.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._changed = asyncio.Event()
        self._is_ended = False
        return asyncio.create_task(self._keep(connections))

    async def _keep(self, connections: Connections) -> None:
        while not self._is_ended:
            self._changed.clear()
            if self._is_wanted:
                try:
                    await self._take_part(connections)
                finally:
                    self._subscription = None  # only now, because decisions were still sent
            else:
                await self._changed.wait()

    async def _take_part(self, connections: Connections) -> None:
        self._subscription = subscription = connections.subscribe(self.terms, self._changed.set)
        try:
            self._joined(subscription)
            while self._is_wanted and not subscription.is_closing:  # a short stop begins a new subscription
                await self._changed.wait()
                self._changed.clear()
                self._adapted(subscription)
        finally:
            clock = asyncio.get_running_loop().time
            deadline = clock() + self.drain_s
            try:
                await self._leaving(subscription, deadline)
            finally:
                await connections.leave(subscription, max(deadline - clock(), min(FLUSH_S_MIN, self.drain_s)))
                self.handled.delivered += subscription.arrived_messages
                subscription.arrived_messages = 0
        if subscription.error is not None:
            raise subscription.error

    def _joined(self, subscription: Subscription) -> None:
        """Hook: the group was joined."""

    def _adapted(self, subscription: Subscription) -> None:
        """Hook: settings have changed."""

    async def _leaving(self, subscription: Subscription, deadline: float) -> None:
        """Hook: finish the application's begun work, as far as possible before `deadline`."""

    async def _decided(self, subscription: Subscription, deadline: float) -> None:
        """Wait until the application has decided all messages it took."""
        try:
            async with asyncio.timeout_at(deadline):
                while subscription.taken_open and subscription.error is None and self._waits_for_decisions():
                    await subscription.progress()
        except TimeoutError:
            pass

    def _waits_for_decisions(self) -> bool:
        return True


async def announce(message: ReceivedMessage) -> None:
    """Announce a suspected message to its broker before its handler begins, and wait for the answer."""
    if (asked := message._piece.acker.begin(message._piece, message._at)) is not None:
        with suppress(QmqError, TimeoutError):  # the attempt goes uncounted
            async with asyncio.timeout(ANNOUNCE_S):
                await asked
