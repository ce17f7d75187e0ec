"""Shell. Looks that follow scrapes, for metrics that cost something to find: no scrape waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

EVERY_S = 60.0


class Scrapes:
    """Made by whose metrics they are; main runs `run`. A metaserver that is not scraped looks at nothing."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._came = asyncio.Event()

    def came(self) -> None:
        self._came.set()

    async def run(self) -> None:
        """Look once after each scrape, but not more often than each `EVERY_S`."""
        while True:
            await self._came.wait()
            self._came.clear()
            await self._look()
            await asyncio.sleep(EVERY_S)
