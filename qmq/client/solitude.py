"""Shell. Suspected messages are handled alone: if the process dies with one, nothing else is to blame.

A consumer that vanished had them, and nobody knows which of them was the reason (qmq.log.message_life). So each waits
until no other handler of its listener runs, and its broker is told before its own begins; others wait meanwhile. All
other messages pass by at the cost of two additions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from qmq.client.received import ReceivedMessage
from qmq.errors import QmqError

TELL_S = 1.0
"""How long a handler waits for the broker to know that it begins. After that an attempt may go uncounted."""


class Solitude:
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
            await tell(message)
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


async def tell(message: ReceivedMessage) -> None:
    """Tell the broker that a handler begins with a suspected message, and wait until it knows."""
    if (asked := message._piece.acker.begin(message._piece, message._at)) is not None:
        with suppress(QmqError, TimeoutError):  # it goes uncounted; a new master would not know it either
            async with asyncio.timeout(TELL_S):
                await asked
