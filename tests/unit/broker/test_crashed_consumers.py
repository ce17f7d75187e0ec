"""Core. Delivery counts of crashed consumers: only messages that a handler began count."""

from __future__ import annotations

import pytest

from qmq.errors import ErrorCode
from qmq.log.group import MessageState, UnackedRange
from qmq.remoting import commands
from qmq.remoting.commands import FLAG_SUSPECTED, Verdict
from qmq.subjects import dead_letter_subject
from tests.unit.broker.world import Client, Group

DEAD = dead_letter_subject("s", "g")


def a_group(count: int, **settings) -> Group:
    group = Group.made(**settings).start()
    group.client("producer").produce(*[f"m{number}" for number in range(count)])
    group.settle()
    return group


def joins(group: Group, begins: bool = True, **terms) -> Client:
    """A new process of the consumer c1."""
    return group.subscribed(begins=begins, **terms)


def pieces(group: Group, client: Client, most: int = 10_000) -> list[commands.Piece]:
    opaque = client.pull(most=most, bytes_max=8 << 20)
    group.settle()
    if client.link.answers[opaque][0] != ErrorCode.SUCCESS:
        return []
    return list(commands.decode_pulled(memoryview(client.body(opaque))))


def process(group: Group, poison: int, limit: int) -> bool:
    """Run once, as our client does; return whether it reached the end of the subject."""
    client = joins(group)
    got = [(piece, at) for piece in pieces(group, client) for at in range(piece.count)]
    for piece, at in got:
        number = piece.pull_sequence + at
        if piece.times > limit:
            client.nack(number, number + 1, dead=True)
            continue
        if piece.flags & FLAG_SUSPECTED:
            client.done(client.begin(number, number + 1))
        if piece.sequence + at == poison:
            client.lost()
            return False
        client.ack(number, number + 1)
    group.settle()
    return True


@pytest.mark.parametrize("poison", [0, 1, 500, 999])
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.slow
def test_one_poison_message_is_one_dead_letter(poison, limit):
    group = a_group(1_000)
    crashes = 0
    while not process(group, poison, limit):
        crashes += 1
        assert crashes <= limit + 1, "the first crash accuses nobody, each other one the poison"
    state = group.a.log.state
    assert crashes == limit + 1
    assert state.next_sequence[DEAD] == 1 and group.a.counters.dead_letters.total() == 1
    assert all(state.groups["s", "g"].state_of(sequence) is MessageState.ACKED for sequence in range(1_000))


def test_suspected_messages_are_flagged_for_reporting_clients():
    group = a_group(3)
    client = joins(group)
    assert [(piece.times, piece.flags & FLAG_SUSPECTED) for piece in pieces(group, client)] == [(1, 0)]
    client.lost()
    client = joins(group)
    first = pieces(group, client)
    assert [(piece.times, piece.flags & FLAG_SUSPECTED, piece.count) for piece in first] == [(1, FLAG_SUSPECTED, 3)]
    began = first[0].pull_sequence + 1
    client.done(client.begin(began, began + 1))
    client.lost()
    client = joins(group)
    found = {piece.sequence: piece.times for piece in pieces(group, client)}
    assert found == {0: 1, 1: 2, 2: 1}, "what it began with counts"
    client.lost()
    old = joins(group, begins=False)
    assert {(piece.sequence, piece.times, piece.flags) for piece in pieces(group, old)} == {
        (0, 4, 0),
        (1, 4, 0),
        (2, 4, 0),
    }


@pytest.mark.parametrize(
    ("begins", "expected"), [(True, [(0, 1, 1, 0), (1, 1, 0, 1)]), (False, [(0, 2, 1, 0)])], ids=["reporting", "silent"]
)
def test_ended_lease_counts_as_a_crash(begins, expected):
    """One message was begun. A silent client may have begun all of them."""
    group = a_group(2, lease_ms=1_000)
    client = joins(group, begins=begins)
    first = pieces(group, client)[0].pull_sequence
    if begins:
        client.done(client.begin(first, first + 1))
    client.lost()
    group.wait(5_000)
    requeued = list(group.progress.requeued)
    assert [(span.first, span.count, span.attempts, span.suspected) for span in requeued] == expected
    assert list(group.b.log.state.groups["s", "g"].requeued) == requeued, "the slave counts the same"


def test_messages_not_begun_return_uncounted():
    group = a_group(5)
    client = joins(group)
    first = pieces(group, client)[0].pull_sequence
    client.done(client.nack(first + 1, first + 5, verdict=Verdict.NOT_BEGUN))
    other = group.subscribed("c2")
    assert [(piece.sequence, piece.count, piece.times) for piece in pieces(group, other)] == [(1, 4, 1)]
    assert group.progress.consumers["c1"].unacked == [UnackedRange(first, 0, 1, 1)]


def test_begin_of_undelivered_messages_is_refused():
    group = a_group(1)
    client = joins(group)
    first = pieces(group, client)[0].pull_sequence
    assert client.code(client.begin(first, first + 2)) == ErrorCode.INVALID_ACK
