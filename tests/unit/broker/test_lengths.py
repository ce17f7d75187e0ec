"""Core. How many bytes wait: as the obvious sum over all frames says, whatever order things happen in."""

from __future__ import annotations

import random

import pytest

from qmq.broker import lengths
from qmq.broker.lengths import Lengths
from qmq.errors import ErrorCode
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from tests.unit.broker.test_limits import KEY, pulled, started
from tests.unit.broker.world import Client, Group

LIMIT = OperatorLimits("s", OF_SUBJECT, bytes_max=5_000)


def obvious(group: Group) -> int:
    log, state = group.a.log, group.a.log.state.groups[KEY]
    refs, size = log.frames("s", state.position, 1_000_000), 0
    for ref in refs:
        size += ref.length - ref.length * max(state.position - ref.begin, 0) // (ref.end - ref.begin)
    if state.requeued.first is not None:
        [ref] = log.frames("s", state.requeued.first, 1)
        size += ref.length * state.requeued.messages // (ref.end - ref.begin)
    return size


@pytest.mark.parametrize("seed", range(20))
def test_the_count_is_that_of_all_frames_from_the_groups_position_on(seed, monkeypatch):
    monkeypatch.setattr(lengths, "FRAMES_AT_ONCE", 2)
    rng = random.Random(seed)
    group, client = started()
    counts, producer = Lengths(group.a.log), Client(group.a)
    for step in range(60):
        match rng.choice(["produce", "produce", "pull", "nack", "look"]):
            case "produce":
                producer.produce(*(f"m{step}-{n}" for n in range(rng.randint(1, 4))), size=rng.randint(1, 900))
            case "pull":
                pulled(group, client, most=rng.randint(1, 9))
            case "nack":
                consumer = group.a.log.state.groups[KEY].consumers.get("c")
                if consumer is not None and consumer.unacked:
                    begin = consumer.unacked[0].pull
                    client.nack(begin, begin + 1, delay_ms=3_600_000)
            case "look":
                assert counts.waiting(KEY, group.a.log.state.groups[KEY]) == obvious(group), f"seed {seed}"
        group.settle()
    assert counts.waiting(KEY, group.a.log.state.groups[KEY]) == obvious(group), f"seed {seed}"


def test_a_long_backlog_is_counted_in_pieces_and_never_too_high(monkeypatch):
    monkeypatch.setattr(lengths, "FRAMES_PER_TICK", 10)
    group, client = started()
    producer = Client(group.a)
    for n in range(35):
        producer.produce(f"m{n}", size=100)
        group.settle()
    counts, seen = Lengths(group.a.log), []
    for _ in range(5):
        counts.new_tick()
        seen.append(counts.waiting(KEY, group.a.log.state.groups[KEY]))
    assert seen == sorted(seen) and len(set(seen)) == 4 and seen[-1] == obvious(group)
    assert len(pulled(group, client, most=30)) == 30
    counts.new_tick()
    assert counts.waiting(KEY, group.a.log.state.groups[KEY]) <= obvious(group)
    for _ in range(3):
        counts.new_tick()
        counted = counts.waiting(KEY, group.a.log.state.groups[KEY])
    assert counted == obvious(group)


def test_producers_are_refused_while_as_many_bytes_wait_for_a_group_as_may():
    group, client = started(LIMIT)
    producer = Client(group.a)
    for n in range(7):
        stored = producer.produce(f"m{n}", size=600)
        group.settle()
        assert producer.receipt(stored).stored == 1, "6 frames of 744 bytes are less than 5,000"
    refused, other = producer.produce("m10"), producer.produce("n0", subject="t")
    group.settle()
    assert producer.receipt(other).stored == 1 and producer.code(refused) == ErrorCode.SUBJECT_FULL
    assert "bytes of s wait for g at g1, and 5,000 may (SetLimits --bytesMax)" in producer.text(refused)
    assert pulled(group, client, most=2) == ["m0", "m1"]
    again = producer.produce("m11")
    group.settle()
    assert producer.receipt(again).stored == 1, "what a consumer has does not wait"


def test_of_too_many_bytes_the_oldest_messages_are_given_up_and_counted():
    group, client = started(LIMIT._replace(drops_oldest=True))
    producer = Client(group.a)
    for n in range(20):
        stored = producer.produce(f"m{n}", size=600)
        group.settle()
        assert producer.receipt(stored).stored == 1
    group.a.wait(1_000)
    group.settle()
    assert obvious(group) <= 5_000
    left = pulled(group, client, most=100)
    assert left == [f"m{n}" for n in range(20 - len(left), 20)] and len(left) == 6
    assert group.a.master.overflowed == {KEY: 14} and not group.a.master.expired
    assert group.a.log.state.groups[KEY] == group.b.log.state.groups[KEY]


def test_what_retention_took_does_not_count():
    group, _ = started()
    producer, log = Client(group.a), group.a.log
    counts = Lengths(log)
    while len(log.bases) < 3:
        producer.produce("m", size=900)
        group.settle()
    before = counts.waiting(KEY, log.state.groups[KEY])
    assert before == obvious(group)
    log.state.kept.start = log.bases[1]
    assert counts.waiting(KEY, log.state.groups[KEY]) == obvious(group) < before
