"""Core. Which slaves a master fills: all of them by itself, or those that an operator named.

A slave's copy has to be *filled* if it is empty, was never whole, or ends before the master's oldest segment; one that
goes on where its log ends only catches up. A filling has an id, `incarnation/n`: n fillings of that data directory came
to their end before it. So what an operator says of one filling says nothing about the next one, and need not be taken
back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class SyncMode(StrEnum):
    AUTOMATIC = "automatic"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class FillOrder:
    """What an operator said of one filling: SyncReplica allows it, CancelSync stops it."""

    fill_id: str
    is_allowed: bool


@dataclass(frozen=True, slots=True)
class FillOrders:
    """What the metaserver's row says about the slaves of a group. Made of each assignment."""

    mode: SyncMode = SyncMode.AUTOMATIC
    orders: tuple[FillOrder, ...] = ()

    @classmethod
    def of(cls, mode: str, orders: Iterable[tuple[str, bool]]) -> FillOrders:
        """A mode of a later version fills nothing by itself."""
        is_automatic = mode in ("", SyncMode.AUTOMATIC)
        return cls(
            SyncMode.AUTOMATIC if is_automatic else SyncMode.MANUAL,
            tuple(FillOrder(fill_id, is_allowed) for fill_id, is_allowed in orders),
        )

    def may_begin(self, fill_id: str) -> bool:
        """Whether this filling may begin, or go on over a new connection."""
        said = self._said(fill_id)
        return self.mode is SyncMode.AUTOMATIC if said is None else said.is_allowed

    def is_cancelled(self, fill_id: str) -> bool:
        """Whether this filling has to stop. That the mode is another one now stops none that is under way."""
        said = self._said(fill_id)
        return said is not None and not said.is_allowed

    def _said(self, fill_id: str) -> FillOrder | None:
        return next((order for order in self.orders if order.fill_id == fill_id), None)
