"""Core. Pulls under load: a pass bounds the work for one group, and slow readers cost bounded memory."""

from __future__ import annotations

from collections import Counter

import pytest

from qmq.broker import answers, serving
from qmq.broker.answers import OWED_BYTES_MAX
from qmq.broker.serving import PASS_BYTES, ServiceQueue
from qmq.errors import ErrorCode
from tests.unit.broker.selecting import Sent, produce
from tests.unit.broker.world import Client, Group, a_group


def consumers(group: Group, count: int, *, subject: str = "s", name: str = "g") -> list[Client]:
    """Return consumers of one group, each subscribed on its own connection."""
    return [group.subscribed(f"{name}-{number}", subject=subject, group=name) for number in range(count)]


def with_consumer(**settings) -> tuple[Group, Client, Client]:
    """Return a group, a producer and a consumer."""
    group, producer = a_group(**settings)
    return group, producer, group.subscribed("c")


def waits(consumer: Client, **pull) -> int:
    return consumer.pull(timeout_ms=60_000, **pull)


@pytest.fixture
def looks(monkeypatch):
    """Count the look-ups per group."""
    counts, choose = Counter(), serving.choose

    def counting(log, subscription, *rest, **more):
        counts[subscription.group] += 1
        return choose(log, subscription, *rest, **more)

    monkeypatch.setattr(serving, "choose", counting)
    return counts


# The queue of one pass.


def test_next_pass_continues_behind_the_last():
    queue = ServiceQueue()
    for name in "abc":
        queue.add(("s", name))
    served = []
    for _ in range(2):
        queue.begin()
        while (entry := queue.next()) is not None:
            served.append(entry[1])
            queue.spend(PASS_BYTES // 2)
            queue.add(entry)
    assert served == ["a", "b", "c", "a"] and not queue.is_empty


def test_spent_pass_is_over_and_the_next_one_is_whole():
    queue = ServiceQueue()
    for name in "aba":
        queue.add(("s", name))
    before = queue.looks_left, queue.copies_left
    queue.spend(PASS_BYTES - 1)
    assert queue.has_time and queue.next() == ("s", "a")
    queue.spend(1)
    queue.looks_left = queue.copies_left = 0
    assert not queue.has_time and queue.next() is None and not queue.is_empty
    queue.begin()
    assert (queue.looks_left, queue.copies_left) == before and queue.has_time
    assert queue.next() == ("s", "b") and queue.is_empty and queue.next() is None


def test_unserved_pulls_go_to_the_next_pass(looks, monkeypatch):
    group, _ = a_group()
    for name in "abc":
        waits(consumers(group, 1, name=name)[0])
    monkeypatch.setattr(serving, "PASS_BYTES", serving.TRY_BYTES)
    looks.clear()
    group.a.master.go_on()
    group.a.host.turn()
    assert looks == {"a": 1}
    group.settle()
    assert looks == {"a": 1, "b": 1, "c": 1}


def test_delivery_costs_its_bytes_and_overhead(monkeypatch):
    group, producer, consumer = with_consumer()
    for _ in range(3):
        waits(consumer, most=1)
    consumer.link.writable = False
    producer.store("m0", "m1", "m2")
    consumer.link.writable = True
    monkeypatch.setattr(serving, "PASS_BYTES", serving.TRY_BYTES + answers.DELIVERY_BYTES + 1)
    group.a.node.writable_again(consumer.link)
    for position in (1, 2, 3):
        group.a.host.turn()
        assert group.progress.position == position


# Look-ups.


def test_one_look_up_serves_a_group_of_200_consumers(looks):
    group, producer = a_group()
    for consumer in [*consumers(group, 200, name="many"), *consumers(group, 2, name="few")]:
        waits(consumer)
    looks.clear()
    producer.store("m")
    assert looks == {"many": 1, "few": 1}


def test_message_with_an_order_key_is_looked_up_once(looks):
    group, producer = a_group()
    produce(producer, [Sent(key="k")], first=0)
    group.settle()
    some = consumers(group, 2)
    some[0].take()
    waiting = [waits(consumer) for consumer in some]
    looks.clear()
    produce(producer, [Sent(key="l")], first=1)
    group.settle()
    assert looks == {"g": 1}
    assert [consumer.answered(pull) for consumer, pull in zip(some, waiting, strict=True)] == [True, False]


def test_acks_and_answers_look_nothing_up(looks):
    """As long as the consumer may have more unacked messages."""
    group, producer, consumer = with_consumer()
    producer.store("m0")
    consumer.take()
    waiting = [waits(consumer) for _ in range(2)]
    looks.clear()
    consumer.done(consumer.ack(consumer.pulled(2)[0][0], consumer.pulled(2)[0][0] + 1))
    assert not looks
    producer.store("m1")
    assert looks == {"g": 1} and list(map(consumer.answered, waiting)) == [True, False]


def test_long_backlog_costs_an_idle_subject_one_turn(looks):
    group, producer = a_group(message_bytes_max=1 << 20, tail_bytes=64 << 20)
    (greedy,) = consumers(group, 1, subject="backlog", name="greedy")
    (modest,) = consumers(group, 1, subject="idle", name="modest")
    for number in range(100):
        producer.store(f"m{number}", subject="backlog", size=30_000)
    waiting = waits(modest)
    looks.clear()
    many = [waits(greedy, most=5, bytes_max=8 << 20) for _ in range(64)]
    assert looks["greedy"] < 40
    producer.produce("lone", subject="idle")
    group.a.host.turn()
    assert looks["modest"] == 1
    group.settle()
    assert modest.answered(waiting) and sum(map(greedy.answered, many)) == 20


# Order.


@pytest.mark.parametrize("messages", ["new", "requeued"])
def test_consumers_of_a_group_share_a_batch(messages):
    group, producer = a_group()
    former, *others = consumers(group, 3)
    first = waits(former) if messages == "requeued" else 0
    waiting = [waits(consumer, most=1) for consumer in others]
    producer.store("m0", "m1")
    if messages == "requeued":
        number = former.pulled(first)[0][0]
        former.done(former.nack(number, number + 2))
    assert [consumer.ids(pull) for consumer, pull in zip(others, waiting, strict=True)] == [["m0"], ["m1"]]


def test_pull_leaves_with_the_messages_it_waits_for():
    """One confirmation of the slave covers both."""
    group, producer, consumer = with_consumer()
    waits(consumer)
    producer.produce("m0")
    group.a.host.turn()
    while group.to_slave():
        pass
    assert group.b.log.state.groups["s", "g"].position == 1


# Deadlines.


def test_overdue_pull_gets_no_message():
    group, producer, consumer = with_consumer()
    overdue, patient = consumer.pull(timeout_ms=50), waits(consumer)
    group.a.host.clock_ms += 50
    producer.store("m0")
    assert consumer.code(overdue) == ErrorCode.NO_MESSAGE and consumer.ids(patient) == ["m0"]
    overdue = consumer.pull(timeout_ms=50)
    group.a.host.clock_ms += 50
    producer.store("m1")
    assert consumer.code(overdue) == ErrorCode.NO_MESSAGE and group.progress.position == 1


# Connections that read slowly.


@pytest.mark.parametrize(("owed_bytes", "is_served"), [(OWED_BYTES_MAX - 1, True), (OWED_BYTES_MAX, False)])
def test_connection_at_its_owed_bytes_waits(owed_bytes, is_served):
    group, producer, consumer = with_consumer()
    waiting = waits(consumer)
    consumer.link.owed_bytes = owed_bytes
    producer.store("m0")
    assert consumer.answered(waiting) is is_served


def test_answer_that_leaves_makes_room_for_the_next():
    group, producer, consumer = with_consumer()
    producer.store("m0")
    first = consumer.pull()
    consumer.link.owed_bytes = OWED_BYTES_MAX
    second = waits(consumer)
    producer.produce("m1")
    group.a.host.turn()
    assert group.progress.position == 1
    group.settle()
    assert [consumer.ids(pull) for pull in (first, second)] == [["m0"], ["m1"]]


def test_writable_connection_is_served_again():
    group, producer, consumer = with_consumer()
    waiting = [waits(consumer, most=1) for _ in range(2)]
    consumer.link.writable = False
    producer.store("m0", "m1")
    assert not any(map(consumer.answered, waiting)) and not group.progress.consumers
    consumer.link.writable = True
    group.a.node.writable_again(consumer.link)
    group.settle()
    assert [consumer.ids(pull) for pull in waiting] == [["m0"], ["m1"]]
