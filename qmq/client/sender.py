"""Shell. Carries a producer's batches to brokers: chooses groups, keeps links, repeats what is in doubt.

The rules are in `qmq.client.batching` and `qmq.client.routing`; here they meet connections and the clock.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from qmq.client.batching import (
    BATCH_BYTES_MAX,
    Batch,
    GroupBatches,
    Limits,
    Next,
    Outcome,
    SubjectQueue,
    Waiting,
    after_error,
    not_stored,
    stored,
)  # fmt: skip
from qmq.client.link import Link
from qmq.client.route_watch import RouteWatch
from qmq.client.routing import Routing, SubjectRoute
from qmq.errors import BrokerReadOnly, Overloaded, QmqError
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.connection import Connection
from qmq.subjects import check_name

log = logging.getLogger(__name__)

TICK_S = 0.05
"""How often deadlines and the rests of groups are looked at; they are long compared with it."""


class _Group:
    """A broker group, as a producer uses it."""

    def __init__(self, link: Link, batches: GroupBatches) -> None:
        self.link, self.batches = link, batches
        self.progress_at = 0.0
        """When the connection last answered, or was given work while it had none."""

    @property
    def can_send(self) -> bool:
        connection = self.link.connection
        return connection is not None and connection.is_open and connection.writable


class Sender:
    """Made by a Producer; used on its event loop from `start` to `stop`."""

    def __init__(
        self, *, metaserver: str, token: str, app: str, producer_id: int, in_flight_max: int, answer_timeout_s: float
    ) -> None:
        self._token, self._app = token, app
        self._producer_id = producer_id
        self._in_flight_max = in_flight_max
        self._answer_timeout_s = answer_timeout_s
        self._loop = asyncio.get_running_loop()
        self._routing = Routing()
        self._groups: dict[str, _Group] = {}
        self._queues: dict[str, SubjectQueue] = {}
        self._active: dict[str, SubjectQueue] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pump_scheduled = False
        self.queued_messages = self.queued_bytes = 0
        self._watch = RouteWatch(
            metaserver=metaserver, token=token, app=app, client_id=f"{producer_id:016x}", produces=True,
            on_routes=self._routes_changed,
        )  # fmt: skip

    # Used by the producer.

    def start(self) -> None:
        self._tasks = [self._loop.create_task(self._watch.run()), self._loop.create_task(self._tick())]

    async def stop(self) -> None:
        """Disconnect. Whoever wants outcomes waits until `is_idle` first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_idle(self) -> bool:
        return not self._active and not any(group.batches.unresolved() for group in self._groups.values())

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def queue(self, subject: str) -> SubjectQueue:
        """Return the queue of a subject; raises InvalidName."""
        queue = self._queues.get(subject)
        if queue is None:
            queue = self._queues[subject] = SubjectQueue(check_name("subject", subject))
            self._watch.watch(subject)
        return queue

    def add(self, subject: str, one: Waiting) -> None:
        """Queue a single message."""
        queue = self.queue(subject)
        queue.add(one)
        self.queued_messages += 1
        self.queued_bytes += len(one.data)
        self._active[subject] = queue
        if not self._pump_scheduled:
            # Not at once: what else is sent in this turn of the loop then travels in the same batch.
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def add_batch(self, batch: Batch) -> None:
        """Queue a whole batch, and send it if there is room."""
        queue = self.queue(batch.subject)
        queue.add_batch(batch)
        self._active[batch.subject] = queue
        self._pump()

    async def wait(self) -> None:
        """Wait until something moved: a batch left a queue or was resolved."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(future)
        await future

    # Choosing and sending.

    def _pump(self) -> None:
        """Send what can be sent now: first what is in doubt, then a batch of each subject in turn."""
        self._pump_scheduled = False
        now_ms = self.now_ms()
        for name, group in self._groups.items():
            if group.batches.has_repeats and group.can_send and not self._routing.resting(name, now_ms):
                while group.can_send and (batch := group.batches.next_repeat()):
                    self._transmit(group, batch)
        moved = True
        while moved and self._active:
            moved = False
            for queue in list(self._active.values()):
                if not any(group.can_send and group.batches.room_bytes() for group in self._groups.values()):
                    break
                moved |= self._send_next(queue, now_ms)
        self._wake()

    def _send_next(self, queue: SubjectQueue, now_ms: int) -> bool:
        """Send one batch of a subject; return False if there is no group for it now."""
        size = queue.next_bytes()

        def load(name: str) -> int | None:
            group = self._groups.get(name)
            if group is None or not group.can_send:
                return None
            room = group.batches.room_bytes()
            return group.batches.load if room and (size <= room or group.batches.never_fits(size)) else None

        name = self._routing.choose(queue.subject, now_ms=now_ms, load=load)
        if name is None:
            return False
        group = self._groups[name]
        batch = self._take(queue, min(group.batches.room_bytes(), BATCH_BYTES_MAX))
        if not group.batches.never_fits(batch.body_bytes):
            group.batches.admit(batch)
            self._transmit(group, batch)
        elif len(batch) > 1:
            queue.put_back(*batch.split())
        else:
            reason = f"{batch.body_bytes} bytes are more than {name} takes in one request"
            batch.resolve(not_stored(Outcome.REFUSED, name, reason))
        self._settle(queue)
        return True

    def _take(self, queue: SubjectQueue, bytes_max: int) -> Batch:
        messages, size = len(queue.waiting), queue.waiting_bytes
        batch = queue.next_batch(bytes_max)
        self.queued_messages += len(queue.waiting) - messages
        self.queued_bytes += queue.waiting_bytes - size
        return batch

    def _settle(self, queue: SubjectQueue) -> None:
        """Put a subject at the end of the line, or out of it if nothing of it waits."""
        self._active.pop(queue.subject, None)
        if queue:
            self._active[queue.subject] = queue

    def _transmit(self, group: _Group, batch: Batch) -> None:
        connection = group.link.connection
        assert connection is not None
        if group.batches.load == 1:
            group.progress_at = self._loop.time()
        header = commands.produce_header(self._producer_id, batch.number, len(batch), batch.crc, batch.subject)
        connection.ask(partial(self._answered, group, connection, batch), Command.PRODUCE, header, *batch.blocks)

    # Answers.

    def _answered(
        self, group: _Group, connection: Connection, batch: Batch, answer: memoryview | QmqError
    ) -> None:
        if batch.result is not None:
            return  # its deadline passed before
        group.progress_at = self._loop.time()
        if isinstance(answer, QmqError):
            self._failed(group, batch, answer)
        else:
            try:
                result = stored(group.link.broker_group, commands.decode_produced(answer))
            except (QmqError, ValueError) as unreadable:
                connection.close(f"unreadable answer to a produce: {unreadable}")  # which puts the batch in doubt
                return
            group.batches.release(batch)
            self._routing.worked(group.link.broker_group)
            batch.resolve(result)
        self._pump()

    def _failed(self, group: _Group, batch: Batch, error: QmqError) -> None:
        name = group.link.broker_group
        match after_error(batch, error):
            case Next.REPEAT:
                group.batches.returned(batch)
            case Next.MOVE:
                group.batches.release(batch)
                queue = self._queues[batch.subject]
                queue.put_back(batch)
                self._active[batch.subject] = queue
            case final:
                group.batches.release(batch)
                outcome = Outcome.UNKNOWN if final is Next.UNKNOWN else Outcome.REFUSED
                batch.resolve(not_stored(outcome, name, str(error)))
                return
        self._routing.failed(name, str(error), now_ms=self.now_ms())
        if not isinstance(error, BrokerReadOnly | Overloaded):
            self._watch.refresh()

    async def _tick(self) -> None:
        """Look at the clock: deadlines, connections that owe an answer, groups whose rest is over."""
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = self.now_ms()
            for name, group in self._groups.items():
                for batch in group.batches.expired(now_ms):
                    group.batches.release(batch)
                    reason = f"no answer before the deadline; last: {self._routing.why_not(batch.subject)}"
                    batch.resolve(not_stored(Outcome.UNKNOWN, name, reason))
                if group.batches.load and self._loop.time() - group.progress_at > self._answer_timeout_s:
                    group.link.drop(f"no answer for {self._answer_timeout_s} s")
            for queue in list(self._active.values()):
                self._expire(queue, now_ms)
            self._pump()

    def _expire(self, queue: SubjectQueue, now_ms: int) -> None:
        reason = self._routing.why_not(queue.subject)
        if self._watch.refused is not None and self._routing.route(queue.subject) is None:
            now_ms, reason = 1 << 62, str(self._watch.refused)  # waiting would not make the token valid
        messages, size = len(queue.waiting), queue.waiting_bytes
        queue.expire(now_ms, reason)
        self.queued_messages += len(queue.waiting) - messages
        self.queued_bytes += queue.waiting_bytes - size
        if not queue:
            self._active.pop(queue.subject, None)

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for future in waiters:
                if not future.done():
                    future.set_result(None)

    # Routes and links.

    def _routes_changed(self, routes: list[SubjectRoute]) -> None:
        changed = self._routing.update(routes)
        for name in self._routing.all_groups():
            if name not in self._groups:
                link = Link(name, owner=self, routing=self._routing, token=self._token, app=self._app)
                self._groups[name] = _Group(link, GroupBatches(self._in_flight_max))
                self._tasks.append(self._loop.create_task(link.run()))
            elif name in changed:
                self._groups[name].link.route_changed()
        self._pump()

    def link_opened(self, link: Link) -> None:
        limits = {name: int(str(link.welcome.get(name, 1 << 20))) for name in Limits._fields}
        self._groups[link.broker_group].batches.limits = Limits(**limits)
        self._routing.worked(link.broker_group)
        self._pump()

    def link_lost(self, link: Link, reason: str) -> None:
        self._groups[link.broker_group].batches.connection_lost()
        self._routing.failed(link.broker_group, reason, now_ms=self.now_ms())
        self._watch.refresh()

    def link_failed(self, link: Link, error: QmqError) -> None:
        self._routing.failed(link.broker_group, str(error), now_ms=self.now_ms())
        self._watch.refresh()

    def link_writable(self, link: Link) -> None:
        self._pump()
