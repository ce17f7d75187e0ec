"""Shell. A producer's two ways: to the broker groups, and, from the first delayed message on, to the delay groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qmq.client.open_clients import report_lost
from qmq.client.sender import Sender
from qmq.types import GroupKind


class Flight:
    """Counts what was given between two flushes: `open` is how many of it have no outcome yet."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = 0


class Senders:
    """Made when a producer is opened, on its event loop; `stop` is its end.

    Args:
        make: makes a sender to groups of a kind.
    """

    def __init__(self, make: Callable[[GroupKind], Sender]) -> None:
        self._make = make
        self._all = [make(GroupKind.NORMAL)]
        self._all[0].start()
        self._flights = [Flight()]
        """Oldest first; the last one takes what is given now."""
        self._is_stopping = False
        self._guard = asyncio.create_task(self._guard_end())

    def of(self, *, is_delayed: bool) -> Sender:
        """Return the way that messages of a kind go."""
        if is_delayed and len(self._all) == 1:
            self._all.append(self._make(GroupKind.DELAY))
            self._all[1].start()
        return self._all[is_delayed]

    def board(self) -> Flight:
        """Count one more on the flight that it returns."""
        flight = self._flights[-1]
        flight.open += 1
        return flight

    async def flush(self) -> None:
        """Wait until all that was given before has its outcome, and for nothing that comes later."""
        under_way = [flight for flight in self._flights if flight.open]
        self._flights = [*under_way, Flight()]
        while any(flight.open for flight in under_way):
            await self.wait()

    @property
    def is_idle(self) -> bool:
        return all(sender.is_idle for sender in self._all)

    @property
    def open_messages(self) -> int:
        """How many messages have no outcome yet."""
        return sum(sender.open_messages for sender in self._all)

    async def _guard_end(self) -> None:
        """Wait for the end of an event loop that cancels all tasks, of a producer that was not closed."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if not self._is_stopping:
                report_lost(self.open_messages, "the event loop ended")
                for sender in self._all:
                    sender.refuse_all()

    async def wait(self) -> None:
        """Wait until something moved in one of them."""
        await self._all[0].wait()

    async def stop(self) -> None:
        """Stop both, also if this is cancelled: each of them says what became of its messages."""
        self._is_stopping = True
        self._guard.cancel()
        first, *others = self._all
        try:
            await first.stop()
        finally:
            for sender in others:
                await sender.stop()
