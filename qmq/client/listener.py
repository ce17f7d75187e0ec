"""Shell. Listener: workers that remove messages from the queue, call the handler, and ack or nack by its outcome.

A handler takes one message, or a list of up to `batch`. The outcome of a call applies to each of its messages that the
handler did not decide. After a failure the messages return in lists of half the size, at the last attempt alone. So a
failing message does not make dead letters of its neighbours.

A suspected message was unacked at a consumer that vanished (qmq.log.group). It is handled alone, in a list of its own:
if the process crashes, no other message can be the cause. It waits until no other handler of the listener runs, and the
broker is notified before its handler begins. For other messages this costs two additions.

While messages wait for a listener of higher `priority`, no call begins. If there is no such listener, this costs one
comparison per call.

Messages prefetched for fast handlers would be minutes of work once the handlers are slow. So while messages wait, the
pace of taking is measured some times a second. Far more waiting messages than the current prefetch are released, the
newest first, as never delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import cast

from qmq.client.blocked_loop import MONITOR, Call, id_of
from qmq.client.handler import FilteredHandler, Given, HandlerCall, HungThreads, WorkerThread, finished, within
from qmq.client.health import Health, degraded, worst
from qmq.client.membership import Membership, announce
from qmq.client.numbers import Sample
from qmq.client.prefetch import LOOK_S, MEASURED_EVERY, Pacer, Prefetch
from qmq.client.received import ReceivedMessage
from qmq.client.subscription import Subscription, is_over
from qmq.client.terms import Refused, Terms, batch_of, check_concurrency, refused_by_error
from qmq.client.unreadable import Unreadable
from qmq.errors import InvalidPayload, UnreadablePayload
from qmq.logs import HANDLED, bounded
from qmq.remoting.commands import Verdict

log = bounded(__name__)

HANDLED_IN_A_ROW = 64
"""Calls after which a worker yields to the event loop; a handler that never awaits would keep it from reading."""
WORKER_REST_S = 1.0
"""Pause before a failed worker is replaced: where no thread can be started, the next one fails too."""
SLOW_S = 0.001
"""Duration of a call after which the next one is measured, too. Timing every fast call cost a twentieth of the
throughput.
"""
CANCEL_S = 5.0
"""Time for a cancelled handler to end."""


class Listener(Membership):
    """Handler of a subject's messages for a consumer group.

    Made by `Consumer.listen`, found in `Consumer.listeners`. Its methods may be called from any thread.
    """

    def __init__(
        self,
        terms: Terms,
        handling: FilteredHandler,
        *,
        concurrency: int,
        batch: int | None,
        auto_ack: bool,
        priorities: Priorities,
        priority: int,
        timeout_s: float | None,
        drain_s: float,
        is_online: bool,
    ) -> None:
        super().__init__(terms, drain_s=drain_s, is_online=is_online)
        self._priorities = priorities
        self._priority = priority
        self._handling = handling
        handling.bound.reject = self._reject
        self._unreadable = Unreadable()
        self._auto_ack = auto_ack
        self._timeout_s = timeout_s
        self._hung = HungThreads()
        self._concurrency = check_concurrency(concurrency)
        self._batch = batch
        """Largest number of messages in a call; None calls the handler with a single message."""
        self._workers: set[asyncio.Task[None]] = set()
        self.exit_with: BaseException | None = None
        """SystemExit or KeyboardInterrupt of a handler, which `Consumer.run` raises at its end."""
        self._gate = SuspectGate()
        self._prefetch = Prefetch(terms.prefetch_messages, self._at_once)

    @property
    def concurrency(self) -> int:
        """Number of handlers that may run at the same time; may be changed at any time. With 1, they run in order."""
        return self._concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._concurrency = check_concurrency(concurrency)
        self._change()

    @property
    def hung_threads(self) -> int:
        """Number of threads with a running call that outlived `timeout` or `drain_s`. At `concurrency`, the next call
        waits.
        """
        return self._hung.count

    @property
    def health(self) -> Health:
        """State of the connections and of the handler's threads, from any thread."""
        hung = f"{self.subject}: {self.hung_threads} threads of the handler hang" if self.hung_threads else ""
        return worst((super().health, degraded(hung)))

    def numbers(self, app: str) -> Iterator[Sample]:
        """Return the numbers of this listener, from any thread."""
        labels = app, self.subject, self.group
        yield from super().numbers(app)
        yield Sample("handlers_running", labels, self._gate.running)
        yield Sample("handlers", labels, self._concurrency)
        yield Sample("hung_threads", labels, self.hung_threads)
        yield Sample("unreadable_messages", labels, self.unreadable_messages)
        yield from self.handled.samples(*labels)

    @property
    def unreadable_messages(self) -> int:
        """Number of messages that wait because this process cannot decode them; the log has the cause."""
        return len(self._unreadable.waiting)

    @property
    def _at_once(self) -> int:
        """Number of messages that handlers may have at the same time."""
        return self._concurrency * (self._batch or 1)

    # Hooks of Membership.

    def _joined(self, subscription: Subscription) -> None:
        self._gate = SuspectGate()
        self._workers.clear()  # the message of a worker that outlived its cancellation went back to the group
        if not (self.terms.broadcast or self.terms.exclusive_ms):  # otherwise no other consumer gets them
            ExcessReturn(subscription, self._prefetch)
        self._priorities.joined(subscription, self._priority)
        self._adapted(subscription)

    def _adapted(self, subscription: Subscription) -> None:
        """Start missing workers. Surplus ones end after their current message."""
        if subscription.is_closing:
            return
        self._prefetch.set_concurrency(self._at_once)
        subscription.prefetch_messages = self._prefetch.messages
        for _ in range(self._concurrency - len(self._workers)):
            worker = asyncio.create_task(self._work(subscription))
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)
        subscription.wake_all()

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if worker.cancelled():
            self._change()  # by a handler that cancels its own task; not while leaving the group
        elif (error := worker.exception()) is not None:
            log.error("worker failed, replaced soon subject=%s group=%s", self.subject, self.group, exc_info=error)
            asyncio.get_running_loop().call_later(WORKER_REST_S, self._change)

    async def _leaving(self, subscription: Subscription, deadline: float) -> None:
        subscription.stop()
        self._priorities.left(subscription)
        self._gate.cancel_waiting()
        self._unreadable.release()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=deadline - asyncio.get_running_loop().time())
            for worker in late:
                log.warning(
                    "handler cancelled after drain_s, its messages go back subject=%s group=%s",
                    self.subject,
                    self.group,
                )
                worker.cancel()
            if late:
                await asyncio.wait(late, timeout=CANCEL_S)
        self._unreadable.release()  # those of the last calls
        if not self._auto_ack:
            await self._decided(subscription, deadline)

    # Workers.

    async def _work(self, subscription: Subscription) -> None:
        """Run one worker: a call at a time, from the buffer to the handler."""
        thread = None
        if self._handling.is_blocking:
            thread = WorkerThread(f"qmq-{self.subject}-{self.group}", self._hung, lambda: self._concurrency)
        handle = self._handling.route(thread)
        if self._timeout_s is not None:
            handle = partial(within, self._timeout_s, handle)
        if self.terms.most_once:
            handle = _after_ack(subscription, handle, self._readable, is_batch=self._batch is not None)
        about = f"handler={self._handling.name} subject={self.subject} group={self.group}"
        try:
            with MONITOR.watched(about) as call:
                await self._serve(subscription, handle, thread, call)
        finally:
            if thread is not None:
                thread.close()

    async def _serve(
        self, subscription: Subscription, handle: HandlerCall, thread: WorkerThread | None, call: Call
    ) -> None:
        gate, priorities, unreadable, is_batch = self._gate, self._priorities, self._unreadable, self._batch is not None
        auto_ack, handled, is_slow, clock = self._auto_ack, 0, True, asyncio.get_running_loop().time
        task = cast(asyncio.Task[None], asyncio.current_task())
        while not subscription.is_closing:
            if task.cancelling():  # by a handler that returned all the same; the next call would be cancelled
                raise asyncio.CancelledError
            if len(self._workers) > self._concurrency:
                self._workers.remove(task)  # before the next one counts
                return
            if self._priority < priorities.highest and priorities.is_behind(self._priority):
                await subscription.wait_for_others()
                continue
            if thread is not None and thread.is_hung:
                await thread.ready()  # before a message is taken: its time would begin
                continue
            if not (taken := self._take(subscription)):
                await subscription.wait()
                continue
            is_alone = taken[0]._piece.suspected
            if (is_alone or not gate.enter()) and not (taken := await _entered(gate, taken, is_alone)):
                continue
            call.taken = taken
            HANDLED.set(taken)
            began = (clock(), time.perf_counter()) if is_slow or handled % MEASURED_EVERY == 0 else None
            try:
                if (result := await handle(taken if is_batch else taken[0])) is not None:
                    await finished(result)
            except asyncio.CancelledError as error:
                is_cancelled = task.cancelling() > 0
                if not (is_cancelled and subscription.is_closing):  # otherwise they return: the drain time is over
                    self._failed(taken, error)
                if is_cancelled:
                    raise
            except (SystemExit, KeyboardInterrupt) as error:
                # Raised from a task, it would end the loop with all connections: no decision would be sent.
                self._failed(taken, error)
                self.exit_with = self.exit_with or error
                self.end()
                return
            except GeneratorExit as error:
                if not _is_current(task):  # the loop has ended, and closes its tasks
                    raise
                self._failed(taken, error)
            except BaseException as error:
                self._failed(taken, error)
            else:
                self.handled.done += len(taken)
                if auto_ack:
                    for message in unreadable.others(taken) if unreadable.waiting else taken:
                        message._done()
            finally:
                gate.leave(alone=is_alone)
            if began is not None:
                is_slow = self._measured(subscription, began, len(taken), handled, is_slow=is_slow)
            handled += 1
            if handled % HANDLED_IN_A_ROW == 0:
                await asyncio.sleep(0)

    def _measured(
        self, subscription: Subscription, began: tuple[float, float], messages: int, handled: int, *, is_slow: bool
    ) -> bool:
        """Record the duration of a call; return whether the next one is measured, too."""
        seconds = time.perf_counter() - began[1]
        self.handled.measured(seconds, 1 if is_slow else MEASURED_EVERY)
        if self._batch is not None or handled % MEASURED_EVERY == 0:
            call_s = asyncio.get_running_loop().time() - began[0]
            self._prefetch.record_call(call_s * (self._batch or 1) / messages)
            subscription.prefetch_messages = self._prefetch.messages
        return self._batch is not None or seconds >= SLOW_S

    def _take(self, subscription: Subscription) -> list[ReceivedMessage]:
        """Take the messages of the next call, if any."""
        if self._batch is not None:
            first = subscription.next_message()
            return subscription.take(self._with_most(first), with_most=self._with_most) if first is not None else []
        message = subscription.take_one()
        return [] if message is None else [message]

    def _with_most(self, message: ReceivedMessage) -> int:
        """Return the size limit of a call with this message."""
        return batch_of(message, self.terms.policy, self._batch or 1)

    def _failed(self, taken: list[ReceivedMessage], error: BaseException) -> None:
        """Nack the undecided messages of a call that raised."""
        undecided = [message for message in taken if not (message.is_decided or message.is_dropped)]
        if not undecided:
            log.warning(
                "handler failed after deciding its messages subject=%s group=%s id=%s sequence=%d messages=%d "
                "broker_group=%s",
                self.subject,
                self.group,
                id_of(taken[0]),
                taken[0].sequence,
                len(taken),
                taken[0].broker_group,
                exc_info=error,
            )
        if isinstance(error, UnreadablePayload):
            self._put_off(undecided, error)
            return
        noted: set[Verdict] = set()
        for message in undecided:
            decision = self._decided_by(message, error)
            if decision.verdict == Verdict.DEAD_LETTER:
                self.handled.dead_letter += 1
            else:
                self.handled.retry += 1
            if decision.verdict not in noted:  # once per call: a list of thousands would fill the log
                noted.add(decision.verdict)
                self._note(message, len(undecided), decision, error)
            message._refuse(decision)

    def _put_off(self, messages: list[ReceivedMessage], error: UnreadablePayload) -> None:
        """Keep messages that cannot be decoded here; they are neither lost nor dead letters."""
        self._unreadable.put(messages)
        log.error(
            "message cannot be decoded here, it stays in its group subject=%s group=%s sequence=%d messages=%d "
            "broker_group=%s cause=%s",
            self.subject,
            self.group,
            messages[0].sequence,
            len(messages),
            messages[0].broker_group,
            error,
        )

    def _reject(self, message: ReceivedMessage, error: Exception) -> None:
        """Fail one message of a list, from the handler's thread."""
        message._piece.acker.on_loop(partial(self._failed, [message], error))

    def _readable(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """At most once: fail messages that cannot be decoded before their acks; return the others. With filters, which
        may change a message, the handler's call decodes it first.
        """
        if not self._handling.bound.is_typed or self._handling.has_filters:
            return messages
        kept = []
        for message in messages:
            try:
                self._handling.bound.decoded(message)
                kept.append(message)
            except (InvalidPayload, UnreadablePayload) as error:
                self._failed([message], error)
        return kept

    def _decided_by(self, message: ReceivedMessage, error: BaseException) -> Refused:
        try:
            decision = refused_by_error(message, self.terms.policy, error, datetime.now(UTC))
        except Exception as another:  # the exception's own __str__ raises; decide by that error
            decision = refused_by_error(message, self.terms.policy, another, datetime.now(UTC))
        return MONITOR.explained(message, decision)

    def _note(self, message: ReceivedMessage, messages: int, decision: Refused, error: BaseException) -> None:
        """Log the decision on a message, the first of `messages` of its call."""
        if decision.verdict == Verdict.DEAD_LETTER:
            log.warning(
                "message is a dead letter subject=%s group=%s id=%s sequence=%d messages=%d broker_group=%s times=%d "
                "reason=%s",
                self.subject,
                self.group,
                id_of(message),
                message.sequence,
                messages,
                message.broker_group,
                message.times,
                decision.reason,
                exc_info=error if decision.is_failure else None,
            )
        elif decision.is_failure:
            log.warning(
                "handler failed, message is retried subject=%s group=%s id=%s sequence=%d messages=%d broker_group=%s "
                "times=%d after_s=%.1f",
                self.subject,
                self.group,
                id_of(message),
                message.sequence,
                messages,
                message.broker_group,
                message.times,
                decision.delay_s,
                exc_info=error,
            )


def _is_current(task: asyncio.Task[None]) -> bool:
    """Return whether the event loop runs `task` now."""
    return asyncio._get_running_loop() is not None and asyncio.current_task() is task


async def _entered(gate: SuspectGate, taken: list[ReceivedMessage], is_alone: bool) -> list[ReceivedMessage]:
    """Wait until a call may begin; return its messages that are still to be handled."""
    try:
        if is_alone:
            await gate.enter_alone(taken[0])
        else:
            await gate.enter_later()
    except asyncio.CancelledError:  # the group is left, and no handler has begun
        _not_begun(taken)
        raise
    to_handle = [message for message in taken if not (message.is_dropped or is_over(message))]
    if not to_handle:
        gate.leave(alone=is_alone)
    return to_handle


def _not_begun(taken: list[ReceivedMessage]) -> None:
    for message in taken:
        message._piece.acker.not_begun(message)


def _after_ack(
    subscription: Subscription,
    handle: HandlerCall,
    readable: Callable[[list[ReceivedMessage]], list[ReceivedMessage]],
    *,
    is_batch: bool,
) -> HandlerCall:
    """At most once: call the handler after the acks are stored, for messages that no other consumer has begun."""

    async def handle_once(given: Given) -> object:
        confirmed = await subscription.confirmed(readable(given if isinstance(given, list) else [given]))
        now_ms = time.time_ns() // 1_000_000
        kept = [message for message in confirmed if not (_may_have_begun(message) or message.has_expired(now_ms))]
        return await handle(kept if is_batch else kept[0]) if kept else None

    return handle_once


def _may_have_begun(message: ReceivedMessage) -> bool:
    return message.times > 1 or message._piece.suspected


class SuspectGate:
    """Gate of a listener's handlers: a suspected message passes alone. Used on its event loop."""

    __slots__ = ("running", "_wanted", "_waiting")

    def __init__(self) -> None:
        self.running: int = 0
        self._wanted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter(self) -> bool:
        """Begin with an unsuspected message; return False to wait with `enter_later`."""
        if self._wanted:
            return False
        self.running += 1
        return True

    async def enter_later(self) -> None:
        """Wait until no suspected message is handled or waits, then begin."""
        while not self.enter():
            await self._change()

    async def _change(self) -> None:
        """Wait until a handler ends or a waiting one gives up."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def cancel_waiting(self) -> None:
        """Cancel the handlers that wait to begin."""
        for future in self._waiting:
            future.cancel()

    async def enter_alone(self, message: ReceivedMessage) -> None:
        """Wait until no other handler runs, and announce the suspected `message` to its broker."""
        self._wanted += 1
        try:
            while self.running:
                await self._change()
        except BaseException:
            self._wanted -= 1
            self._wake()
            raise
        self.running = 1
        try:
            await announce(message)
        except BaseException:
            self.leave(alone=True)
            raise

    def leave(self, *, alone: bool) -> None:
        self.running -= 1
        self._wanted -= alone
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_result(None)


PRIORITY_MAX = 9
"""Few classes: each is a subject of its own."""


class Priorities:
    """Priorities of a consumer's listeners; used on its event loop."""

    def __init__(self) -> None:
        self.highest: int = 0
        """Highest priority of a joined listener."""
        self._priorities: dict[Subscription, int] = {}

    def joined(self, subscription: Subscription, priority: int) -> None:
        self._priorities[subscription] = priority
        self.highest = max(self._priorities.values())
        if priority:  # otherwise no listener waits for it
            subscription.on_empty = self._go_on

    def left(self, subscription: Subscription) -> None:
        """Remove a stopped subscription, which no listener waits for."""
        self._priorities.pop(subscription, None)
        self.highest = max(self._priorities.values(), default=0)

    def is_behind(self, priority: int) -> bool:
        """Return whether messages of a higher priority wait."""
        return any(
            other > priority and not subscription.is_closing and subscription.next_message() is not None
            for subscription, other in self._priorities.items()
        )

    def _go_on(self) -> None:
        """Wake all listeners that wait for higher priorities."""
        for subscription in self._priorities:
            subscription.go_on()


class ExcessReturn:
    """Return of excess messages of one subscription. Used on the listener's event loop; ends by itself."""

    def __init__(self, subscription: Subscription, prefetch: Prefetch) -> None:
        self._subscription = subscription
        self._prefetch = prefetch
        self._pacer = Pacer()
        self._is_watching = False
        subscription.on_waiting = self._watch

    def _watch(self) -> None:
        """Measure the pace while messages wait."""
        if not self._is_watching:
            self._look()

    def _look(self) -> None:
        subscription, loop = self._subscription, asyncio.get_running_loop()
        waiting = 0 if subscription.is_closing else subscription.waiting_messages
        self._is_watching = waiting > 0
        if not waiting:
            return
        loop.call_later(LOOK_S, self._look)
        arrived = subscription.arrived_messages
        if (pace := self._pacer.pace(loop.time(), arrived=arrived, taken=arrived - waiting)) is None:
            return
        self._prefetch.record_pace(pace)
        subscription.prefetch_messages = self._prefetch.messages
        if pace.is_too_slow_for(waiting):
            subscription.release_excess()
