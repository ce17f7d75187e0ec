"""Known bugs of watchdogs and relays, for `tests.simulation.bugs`."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from qmq.outbox.claims import ClaimName, is_relay
from qmq.outbox.drain_plan import DrainPlan
from qmq.outbox.statements import Statements
from tests.support.planting import Bug


def _term_is_not_in_the_claim():
    return [mock.patch.object(ClaimName, "of_term", lambda self, term: self)]


def _doubt_is_dropped():
    return [mock.patch.object(DrainPlan, "_repeat_delay_ms", lambda self, claim: self._release(claim, "?") or 0)]


def _sent_before_the_claim_is_stored():
    real = DrainPlan._compose

    def compose(self, page, now_ms):
        real(self, page, now_ms)
        for text, claim in self._new.items():
            self._claims[text] = replace(claim, rows=list(claim.rows))

    return [mock.patch.object(DrainPlan, "_compose", compose)]


def _producer_relays_without_a_claim():
    real = Statements._take

    def take(self, claim, ids):
        return list(ids) if is_relay(ClaimName.parse(claim).term) else real(self, claim, ids)

    return [mock.patch.object(Statements, "_take", take)]


def _relay_keeps_the_term_of_a_claim():
    real = ClaimName.of_term
    return [mock.patch.object(ClaimName, "of_term", lambda self, term: self if is_relay(term) else real(self, term))]


BUGS = [
    Bug("a new leader does not put its term in the claim", _term_is_not_in_the_claim),
    Bug("doubt is dropped", _doubt_is_dropped),
    Bug("sent before the claim is stored", _sent_before_the_claim_is_stored),
    Bug("a producer relays without a claim", _producer_relays_without_a_claim),
    Bug("a relay keeps the term of a claim it takes over", _relay_keeps_the_term_of_a_claim, first=147),
]
