"""Core. Order keys of one consumer group: who holds a key, and who stands in line behind it.

Only messages before the group's position that are not settled count. The first one of a key is its holder: it is with
a consumer, or waits for its retry, or is the next to be delivered. All others of the key stand behind it, in order. So
one message of a key is under way at a time, whatever becomes of it. Derived from the fold and the labels; made again by
the next master.

Keeps I24.
"""

from __future__ import annotations

from collections import deque


class Keys:
    """Made by a group's filter. A key is a label's upper half, 1 or more."""

    def __init__(self) -> None:
        self._holder: dict[int, int] = {}
        self._key: dict[int, int] = {}
        self._behind: dict[int, deque[int]] = {}
        self.deferred = 0
        """Messages that stand behind others."""

    def __len__(self) -> int:
        """Return how many keys are held."""
        return len(self._holder)

    def is_busy(self, key: int) -> bool:
        return key in self._holder

    def hold(self, key: int, sequence: int) -> None:
        """A message of a key that nobody holds is delivered."""
        self._holder[key] = sequence
        self._key[sequence] = key

    def defer(self, key: int, sequence: int) -> None:
        """A later message of a busy key has to wait."""
        behind = self._behind.get(key)
        if behind is None:
            behind = self._behind[key] = deque()
        behind.append(sequence)
        self.deferred += 1

    def settled(self, sequence: int) -> int | None:
        """A message is over for the group; return the one that holds its key from now on, and may be delivered."""
        key = self._key.pop(sequence, None)
        if key is None:
            return None
        behind = self._behind.get(key)
        if behind is None:
            del self._holder[key]
            return None
        following = behind.popleft()
        if not behind:
            del self._behind[key]
        self.deferred -= 1
        self.hold(key, following)
        return following
