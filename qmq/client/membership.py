"""Shell. A listener's or puller's part in its consumer group, which begins and ends while the consumer runs."""

from __future__ import annotations

import asyncio
import threading

from qmq.client.connections import Connections
from qmq.client.subscription import Subscription
from qmq.client.terms import Terms

FLUSH_S_MIN = 1.0
"""What is left to send decisions when handlers took all the time that there was."""


class Membership:
    """Takes part in a consumer group as long as everybody wants that: the application (`stop`, `resume`), the consumer
    (`set_online`), and its owner (`end`). These may be called from any thread and return at once.

    While it is out of the group it holds nothing: what was not begun went back to the group, as if it had never been
    delivered.
    """

    def __init__(self, terms: Terms, *, drain_s: float, is_online: bool) -> None:
        self.terms = terms
        self.drain_s = drain_s
        self.is_stopped = False
        self._is_online, self._is_ended = is_online, False
        self._subscription: Subscription | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._changed = asyncio.Event()

    @property
    def subject(self) -> str:
        return self.terms.subject

    @property
    def group(self) -> str:
        """The consumer group; of a broadcast, the consumer's own."""
        return self.terms.group

    def stop(self) -> None:
        """Take no more messages. Those that are being handled are finished; the rest goes back to the group."""
        self.is_stopped = True
        self._change()

    def resume(self) -> None:
        """Take messages again."""
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
        """Have it looked at what is wanted now: at once, if this is the event loop's thread."""
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
        """Be in the group when that is wanted, until the end; the task raises QmqError if it cannot go on."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._changed, self._is_ended = asyncio.Event(), False
        return asyncio.create_task(self._keep(connections))

    async def _keep(self, connections: Connections) -> None:
        while not self._is_ended:
            self._changed.clear()
            if self._is_wanted:
                try:
                    await self._take_part(connections)
                finally:
                    self._subscription = None  # not before: until now, decisions were sent
            else:
                await self._changed.wait()

    async def _take_part(self, connections: Connections) -> None:
        self._subscription = subscription = connections.subscribe(self.terms, self._changed.set)
        try:
            self._joined(subscription)
            while self._is_wanted and not subscription.is_closing:  # if it was stopped for a moment, it begins anew
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
        if subscription.error is not None:
            raise subscription.error

    def _joined(self, subscription: Subscription) -> None:
        """The group has this member again."""

    def _adapted(self, subscription: Subscription) -> None:
        """Something was changed meanwhile."""

    async def _leaving(self, subscription: Subscription, deadline: float) -> None:
        """Bring to an end what the application has begun, as far as that is possible before `deadline`."""

    async def _decided(self, subscription: Subscription, deadline: float) -> None:
        """Wait until the application has decided all that it took."""
        try:
            async with asyncio.timeout_at(deadline):
                while subscription.taken_open and subscription.error is None and self._waits_for_decisions():
                    await subscription.progress()
        except TimeoutError:
            pass

    def _waits_for_decisions(self) -> bool:
        return True
