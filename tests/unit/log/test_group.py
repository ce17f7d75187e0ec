"""Core. A consumer's ranges of pull sequences."""

from __future__ import annotations

from itertools import combinations

import pytest

from qmq import ranges
from qmq.errors import InvalidAck
from qmq.log.fold import EpochStart, State
from qmq.log.group import MASTERSHIP_BITS, Consumer, Group, MessageState, UnackedRange
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.types import Epoch


def test_consecutive_deliveries_share_a_range():
    """Otherwise a consumer with 100,000 messages in flight would have as many ranges."""
    consumer = Consumer()
    for at in range(3):
        consumer.deliver(UnackedRange(at, 10 + at, 1, 1))
    assert consumer.unacked == [UnackedRange(0, 10, 3, 1)]
    consumer.deliver(UnackedRange(3, 13, 2, 2))
    consumer.deliver(UnackedRange(5, 20, 1, 2))
    assert consumer.unacked == [UnackedRange(0, 10, 3, 1), UnackedRange(3, 13, 2, 2), UnackedRange(5, 20, 1, 2)]
    assert (consumer.next_pull, consumer.acked_end, consumer.unacked_messages) == (6, 0, 6)


def test_consumer_keeps_one_end_per_mastership():
    consumer, begin = Consumer(), 1 << MASTERSHIP_BITS
    for pull in (5, 6, begin - 1, begin, begin + 1):
        consumer.deliver(UnackedRange(pull, pull, 1, 1))
    assert consumer.mastership_ends == [begin, begin + 2]
    consumer.unacked = []
    consumer.deliver(UnackedRange(2 * begin, 9, 1, 1))
    assert consumer.mastership_ends == [2 * begin + 1]


DELIVERED = ((0, 10, 3, 1, 0), (3, 20, 5, 2, 0), (8, 30, 3, 1, 1), (11, 40, 2, 0, 2))
END = 13


def a_consumer() -> tuple[Consumer, dict[int, UnackedRange]]:
    """Return a consumer with gaps in its ranges, and each of its messages by pull sequence."""
    consumer = Consumer()
    for row in DELIVERED:
        consumer.deliver(UnackedRange(*row))
    consumer.take(0, 1)
    consumer.take(5, 7)
    plain = {
        held.pull + at: held.part(held.pull + at, held.pull + at + 1)
        for held in consumer.unacked
        for at in range(held.count)
    }
    assert sorted(plain) == [*range(1, 5), *range(7, END)]
    return consumer, plain


def test_unacked_ranges_equal_single_messages():
    for begin, end in combinations(range(END + 1), 2):
        check_range(begin, end)


def check_range(begin: int, end: int) -> None:
    consumer, plain = a_consumer()
    within = [pull for pull in plain if begin <= pull < end]
    assert consumer.unacked_in(begin, end) == ranges.union((pull, pull + 1) for pull in within)
    overlapping = [held for held in consumer.unacked if begin < held.pull_end and held.pull < end]
    assert list(consumer.overlapping(begin, end)) == overlapping
    taken = consumer.take(begin, end)
    assert taken == [held.part(begin, end) for held in overlapping]
    singly = [held.part(at, at + 1) for held in [*taken, *consumer.unacked] for at in range(held.pull, held.pull_end)]
    assert sorted(singly) == sorted(plain.values())
    assert not any(begin < held.pull_end and held.pull < end for held in consumer.unacked)
    assert consumer.unacked == sorted(consumer.unacked) and all(held.count for held in consumer.unacked)


@pytest.mark.parametrize("limit", range(5))
def test_messages_above_the_delivery_limit(limit):
    consumer, plain = a_consumer()
    often = [pull for pull, message in plain.items() if limit and message.attempts + message.suspected > limit]
    found = consumer.delivered_more_than(limit)
    assert ranges.union(found) == ranges.union((pull, pull + 1) for pull in often) and ranges.size(found) == len(often)
    for end in range(END + 2):
        rest = [pull for pull in plain if pull < end and pull not in often]
        assert consumer.unacked_below(end, limit) == ranges.union((pull, pull + 1) for pull in rest)


def test_unacked_count_reaches_a_limit():
    consumer, plain = a_consumer()
    assert [consumer.has_as_many_as(limit) for limit in range(END + 1)] == [
        limit <= len(plain) for limit in range(END + 1)
    ]
    consumer = Consumer()
    consumer.deliver(UnackedRange(0, 0, 3, 1))
    assert [consumer.has_as_many_as(limit) for limit in (2, 3, 4)] == [True, True, False]


@pytest.mark.parametrize(("begin", "end"), [(3, 3), (4, 3), (END, END + 1), (0, END + 1)])
def test_empty_or_undelivered_range_is_refused(begin, end):
    consumer, _ = a_consumer()
    with pytest.raises(InvalidAck):
        consumer.check_given(begin, end)
    with pytest.raises(InvalidAck):
        consumer.unacked_in(begin, end)
    consumer.check_given(0, END)


@pytest.mark.parametrize(
    ("end", "was_given"),
    [
        pytest.param(0, True, id="nothing"),
        pytest.param(5, True, id="settled messages"),
        pytest.param(1 << MASTERSHIP_BITS, True, id="all below the first unacked"),
        pytest.param((1 << MASTERSHIP_BITS) + 3, True, id="all of an earlier mastership"),
        pytest.param((1 << MASTERSHIP_BITS) + 4, False, id="more than an earlier mastership delivered"),
        pytest.param((2 << MASTERSHIP_BITS) + 2, False, id="of a mastership without deliveries"),
        pytest.param((3 << MASTERSHIP_BITS) + 1, True, id="the first of a mastership"),
        pytest.param((3 << MASTERSHIP_BITS) + 7, True, id="all that a mastership delivered"),
        pytest.param(4 << MASTERSHIP_BITS, False, id="all that it could deliver"),
        pytest.param((4 << MASTERSHIP_BITS) + 1, True, id="all of a mastership with one delivery"),
        pytest.param(6 << MASTERSHIP_BITS, True, id="all of a mastership that used every sequence"),
        pytest.param((6 << MASTERSHIP_BITS) + 1, False, id="of a later mastership"),
    ],
)
def test_pull_sequence_was_given_by_its_mastership(end, was_given):
    consumer = Consumer()
    for mastership, count in ((0, 5), (1, 3), (3, 7), (4, 1), (5, 1 << MASTERSHIP_BITS)):
        consumer.deliver(UnackedRange(mastership << MASTERSHIP_BITS, mastership << MASTERSHIP_BITS, count, 1))
    consumer.take(0, 5)
    assert consumer.was_given(end) is was_given


def test_states_of_messages_in_a_group():
    requeued = Requeued([RequeuedRange(2, 2, 1, 0)])
    first, second = UnackedRange(7, 4, 2, 1), UnackedRange(9, 8, 1, 1)
    group = Group(10, 0, requeued, {"c1": Consumer(9, [first]), "c2": Consumer(10, [second])})
    names = "acked acked requeued requeued delivered delivered acked acked delivered acked new new"
    assert [group.state_of(sequence) for sequence in range(12)] == [
        MessageState[name.upper()] for name in names.split()
    ]
    assert (sorted(group.unconsumed(12)), group.first_unconsumed(12)) == ([(2, 4), (4, 6), (8, 9), (10, 12)], 2)
    assert (sorted(group.unconsumed(10)), group.first_unconsumed(10)) == ([(2, 4), (4, 6), (8, 9)], 2)
    requeued.take(2, 2)
    assert group.first_unconsumed(10) == 4
    group.consumers.clear()
    assert (group.unconsumed(10), group.first_unconsumed(10)) == ([], None)
    assert (group.unconsumed(11), group.first_unconsumed(11)) == ([(10, 11)], 10)


OF_2_3 = 2 << 48 | 3 << 32


@pytest.mark.parametrize(
    ("epoch", "given", "following"),
    [
        pytest.param(Epoch(2, 3), 7, OF_2_3, id="the first of a mastership"),
        pytest.param(Epoch(2, 3), OF_2_3 + 7, OF_2_3 + 7, id="the next of a mastership"),
        pytest.param(Epoch(2, 2), OF_2_3 + 7, OF_2_3 + 7, id="never a used sequence"),
        pytest.param(Epoch(0x5_0002, 0x7_0003), 7, OF_2_3, id="16 bits of the term and of the boot"),
    ],
)
def test_pull_sequences_are_unique_per_epoch(epoch, given, following):
    state = State(epochs=[EpochStart(epoch, 0, 0)])
    group = Group(position=0, floor=given, consumers={"there": Consumer(given + 1)})
    assert state.next_pull(group, "new") == following
    assert state.next_pull(group, "there") == following + (following == given)
