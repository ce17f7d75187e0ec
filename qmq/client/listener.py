"""Shell. A listener: workers that take messages, call the handler, and decide by its outcome.

A listener: workers that take messages and call the handler, and decide by what becomes of the call.

A handler takes one message at a time, or lists of up to `batch`. What becomes of a call is decided for each message of
it that the handler has not decided itself. One that fails its call does not take its neighbours along: what failed
comes again in lists of half the size, at the last attempt alone. A suspected message is a list of its own, too: if the
process dies with it, nothing else is to blame (qmq.client.listener).

Suspected messages are handled alone: if the process dies with one, nothing else is to blame.

A consumer that vanished had them, and nobody knows which of them was the reason (qmq.log.message_life). So each waits
until no other handler of its listener runs, and its broker is told before its own begins; others wait meanwhile. All
other messages pass by at the cost of two additions.

Which listeners of a consumer let the messages of others go first.

A listener whose `priority` is lower begins no call while a message waits here for a listener of a higher one. Whoever
has no such listener pays a comparison for each call.

What waits in a listener for handlers that became slow goes back to its group.

What was prefetched for fast handlers would be minutes of work, once they are slow, that no other consumer of the group
gets. So while messages wait, somebody looks at how many were taken, a few times a second; and if what waits is far more
than would be asked for now, the newest go back, as never delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from datetime import UTC, datetime
from typing import cast

from qmq.client.handler import FilteredHandler, Given, HandlerCall, HandlerThread, finished
from qmq.client.membership import Membership, announce
from qmq.client.prefetch import LOOK_S, MEASURED_EVERY, Pacer, Prefetch
from qmq.client.received import ReceivedMessage
from qmq.client.subscription import Subscription, is_over
from qmq.client.terms import Refused, Terms, batch_of, check_concurrency, refused_by_error
from qmq.logs import bounded
from qmq.remoting.commands import Verdict

log = bounded(__name__)

HANDLED_IN_A_ROW = 64
"""A handler that never waits for anything would keep the loop from reading; after so many it has its turn."""
WORKER_REST_S = 1.0
"""How long nobody takes the place of a worker that failed: where no thread can be started, the next one fails too."""
CANCEL_S = 5.0
"""How long a handler that was cancelled may take to end."""


class Listener(Membership):
    """A handler that is called with the messages of a subject for a consumer group.

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
        drain_s: float,
        is_online: bool,
    ) -> None:
        super().__init__(terms, drain_s=drain_s, is_online=is_online)
        self._priorities = priorities
        self._priority = priority
        self._handling = handling
        self._auto_ack = auto_ack
        self._concurrency = check_concurrency(concurrency)
        self._batch = batch
        """Messages in a call, at most; None: the handler takes one, and no list."""
        self._workers: set[asyncio.Task[None]] = set()
        self._gate = SuspectGate()
        self._prefetch = Prefetch(terms.prefetch_messages, self._at_once)

    @property
    def concurrency(self) -> int:
        """How many handlers may run at the same time; may be changed at any time. With 1, they run in order."""
        return self._concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._concurrency = check_concurrency(concurrency)
        self._change()

    @property
    def _at_once(self) -> int:
        """How many messages handlers may have at the same time."""
        return self._concurrency * (self._batch or 1)

    # The members' part.

    def _joined(self, subscription: Subscription) -> None:
        self._gate = SuspectGate()
        self._workers.clear()  # whoever outlived its cancellation has a message that went back to the group
        if not (self.terms.broadcast or self.terms.exclusive_ms):  # else there is nobody to share with
            ExcessReturn(subscription, self._prefetch)
        self._priorities.joined(subscription, self._priority)
        self._adapted(subscription)

    def _adapted(self, subscription: Subscription) -> None:
        """Have as many workers as asked for; those too many end by themselves, after the message that they handle."""
        if subscription.is_closing:
            return
        self._prefetch.concur(self._at_once)
        subscription.prefetch_messages = self._prefetch.messages
        for _ in range(self._concurrency - len(self._workers)):
            worker = asyncio.create_task(self._work(subscription))
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)
        subscription.wake_all()

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if worker.cancelled():
            self._change()  # by a handler that cancels the task it runs in; while this leaves the group, nobody looks
        elif (error := worker.exception()) is not None:
            log.error("worker ended, another begins subject=%s group=%s", self.subject, self.group, exc_info=error)
            asyncio.get_running_loop().call_later(WORKER_REST_S, self._change)

    async def _leaving(self, subscription: Subscription, deadline: float) -> None:
        subscription.stop()
        self._priorities.left(subscription)
        self._gate.cancel_waiting()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=deadline - asyncio.get_running_loop().time())
            for worker in late:
                log.warning("handler does not end, its message goes back subject=%s group=%s", self.subject, self.group)
                worker.cancel()
            if late:
                await asyncio.wait(late, timeout=CANCEL_S)
        if not self._auto_ack:
            await self._decided(subscription, deadline)

    # Workers.

    async def _work(self, subscription: Subscription) -> None:
        """One worker: a call at a time, from the buffer to the handler."""
        thread = HandlerThread(f"qmq-{self.subject}-{self.group}") if self._handling.is_blocking else None
        handle = self._handling.route(thread)
        if self.terms.most_once:
            handle = _after_ack(subscription, handle, is_batch=self._batch is not None)
        try:
            await self._serve(subscription, handle)
        finally:
            if thread is not None:
                thread.close()

    async def _serve(self, subscription: Subscription, handle: HandlerCall) -> None:
        gate, priorities, is_batch = self._gate, self._priorities, self._batch is not None
        auto_ack, handled, clock = self._auto_ack, 0, asyncio.get_running_loop().time
        task = cast(asyncio.Task[None], asyncio.current_task())
        while not subscription.is_closing:
            if task.cancelling():  # by a handler that returned all the same; the next one would get it
                raise asyncio.CancelledError
            if len(self._workers) > self._concurrency:
                self._workers.remove(task)  # before the next one counts
                return
            if self._priority < priorities.highest and priorities.is_behind(self._priority):
                await subscription.wait_for_others()
                continue
            taken = self._take(subscription)
            if not taken:
                await subscription.wait()
                continue
            is_alone = taken[0]._piece.suspected
            if (is_alone or not gate.enter()) and not (taken := await _entered(gate, taken, is_alone)):
                continue
            began_s = clock() if is_batch or handled % MEASURED_EVERY == 0 else None
            try:
                if (result := await handle(taken if is_batch else taken[0])) is not None:
                    await finished(result)
            except asyncio.CancelledError as error:
                is_cancelled = task.cancelling() > 0
                if not (is_cancelled and subscription.is_closing):  # else it is given back: the drain lost its patience
                    self._failed(taken, error)
                if is_cancelled:
                    raise
            except (SystemExit, KeyboardInterrupt, GeneratorExit):
                raise  # the loop ends, or has ended
            except BaseException as error:
                self._failed(taken, error)
            else:
                if auto_ack:
                    for message in taken:
                        message._done()
            finally:
                gate.leave(alone=is_alone)
            if began_s is not None:
                self._prefetch.measured((clock() - began_s) * (self._batch or 1) / len(taken))
                subscription.prefetch_messages = self._prefetch.messages
            handled += 1
            if handled % HANDLED_IN_A_ROW == 0:
                await asyncio.sleep(0)

    def _take(self, subscription: Subscription) -> list[ReceivedMessage]:
        """Take what the next call gets; nothing if there is nothing."""
        if self._batch is not None:
            first = subscription.next_message()
            return subscription.take(self._with_most(first), with_most=self._with_most) if first is not None else []
        message = subscription.take_one()
        return [] if message is None else [message]

    def _with_most(self, message: ReceivedMessage) -> int:
        """Return how many messages a call has at most that this one is among."""
        return batch_of(message, self.terms.policy, self._batch or 1)

    def _failed(self, taken: list[ReceivedMessage], error: BaseException) -> None:
        """The handler raised: have its messages delivered again, but those that were decided before."""
        undecided = [message for message in taken if not (message.is_decided or message.is_dropped)]
        if not undecided:
            log.warning(
                "handler failed, its messages were decided before subject=%s group=%s sequence=%d messages=%d "
                "broker_group=%s",
                self.subject,
                self.group,
                taken[0].sequence,
                len(taken),
                taken[0].broker_group,
                exc_info=error,
            )
        noted: set[Verdict] = set()
        for message in undecided:
            decision = self._decided_by(message, error)
            if decision.verdict not in noted:  # once for a call, or a list of thousands would fill the log
                noted.add(decision.verdict)
                self._note(message, len(undecided), decision, error)
            message._refuse(decision)

    def _decided_by(self, message: ReceivedMessage, error: BaseException) -> Refused:
        try:
            return refused_by_error(message, self.terms.policy, error, datetime.now(UTC))
        except Exception as another:  # an exception that cannot say what it is; the message must not stay for that
            return refused_by_error(message, self.terms.policy, another, datetime.now(UTC))

    def _note(self, message: ReceivedMessage, messages: int, decision: Refused, error: BaseException) -> None:
        """Log what becomes of a message, the first of so many of its call."""
        if decision.verdict == Verdict.DEAD_LETTER:
            log.warning(
                "message is a dead letter subject=%s group=%s sequence=%d messages=%d broker_group=%s times=%d "
                "reason=%s",
                self.subject,
                self.group,
                message.sequence,
                messages,
                message.broker_group,
                message.times,
                decision.reason,
                exc_info=error if decision.is_failure else None,
            )
        elif decision.is_failure:
            log.warning(
                "handler failed, message comes again subject=%s group=%s sequence=%d messages=%d broker_group=%s "
                "times=%d after_s=%.1f",
                self.subject,
                self.group,
                message.sequence,
                messages,
                message.broker_group,
                message.times,
                decision.delay_s,
                exc_info=error,
            )


async def _entered(gate: SuspectGate, taken: list[ReceivedMessage], is_alone: bool) -> list[ReceivedMessage]:
    """Wait until a call may begin; return those of its messages that are to be handled here then, if any."""
    try:
        if is_alone:
            await gate.enter_alone(taken[0])
        else:
            await gate.enter_later()
    except asyncio.CancelledError:  # the group is left, and nothing has begun
        _not_begun(taken)
        raise
    ours = [message for message in taken if not (message.is_dropped or is_over(message))]
    if not ours:
        gate.leave(alone=is_alone)
    return ours


def _not_begun(taken: list[ReceivedMessage]) -> None:
    for message in taken:
        message._piece.acker.not_begun(message)


def _after_ack(subscription: Subscription, handle: HandlerCall, *, is_batch: bool) -> HandlerCall:
    """At most once: the handler is called when the broker keeps the ack, and for what nobody has begun."""

    async def handle_once(given: Given) -> object:
        confirmed = await subscription.confirmed(given if isinstance(given, list) else [given])
        now_ms = time.time_ns() // 1_000_000
        kept = [message for message in confirmed if not (_may_have_begun(message) or message.has_expired(now_ms))]
        return await handle(kept if is_batch else kept[0]) if kept else None

    return handle_once


def _may_have_begun(message: ReceivedMessage) -> bool:
    return message.times > 1 or message._piece.suspected


class SuspectGate:
    """One for the handlers of a listener; used on its event loop."""

    __slots__ = ("_running", "_wanted", "_waiting")

    def __init__(self) -> None:
        self._running = self._wanted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter(self) -> bool:
        """Begin with a message that nobody suspects; False: wait, with `enter_later`."""
        if self._wanted:
            return False
        self._running += 1
        return True

    async def enter_later(self) -> None:
        """Wait until nobody is alone or wants to be, and begin."""
        while not self.enter():
            await self._change()

    async def _change(self) -> None:
        """Wait until somebody has ended, or waits no more."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def cancel_waiting(self) -> None:
        """Whoever waits to begin gets a CancelledError."""
        for future in self._waiting:
            future.cancel()

    async def enter_alone(self, message: ReceivedMessage) -> None:
        """Wait until nobody else is handling anything, and tell the broker of `message` that its handler begins."""
        self._wanted += 1
        try:
            while self._running:
                await self._change()
        except BaseException:
            self._wanted -= 1
            self._wake()
            raise
        self._running = 1
        try:
            await announce(message)
        except BaseException:
            self.leave(alone=True)
            raise

    def leave(self, *, alone: bool) -> None:
        self._running -= 1
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
    """One for the listeners of a consumer; used on its event loop."""

    def __init__(self) -> None:
        self.highest = 0
        """Of those that take part."""
        self._priorities: dict[Subscription, int] = {}

    def joined(self, subscription: Subscription, priority: int) -> None:
        self._priorities[subscription] = priority
        self.highest = max(self._priorities.values())
        if priority:  # else nobody waits for it
            subscription.on_empty = self._go_on

    def left(self, subscription: Subscription) -> None:
        """It was stopped before, so nobody waits for it any more."""
        self._priorities.pop(subscription, None)
        self.highest = max(self._priorities.values(), default=0)

    def is_behind(self, priority: int) -> bool:
        """Whether messages of a higher priority wait."""
        return any(
            other > priority and not subscription.is_closing and subscription.next_message() is not None
            for subscription, other in self._priorities.items()
        )

    def _go_on(self) -> None:
        """Have all look again that let others go first."""
        for subscription in self._priorities:
            subscription.go_on()


class ExcessReturn:
    """Made by a listener for each of its subscriptions; used on its event loop. It ends by itself."""

    def __init__(self, subscription: Subscription, prefetch: Prefetch) -> None:
        self._subscription = subscription
        self._prefetch = prefetch
        self._pacer = Pacer()
        self._is_watching = False
        subscription.on_waiting = self._watch

    def _watch(self) -> None:
        """Messages wait; look at them until none does."""
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
        if (pace := self._pacer.looked(loop.time(), arrived=arrived, taken=arrived - waiting)) is None:
            return
        self._prefetch.seen(pace)
        subscription.prefetch_messages = self._prefetch.messages
        if pace.is_too_slow_for(waiting):
            subscription.give_back_excess()
