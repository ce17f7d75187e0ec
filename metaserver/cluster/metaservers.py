"""Core. Which other metaservers live: each raises a counter in its row, and every reader times it with its own clock.

A row that was not read for a while has a timeout to advance, once the database is back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qmq.metaserver.model import MetaserverRow

GAP_MS = 3000
"""Readings further apart say nothing about what happened in between; they are made about once a second."""
FORGOTTEN_TIMEOUTS = 12
"""A row that stood still for so many timeouts may be removed: its process is not coming back."""


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

    @property
    def rows(self) -> list[MetaserverRow]:
        return [peer.row for peer in self._peers.values() if peer.row is not None]

    def read(self, rows: Iterable[MetaserverRow], *, mentioned: Iterable[str] = (), now_ms: int) -> None:
        """Take in all rows, as read just now.

        Args:
            mentioned: ids that sightings name. One without a row is given a timeout to come back, too.
        """
        found: dict[str, MetaserverRow | None] = {**dict.fromkeys(mentioned), **{row.id: row for row in rows}}
        after_gap = self._read_ms is None or now_ms - self._read_ms > GAP_MS
        before, self._peers, self._read_ms = self._peers, {}, now_ms
        for id, row in found.items():
            known = before.get(id)
            stands_still = known is not None and (row is None or (known.row is not None and row.beat == known.row.beat))
            self._peers[id] = _Peer(row, known.advanced_ms if known and stands_still and not after_gap else now_ms)

    def is_silent(self, id: str, *, now_ms: int) -> bool:
        """Whether nothing was heard of a metaserver for the timeout: its counter stands still, or the database is away.

        Silence is a reason to ask its brokers, no more.
        """
        peer = self._peers.get(id)
        if self.is_unread(now_ms=now_ms) or self._read_ms is None:
            return True
        return peer is not None and self._read_ms - peer.advanced_ms > self._timeout_ms

    def is_unread(self, *, now_ms: int) -> bool:
        """Whether the rows could not be read for the timeout: the database is away."""
        return self._read_ms is None or now_ms - self._read_ms > self._timeout_ms

    def forgotten(self) -> list[str]:
        """Ids of rows that nobody needs any more."""
        if self._read_ms is None:
            return []
        limit = self._read_ms - FORGOTTEN_TIMEOUTS * self._timeout_ms
        return [id for id, peer in self._peers.items() if peer.row is not None and peer.advanced_ms < limit]
