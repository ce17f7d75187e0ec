"""Core. The demo's book: what became of each row, and whether all of it is as promised.

Rows have numbers from 0; their messages' ids carry them. A row's number is all that is kept of it, so that the book
of a large file stays small: two bytes a row.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_ID = re.compile(r"row-(\d{1,12})")
OTHER = "another reason: nothing happened to its group before"


def message_id(number: int) -> str:
    return f"row-{number:07d}"


def number_of(identity: str | None) -> int | None:
    """The row that a message was made of; None if it is none of ours."""
    found = _ID.fullmatch(identity or "")
    return int(found.group(1)) if found else None


@dataclass
class Tally:
    """Counts for `total` rows. `at` is any clock that only grows, the same for events and deliveries."""

    total: int
    stored: int = 0
    not_stored: Counter[str] = field(default_factory=Counter)
    consumed: int = 0
    """Deliveries, repeated ones included."""
    strange: int = 0
    """Deliveries of messages that were never sent."""
    _group_of: bytearray = field(init=False)
    _deliveries: bytearray = field(init=False)
    _groups: list[str] = field(default_factory=lambda: [""])
    _events: list[tuple[float, str, str]] = field(default_factory=list)
    _repeated: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._group_of = bytearray(self.total)
        self._deliveries = bytearray(self.total)

    def answered(self, number: int, *, outcome: str, group: str, reason: str) -> None:
        """A receipt came for a row."""
        if outcome != "stored":
            self.not_stored[f"{outcome}: {reason}"] += 1
            return
        self.stored += 1
        if group not in self._groups:
            self._groups.append(group)
        self._group_of[number] = self._groups.index(group)

    def delivered(self, identity: str | None, at: float) -> None:
        """A consumer was handed a message."""
        number = number_of(identity)
        if number is None or number >= self.total:
            self.strange += 1
            return
        self.consumed += 1
        if self._deliveries[number]:
            self._repeated.append((number, at))
        self._deliveries[number] = min(255, self._deliveries[number] + 1)

    def happened(self, group: str, what: str, at: float) -> None:
        """Something was done to a broker group that may have messages in flight delivered again."""
        self._events.append((at, group, what))

    @property
    def distinct(self) -> int:
        """Rows that were delivered at least once."""
        return self.total - self._deliveries.count(0)

    @property
    def duplicates(self) -> Counter[str]:
        """Repeated deliveries by what had last been done to their group."""
        reasons: Counter[str] = Counter()
        for number, at in self._repeated:
            group = self._groups[self._group_of[number]]
            before = [(when, what) for when, whose, what in self._events if whose == group and when <= at]
            reasons[f"in flight at the {max(before)[1]}" if before else OTHER] += 1
        return reasons

    @property
    def lost(self) -> list[int]:
        """Rows that were acknowledged and never delivered. Must be empty."""
        return [n for n in range(self.total) if self._group_of[n] and not self._deliveries[n]]

    def complaints(self) -> list[str]:
        """Everything that is not as promised; empty if all is well."""
        lost, found = self.lost, []
        if self.stored != self.total:
            reasons = "; ".join(f"{count} {reason}" for reason, count in self.not_stored.most_common(3))
            found.append(f"{self.total - self.stored} of {self.total} messages were not acknowledged ({reasons})")
        if lost:
            found.append(f"{len(lost)} acknowledged messages were never delivered, the first is {message_id(lost[0])}")
        if self.strange:
            found.append(f"{self.strange} messages were delivered that were never sent")
        return found
