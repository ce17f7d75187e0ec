"""Core. What a transaction will have written and sent: the messages given so far, by savepoint."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Staged(Generic[T]):
    """Things that live as long as the savepoint they were added in. Savepoints end innermost first.

    It may begin amid a transaction: a savepoint from before holds everything that was added since.
    """

    def __init__(self) -> None:
        self._levels: list[list[T]] = [[]]

    def add(self, things: list[T]) -> None:
        self._levels[-1].extend(things)

    def savepoint(self) -> None:
        self._levels.append([])

    def release(self) -> None:
        """The innermost savepoint ends, and what was added in it stays."""
        if len(self._levels) > 1:
            things = self._levels.pop()
            self._levels[-1].extend(things)

    def roll_back(self) -> list[T]:
        """The innermost savepoint ends; return what was added in it and is no more."""
        dropped = self._levels.pop()
        if not self._levels:
            self._levels = [[]]
        return dropped

    def take(self) -> list[T]:
        """End with all that is left, in the order in which it was added."""
        things = [thing for level in self._levels for thing in level]
        self._levels = [[]]
        return things
