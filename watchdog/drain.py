"""Shell. Drains one database for a watchdog: its SQL runs on a thread of its own.

One database that is slow, hangs or is gone holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from qmq.client.numbered import NumberedSender
from qmq.garbage import without_frames
from qmq.outbox import drain
from qmq.outbox.draining import Draining
from qmq.outbox.work import Work
from qmq.watchdog.db.engine import open_source
from qmq.watchdog.db.outbox import Outbox
from qmq.watchdog.sources import Source

log = logging.getLogger("qmq.watchdog")

TROUBLE_S_MIN, TROUBLE_S_MAX = 0.5, 30.0
"""How long a database that failed is left alone: doubled with each failure in a row."""


class Drain(drain.Drain):
    """One outbox under one leader. Made by the leader; `run` ends when it is stopped, deposed or cancelled.

    Args:
        holds: says whether the lease still holds; asked before whatever has an effect.
    """

    def __init__(self, source: Source, core: Draining, sender: NumberedSender, holds: Callable[[], bool]) -> None:
        super().__init__(core, sender, self._ask)
        self.source = source
        self._holds = holds
        self._thread = ThreadPoolExecutor(1, "outbox")
        self._outbox: Outbox | None = None
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
            if self._outbox is not None and not self.is_hanging:
                self._outbox.close()

    async def _ask(self, work: Work) -> Any:
        assert self._outbox is not None
        self._call = self._thread.submit(without_frames, partial(self._outbox.do, work))
        result = await asyncio.wrap_future(self._call)
        if self.trouble:
            log.warning("outbox answers again database=%s", self.source.url)
        self.trouble, self._failures = "", 0
        return result

    async def _trouble(self, error: Exception) -> None:
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0][:200]
        if reason != self.trouble:
            log.error("outbox not of use database=%s reason=%s", self.source.url, reason)
        self.trouble = reason
        wait_s = min(TROUBLE_S_MIN * 2 ** min(self._failures, 10), TROUBLE_S_MAX)
        self._failures += 1
        await asyncio.sleep(wait_s)
