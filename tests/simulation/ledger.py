"""Ledger of messages: sent, acknowledged and received by clients, and the rules that stored messages follow.

The oracles of cores, delay groups and shells are ledgers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from tests.simulation.events import Violation

Place = tuple[Any, ...]
"""(subject, sequence); with several broker groups (subject, broker group, sequence)."""
Stored = Mapping[Place, str]


class Ledger:
    """Base of an oracle, made per seed."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}
        """Message id -> subject."""
        self.acked: dict[str, Place] = {}
        """Message id -> place in its receipt."""
        self.delivered: dict[Place, str] = {}
        self._receipts: dict[Place, str] = {}

    def note_receipt(self, id: str, place: Place) -> None:
        self._check_place(id, place)
        self.acked[id] = place
        self._receipts[place] = id

    def note_delivery(self, id: str, place: Place) -> None:
        if self.sent.get(id) != place[0]:
            raise Violation(f"I10: {id} was never sent to {place[0]}")
        self._check_place(id, place)
        self.delivered[place] = id

    def _check_place(self, id: str, place: Place) -> None:
        for known in (self._receipts.get(place, id), self.delivered.get(place, id)):
            if known != id:
                raise Violation(f"I7: {place} is both {known} and {id}")

    def check_stored(
        self, stored: Stored, is_kept: Callable[[Place], bool], may_repeat: Container[str] = frozenset()
    ) -> None:
        """Check the messages of a log.

        Args:
            stored: place -> message id.
            is_kept: whether the log still has the message of a place.
            may_repeat: ids that may be stored more than once.
        """
        kept = {place: id for place, id in stored.items() if id not in may_repeat}
        for number, rule in RULES.items():
            for finding in rule(self, stored if number != "I18" else kept, is_kept):
                raise Violation(f"{number}: {finding}")


def _each_once(ledger: Ledger, stored: Stored, is_kept: Callable[[Place], bool]) -> Iterator[str]:
    seen: dict[str, Place] = {}
    for place, id in stored.items():
        if seen.setdefault(id, place) != place:
            yield f"{id} is stored at {seen[id]} and at {place}"


def _sent_before(ledger: Ledger, stored: Stored, is_kept: Callable[[Place], bool]) -> Iterator[str]:
    return (f"{id} was never sent to {place[0]}" for place, id in stored.items() if ledger.sent.get(id) != place[0])


def _acknowledged_kept(ledger: Ledger, stored: Stored, is_kept: Callable[[Place], bool]) -> Iterator[str]:
    for id, place in ledger.acked.items():
        if is_kept(place) and stored.get(place) != id:
            yield f"{id}, acknowledged at {place}, is lost; {stored.get(place)} is there"


def _delivered_kept(ledger: Ledger, stored: Stored, is_kept: Callable[[Place], bool]) -> Iterator[str]:
    for place, id in ledger.delivered.items():
        if is_kept(place) and stored.get(place) != id:
            yield f"{id} was delivered at {place} and is not in the log"


RULES: dict[str, Callable[[Ledger, Stored, Callable[[Place], bool]], Iterator[str]]] = {
    "I18": _each_once,
    "I10": _sent_before,
    "I1": _acknowledged_kept,
    "I6": _delivered_kept,
}
"""Invariant -> its findings in the messages of a log."""
