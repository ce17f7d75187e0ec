"""Shell. Carries out what `qmq.outbox.draining` decides: one piece of work with a database at a time, and sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from qmq.client.batch_life import Answer
from qmq.client.numbered import NumberedSender
from qmq.outbox.draining import Attempt, Draining
from qmq.outbox.work import Claiming, Disown, ReadClaims, ReadPage, Settling, TakeOver, Work


class Drain:
    """The steps of one drain. Made by a watchdog for a lease, by a producer's relay while rows wait; used on one loop.

    Args:
        do: has the database do a piece of work, and returns its answer; it may raise any error of a driver.
    """

    def __init__(self, core: Draining, sender: NumberedSender, do: Callable[[Work], Awaitable[Any]]) -> None:
        self.core = core
        self._sender, self._do = sender, do
        self._moved = asyncio.Event()

    def wake(self) -> None:
        """Look again at once: an answer came, or groups can be sent to."""
        self._moved.set()

    async def step(self) -> None:
        """Send due batches, then do one piece of work, or wait until there may be some.

        Raises:
            Exception: the work failed, or its outcome is unknown; the core has noted that.
        """
        now_ms = now()
        self._moved.clear()
        for attempt in self.core.attempts(now_ms):
            self._send(attempt)
        work = self.core.next_work(now_ms)
        if work is not None:
            await self._carry_out(work)
        elif not self.core.has_stopped:
            await self.rest(self.core.wake_ms(now_ms) - now_ms)

    async def rest(self, wait_ms: int) -> None:
        """Wait so long, or until something moves."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._moved.wait()
        except TimeoutError:
            pass

    def _send(self, attempt: Attempt) -> None:
        self._sender.send(attempt.group, attempt.batch, partial(self._answered, attempt))

    def _answered(self, attempt: Attempt, answer: Answer) -> None:
        self.core.answered(attempt.claim, answer, now())
        self._moved.set()

    async def _carry_out(self, work: Work) -> None:
        core = self.core
        try:
            result = await self._do(work)
        except Exception:  # of any kind: RuntimeError for want of a package, UnicodeError
            core.failed(work, now())
            raise
        match work:
            case ReadPage():
                core.page(result, now())
            case Claiming():
                core.claimed(result, now())
            case Settling():
                core.settled(work, now())
            case ReadClaims():
                core.known(result)
            case TakeOver():
                core.taken_over(work, result, now())
            case Disown():
                core.disowned(work, result)


def now() -> int:
    return time.monotonic_ns() // 1_000_000
