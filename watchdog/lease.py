"""Core. Lease that lets one of several watchdogs act: a row with term and beat at the metaserver, changed by
compare-and-set.

The holder raises the beat after a third of its lease. Each raise costs the metaserver a transaction with its fsync. The
rest of the lease leaves time to repeat a lost request. A watchdog that sees the same (term, beat) for a whole lease, by
its own clock, takes the row with the next term. Clocks are never compared. The holder counts its lease from before its
request, the others from after they saw the resulting beat. So the lease ends for its holder first. The same process may
hold it again after any number of elections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KEPT_SHARE = 0.3
"""Fraction of the lease after which the holder sends a request: every two seconds, with one check a second."""
PATIENCE_SHARE = 0.4
"""Fraction of the lease after which a request is given up, while there is time for another one."""


class LeaseRow(NamedTuple):
    """The metaserver's row; `node` is empty if the lease is free."""

    node: str
    term: int
    beat: int


class LeaseRequest(NamedTuple):
    """Request to raise the beat of the own row; with `take`, to take a row that is free or unchanged since (term,
    beat).
    """

    take: bool
    term: int
    beat: int


@dataclass(slots=True)
class Lease:
    """One watchdog's view of the lease. `node` is unique to the process, also on one host."""

    node: str
    lease_ms: int
    term: int = 0
    """Term of this leader; 0 without the lease."""
    _held_until_ms: int = 0
    _seen: LeaseRow | None = None
    _seen_ms: int = 0

    def holds(self, now_ms: int) -> bool:
        """Return whether this process may act now."""
        return self.term != 0 and now_ms < self._held_until_ms

    def is_due(self, now_ms: int) -> bool:
        """Return whether to send a request now: always without the lease; as its holder, after KEPT_SHARE of it."""
        return not self.holds(now_ms) or self._held_until_ms - now_ms <= (1 - KEPT_SHARE) * self.lease_ms

    @property
    def patience_ms(self) -> int:
        """Maximum wait for an answer."""
        return int(PATIENCE_SHARE * self.lease_ms)

    @property
    def holder(self) -> str:
        """Holder in the metaserver's last answer."""
        return self._seen.node if self._seen else ""

    def request(self, now_ms: int) -> LeaseRequest:
        """Return the request to send now."""
        if self._seen is None:
            return LeaseRequest(False, 0, 0)
        is_over = now_ms - self._seen_ms > self.lease_ms
        return LeaseRequest(is_over, self._seen.term, self._seen.beat)

    def answered(self, row: LeaseRow, *, asked_ms: int, now_ms: int) -> None:
        """Apply the metaserver's row, the answer to a request sent at `asked_ms`."""
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
