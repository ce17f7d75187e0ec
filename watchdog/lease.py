"""Core. Who of several watchdogs acts: a lease at the metaserver, a row with term and beat, changed by compare-and-set.

The holder raises the beat every second. Whoever sees the same (term, beat) for the whole lease, by its own clock, takes
the row with the next term; no two clocks are compared. The holder counts its lease from before it asked, the others
from after they saw the beat that this raised: it ends for the holder first. After any number of elections the same
process may hold it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LeaseRow(NamedTuple):
    """The row as the metaserver has it; `node` is empty if nobody holds it."""

    node: str
    term: int
    beat: int


class LeaseRequest(NamedTuple):
    """Raise the beat if the row is mine; else take it if it is free, or still is (term, beat) and `take` is set."""

    take: bool
    term: int
    beat: int


@dataclass(slots=True)
class Lease:
    """One watchdog's view. `node` is unique to the process: two on one host are two."""

    node: str
    lease_ms: int
    term: int = 0
    """Of this leader; 0: it is none."""
    _held_until_ms: int = 0
    _seen: LeaseRow | None = None
    _seen_ms: int = 0

    def holds(self, now_ms: int) -> bool:
        """Whether this process may act now."""
        return self.term != 0 and now_ms < self._held_until_ms

    @property
    def holder(self) -> str:
        """Who held it when the metaserver last answered."""
        return self._seen.node if self._seen else ""

    def request(self, now_ms: int) -> LeaseRequest:
        """Return what to ask of the metaserver now."""
        if self._seen is None:
            return LeaseRequest(False, 0, 0)
        is_over = now_ms - self._seen_ms > self.lease_ms
        return LeaseRequest(is_over, self._seen.term, self._seen.beat)

    def answered(self, row: LeaseRow, *, asked_ms: int, now_ms: int) -> None:
        """Take the row in that the metaserver has after a request sent at `asked_ms`."""
        if row != self._seen:
            self._seen, self._seen_ms = row, now_ms
        if row.node == self.node:
            self.term, self._held_until_ms = row.term, asked_ms + self.lease_ms
        else:
            self.term = 0

    def released(self) -> None:
        self.term = 0
