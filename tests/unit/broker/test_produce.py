"""Core. What a master stores, refuses and acknowledges (design, sections 1 and 4)."""

from __future__ import annotations

from qmq.errors import ErrorCode
from tests.unit.broker.world import Client, Group


def a_group(**settings) -> tuple[Group, Client]:
    group = Group.made(**settings).start()
    return group, Client(group.a)


def test_largest_batch_of_nothing_but_refused_messages_is_answered():
    group, client = a_group()
    most, more = client.produce_raw([b""] * 65_535), client.produce_raw([b""] * 65_536)
    receipt = client.receipt(most)
    assert receipt.stored == 0 and len(receipt.refused) == 65_535
    assert client.code(more) == ErrorCode.INVALID_REQUEST
    assert group.a.log.end == group.b.log.end
