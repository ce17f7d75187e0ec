"""Planted bugs of watchdogs and relays."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from qmq.outbox.claims import ClaimName, is_relay
from qmq.outbox.drain_plan import DrainPlan
from qmq.outbox.statements import Statements
from tests.simulation.bugs import bug


@bug("outbox")
def term_is_not_in_the_claim():
    return [mock.patch.object(ClaimName, "of_term", lambda self, term: self)]


@bug("outbox")
def doubt_is_dropped():
    return [mock.patch.object(DrainPlan, "_repeat_delay_ms", lambda self, claim: self._release(claim, "?") or 0)]


@bug("outbox")
def sent_before_the_claim_is_stored():
    real = DrainPlan._compose

    def compose(self, page, now_ms):
        real(self, page, now_ms)
        for text, claim in self._new.items():
            self._claims[text] = replace(claim, rows=list(claim.rows))

    return [mock.patch.object(DrainPlan, "_compose", compose)]


@bug("outbox")
def producer_relays_without_a_claim():
    real = Statements._take

    def take(self, claim, ids):
        return list(ids) if is_relay(ClaimName.parse(claim).term) else real(self, claim, ids)

    return [mock.patch.object(Statements, "_take", take)]


@bug("outbox", first=147)
def relay_keeps_the_term_of_a_claim():
    real = ClaimName.of_term
    return [mock.patch.object(ClaimName, "of_term", lambda self, term: self if is_relay(term) else real(self, term))]
