"""Core. Pulls under load: a pass bounds the work for one group, and slow readers cost bounded memory."""

from __future__ import annotations

from collections import Counter

import pytest

from qmq.broker import service_queue, serving
from qmq.broker.service_queue import OWED_BYTES_MAX, PASS_BYTES, ServiceQueue
from qmq.errors import ErrorCode
from tests.unit.broker.selecting import Sent, produce
from tests.unit.broker.world import a_group


def consumers(group, count, *, subject="s", name="g"):
    """Consumers of one group, each subscribed on its own connection."""
    return [group.subscribed(f"{name}-{number}", subject=subject, group=name) for number in range(count)]


@pytest.fixture
def looks(monkeypatch):
    """Count the look-ups per group."""
    counts, choose = Counter(), serving.choose

    def counting(log, subscription, *rest, **more):
        counts[subscription.group] += 1
        return choose(log, subscription, *rest, **more)

    monkeypatch.setattr(serving, "choose", counting)
    return counts


def test_turn_ends_when_it_has_done_enough_and_the_next_one_goes_on_behind_it():
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
    assert served == ["a", "b", "c", "a"] and not queue.is_over


def test_turn_is_over_when_it_has_done_just_enough_and_the_next_one_may_do_as_much():
    queue = ServiceQueue()
    for name in "aba":
        queue.add(("s", name))
    before = queue.looks_left, queue.copies_left
    queue.spend(PASS_BYTES - 1)
    assert queue.has_time and queue.next() == ("s", "a")
    queue.spend(1)
    queue.looks_left = queue.copies_left = 0
    assert not queue.has_time and queue.next() is None and not queue.is_over
    queue.begin()
    assert (queue.looks_left, queue.copies_left) == before and queue.has_time
    assert queue.next() == ("s", "b") and queue.is_over and queue.next() is None


def test_message_for_a_group_of_200_consumers_is_looked_for_once(looks):
    group, client = a_group()
    for consumer in [*consumers(group, 200, name="many"), *consumers(group, 2, name="few")]:
        consumer.pull(timeout_ms=60_000)
    looks.clear()
    client.store("m")
    assert looks == {"many": 1, "few": 1}


def test_consumers_of_a_group_are_served_in_turn():
    group, client = a_group()
    some = consumers(group, 3)
    order = []
    for round in range(2):
        pulls = [(consumer, consumer.pull(timeout_ms=60_000)) for consumer in some]
        for number in range(3):
            client.store(f"m{round}{number}")
            order += [
                some.index(one)
                for one, opaque in pulls
                if one.answered(opaque) and one.pulled(opaque)[0][2] == f"m{round}{number}"
            ]
    assert order == [0, 1, 2, 0, 1, 2]


def test_consumer_with_a_backlog_and_many_pulls_costs_an_idle_subject_one_turn(looks):
    group, client = a_group(message_bytes_max=1 << 20, tail_bytes=64 << 20)
    (greedy,) = consumers(group, 1, subject="backlog", name="greedy")
    (modest,) = consumers(group, 1, subject="idle", name="modest")
    for number in range(100):
        client.store(f"m{number}", subject="backlog", size=30_000)
    waiting = modest.pull(timeout_ms=60_000)
    looks.clear()
    many = [greedy.pull(most=5, bytes_max=8 << 20, timeout_ms=60_000) for _ in range(64)]
    assert looks["greedy"] < 40
    client.produce("lone", subject="idle")
    group.a.host.turn()
    assert looks["modest"] == 1
    group.settle()
    assert modest.answered(waiting) and sum(map(greedy.answered, many)) == 20


def test_overdue_pull_gets_no_message():
    group, client = a_group()
    (late,) = consumers(group, 1)
    overdue, patient = late.pull(timeout_ms=50), late.pull(timeout_ms=60_000)
    group.a.host.clock_ms += 50
    client.store("m0")
    assert late.code(overdue) == ErrorCode.NO_MESSAGE
    assert late.ids(patient) == ["m0"]
    overdue = late.pull(timeout_ms=50)
    group.a.host.clock_ms += 50
    client.store("m1")
    assert late.code(overdue) == ErrorCode.NO_MESSAGE and group.progress.position == 1


@pytest.mark.parametrize(("owed_bytes", "is_served"), [(OWED_BYTES_MAX - 1, True), (OWED_BYTES_MAX, False)])
def test_connection_that_is_owed_as_much_as_it_may_waits(owed_bytes, is_served):
    group, client = a_group()
    (one,) = consumers(group, 1)
    waiting = one.pull(timeout_ms=60_000)
    one.link.owed_bytes = owed_bytes
    client.store("m0")
    assert one.answered(waiting) is is_served


def test_pulls_time_out_in_order_of_deadline():
    group, _ = a_group()
    one, other = consumers(group, 2)
    pulls = [(one, 400_000), (one, 300), (other, 200), (one, 100), (other, 40_000), (other, 100)]
    opaques = [(consumer, consumer.pull(timeout_ms=timeout_ms), timeout_ms) for consumer, timeout_ms in pulls]
    waited = 0
    for until in (99, 100, 199, 200, 299, 300, 29_000, 39_999, 40_000, 399_999, 400_000):
        for step in range(waited + 1_000, until, 1_000):
            wait(group, step - waited, one, other)
            waited = step
        wait(group, until - waited, one, other)
        waited = until
        for consumer, opaque, timeout_ms in opaques:
            assert consumer.answered(opaque) == (timeout_ms <= until), (timeout_ms, until)
    again = one.pull(timeout_ms=50)
    wait(group, 50, one)
    assert one.answered(again)


def wait(group, ms, *alive):
    group.a.host.clock_ms += ms
    for consumer in alive:
        consumer.heartbeat()
    group.a.node.tick()
    group.settle()


@pytest.mark.slow
def test_connection_that_reads_nothing_is_owed_so_much_and_no_more():
    group, client = a_group(message_bytes_max=1 << 20)
    (stalled,) = consumers(group, 1)
    for number in range(700):
        client.store(f"m{number}", size=30_000)
    for _ in range(60):
        stalled.pull(most=20, timeout_ms=60_000)
        group.a.host.turn()
    link, reads = stalled.link, len(group.a.host.reads)
    assert OWED_BYTES_MAX <= link.owed_bytes < OWED_BYTES_MAX + (1 << 20) and not link.answers.keys() - {1}
    group.settle()
    assert link.owed_bytes == 0 and reads and len(link.answers) > 30


@pytest.mark.parametrize("comes", ["new", "back"])
def test_consumers_of_a_group_share_a_batch(comes):
    group, client = a_group()
    former, *others = consumers(group, 3)
    first = former.pull(timeout_ms=60_000) if comes == "back" else 0
    waiting = [one.pull(most=1, timeout_ms=60_000) for one in others]
    client.store("m0", "m1")
    if comes == "back":
        number = former.pulled(first)[0][0]
        former.done(former.nack(number, number + 2))
    assert [one.pulled(opaque)[0][2] for one, opaque in zip(others, waiting, strict=True)] == ["m0", "m1"]


def test_an_ack_looks_for_nothing_while_its_consumer_may_have_more(looks):
    group, client = a_group()
    client.produce("m0")
    (one,) = consumers(group, 1)
    one.take()
    number = one.first
    one.pull(timeout_ms=60_000)
    looks.clear()
    one.done(one.ack(number, number + 1))
    assert not looks


def test_unserved_pulls_go_to_the_next_pass(looks, monkeypatch):
    group, _ = a_group()
    for name in "abc":
        consumers(group, 1, name=name)[0].pull(timeout_ms=60_000)
    monkeypatch.setattr(service_queue, "PASS_BYTES", service_queue.TRY_BYTES)
    looks.clear()
    group.a.master.go_on()
    group.a.host.turn()
    assert looks == {"a": 1}
    group.settle()
    assert looks == {"a": 1, "b": 1, "c": 1}


def test_a_message_with_an_order_key_is_looked_for_once_too(looks):
    group, client = a_group()
    produce(client, [Sent(key="k")], first=0)
    group.settle()
    some = consumers(group, 2)
    some[0].pull()
    group.settle()
    waiting = [one.pull(timeout_ms=60_000) for one in some]
    looks.clear()
    produce(client, [Sent(key="l")], first=1)
    group.settle()
    assert looks == {"g": 1} and [one.answered(pull) for one, pull in zip(some, waiting, strict=True)] == [True, False]


def test_connection_that_takes_nothing_more_is_served_when_it_does():
    group, client = a_group()
    (one,) = consumers(group, 1)
    waiting = [one.pull(most=1, timeout_ms=60_000) for _ in range(2)]
    one.link.writable = False
    client.store("m0", "m1")
    assert not any(map(one.answered, waiting)) and not group.progress.consumers
    one.link.writable = True
    group.a.node.writable_again(one.link)
    group.settle()
    assert [one.pulled(opaque)[0][2] for opaque in waiting] == ["m0", "m1"]


def test_connection_that_was_owed_too_much_is_served_when_an_answer_has_left():
    group, client = a_group()
    (one,) = consumers(group, 1)
    client.store("m0")
    first = one.pull()
    one.link.owed_bytes = OWED_BYTES_MAX
    second = one.pull(timeout_ms=60_000)
    client.produce("m1")
    group.a.host.turn()
    assert group.progress.position == 1
    group.settle()
    assert [one.pulled(opaque)[0][2] for opaque in (first, second)] == ["m0", "m1"]


def test_an_answer_that_leaves_looks_for_nothing(looks):
    group, client = a_group()
    (one,) = consumers(group, 1)
    waiting = [one.pull(timeout_ms=60_000) for _ in range(2)]
    looks.clear()
    client.store("m0")
    assert looks == {"g": 1} and list(map(one.answered, waiting)) == [True, False]


def test_delivery_costs_its_bytes_and_overhead(monkeypatch):
    group, client = a_group()
    (one,) = consumers(group, 1)
    for _ in range(3):
        one.pull(most=1, timeout_ms=60_000)
    one.link.writable = False
    client.store("m0", "m1", "m2")
    one.link.writable = True
    monkeypatch.setattr(service_queue, "PASS_BYTES", service_queue.TRY_BYTES + service_queue.DELIVERY_BYTES + 1)
    group.a.node.writable_again(one.link)
    for position in (1, 2, 3):
        group.a.host.turn()
        assert group.progress.position == position


def test_messages_leave_for_the_slave_together_with_the_pull_that_waits_for_them():
    """One confirmation covers both."""
    group, client = a_group()
    (one,) = consumers(group, 1)
    one.pull(timeout_ms=60_000)
    client.produce("m0")
    group.a.host.turn()
    while group.to_slave():
        pass
    assert group.b.log.state.groups["s", "g"].position == 1
