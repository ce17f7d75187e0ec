"""Core. Liveness of the other metaservers: each raises a counter in its row, and readers measure it with their own
clocks.

After the database was away, every row gets one timeout to advance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qmq.metaserver.model import MetaserverRow

GAP_MS = 3000
"""Readings come about once a second. Over a longer gap, a constant counter proves nothing."""
STOPPED_MS = 24 * 3600 * 1000
"""How long a metaserver that left is named: a stop removes its row, so nothing else would show it."""
FORGOTTEN_TIMEOUTS = 12
"""Timeouts without an advance after which a row is removed."""


@dataclass(slots=True)
class _Peer:
    row: MetaserverRow | None
    advanced_ms: int


class Peers:
    """Metaservers that use the same database. Owned by `Liveness`; used from the loop only."""

    def __init__(self, *, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._peers: dict[str, _Peer] = {}
        self._read_ms: int | None = None
        self._stopped: dict[str, int] = {}
        """HTTP address -> when its last row disappeared."""

    @property
    def rows(self) -> list[MetaserverRow]:
        return [peer.row for peer in self._peers.values() if peer.row is not None]

    def read(self, rows: Iterable[MetaserverRow], *, mentioned: Iterable[str] = (), now_ms: int) -> None:
        """Apply all rows, as read just now.

        Args:
            mentioned: ids that sightings name. One without a row gets a timeout to return, too.
        """
        found: dict[str, MetaserverRow | None] = {**dict.fromkeys(mentioned), **{row.id: row for row in rows}}
        after_gap = self._read_ms is None or now_ms - self._read_ms > GAP_MS
        before, self._peers, self._read_ms = self._peers, {}, now_ms
        for id, row in found.items():
            known = before.get(id)
            stands_still = known is not None and (row is None or (known.row is not None and row.beat == known.row.beat))
            self._peers[id] = _Peer(row, known.advanced_ms if known and stands_still and not after_gap else now_ms)
        present = {row.http_address for row in self.rows}
        left = {peer.row.http_address for peer in before.values() if peer.row is not None} - present
        self._stopped = {address: at_ms for address, at_ms in self._stopped.items() if address not in present}
        self._stopped |= dict.fromkeys(left, now_ms)

    def stopped(self, *, now_ms: int) -> list[str]:
        """Return the addresses of metaservers that stopped or were removed within a day and did not return."""
        return sorted(address for address, at_ms in self._stopped.items() if now_ms - at_ms < STOPPED_MS)

    def is_silent(self, id: str, *, now_ms: int) -> bool:
        """Return whether a metaserver's counter did not advance for the timeout, or the database was away.

        Silence only means that its brokers are asked.
        """
        peer = self._peers.get(id)
        if self.is_unread(now_ms=now_ms) or self._read_ms is None:
            return True
        return peer is not None and self._read_ms - peer.advanced_ms > self._timeout_ms

    def is_unread(self, *, now_ms: int) -> bool:
        """Return whether the rows could not be read for the timeout: the database is away."""
        return self._read_ms is None or now_ms - self._read_ms > self._timeout_ms

    def forgotten(self) -> list[str]:
        """Return the ids of rows to remove."""
        if self._read_ms is None:
            return []
        limit = self._read_ms - FORGOTTEN_TIMEOUTS * self._timeout_ms
        return [id for id, peer in self._peers.items() if peer.row is not None and peer.advanced_ms < limit]
