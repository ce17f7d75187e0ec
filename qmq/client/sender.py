"""Shell. Sender of a producer's batches: chooses broker groups, keeps connections, repeats batches of unknown outcome.

The rules are in `qmq.client.batch`, `backlog` and `routes`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from qmq.access import Token
from qmq.client.backlog import (
    Backlog,
    GroupBatches,
    Lanes,
    Limits,
    Line,
    QueuedMessage,
    SendOrder,
    SubjectQueue,
)
from qmq.client.batch import (
    BATCH_BYTES_MAX,
    Batch,
    BatchState,
    Result,
    Stored,
    Unknown,
    answer_of,
    refused,
    stored,
    unknown,
)
from qmq.client.health import CONNECTED, Health, of_groups, worst
from qmq.client.journal import JournalWriter
from qmq.client.lifetime import logged_task, report_lost
from qmq.client.link import Link
from qmq.client.route_watch import NO_ROUTE_YET, RouteWatch
from qmq.client.routes import FAILURES_MAX, Breaker, BreakerState, RefusalClock, Routing, SubjectRoute
from qmq.errors import (
    AccessError,
    BrokerReadOnly,
    CallError,
    ClientClosed,
    NoRoute,
    NotServed,
    Overloaded,
    QmqError,
    QueueFull,
    SubjectFull,
)
from qmq.log.frame import FLAG_ORDERED
from qmq.logs import bounded
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.connection import Connection
from qmq.subjects import check_subject
from qmq.types import GroupKind

log = bounded(__name__)

NO_DELAY_GROUP = (
    "there is no delay group: an operator starts two delay servers and adds them with AddBroker, roles 5 and 6"
)
_NEVER_MS = 1 << 62
BATCHES_AT_ONCE = 1_000
"""Batches sent, or refused as too large, in one pass of the event loop. Limits in flight bound the sent ones. Without
this limit, a callback that sends each refused message again would keep the pass going.
"""
TICK_S = 0.02
"""Interval of checks of deadlines and rests, which are much longer."""
EXPIRED_AT_ONCE = 2_000
"""Queues whose deadlines are checked per tick, in a few ms; 20,000 queues are all checked five times a second."""
WOKEN_BY_ANSWER, WOKEN_BY_TICK = 2, 200
"""Queues that are checked again for room in a group: after each of its answers, and in each tick."""


class _Group:
    """Broker group of a producer."""

    def __init__(self, link: Link, batches: GroupBatches) -> None:
        self.link = link
        self.batches = batches
        self.breaker = Breaker()
        self.name = link.broker_group

    @property
    def can_send(self) -> bool:
        connection = self.link.connection
        return connection is not None and connection.is_open and connection.writable


class Sender:
    """Sender to the groups of one kind. Made by a Producer; used on its event loop from `start` to `stop`.

    Args:
        backlog: shared with the producer's other sender.
        kind: broker groups or delay groups.
        journal: gets acknowledged batches.
        readonly_wait_ms: time until a message is refused while all groups are readonly; None waits until its deadline.
    """

    def __init__(
        self,
        *,
        metaserver: str,
        token: Token,
        app: str,
        producer_id: int,
        in_flight_max: int,
        answer_timeout_s: float,
        backlog: Backlog,
        kind: GroupKind = GroupKind.NORMAL,
        journal: JournalWriter | None = None,
        readonly_wait_ms: int | None = None,
    ) -> None:
        self._token = token
        self._app = app
        self._producer_id = producer_id
        self._journal = journal
        self._in_flight_max = in_flight_max
        self._answer_timeout_s = answer_timeout_s
        self._loop = asyncio.get_running_loop()
        self._routing = Routing()
        self._refusal_clock = RefusalClock(self._routing, readonly_wait_ms) if readonly_wait_ms is not None else None
        self._groups: dict[str, _Group] = {}
        self._queues: dict[str, SubjectQueue] = {}
        self._lanes: dict[str, Lanes] = {}
        self._order = SendOrder()
        self._tasks: list[asyncio.Task[None]] = []
        self._pump_scheduled = False
        self._has_work = asyncio.Event()
        """Set while there may be deadlines or rests to check."""
        self._closed: ClientClosed | None = None
        """Error of messages that are added after the end."""
        self._backlog = backlog
        self._kind = kind
        self._watch = RouteWatch(
            metaserver=metaserver,
            token=token,
            app=app,
            client_id=f"{producer_id:016x}",
            produces=True,
            on_routes=self._routes_changed,
            on_idle=self._forget,
            kind=kind,
        )

    # Used by the producer.

    def start(self) -> None:
        self._tasks = [logged_task(self._loop.create_task(work)) for work in (self._watch.run(), self._tick())]

    async def stop(self) -> None:
        """Disconnect. Messages without an outcome get one here, also if this call is cancelled. Wait for `is_idle`
        first to get real outcomes.
        """
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self.refuse_all()

    def refuse_all(self) -> None:
        """Give an outcome to every message without one; nothing is sent afterwards."""
        for group in self._groups.values():
            for batch in group.batches.unresolved():
                self._give_up(group, batch, "the producer was closed before an answer came")
        self._closed = ClientClosed("the producer was closed before the message was sent")
        for queue in list(self._order.waiting):
            queue.expire(_NEVER_MS, self._closed)
        self._order.clear()
        self._backlog.wake_waiters()

    @property
    def is_idle(self) -> bool:
        return not self._order.waiting and not any(group.batches.has_any for group in self._groups.values())

    @property
    def open_messages(self) -> int:
        """Number of messages without an outcome."""
        waiting = sum(len(queue.waiting) + sum(map(len, queue.ready)) for queue in self._order.waiting)
        return waiting + sum(len(batch) for group in self._groups.values() for batch in group.batches.unresolved())

    @property
    def requests_in_flight(self) -> int:
        return sum(group.batches.load for group in list(self._groups.values()))

    @property
    def health(self) -> Health:
        """Health of the connections to the groups of all subjects in use; from any thread."""
        if not self._queues:
            return CONNECTED
        links = [group.link for group in list(self._groups.values())]
        missing = {link.broker_group: link.failure or "connecting" for link in links if not link.is_open}
        routes = str(self._watch.refused or self._watch.silence)
        if not links and not routes:
            routes = next(iter([*self._watch.refusals.values()]), "") or NO_ROUTE_YET
        return of_groups(missing, connected=len(links) - len(missing), routes=routes)

    @property
    def queue_bytes_max(self) -> int:
        """Limit in bytes of one queue, and of the messages of one `send_many` without an outcome."""
        return self._backlog.bytes_max

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def queue(self, subject: str, label: int = 0) -> SubjectQueue:
        """Return the queue of a message with this subject and label; raises InvalidName."""
        queue = self._queues.get(subject)
        if queue is None:
            queue = self._queues[subject] = SubjectQueue(check_subject(subject), self._backlog)
            self._watch.watch(subject)
        return self._lanes_of(subject).lane(label) if label >> 32 else queue

    def _lanes_of(self, subject: str) -> Lanes:
        lanes = self._lanes.get(subject)
        if lanes is None:
            lanes = self._lanes[subject] = Lanes(subject, self._backlog)
            lanes.set_groups(group.broker_group for group in self._routing.groups_of(subject))
        return lanes

    def batch_bytes_max(self, subject: str) -> int:
        """Return the size limit of a batch for any group of this subject that takes requests now. The limits of other
        groups may be out of date.
        """
        names = [group.broker_group for group in self._routing.groups_of(subject) if group.writable]
        groups = (self._groups[name].batches for name in names if name in self._groups and self._takes(name))
        return min((batches.batch_bytes_max for batches in groups), default=BATCH_BYTES_MAX)

    def add(self, queue: SubjectQueue, message: QueuedMessage) -> None:
        """Queue a single message."""
        queue.add(message)
        if self._closed is not None:
            queue.expire(_NEVER_MS, self._closed)
            return
        if queue not in self._order.active:
            self._note(queue)
        self._pump_soon()  # later, so that messages of this pass of the loop share a batch

    def add_batch(self, queue: SubjectQueue, batch: Batch) -> None:
        """Queue a whole batch, and send it if there is room."""
        if self._closed is not None:
            self._backlog.resolve(batch, refused("", self._closed))
            return
        queue.add_batch(batch)
        self._note(queue)
        self._pump()

    def too_late(self, subject: str) -> QmqError:
        """Return the error for a message that reached its deadline before there was room for it."""
        return self._closed or self._why_not(subject)

    def refuse_late(self, batch: Batch) -> None:
        """Refuse a batch that reached its deadline before it was queued."""
        self._backlog.resolve(batch, refused("", self.too_late(batch.subject)))

    def count_refused(self) -> None:
        """Count a message that was refused before it was queued."""
        self._backlog.count_refused()

    def refuse_stuck(self, queue: SubjectQueue, batch: Batch) -> None:
        """Refuse a queued batch if no group of its subject takes requests now."""
        if batch in queue.ready:
            if not any(self._takes(group.broker_group) for group in self._routing.groups_of(queue.subject)):
                queue.ready.remove(batch)
                self._settle(queue)
                self._backlog.resolve(batch, refused("", self._why_not(queue.subject)))

    def _why_not(self, subject: str) -> QmqError:
        """Return the error for a message that no group took."""
        why, groups = self._routing.why_not(subject), self._routing.groups_of(subject)
        if groups:
            return NotServed(why)
        if not self._routing.has_route(subject) and self._watch.silence:
            return NoRoute(self._watch.silence)
        return NoRoute(why if self._kind is not GroupKind.DELAY else f"{NO_DELAY_GROUP} ({why})")

    async def room(self, subject: str, label: int, size: int, deadline_ms: int) -> SubjectQueue | QueueFull:
        """Return the queue once it has room for `size` bytes, or the error at the deadline. Calls for one order key
        enter in their order.
        """
        backlog, key = self._backlog, (subject, label >> 32)
        if backlog.has_room(queue := self.queue(subject, label), size, label):
            return queue
        line = backlog.entering.setdefault(key, deque()) if label >> 32 else deque()
        try:
            # The queue is looked up again: keys may have changed groups.
            await self.wait_for_room(line, lambda: backlog.has_room(self.queue(subject, label), size), deadline_ms)
        finally:
            if not line:
                backlog.entering.pop(key, None)
        return backlog.full() if self.now_ms() >= deadline_ms else self.queue(subject, label)

    async def wait_for_room(self, line: Line, has_room: Callable[[], bool], deadline_ms: int | None) -> None:
        """Wait until a call is the first of its line and has room, or until the deadline."""
        place: asyncio.Future[None] = self._loop.create_future()
        line.append(place)
        try:
            if line[0] is not place:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(None if deadline_ms is None else deadline_ms / 1000):
                        await place
            while not has_room() and (deadline_ms is None or self.now_ms() < deadline_ms):
                await self.wait()
        finally:
            line.remove(place)
            if line and not line[0].done():
                line[0].set_result(None)

    async def wait(self) -> None:
        """Wait for progress in either sender of the producer, or for a tick."""
        self._has_work.set()
        moved: asyncio.Future[None] = self._loop.create_future()
        self._backlog.waiters.append(lambda: None if moved.done() else moved.set_result(None))
        await moved

    # Requests.

    async def groups(self, subject: str, deadline_ms: int) -> list[str]:
        """Return the groups of a subject, once the metaserver has sent its route.

        Raises:
            InvalidName: the subject is not valid.
            NoRoute, AccessError: there was no route until the deadline, or the token is rejected.
            ClientClosed: the producer was closed.
        """
        self.queue(subject)
        while not (groups := self._routing.groups_of(subject)):
            if self._closed is not None:
                raise self._closed
            if self._watch.refused is not None:
                raise self._watch.refused
            if self.now_ms() >= deadline_ms:
                raise self._why_not(subject)
            await self.wait()
        return [group.broker_group for group in groups]

    def connection(self, name: str) -> Connection | None:
        """Return the connection to a group's master, or None if it is lost or the group rests.

        Raises:
            ClientClosed: the producer was closed.
            AccessError: the token is rejected.
        """
        if (ended := self._closed or self._watch.rejected) is not None:
            raise ended
        group = self._groups.get(name)
        if group is None or not group.can_send or self._routing.resting(name, self.now_ms()):
            return None
        return group.link.connection

    def report_failure(self, name: str, error: QmqError) -> None:
        """Let a group rest that did not answer, and refresh its route."""
        self._routing.failed(name, str(error), now_ms=self.now_ms())
        self._watch.refresh()

    def rest_reason(self, name: str) -> str:
        """Return the reason of a group's last rest, or ""."""
        return self._routing.rest_reason(name)

    # Choosing and sending.

    def _note(self, queue: SubjectQueue) -> None:
        """Record that a queue has messages, or may be sent to another group."""
        if not queue:
            return
        self._has_work.set()
        if queue.group is None:
            is_active = bool(self._routing.groups_of(queue.subject))
        else:
            is_active = bool(queue.group) and queue.under_way is None and not self._lanes[queue.subject].are_moving
        self._order.note(queue, is_active=is_active)

    def _settle(self, queue: SubjectQueue) -> None:
        """Move a queue to the end of the order, or out of it if it is empty."""
        self._order.remove(queue)
        self._note(queue)

    def _takes(self, name: str) -> bool:
        """Return whether a group takes requests now."""
        group, now_ms = self._groups[name], self.now_ms()
        return group.can_send and group.breaker.allows(now_ms) and not self._routing.resting(name, now_ms)

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send all that can be sent now: repeats first, then a batch of each queue in turn."""
        self._pump_scheduled = False
        now_ms = self.now_ms()
        for name, group in self._groups.items():
            if group.batches.has_repeats and self._takes(name):
                while group.can_send and (batch := group.batches.next_repeat()):
                    self._backlog.repeats += 1
                    self._transmit(group, batch)
        left = BATCHES_AT_ONCE
        while self._order.active:
            queue = next(iter(self._order.active))
            if not left:
                self._pump_soon()
                break
            if self._send_next(queue, now_ms):
                left -= 1
            else:
                if not any(map(self._has_room, self._groups)):
                    break  # no group has room for any queue: all stay active
                self._wait_for_room(queue)
        if self._backlog.waiters:
            self._backlog.wake_waiters()

    def _has_room(self, name: str) -> bool:
        return bool(self._takes(name) and self._groups[name].batches.room_bytes())

    def _wait_for_room(self, queue: SubjectQueue) -> None:
        names = [group.broker_group for group in self._routing.groups_of(queue.subject)]
        self._order.crowd(queue, [name for name in names if queue.group in (None, name)])

    def _wake_crowd(self, name: str, count: int) -> None:
        for queue in self._order.take_crowd(name, count):
            self._note(queue)

    def _send_next(self, queue: SubjectQueue, now_ms: int) -> bool:
        """Send one batch of a queue; return False if no group accepts it now."""
        self._watch.watch(queue.subject)
        size, rooms = queue.next_bytes(), dict[str, int]()

        def load(name: str) -> int | None:
            group = self._groups.get(name)
            if group is None or not group.can_send or queue.group not in (None, name):
                return None
            room = rooms[name] = group.batches.room_bytes(queue.subject)
            if not room or size > room and not group.batches.never_fits(size) or not group.breaker.allows(now_ms):
                return None
            return group.batches.load

        name = self._routing.choose(queue.subject, now_ms=now_ms, load=load)
        if name is None:
            return False
        group = self._groups[name]
        batch = queue.next_batch(min(rooms[name], group.batches.batch_bytes_max))
        if not group.batches.never_fits(batch.body_bytes):
            group.batches.admit(batch)
            self._transmit(group, batch)
        elif len(batch) > 1:
            queue.put_back(*batch.split())
        else:
            error = group.batches.limits.exceeded(batch.body_bytes, name)
            self._end(group, batch, refused(name, error))
        self._settle(queue)
        return True

    def _transmit(self, group: _Group, batch: Batch) -> None:
        connection = group.link.connection
        assert connection is not None
        if group.batches.load == 1:
            group.link.progressed(self._loop.time())
        header = commands.produce_header(
            self._producer_id, batch.number, len(batch.ids), batch.crc, batch.subject, batch.flags
        )
        connection.ask(partial(self._answered, group, connection, batch), Command.PRODUCE, header, *batch.blocks)

    # Answers.

    def _answered(self, group: _Group, connection: Connection, batch: Batch, answer: memoryview | QmqError) -> None:
        group.link.progressed(self._loop.time())
        if connection.is_open:
            group.breaker.answered()
        elif group.breaker.failed(now_ms := self.now_ms()):
            log.warning("broker does not answer group=%s failures=%d", group.name, FAILURES_MAX)
            self._routing.failed(group.name, f"{FAILURES_MAX} requests in a row got no answer", now_ms=now_ms)
        if batch.result is not None:
            return  # its deadline passed before
        if isinstance(answer, QmqError):
            self._failed(group, batch, answer)
        else:
            try:
                produced = commands.decode_produced(answer)
                result = stored(group.name, produced)
            except (QmqError, ValueError) as unreadable:
                connection.close(f"unreadable answer to a produce: {unreadable}")
                group.batches.answered(batch, Unknown)
                return
            group.batches.answered(batch, Stored)
            group.batches.advised(produced.batch_bytes)
            self._routing.succeeded(group.name)
            if self._refusal_clock is not None:
                self._refusal_clock.succeeded(batch.subject, group.name)
            self._end(group, batch, result)
        self._wake_crowd(group.name, WOKEN_BY_ANSWER)
        self._pump()

    def _end(self, group: _Group, batch: Batch, result: Result) -> None:
        group.batches.release(batch)
        if self._journal is not None:
            self._journal.stored(batch, result)
        self._backlog.resolve(batch, result)
        self._lane_is_free(batch)

    def _give_up(self, group: _Group, batch: Batch, reason: str) -> None:
        group.batches.give_up(batch)
        self._end(group, batch, unknown(group.name, reason))

    def _failed(self, group: _Group, batch: Batch, error: QmqError) -> None:
        """Handle an error answer.

        A batch that is not stored goes to another group, or is refused if the error would follow it there. Otherwise it
        is repeated. The group refuses a repeat whose number is too old, and its outcome stays unknown.
        """
        is_stored_nowhere = group.batches.answered(batch, answer_of(error)) is BatchState.NOT_STORED
        has_old_token = isinstance(error, AccessError) and group.link.has_old_token
        if has_old_token:
            group.link.drop(f"the token's file has another one: {error}")
        elif isinstance(error, CallError | AccessError | SubjectFull):  # the other groups are as full, or soon will be
            if is_stored_nowhere:
                self._end(group, batch, refused(group.name, error))
            else:
                self._give_up(group, batch, str(error))
            return
        if is_stored_nowhere:
            group.batches.release(batch)
            queue = self._queue_of(group, batch)
            queue.put_back(batch)
            self._backlog.repeats += 1
            self._note(queue)
            self._lane_is_free(batch)
        is_readonly = isinstance(error, BrokerReadOnly)
        self._routing.failed(group.name, str(error), now_ms=self.now_ms(), is_readonly=is_readonly)
        if not isinstance(error, BrokerReadOnly | Overloaded):
            self._watch.refresh()

    def _queue_of(self, group: _Group, batch: Batch) -> SubjectQueue:
        if batch.flags & FLAG_ORDERED:
            return next(lane for lane in self._lanes[batch.subject] if lane.group == group.name)
        return self._queues[batch.subject]

    def _lane_is_free(self, batch: Batch) -> None:
        """Renew the lanes after a lane's batch ended: its next batch may be sent, or the lanes may move."""
        if batch.flags & FLAG_ORDERED:
            self._renew(self._lanes[batch.subject])

    def _renew(self, lanes: Lanes, groups: Iterable[str] | None = None) -> None:
        """Refill lanes if that is due; `groups` are the subject's current groups if they may have changed. The old
        lanes are settled as well: an empty lane that stays active would break the next send.
        """
        before = list(lanes)
        if groups is None:
            lanes.move()
        else:
            lanes.set_groups(groups)
        for queue in (*before, *lanes):
            self._settle(queue)

    async def _tick(self) -> None:
        """Check deadlines, late answers and rests, while there is anything to send."""
        while True:
            if self.is_idle and not self._backlog.waiters:
                self._has_work.clear()
                await self._has_work.wait()
            await asyncio.sleep(TICK_S)
            now_ms = self.now_ms()
            for group in self._groups.values():
                self._give_up_expired(group, now_ms)
                if group.batches.load and group.link.is_late(self._loop.time(), self._answer_timeout_s):
                    reason = f"no answer for {self._answer_timeout_s} s"
                    log.warning("connection given up group=%s reason=%s (answer_timeout_s)", group.name, reason)
                    group.link.drop(reason)
                if self._takes(group.name):
                    self._wake_crowd(group.name, WOKEN_BY_TICK)
            for queue in self._order.take_to_expire(EXPIRED_AT_ONCE):
                self._expire(queue, now_ms)
            self._pump()

    def _give_up_expired(self, group: _Group, now_ms: int) -> None:
        if (rejected := self._watch.rejected) is not None:
            now_ms, reason = _NEVER_MS, str(rejected)
        else:
            why = self._routing.rest_reason(group.name)
            reason = f"no answer of {group.name} before the deadline" + (f"; last: {why}" if why else "")
        for batch in group.batches.expired(now_ms):
            self._give_up(group, batch, reason)

    def _expire(self, queue: SubjectQueue, now_ms: int) -> None:
        refused = self._watch.refused if self._routing.route(queue.subject) is None else self._watch.rejected
        if refused is not None:
            queue.expire(_NEVER_MS, refused)  # waiting would not make the token valid
        elif self._refusal_clock is not None and self._refusal_clock.is_over(queue.subject, queue.group or "", now_ms):
            queue.expire(_NEVER_MS, self._why_not(queue.subject))
        elif (deadline_ms := queue.first_deadline_ms()) is not None and deadline_ms <= now_ms:
            queue.expire(now_ms, self._why_not(queue.subject))
        if not queue:
            self._settle(queue)

    # Routes and links.

    def _routes_changed(self, routes: list[SubjectRoute]) -> None:
        changed = self._routing.update(routes)
        for name in self._routing.all_groups():
            if name not in self._groups:
                link = Link(name, owner=self, routing=self._routing, token=self._token, app=self._app)
                self._groups[name] = _Group(link, GroupBatches(self._in_flight_max))
                self._tasks.append(logged_task(self._loop.create_task(link.run())))
            elif name in changed:
                self._groups[name].breaker = Breaker()
                self._groups[name].link.route_changed()
        for subject in dict.fromkeys(route.subject for route in routes):
            if subject in self._queues:
                self._note(self._queues[subject])
            if (lanes := self._lanes.get(subject)) is not None:
                self._renew(lanes, (group.broker_group for group in self._routing.groups_of(subject)))
        self._pump()

    def _forget(self, idle: set[str]) -> set[str]:
        """Forget queues and routes of subjects without unresolved messages; return these subjects."""
        busy = {queue.subject for queue in self._order.waiting}
        busy.update(batch.subject for group in self._groups.values() for batch in group.batches.unresolved())
        for subject in (gone := idle - busy):
            self._queues.pop(subject, None)
            self._lanes.pop(subject, None)
        self._routing.forget(gone)
        if self._refusal_clock is not None:
            self._refusal_clock.forget(gone)
        return gone

    def link_opened(self, link: Link) -> None:
        limits = {name: int(str(link.welcome.get(name, 1 << 20))) for name in Limits._fields}
        group = self._groups[link.broker_group]
        group.batches.limits = Limits(**limits)
        if group.breaker.state is BreakerState.CLOSED:  # otherwise it has to answer first
            self._routing.succeeded(link.broker_group)
        self._pump()

    def link_lost(self, link: Link, reason: str) -> None:
        self._routing.failed(link.broker_group, reason, now_ms=self.now_ms())
        self._watch.refresh()

    def link_failed(self, link: Link, error: QmqError) -> None:
        self._routing.failed(link.broker_group, str(error), now_ms=self.now_ms())
        self._watch.link_failed(error)

    def link_writable(self, link: Link) -> None:
        self._pump()


class Flight:
    """Count of the messages without an outcome that were sent between two flushes."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: int = 0


class Senders:
    """Both senders of a producer: to broker groups, and, from the first delayed message on, to delay groups.

    Made on the event loop when the producer is opened; ends with `stop`.

    Args:
        make: makes a sender to groups of a kind.
    """

    def __init__(self, make: Callable[[GroupKind], Sender]) -> None:
        self._make = make
        self._all = [make(GroupKind.NORMAL)]
        self._all[0].start()
        self._flights = [Flight()]
        """Oldest first; the last one counts new messages."""
        self._is_stopping = False
        self._guard = asyncio.create_task(self._guard_end())

    def of(self, *, is_delayed: bool) -> Sender:
        """Return the sender for delayed or other messages."""
        if is_delayed and len(self._all) == 1:
            self._all.append(self._make(GroupKind.DELAY))
            self._all[1].start()
        return self._all[is_delayed]

    def board(self) -> Flight:
        """Count one message on the current flight, and return the flight."""
        flight = self._flights[-1]
        flight.open += 1
        return flight

    async def flush(self) -> None:
        """Wait for the outcomes of all earlier messages, not of later ones."""
        under_way = [flight for flight in self._flights if flight.open]
        self._flights = [*under_way, Flight()]
        while any(flight.open for flight in under_way):
            await self.wait()

    @property
    def is_idle(self) -> bool:
        return all(sender.is_idle for sender in self._all)

    @property
    def open_messages(self) -> int:
        """Number of messages without an outcome."""
        return sum(sender.open_messages for sender in self._all)

    @property
    def health(self) -> Health:
        return worst(sender.health for sender in self._all)

    @property
    def requests_in_flight(self) -> int:
        return sum(sender.requests_in_flight for sender in self._all)

    async def _guard_end(self) -> None:
        """Refuse all messages when the event loop ends without closing the producer."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if not self._is_stopping:
                report_lost(self.open_messages, "the event loop ended")
                for sender in self._all:
                    sender.refuse_all()

    async def wait(self) -> None:
        """Wait for progress in one of the senders."""
        await self._all[0].wait()

    async def stop(self) -> None:
        """Stop both senders, also if this call is cancelled. Each gives its messages an outcome."""
        self._is_stopping = True
        self._guard.cancel()
        first, *others = self._all
        try:
            await first.stop()
        finally:
            for sender in others:
                await sender.stop()
