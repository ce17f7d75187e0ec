"""Shell. The demo's tally notices broken promises."""

from __future__ import annotations

import pytest

from qmq.deploy.proof import OTHER, Tally, message_id, number_of


def tally(stored, delivered):
    book = Tally(total=3)
    for number in stored:
        book.answered(number, outcome="stored", group="g1", reason="")
    for number in delivered:
        book.delivered(message_id(number), at=1.0)
    return book


def test_all_stored_and_delivered_is_well():
    book = tally([0, 1, 2], [2, 0, 1])
    assert (book.stored, book.consumed, book.distinct, book.lost, book.complaints()) == (3, 3, 3, [], [])


def test_acknowledged_undelivered_message_is_lost():
    book = tally([0, 1, 2], [0, 2])
    assert book.lost == [1]
    assert book.complaints() == ["1 acknowledged messages were never delivered, the first is row-0000001"]


def test_unacknowledged_message_is_not_lost():
    book = tally([0, 1], [0, 1])
    book.answered(2, outcome="refused", group="", reason="too large")
    assert book.lost == []
    assert book.complaints() == ["1 of 3 messages were not acknowledged (1 refused: too large)"]


@pytest.mark.parametrize("identity", [None, "", "row-3", "row-x", "other", "row-0000001 "])
def test_foreign_message_is_noticed(identity):
    book = tally([0, 1, 2], [0, 1, 2])
    book.delivered(identity, at=2.0)
    assert book.complaints() == ["1 messages were delivered that were never sent"]


def test_repeated_delivery_has_its_groups_last_event():
    book = Tally(total=3)
    for number, group in enumerate(["g1", "g2", "g1"]):
        book.answered(number, outcome="stored", group=group, reason="")
    book.happened("g1", "SIGKILL of g1's master", at=1.0)
    book.happened("g2", "swap of g2", at=2.0)
    for number, at in [(0, 0.0), (1, 0.0), (2, 0.0), (0, 0.5), (0, 1.5), (1, 1.5), (1, 2.0), (2, 9.0)]:
        book.delivered(message_id(number), at)
    assert book.duplicates == {
        "in flight at the SIGKILL of g1's master": 2,
        "in flight at the swap of g2": 1,
        OTHER: 2,
    }
    assert (book.consumed, book.distinct, book.complaints()) == (8, 3, [])


def test_a_row_delivered_very_often_is_counted_right():
    book = tally([0, 1, 2], [0] * 300 + [1, 2])
    assert (book.consumed, book.distinct, sum(book.duplicates.values())) == (302, 3, 299)


def test_an_id_carries_its_row():
    assert [number_of(message_id(n)) for n in (0, 336_775, 12_345_678)] == [0, 336_775, 12_345_678]
