"""Shell. A producer's two ways: to the broker groups, and, from the first delayed message on, to the delay groups."""

from __future__ import annotations

from collections.abc import Callable

from qmq.client.moves import Moves
from qmq.client.sender import Sender
from qmq.types import GroupKind


class Senders:
    """Made when a producer is opened, on its event loop; `stop` is its end.

    Args:
        make: makes a sender to groups of a kind.
    """

    def __init__(self, make: Callable[[GroupKind, Moves], Sender]) -> None:
        self._make, self._moves = make, Moves()
        self._all = [make(GroupKind.NORMAL, self._moves)]
        self._all[0].start()

    def of(self, *, is_delayed: bool) -> Sender:
        """Return the way that messages of a kind go."""
        if is_delayed and len(self._all) == 1:
            self._all.append(self._make(GroupKind.DELAY, self._moves))
            self._all[1].start()
        return self._all[is_delayed]

    @property
    def is_idle(self) -> bool:
        return all(sender.is_idle for sender in self._all)

    async def wait(self) -> None:
        """Wait until something moved in one of them."""
        await self._moves.wait()

    async def stop(self) -> None:
        for sender in self._all:
            await sender.stop()
