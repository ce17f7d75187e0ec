"""Planted bugs of watchdogs and relays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from qmq.outbox.claims import ClaimName, Page, is_relay
from qmq.outbox.drain_plan import DrainPlan
from qmq.outbox.statements import Statements
from tests.simulation.bugs import bug, plant

plant("outbox", "term is not in the claim", patch.object(ClaimName, "of_term", lambda self, term: self))
plant(
    "outbox",
    "unknown batch is released",
    patch.object(DrainPlan, "_repeat_delay_ms", lambda self, claim: self._release(claim, "?") or 0),
)


@bug("outbox", DrainPlan, "_compose")
def sent_before_the_claim_is_stored(real: Any, self: DrainPlan, page: Page, now_ms: int) -> None:
    real(self, page, now_ms)
    for text, claim in self._new.items():
        self._claims[text] = replace(claim, rows=list(claim.rows))


@bug("outbox", Statements, "_take")
def producer_relays_without_a_claim(real: Any, self: Statements, claim: str, ids: list[int]) -> Any:
    return list(ids) if is_relay(ClaimName.parse(claim).term) else real(self, claim, ids)


@bug("outbox", ClaimName, "of_term")
def relay_keeps_the_term_of_a_claim(real: Any, self: ClaimName, term: int) -> ClaimName:
    return self if is_relay(term) else real(self, term)
