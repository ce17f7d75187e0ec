"""Core. Messages that retention took before a consumer group acked them, each counted once."""

from __future__ import annotations

from typing import NamedTuple


class Gap(NamedTuple):
    """Such messages, by sequence: numbered like a part of a hand-out, so that each is skipped once."""

    pull_sequence: int
    begin: int
    end: int

    @property
    def pull_end(self) -> int:
        return self.pull_sequence + self.end - self.begin


class Skipped:
    """Of one reign. A consumer that comes back meets those it had not acked again: they are not counted again."""

    def __init__(self) -> None:
        self.messages: dict[tuple[str, str], int] = {}
        """(subject, consumer group) -> how many."""
        self._counted: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
        """(subject, group, consumer) -> pull sequences `[begin, end)`, disjoint, that are counted and not acked."""

    def note(self, key: tuple[str, str, str], gaps: list[Gap], acked_end: int) -> None:
        """A consumer, which acked everything below `acked_end`, went over `gaps`."""
        counted = [one for one in self._counted.pop(key, ()) if one[1] > acked_end]
        for gap in gaps:
            begin, end = gap.pull_sequence, gap.pull_end
            known = sum(max(min(one[1], end) - max(one[0], begin), 0) for one in counted)
            self.messages[key[:2]] = self.messages.get(key[:2], 0) + end - begin - known
            touching = [(begin, end), *(one for one in counted if one[0] <= end and begin <= one[1])]
            counted = [one for one in counted if one not in touching]
            counted.append((min(one[0] for one in touching), max(one[1] for one in touching)))
        if counted:
            self._counted[key] = counted

    def forget(self, key: tuple[str, str, str]) -> None:
        """The consumer left: it gets new pull sequences."""
        self._counted.pop(key, None)
