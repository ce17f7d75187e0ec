"""Shell. A watchdog's two states: waiting for the lease, and holding it, which drains all databases of its room.

Losing the lease ends every drain at once; winning it again makes new ones. Only counters survive. Each drain runs its
SQL on a thread of its own, so a slow or hanging database delays only itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from qmq.client.numbered_sender import NumberedSender
from qmq.errors import CallError, NotServed
from qmq.memory import without_frames
from qmq.outbox.claims import PRODUCER_BITS, Work
from qmq.outbox.drain_plan import Counts, DrainPlan
from qmq.outbox.relay import Drain
from qmq.ticking import until_next_second
from qmq.watchdog.database import Outbox, open_source
from qmq.watchdog.lease import Lease
from qmq.watchdog.meta_link import MetaLink
from qmq.watchdog.settings import Source, WatchdogSettings

log = logging.getLogger("qmq.watchdog")

TROUBLE_S_MIN, TROUBLE_S_MAX = 0.5, 30.0
"""Pause after a failure of a database, doubled with each failure in a row."""


class DatabaseDrain(Drain):
    """Drain of one outbox during one lease. Made by the leader; `run` ends when stopped or cancelled, or with the
    lease.

    Args:
        holds: returns whether the lease is still held; called before every effect.
    """

    def __init__(self, source: Source, core: DrainPlan, sender: NumberedSender, holds: Callable[[], bool]) -> None:
        super().__init__(core, sender, self._ask)
        self.source = source
        self._holds = holds
        self._thread = ThreadPoolExecutor(1, "outbox")
        self._outbox: Outbox | None = None
        self.trouble = ""
        """Reason why the database is unusable; empty while it is usable."""
        self._failures = 0
        self._call: Future[Any] | None = None

    @property
    def is_hanging(self) -> bool:
        """Whether a call to the database is still running; its thread cannot be ended."""
        return self._call is not None and not self._call.done()

    def stop(self) -> None:
        """Stop claiming, and end once the sent batches are answered."""
        self.core.stop()
        self.wake()

    async def run(self) -> None:
        try:
            while self._holds() and not self.core.has_stopped:
                try:
                    if self._outbox is None:
                        self._outbox = Outbox(open_source(self.source), self.source)
                    await self.step()
                except Exception as error:
                    await self._trouble(error)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
            if self._outbox is not None:
                close = self._outbox.close
                if self._call is None:
                    close()
                else:  # a connection in use would return to the closed pool, and stay open
                    self._call.add_done_callback(lambda _: close())

    async def _ask(self, work: Work) -> Any:
        assert self._outbox is not None
        self._call = self._thread.submit(without_frames, partial(self._outbox.do, work))
        result = await asyncio.wrap_future(self._call)
        if self.trouble:
            log.warning("outbox answers again database=%s", self.source.url)
        self.trouble = ""
        self._failures = 0
        return result

    async def _trouble(self, error: Exception) -> None:
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0][:200]
        if reason != self.trouble:
            log.error("outbox unusable database=%s reason=%s", self.source.url, reason)
        self.trouble = reason
        wait_s = min(TROUBLE_S_MIN * 2 ** min(self._failures, 10), TROUBLE_S_MAX)
        self._failures += 1
        await asyncio.sleep(wait_s)


class Leader:
    """The lease and the drains of one watchdog. Made by main; `run` ends when cancelled, `stop` releases the lease."""

    def __init__(self, settings: WatchdogSettings, link: MetaLink, sender: NumberedSender, address: str) -> None:
        self._settings = settings
        self._link = link
        self._sender = sender
        self._address = address
        self.lease = Lease(secrets.token_hex(8), settings.lease_ms)
        self.drains: dict[str, DatabaseDrain] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: list[DatabaseDrain] = []
        self.sources: list[Source] = []
        self.problems: dict[str, str] = {}
        """Databases with unusable registrations -> reason."""
        self.counts: dict[str, Counts] = {}
        """By database; kept across leases and drains."""
        self.elections = 0
        self.metaserver_trouble = ""
        self._refreshed_at = 0.0
        self._term = 0
        self._is_stopping = False
        sender.on_change(self._wake)

    @property
    def is_leader(self) -> bool:
        return self.lease.holds(now_ms())

    @property
    def refusals(self) -> dict[str, str]:
        """Subject -> reason why the metaserver refuses its route."""
        return self._sender.refusals

    @property
    def is_hanging(self) -> bool:
        """Whether a drain of this lease or the last one waits for a database that does not answer."""
        return any(drain.is_hanging for drain in (*self.drains.values(), *self._ended))

    async def run(self) -> None:
        while not self._is_stopping:
            began = time.monotonic()
            if self.lease.is_due(now_ms()):
                await self._elect()
            if self.lease.term != self._term or not self.is_leader:
                await self._depose()
            if self.is_leader:
                await self._lead()
            next_s = began + until_next_second(began, self._settings.beat_ms / 1000)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _elect(self) -> None:
        asked_ms = now_ms()
        request = self.lease.request(asked_ms)
        try:
            row = await self._link.hold(self.lease.node, self._address, request, patience_ms=self.lease.patience_ms)
        except NotServed as error:
            if not self.metaserver_trouble:
                log.warning("metaserver not reachable, retrying reason=%s", error)
            self.metaserver_trouble = str(error)
            return
        self.metaserver_trouble = ""
        self.lease.answered(row, asked_ms=asked_ms, now_ms=now_ms())

    async def _depose(self) -> None:
        """End all drains. Their running statements are conditional on claims of the ended term."""
        if self._term:
            log.warning("leadership ended term=%d", self._term)
        self._term = 0
        self._ended = [drain for drain in (*self._ended, *self.drains.values()) if drain.is_hanging]
        tasks = self._tasks
        self._tasks = {}
        self.drains = {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _lead(self) -> None:
        if not self._term:
            self._term = self.lease.term
            self.elections += 1
            self._refreshed_at = 0.0
            log.info("leadership began room=%s term=%d", self._settings.room, self._term)
        if time.monotonic() - self._refreshed_at >= self._settings.refresh_ms / 1000:
            await self._refresh()
        for url, task in list(self._tasks.items()):
            if task.done():  # a drain ends on an error, or when the lease was late
                log.warning("drain restarted database=%s reason=%r", url, task.exception() or "the lease was late")
                self._forget(url)
                self._refreshed_at = 0.0

    async def _refresh(self) -> None:
        """Begin drains of databases that are new or changed; end drains of removed ones."""
        try:
            self.sources, self.problems = await self._link.sources()
        except (NotServed, CallError) as error:
            log.warning("registered databases not read, retrying reason=%s", error)
            return
        self._refreshed_at = time.monotonic()
        for url, problem in self.problems.items():
            log.warning("registration unusable database=%s reason=%s", url, problem)
        wanted = {source.url: source for source in self.sources}
        for url, drain in list(self.drains.items()):
            if wanted.get(url) != drain.source:
                self._tasks[url].cancel()
                self._forget(url)
        # An ended drain may still write under claims of this very term: wait for its end.
        self._ended = [drain for drain in self._ended if drain.is_hanging]
        ending = {drain.source.url for drain in self._ended}
        for url, source in wanted.items():
            if url not in self.drains and url not in ending:
                self._begin(url, source)

    def _begin(self, url: str, source: Source) -> None:
        counts = self.counts.setdefault(url, Counts())
        core = DrainPlan(self._term, self._settings.limits(source.rate), self._sender, _new_producer, counts)
        self.drains[url] = drain = DatabaseDrain(source, core, self._sender, self._holder(self._term))
        self._tasks[url] = asyncio.create_task(drain.run())
        log.info("drain begins database=%s table=%s rate=%d", url, source.table, source.rate)

    def _holder(self, term: int) -> Callable[[], bool]:
        return lambda: self.lease.term == term and self.lease.holds(now_ms())

    def _forget(self, url: str) -> None:
        self._ended.append(self.drains.pop(url))
        del self._tasks[url]

    def _wake(self) -> None:
        for drain in self.drains.values():
            drain.wake()

    async def stop(self) -> None:
        """Stop claiming, wait a little for answers, release the lease."""
        self._is_stopping = True
        for drain in self.drains.values():
            drain.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._settings.stop_ms / 1000)
        held = self.lease.term != 0
        await self._depose()
        if held:
            try:
                await self._link.release(self.lease.node)
            except NotServed as error:
                log.warning("lease not released, it expires by itself reason=%s", error)
            self.lease.released()


def _new_producer() -> int:
    return secrets.randbits(PRODUCER_BITS) or 1


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
