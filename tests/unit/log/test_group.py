"""Core. What a consumer has of its group: ranges of pull sequences."""

from __future__ import annotations

import pytest

from qmq.log.fold import EpochStart, State
from qmq.log.group import MASTERSHIP_BITS, Consumer, Group, UnackedRange
from qmq.types import Epoch


def test_what_is_delivered_one_after_the_other_is_one_range_as_long_as_it_counts_alike():
    """A consumer with 100,000 messages in flight would have as many ranges else."""
    consumer = Consumer()
    for at in range(3):
        consumer.deliver(UnackedRange(at, 10 + at, 1, 1))
    assert consumer.unacked == [UnackedRange(0, 10, 3, 1)]
    consumer.deliver(UnackedRange(3, 13, 2, 2))
    consumer.deliver(UnackedRange(5, 20, 1, 2))
    assert consumer.unacked == [UnackedRange(0, 10, 3, 1), UnackedRange(3, 13, 2, 2), UnackedRange(5, 20, 1, 2)]
    assert (consumer.next_pull, consumer.acked_end, consumer.unacked_messages) == (6, 0, 6)


def test_each_mastership_has_one_end_of_what_it_gave_out_as_far_as_any_of_it_is_un_acked():
    consumer, begin = Consumer(), 1 << MASTERSHIP_BITS
    for pull in (5, 6, begin - 1, begin, begin + 1):
        consumer.deliver(UnackedRange(pull, pull, 1, 1))
    assert consumer.mastership_ends == [begin, begin + 2]
    consumer.unacked = []
    consumer.deliver(UnackedRange(2 * begin, 9, 1, 1))
    assert consumer.mastership_ends == [2 * begin + 1]


@pytest.mark.parametrize(
    ("begin", "end", "taken", "left"),
    [
        pytest.param(0, 3, [(0, 10, 3, 1)], [(3, 20, 3, 2), (6, 30, 3, 1)], id="a whole range"),
        pytest.param(3, 6, [(3, 20, 3, 2)], [(0, 10, 3, 1), (6, 30, 3, 1)], id="the one in the middle"),
        pytest.param(1, 2, [(1, 11, 1, 1)], [(0, 10, 1, 1), (2, 12, 1, 1), (3, 20, 3, 2), (6, 30, 3, 1)], id="within"),
        pytest.param(2, 7, [(2, 12, 1, 1), (3, 20, 3, 2), (6, 30, 1, 1)], [(0, 10, 2, 1), (7, 31, 2, 1)], id="overall"),
    ],
)
def test_what_is_taken_is_what_lies_within_and_the_rest_stays(begin, end, taken, left):
    consumer = Consumer()
    for one in ((0, 10, 3, 1), (3, 20, 3, 2), (6, 30, 3, 1)):
        consumer.deliver(UnackedRange(*one))
    assert consumer.take(begin, end) == [UnackedRange(*one) for one in taken]
    assert consumer.unacked == [UnackedRange(*one) for one in left]


OF_2_3 = 2 << 48 | 3 << 32


@pytest.mark.parametrize(
    ("epoch", "given", "following"),
    [
        pytest.param(Epoch(2, 3), 7, OF_2_3, id="the first of a mastership"),
        pytest.param(Epoch(2, 3), OF_2_3 + 7, OF_2_3 + 7, id="the next of a mastership"),
        pytest.param(Epoch(2, 2), OF_2_3 + 7, OF_2_3 + 7, id="never one that was used"),
        pytest.param(Epoch(0x5_0002, 0x7_0003), 7, OF_2_3, id="16 bits of the term and of the boot"),
    ],
)
def test_pull_sequences_of_a_mastership_begin_with_its_epoch_and_none_is_used_again(epoch, given, following):
    state = State(epochs=[EpochStart(epoch, 0, 0)])
    group = Group(position=0, floor=given, consumers={"there": Consumer(given + 1)})
    assert state.next_pull(group, "new") == following
    assert state.next_pull(group, "there") == following + (following == given)
