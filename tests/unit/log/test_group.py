"""Core. What a consumer has of its group: ranges of pull sequences."""

from __future__ import annotations

from qmq.log.group import Consumer, UnackedRange


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
