"""Shell. Lets tasks wait until something moved in a producer: a batch left a queue, was resolved, or was given up."""

from __future__ import annotations

import asyncio


class Moves:
    """Made by a producer, shared by its senders, whose queues share their room; used on its event loop."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait until something moved, or a sender looked at the clock."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        await future

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiters)

    def wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for future in waiters:
                if not future.done():
                    future.set_result(None)
