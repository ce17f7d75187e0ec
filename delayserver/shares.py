"""Core. Fair shares: whoever has something to send goes on in rounds, by deficit round robin.

Each round adds one quantum to what a key may spend, and no key saves more than that up. A batch may cost more than the
key has: then it has debts, and the next rounds go by until they are paid. So over time all that have something to send
spend the same, however large their batches are, and one that begins waits for one batch of each other at most.

Source: Shreedhar and Varghese, Efficient fair queueing using deficit round robin (1995); with debts instead of savings,
as in surplus round robin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

K = TypeVar("K")


class FairShares(dict[K, int]):
    """Key -> what it may spend, in the order of the round; only these functions change it. Used on its owner's loop."""

    def __init__(self, quantum: int) -> None:
        super().__init__()
        self._quantum = quantum

    def join(self, key: K) -> None:
        """It has something to send; behind the others, if it had nothing."""
        self.setdefault(key, 0)

    def leave(self, key: K) -> None:
        """It has nothing to send any more; debts are forgotten."""
        self.pop(key, None)

    def has_credit(self, key: K) -> bool:
        return self.get(key, 0) > 0

    def spend(self, key: K, cost: int) -> None:
        """It has sent something; the next pass begins with the others."""
        self[key] = self.pop(key) - cost

    def rounds(self, candidates: list[K]) -> Iterator[K]:
        """Yield who may spend next, round by round; whoever has spent nothing by then is out of the coming rounds.

        Args:
            candidates: keys that may be able to send now, in the order of the round.
        """
        order = deque(candidates)
        while order:
            key = order.popleft()
            if key not in self:
                continue
            self[key] = credit = min(self[key] + self._quantum, self._quantum)
            if credit > 0:
                yield key
                if self.get(key) == credit:
                    continue
            order.append(key)
