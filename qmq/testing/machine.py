"""Shell. In-memory broker as a whole: both copies, their ports, the metaserver, and the wait conditions of tests.

A delay group is added when a client first needs it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from qmq.broker.answers import Counters
from qmq.broker.master import BrokerMaster
from qmq.broker.settings import BrokerSettings
from qmq.broker.subscriptions import LOOKS_IN_LEASE
from qmq.codec import decode_message, split_batch
from qmq.errors import NotServed, QmqError
from qmq.message import Message
from qmq.remoting.commands import Command
from qmq.testing.conditions import Condition, GroupProgress, progress_of
from qmq.testing.copies import Acceptor, Clock, Copies, Copy
from qmq.testing.metaserver import Metaserver

if TYPE_CHECKING:
    from qmq.testing.delays import Delays

COMMANDS = frozenset(
    {
        Command.PRODUCE,
        Command.SUBSCRIBE,
        Command.PULL,
        Command.ACK,
        Command.NACK,
        Command.BEGIN,
        Command.HEARTBEAT,
        Command.UNSUBSCRIBE,
    }
)
TICK_S = 0.1
"""Interval of the broker's own ticks, for leases and retries that come due without `advance`."""


class Machine:
    """Parts of a broker, made, used and closed on one event loop by `qmq.testing.broker`."""

    def __init__(self, group: str, settings: BrokerSettings) -> None:
        self.refusals: deque[QmqError] = deque()
        self.metaserver: Metaserver = Metaserver(group, self._open_delays)
        self._clock = Clock()
        self._conditions: list[Condition] = []
        self._failure: Exception | None = None
        self._readonly: frozenset[str] = frozenset()
        self._delays: Delays | None = None
        self._opening_delays = asyncio.Lock()

        def make(name: str) -> Copy[BrokerMaster]:
            return Copy(
                name,
                settings=settings,
                clock=self._clock,
                happened=self._happened,
                failed=self._failed,
                promote=partial(BrokerMaster, settings=settings, counters=Counters()),
            )

        self._copies = Copies(group, make)
        self._acceptors: dict[Copy[BrokerMaster], Acceptor] = {
            copy: Acceptor(copy, group=group, settings=settings, commands=COMMANDS, refusals=self.refusals)
            for copy in self._copies.copies
        }
        self._lease_ms = settings.lease_ms
        self._looks_soon = False
        self._ticking = asyncio.ensure_future(self._tick())

    async def open(self) -> None:
        for acceptor in self._acceptors.values():
            await acceptor.open()
        self._copies.begin_mastership()
        while not self._copies.is_ready:
            await asyncio.sleep(0)
            self.check()
        self._publish_routes()
        await self.metaserver.open()

    async def close(self) -> None:
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await asyncio.gather(*(acceptor.close() for acceptor in self._all_acceptors()), self.metaserver.close())

    async def _open_delays(self) -> tuple[str, int]:
        """Return the delay group's name and port; it is made on first use.

        Raises:
            NotServed: the packages of a delay group are not installed.
        """
        async with self._opening_delays:
            if self._delays is None:
                try:
                    from qmq.testing.delays import Delays
                except ImportError as error:
                    raise NotServed(f"delayed messages in tests need {error.name}: install qmq[testing]") from None
                delays = Delays(
                    self._copies,
                    clock=self._clock,
                    happened=self._happened,
                    failed=self._failed,
                    refusals=self.refusals,
                )
                await delays.open()
                self._delays = delays
        return self._delays.group, self._delays.port

    def _all_acceptors(self) -> list[Acceptor]:
        return [*self._acceptors.values(), *(self._delays.acceptors if self._delays else [])]

    def check(self) -> None:
        """Raise an error that a core must never raise."""
        if self._failure is not None:
            raise RuntimeError("the in-memory broker failed; this is a bug of qmq") from self._failure

    # Called by tests.

    def messages(self, subject: str) -> list[Message]:
        log = self._copies.log
        refs = log.frames(subject, 0, 1 << 30)
        found = [(log.tail_body(ref.offset) or log.stored.read_bodies([ref])[0], ref) for ref in refs]
        batches = (split_batch(body, frame.count) for (frame, body), _ in found)
        return [decode_message(bytes(data)) for data in chain.from_iterable(batches)]

    def progress_of(self, subject: str, group: str) -> GroupProgress:
        master = self._copies.master
        subscriptions = [found for found in master.subscriptions if (found.subject, found.group) == (subject, group)]
        consumers = {found.consumer for found in subscriptions}
        return progress_of(
            self._copies.log.state, subject, group, consumers=len(consumers), now_ms=self._clock.now_ms()
        )

    def delayed(self, subject: str) -> list[Message]:
        return self._delays.messages(subject) if self._delays else []

    async def advance(self, ms: int) -> None:
        """Advance the clock, from one delayed message to the next; each reaches the broker when it is due."""
        while self._delays is not None and ms > 0:
            step = self._delays.next_due_ms(ms)
            self.skip(step)
            ms -= step
            await self._delays.caught_up()
        self.skip(ms)

    def skip(self, ms: int) -> None:
        """Advance the clock in steps. Each step renews the leases of connected consumers, whose heartbeats would be too
        slow.

        At first a step is a part of a lease, because the core counts no longer silence between two ticks. Once the
        leases of vanished consumers have ended, steps go from one retry to the next.
        """
        step_ms, leases_end_ms = self._lease_ms // LOOKS_IN_LEASE, self._clock.skipped_ms + self._lease_ms
        while ms > 0:
            step = step_ms
            if self._clock.skipped_ms > leases_end_ms:
                step = max(step_ms, self._next_retry_ms(ms))
            step = min(ms, step)
            self._clock.skipped_ms += step
            for acceptor in self._acceptors.values():
                acceptor.renew_leases()
            self._copies.tick()
            ms -= step

    def _next_retry_ms(self, within_ms: int) -> int:
        """Return the ms until the next retry is due, at most `within_ms`."""
        now_ms = self._clock.now_ms()
        dues = [group.requeued.next_due_ms(now_ms) for group in self._copies.log.state.groups.values()]
        return min((due_ms - now_ms for due_ms in dues if due_ms is not None), default=within_ms)

    def mark(self, *, readonly: str | None) -> None:
        self._readonly = frozenset() if readonly is None else self._readonly | {readonly}
        self._copies.mark_readonly(self._readonly)
        self._publish_routes()

    async def drop(self) -> None:
        for acceptor in self._all_acceptors():
            await acceptor.drop_all("the test dropped all connections")

    def swap(self) -> None:
        self._copies.swap()
        self._publish_routes()

    def _publish_routes(self) -> None:
        port = self._acceptors[self._copies.copies[0]].port
        self.metaserver.publish(port=port, term=self._copies.term, readonly=self._readonly)

    # Wait conditions.

    def watch(self, condition: Condition) -> Condition:
        self._conditions.append(condition)
        self._happened()
        return condition

    def give_up(self, condition: Condition, timeout: float) -> str:
        """Forget a condition; return the reason why it is not met."""
        if condition in self._conditions:
            self._conditions.remove(condition)
        found = self.progress_of(condition.subject, condition.group).text(self._clock.now_ms())
        return f"not {condition.text} within {timeout} s; {found}"

    def _happened(self) -> None:
        """Check the conditions soon, once for all events of this pass of the loop."""
        if self._conditions and not self._looks_soon:
            self._looks_soon = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looks_soon = False
        if not self._copies.is_ready:
            return
        for condition in list(self._conditions):
            found = self.progress_of(condition.subject, condition.group)
            if condition.met.cancelled():
                self._conditions.remove(condition)  # its waiter was cancelled
            elif condition.is_met(found):
                self._conditions.remove(condition)
                if condition.met.set_running_or_notify_cancel():
                    condition.met.set_result(None)
            elif condition.skip_delays and found.delayed and not found.held:
                self.skip(found.next_due_ms - self._clock.now_ms())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._copies.tick()
            if self._delays is not None:
                self._delays.tick()

    def _failed(self, error: Exception) -> None:
        self._failure = self._failure or error
        conditions = list(self._conditions)
        self._conditions.clear()
        for condition in conditions:
            if condition.met.set_running_or_notify_cancel():
                condition.met.set_exception(error)
