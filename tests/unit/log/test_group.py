"""Core. What a consumer has of its group: ranges of pull sequences."""

from __future__ import annotations

from qmq.log.group import MASTERSHIP_BITS, Consumer, UnackedRange


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
    for pull in (5, 6, begin, begin + 1):
        consumer.deliver(UnackedRange(pull, pull, 1, 1))
    assert consumer.mastership_ends == [7, begin + 2]
    consumer.unacked = []
    consumer.deliver(UnackedRange(2 * begin, 9, 1, 1))
    assert consumer.mastership_ends == [2 * begin + 1]
