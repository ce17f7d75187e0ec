"""Shell. Carries out what `watchdog.draining` decides for one database: SQL on a thread of its own, sends on the loop.

One database that is slow, hangs or is gone holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from qmq.client.batch_life import Answer
from qmq.client.numbered import NumberedSender
from qmq.watchdog.db.engine import open_source
from qmq.watchdog.db.outbox import Outbox
from qmq.watchdog.draining import Attempt, Draining
from qmq.watchdog.sources import Source
from qmq.watchdog.work import Claiming, Disown, ReadClaims, ReadPage, Settling, TakeOver, Work

log = logging.getLogger("qmq.watchdog")

TROUBLE_S_MIN, TROUBLE_S_MAX = 0.5, 30.0
"""How long a database that failed is left alone: doubled with each failure in a row."""


class Drain:
    """One outbox under one leader. Made by the leader; `run` ends when it is stopped, deposed or cancelled.

    Args:
        holds: says whether the lease still holds; asked before whatever has an effect.
    """

    def __init__(self, source: Source, core: Draining, sender: NumberedSender, holds: Callable[[], bool]) -> None:
        self.source, self.core = source, core
        self._sender, self._holds = sender, holds
        self._thread = ThreadPoolExecutor(1, "outbox")
        self._moved = asyncio.Event()
        self._is_stopping = False
        self.trouble = ""
        """Why the database was last not of use; empty while it is."""
        self._failures = 0
        self._call: Future[Any] | None = None

    @property
    def is_hanging(self) -> bool:
        """Whether a call to the database has not returned; its thread cannot be ended."""
        return self._call is not None and not self._call.done()

    def stop(self) -> None:
        """Claim nothing more; end when what is under way has its answers."""
        self._is_stopping = True
        self.core.stop()
        self._moved.set()

    def wake(self) -> None:
        self._moved.set()

    async def run(self) -> None:
        outbox: Outbox | None = None
        try:
            while self._holds():
                if outbox is None:
                    outbox = await self._open()
                elif not await self._step(outbox):
                    return
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
            if outbox is not None and not self.is_hanging:
                outbox.close()

    async def _open(self) -> Outbox | None:
        try:
            return Outbox(open_source(self.source), self.source)
        except Exception as error:
            await self._trouble(error)
            return None

    async def _step(self, outbox: Outbox) -> bool:
        """Send what is to be sent, then do one piece of work, or wait; return whether there will be more."""
        now_ms = _now_ms()
        self._moved.clear()
        for attempt in self.core.attempts(now_ms):
            self._send(attempt)
        work = self.core.next_work(now_ms)
        if work is not None:
            await self._carry_out(outbox, work)
        elif self._is_stopping and self.core.is_idle:
            return False
        else:
            await self._rest(self.core.wake_ms(now_ms) - now_ms)
        return True

    async def _rest(self, wait_ms: int) -> None:
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._moved.wait()
        except TimeoutError:
            pass

    def _send(self, attempt: Attempt) -> None:
        self._sender.send(attempt.group, attempt.batch, partial(self._answered, attempt))

    def _answered(self, attempt: Attempt, answer: Answer) -> None:
        self.core.answered(attempt.claim, answer, _now_ms())
        self._moved.set()

    async def _carry_out(self, outbox: Outbox, work: Work) -> None:
        core = self.core
        try:
            self._call = self._thread.submit(_doing(outbox, work), work)
            result = await asyncio.wrap_future(self._call)
        except Exception as error:  # drivers raise what they like: RuntimeError for want of a package, UnicodeError
            core.failed(work, _now_ms())
            await self._trouble(error)
            return
        if self.trouble:
            log.warning("outbox answers again database=%s", self.source.url)
        self.trouble, self._failures = "", 0
        match work:
            case ReadPage():
                core.page(result, _now_ms())
            case Claiming():
                core.claimed(result, _now_ms())
            case Settling():
                core.settled(work)
            case ReadClaims():
                core.known(result)
            case TakeOver():
                core.taken_over(work, result, _now_ms())
            case Disown():
                core.disowned(work, result)

    async def _trouble(self, error: Exception) -> None:
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0][:200]
        if reason != self.trouble:
            log.error("outbox not of use database=%s reason=%s", self.source.url, reason)
        self.trouble = reason
        wait_s = min(TROUBLE_S_MIN * 2 ** min(self._failures, 10), TROUBLE_S_MAX)
        self._failures += 1
        await asyncio.sleep(wait_s)


def _doing(outbox: Outbox, work: Work) -> Callable[[Any], Any]:
    match work:
        case ReadPage():
            return outbox.read_page
        case Claiming():
            return outbox.claim
        case Settling():
            return outbox.settle
        case ReadClaims():
            return outbox.read_claims
        case TakeOver():
            return outbox.take_over
        case Disown():
            return outbox.disown


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
