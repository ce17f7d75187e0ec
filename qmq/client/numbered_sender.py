"""Shell. Sender of batches with stored numbers, for the outbox (rows claimed in a database) and delay servers.

Producer id, number and broker group of such a batch are stored before it is sent. So the batch may be repeated after a
crash, and the group stores it once (qmq.log.fold, P2). This sender makes one attempt per call and returns its answer;
its owner decides the next step (qmq.client.batch).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

from qmq.access import Token
from qmq.client.backlog import Limits
from qmq.client.batch import Answer, NotStored, NumberedBatch, OnAnswer, Stored, Unknown, answer_of
from qmq.client.lifetime import logged_task
from qmq.client.link import Link
from qmq.client.route_watch import RouteWatch
from qmq.client.routes import FAILURES_MAX, Breaker, BreakerState, GroupRoute, Routing, SubjectRoute, group_of_key
from qmq.errors import (
    BrokerReadOnly,
    CallError,
    ClientClosed,
    NotServed,
    Overloaded,
    QmqError,
)
from qmq.logs import bounded
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.connection import Connection
from qmq.subjects import check_subject

log = bounded(__name__)

TICK_S = 0.05
"""Interval of checks for late answers and ended rests."""
ANSWER_TIMEOUT_S = 10.0
"""Time until a connection without an answer is dropped. A broker that waits for its slave answers much earlier."""


class _Flight:
    """One attempt without an answer."""

    __slots__ = ("done", "size")

    def __init__(self, done: OnAnswer, size: int) -> None:
        self.done = done
        self.size = size


class _Group:
    """Broker group of this sender."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.breaker = Breaker()
        self.limits = Limits(1 << 20, 1 << 20)
        self.flights: dict[_Flight, None] = {}
        self.bytes_in_flight = 0

    def body_bytes_max(self) -> int:
        """Return the largest body that the group takes on an idle connection."""
        return max(0, self.limits.batch_bytes_max)


class NumberedSender:
    """Sender of a process, used on one event loop: `async with NumberedSender(…) as sender`.

    Args:
        metaserver: HTTP address.
        app: name of this process for brokers and the metaserver.
    """

    def __init__(self, *, metaserver: str, token: Token, app: str, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._token = token
        self._app = app
        self._answer_timeout_s = answer_timeout_s
        self._routing = Routing()
        self._groups: dict[str, _Group] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: list[Callable[[], None]] = []
        self._usable: frozenset[str] = frozenset()
        self._is_open = False
        self._has_work = asyncio.Event()
        """Set while an answer is missing or a group rests."""
        self._watch = RouteWatch(
            metaserver=metaserver,
            token=token,
            app=app,
            client_id=f"{random.getrandbits(64):016x}",
            produces=True,
            on_routes=self._routes_changed,
            on_idle=self._forget,
        )

    async def __aenter__(self) -> NumberedSender:
        self._loop = asyncio.get_running_loop()
        self._tasks = [logged_task(self._loop.create_task(work)) for work in (self._watch.run(), self._tick())]
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect. Attempts without an answer end as unknown."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for group in self._groups.values():
            for flight in list(group.flights):
                self._end(group, flight, Unknown("the sender was closed before the answer"))

    # Routes and room.

    def watch(self, subject: str) -> None:
        """Keep the route of a subject while it is used; raises InvalidName."""
        self._watch.watch(check_subject(subject))

    def _groups_of(self, subject: str) -> tuple[GroupRoute, ...]:
        self._watch.watch(subject)
        return self._routing.groups_of(subject)

    def _forget(self, idle: set[str]) -> set[str]:
        self._routing.forget(idle)
        return idle

    @property
    def refusals(self) -> dict[str, str]:
        """Reasons of subjects that the metaserver refused. "" stands for all subjects while no metaserver answers."""
        trouble = self._watch.trouble
        return ({"": trouble} if trouble else {}) | self._watch.refusals

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` when routes or usable groups change."""
        self._listeners.append(callback)

    def is_known(self, subject: str) -> bool:
        """Return whether a route of the subject is known."""
        return self._routing.route(subject) is not None

    def groups(self, subject: str) -> list[str]:
        """Return the writable and usable broker groups of `subject`; none before its route came."""
        groups = self._groups_of(subject)
        return [group.broker_group for group in groups if group.writable and self.is_usable(group.broker_group)]

    def home(self, subject: str, label: int) -> str | None:
        """Return the broker group of an order key, usable or not; None without a route.

        Args:
            label: label of a message with an order key (qmq.codec).
        """
        groups = self.sharers(subject)
        return group_of_key(label >> 32, groups) if groups else None

    def sharers(self, subject: str) -> list[str]:
        """Return the broker groups that share the subject's order keys. While they stay the same, so does each key's
        `home`.
        """
        return [group.broker_group for group in self._groups_of(subject)]

    def is_usable(self, name: str) -> bool:
        """Return whether a group is connected and does not rest, with any routes."""
        group, now_ms = self._groups.get(name), self._now_ms()
        if group is None or self._routing.resting(name, now_ms) or not group.breaker.allows(now_ms):
            return False
        connection = group.link.connection
        return connection is not None and connection.is_open and connection.writable

    def is_any_usable(self) -> bool:
        """Return whether any group is usable."""
        return any(map(self.is_usable, self._groups))

    def room(self, name: str) -> int:
        """Return the size limit of the next batch's body to this group; 0 if it takes none."""
        group = self._groups.get(name)
        if group is None or not self.is_usable(name):
            return 0
        return max(0, min(group.body_bytes_max(), group.limits.window_bytes - group.bytes_in_flight))

    def in_flight(self, name: str) -> int:
        """Return the number of batches to this group without an answer."""
        group = self._groups.get(name)
        return len(group.flights) if group else 0

    def why_not(self, subject: str) -> str:
        """Return the reason why no group accepts a batch of `subject`."""
        if self._watch.refused is not None and not self.is_known(subject):
            return str(self._watch.refused)
        return self._routing.why_not(subject)

    # Sending.

    def send(self, group: str, batch: NumberedBatch, done: OnAnswer) -> None:
        """Send a batch to a broker group; `done` is called once, during this call if the batch cannot be sent.

        Batches travel in order and do not wait for each other's answers.
        """
        if not self._is_open:
            done(NotStored(ClientClosed("the sender is not open")))
            return
        self._watch.watch(batch.subject)
        known = self._groups.get(group)
        connection = known.link.connection if known else None
        if known is None or connection is None or not connection.is_open:
            why = self._routing.rest_reason(group) or "no connection"
            done(NotStored(NotServed(f"{group}: {why}")))
            return
        size = sum(map(len, batch.blocks))
        if size > known.body_bytes_max():
            done(NotStored(known.limits.exceeded(size, group)))
        elif known.flights and known.bytes_in_flight + size > known.limits.window_bytes:
            done(NotStored(Overloaded(f"{known.bytes_in_flight} bytes are in flight to {group}")))
        else:
            self._transmit(known, connection, batch, _Flight(done, size))

    def _transmit(self, group: _Group, connection: Connection, batch: NumberedBatch, flight: _Flight) -> None:
        if not group.flights:
            group.link.progressed(self._loop.time())
            self._has_work.set()
        group.flights[flight] = None
        group.bytes_in_flight += flight.size
        header = commands.produce_header(
            batch.producer, batch.number, batch.count, batch.crc, batch.subject, batch.flags
        )
        connection.ask(partial(self._answered, group, connection, flight), Command.PRODUCE, header, *batch.blocks)

    def _end(self, group: _Group, flight: _Flight, answer: Answer) -> None:
        if flight in group.flights:  # otherwise the sender was closed and it has its answer
            del group.flights[flight]
            group.bytes_in_flight -= flight.size
            flight.done(answer)

    def _answered(self, group: _Group, connection: Connection, flight: _Flight, answer: memoryview | QmqError) -> None:
        name, now_ms = group.link.broker_group, self._now_ms()
        group.link.progressed(self._loop.time())
        if connection.is_open:
            group.breaker.answered()
        elif group.breaker.failed(now_ms):
            log.warning("broker does not answer group=%s failures=%d", name, FAILURES_MAX)
            self._rests(name, f"{FAILURES_MAX} requests in a row got no answer")
        if isinstance(answer, QmqError):
            self._failed(name, answer)
            self._end(group, flight, answer_of(answer))
            return
        try:
            produced = commands.decode_produced(answer)
        except (QmqError, ValueError) as unreadable:
            connection.close(f"unreadable answer to a produce: {unreadable}")
            self._end(group, flight, Unknown(f"{name}: {unreadable}"))
            return
        self._routing.succeeded(name)
        self._end(group, flight, Stored(produced.first_sequence, produced.stored, produced.refused))

    def _failed(self, name: str, error: QmqError) -> None:
        if isinstance(error, CallError):
            return  # caused by the batch, not by the group
        self._rests(name, str(error))
        if not isinstance(error, BrokerReadOnly | Overloaded):
            self._watch.refresh()

    def _rests(self, name: str, reason: str) -> None:
        """Let a group rest. A rest may be shorter than a tick; listeners are called when it ends."""
        self._routing.failed(name, reason, now_ms=self._now_ms())
        self._usable -= {name}
        self._has_work.set()

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    async def _tick(self) -> None:
        """Check for late answers and ended rests, while there are any to expect."""
        while True:
            if len(self._usable) == len(self._groups) and not any(group.flights for group in self._groups.values()):
                self._has_work.clear()
                await self._has_work.wait()
            await asyncio.sleep(TICK_S)
            for group in self._groups.values():
                if group.flights and group.link.is_late(self._loop.time(), self._answer_timeout_s):
                    group.link.drop(f"no answer for {self._answer_timeout_s} s")
            if frozenset(name for name in self._groups if self.is_usable(name)) != self._usable:
                self._changed()

    def _changed(self) -> None:
        self._has_work.set()
        self._usable = frozenset(name for name in self._groups if self.is_usable(name))
        for callback in self._listeners:
            callback()

    # Routes and links.

    def _routes_changed(self, routes: list[SubjectRoute]) -> None:
        changed = self._routing.update(routes)
        for name in self._routing.all_groups():
            if name not in self._groups:
                link = Link(name, owner=self, routing=self._routing, token=self._token, app=self._app)
                self._groups[name] = _Group(link)
                self._tasks.append(logged_task(self._loop.create_task(link.run())))
            elif name in changed:
                self._groups[name].breaker = Breaker()
                self._groups[name].link.route_changed()
        self._changed()

    def link_opened(self, link: Link) -> None:
        group = self._groups[link.broker_group]
        group.limits = Limits(**{name: int(str(link.welcome.get(name, 1 << 20))) for name in Limits._fields})
        if group.breaker.state is BreakerState.CLOSED:  # otherwise it has to answer first
            self._routing.succeeded(link.broker_group)
        self._changed()

    def link_lost(self, link: Link, reason: str) -> None:
        self._link_is_down(link, reason)

    def link_failed(self, link: Link, error: QmqError) -> None:
        self._watch.link_failed(error)
        self._link_is_down(link, str(error))

    def _link_is_down(self, link: Link, reason: str) -> None:
        self._rests(link.broker_group, reason)
        self._watch.refresh()
        self._changed()

    def link_writable(self, link: Link) -> None:
        self._changed()
