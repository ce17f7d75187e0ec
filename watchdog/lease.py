"""Core. Who of several watchdogs acts: a lease at the metaserver, a row with term and beat, changed by compare-and-set.

The holder raises the beat when a third of its lease is over: each time costs the metaserver a transaction with its
fsync, and what is left is long enough for a question that nobody answers and another one. Whoever sees the same (term,
beat) for the whole lease, by its own clock, takes the row with the next term; no two clocks are compared. The holder
counts its lease from before it asked, the others from after they saw the beat that this raised: it ends for the holder
first. After any number of elections the same process may hold it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KEPT_SHARE = 0.3
"""Of a lease: so long its holder asks no more. With the usual second between two looks it asks every two seconds."""
PATIENCE_SHARE = 0.4
"""Of a lease: a question that is not answered by then is given up, while there is time for another one."""


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

    def is_due(self, now_ms: int) -> bool:
        """Whether to ask the metaserver now: who waits for the lease, always; its holder, when some of it is over."""
        return not self.holds(now_ms) or self._held_until_ms - now_ms <= (1 - KEPT_SHARE) * self.lease_ms

    @property
    def patience_ms(self) -> int:
        """How long to wait for an answer."""
        return int(PATIENCE_SHARE * self.lease_ms)

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
            self._seen = row
            self._seen_ms = now_ms
        if row.node == self.node:
            self.term = row.term
            self._held_until_ms = asked_ms + self.lease_ms
        else:
            self.term = 0

    def released(self) -> None:
        self.term = 0
