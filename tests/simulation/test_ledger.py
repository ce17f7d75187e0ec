"""Each rule of the ledger finds its fault."""

from __future__ import annotations

import pytest

from tests.simulation.events import Violation
from tests.simulation.ledger import Ledger, Place

ONE, TWO = ("s", 1), ("s", 2)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.sent |= {"m": "s", "n": "s", "t": "other"}
    ledger.note_receipt("m", ONE)
    ledger.note_delivery("n", TWO)
    return ledger


@pytest.mark.parametrize(
    "stored, law",
    [
        ({ONE: "m", TWO: "n"}, ""),
        ({TWO: "n"}, "I1"),
        ({ONE: "m"}, "I6"),
        ({ONE: "m", TWO: "n", ("s", 3): "t"}, "I10"),
        ({ONE: "m", TWO: "n", ("s", 3): "n"}, "I18"),
    ],
)
def test_stored_messages_follow_the_rules(ledger: Ledger, stored: dict[Place, str], law: str) -> None:
    if not law:
        return ledger.check_stored(stored, lambda place: True)
    with pytest.raises(Violation, match=f"^{law}: "):
        ledger.check_stored(stored, lambda place: True)


def test_deleted_messages_break_no_rule(ledger: Ledger) -> None:
    ledger.check_stored({}, lambda place: False)


def test_place_means_one_message(ledger: Ledger) -> None:
    with pytest.raises(Violation, match="^I7: "):
        ledger.note_receipt("m", TWO)
    with pytest.raises(Violation, match="^I10: "):
        ledger.note_delivery("t", ("s", 3))
