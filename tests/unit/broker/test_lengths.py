"""Core. Waiting bytes equal the plain sum over all frames, in any order of events."""

from __future__ import annotations

import random

import pytest

from qmq.broker import subject_limits
from qmq.broker.subject_limits import Lengths
from qmq.errors import ErrorCode
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.types import Role
from tests.unit.broker.test_limits import KEY, started
from tests.unit.broker.world import Client, Group

LIMIT = OperatorLimits("s", OF_SUBJECT, bytes_max=5_000)


def obvious(group: Group) -> int:
    log, state = group.a.log, group.progress
    refs, size = log.frames("s", state.position, 1_000_000), 0
    for ref in refs:
        size += ref.length - ref.length * max(state.position - ref.begin, 0) // (ref.end - ref.begin)
    for one in state.requeued:
        for ref in log.frames("s", one.first, 1_000_000):
            part = min(one.end, ref.end) - max(one.first, ref.begin)
            size += ref.length * max(part, 0) // (ref.end - ref.begin)
    return size


def returned(group: Group, client: Client, first: int, end: int) -> None:
    """Requeue these of the consumer's messages, for later."""
    begin = group.progress.consumers["c"].next_pull - group.progress.position
    client.done(client.nack(begin + first, begin + end, delay_ms=3_600_000))


@pytest.mark.parametrize("seed", range(20))
def test_the_count_is_that_of_all_frames_from_the_groups_position_on(seed, monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_LOOK_UP", 2)
    rng = random.Random(seed)
    group, client = started()
    counts, producer = Lengths(group.a.log), group.client()
    for step in range(60):
        match rng.choice(["produce", "produce", "pull", "nack", "look"]):
            case "produce":
                producer.produce(*(f"m{step}-{n}" for n in range(rng.randint(1, 4))), size=rng.randint(1, 900))
            case "pull":
                client.take(most=rng.randint(1, 9))
            case "nack":
                consumer = group.progress.consumers.get("c")
                if consumer is not None and consumer.unacked:
                    begin = consumer.unacked[0].pull
                    client.nack(begin, begin + 1, delay_ms=3_600_000)
            case "look":
                assert counts.waiting(KEY, group.progress) == obvious(group), f"seed {seed}"
        group.settle()
    assert counts.waiting(KEY, group.progress) == obvious(group), f"seed {seed}"


def test_uncounted_frames_count_zero():
    group, client = started()
    producer = group.client()
    for number in range(12):
        producer.store(f"m{number}", size=100)
    counts, state = Lengths(group.a.log), group.a.log.state
    assert counts.waiting(KEY, state.groups[KEY]) == obvious(group) and not counts.has_unfinished
    counts._left = 0  # of this tick
    state.groups[KEY].position = 9
    assert counts.waiting(KEY, state.groups[KEY]) == 0 and counts.has_unfinished
    counts.new_tick()
    assert counts.waiting(KEY, state.groups[KEY]) == obvious(group) > 0 and not counts.has_unfinished


def test_a_long_backlog_is_counted_in_pieces_and_never_too_high(monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_TICK", 10)
    group, client = started()
    producer = group.client()
    for n in range(35):
        producer.store(f"m{n}", size=100)
    counts, seen = Lengths(group.a.log), []
    for _ in range(5):
        counts.new_tick()
        seen.append(counts.waiting(KEY, group.progress))
    assert seen == sorted(seen) and len(set(seen)) == 4 and seen[-1] == obvious(group)
    assert len(client.take(most=30)) == 30
    counts.new_tick()
    assert counts.waiting(KEY, group.progress) <= obvious(group)
    for _ in range(3):
        counts.new_tick()
        counted = counts.waiting(KEY, group.progress)
    assert counted == obvious(group)


def test_producers_are_refused_while_as_many_bytes_wait_for_a_group_as_may():
    group, client = started(LIMIT)
    producer = group.client()
    for n in range(7):
        stored = producer.produce(f"m{n}", size=600)
        group.settle()
        assert producer.receipt(stored).stored == 1, "6 frames of 744 bytes are less than 5,000"
    refused, other = producer.produce("m10"), producer.produce("n0", subject="t")
    group.settle()
    assert producer.receipt(other).stored == 1 and producer.code(refused) == ErrorCode.SUBJECT_FULL
    assert "bytes of s wait for g at g1, and 5,000 may (SetLimits --bytesMax)" in producer.text(refused)
    assert client.take(most=2) == ["m0", "m1"]
    assert producer.store("m11").stored == 1, "what a consumer has does not wait"


def test_of_too_many_bytes_the_oldest_messages_are_given_up_and_counted():
    group, client = started(LIMIT._replace(drops_oldest=True))
    producer = group.client()
    for n in range(20):
        stored = producer.produce(f"m{n}", size=600)
        group.settle()
        assert producer.receipt(stored).stored == 1
    group.wait(1_000)
    assert obvious(group) <= 5_000
    left = client.take(most=100)
    assert left == [f"m{n}" for n in range(20 - len(left), 20)] and len(left) == 6
    assert group.a.master.overflowed == {KEY: 14} and not group.a.master.expired
    assert group.progress == group.b.log.state.groups[KEY]


def test_deleted_frames_do_not_count():
    group, _ = started()
    producer, log = group.client(), group.a.log
    counts = Lengths(log)
    while len(log.bases) < 3:
        producer.store("m", size=900)
    before = counts.waiting(KEY, log.state.groups[KEY])
    assert before == obvious(group)
    log.state.kept.start = log.bases[1]
    assert counts.waiting(KEY, log.state.groups[KEY]) == obvious(group) < before


def produced(group: Group, *sizes: int) -> None:
    """Messages of these sizes, each in its own frame."""
    producer = group.client()
    for n, size in enumerate(sizes):
        producer.store(f"m{n}", size=size)


def test_requeued_messages_count_as_their_own_frames_do_and_not_as_the_first_of_them():
    group, client = started(LIMIT._replace(drops_oldest=True))
    produced(group, 900, *[10] * 30)
    assert len(client.take(most=100)) == 31
    returned(group, client, 0, 31)
    counts = Lengths(group.a.log)
    assert counts.waiting(KEY, group.progress) == obvious(group) < 10_000
    whole = LIMIT._replace(bytes_max=obvious(group), drops_oldest=True)
    group.a.assign(Role.MASTER, limits=(whole,))
    group.wait(1_000)
    assert not group.a.master.overflowed and group.progress.requeued.messages == 31


def test_requeued_messages_of_many_ranges_are_counted_in_part_and_never_too_high(monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_SUMMED", 3)
    group, client = started()
    produced(group, *[100] * 20)
    assert len(client.take(most=100)) == 20
    for n in range(0, 20, 2):
        returned(group, client, n, n + 1)
    counts = Lengths(group.a.log)
    refs = group.a.log.frames("s", 0, 20)
    assert counts.waiting(KEY, group.progress) == sum(refs[n].length for n in (0, 2, 4))


def test_requeued_messages_that_retention_took_do_not_count_and_hide_none(monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_SUMMED", 2)
    group, client = started()
    log, n = group.a.log, 0
    while len(log.bases) < 3:
        produced(group, 900)
        n += 1
    state = log.state.groups[KEY]
    while state.position < n:
        client.take(most=100)
    for at in range(0, n - 1, 2):
        returned(group, client, at, at + 1)
    returned(group, client, n - 1, n)
    counts = Lengths(log)
    assert counts.waiting(KEY, state) > 0
    log.state.kept.start = log.bases[1]
    assert 0 < counts.waiting(KEY, state) <= obvious(group)
    log.state.kept.start = log.end
    assert counts.waiting(KEY, state) == obvious(group) == 0


def test_deleted_requeued_messages_refuse_no_producer():
    group, client = started(LIMIT)
    produced(group, *[600] * 7)
    assert len(client.take(most=100)) == 7
    returned(group, client, 0, 7)
    producer = group.client()
    assert producer.outcome(producer.produce("m")) == ErrorCode.SUBJECT_FULL
    group.a.log.state.kept.start = group.a.log.frames("s", 6, 1)[0].offset
    stored = producer.produce("m")
    group.settle()
    assert producer.receipt(stored).stored == 1


def test_counts_go_on_in_each_tick_though_a_subject_is_looked_at_once_a_second(monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_TICK", 10)
    group, _ = started()
    produced(group, *[100] * 95)
    group.a.assign(Role.MASTER, limits=(LIMIT._replace(drops_oldest=True),))
    group.wait(100, times=20)
    assert obvious(group) <= 5_000, "95 frames, 10 in a tick, were counted within the second"


def test_counts_of_several_groups_go_on_by_turns(monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_TICK", 10)
    group, _ = started()
    group.subscribed("o", group="other").lost()
    produced(group, *[100] * 45)
    counts, groups = Lengths(group.a.log), group.a.log.state.groups
    assert counts.waiting(KEY, groups[KEY]) > 0 == counts.waiting(("s", "other"), groups["s", "other"])
    for _ in range(2):
        counts.new_tick()
    assert counts.waiting(("s", "other"), groups["s", "other"]) > 0
    for _ in range(6):
        assert counts.has_unfinished
        counts.new_tick()
    assert not counts.has_unfinished
    assert counts.waiting(KEY, groups[KEY]) == counts.waiting(("s", "other"), groups["s", "other"]) == obvious(group)


def test_no_more_of_the_oldest_are_given_up_than_have_the_bytes_that_are_too_many():
    group, _ = started()
    producer = group.client()
    produced(group, 900, 900)
    producer.store(*(f"n{n}" for n in range(50)), size=10)
    refs = group.a.log.frames("s", 0, 10)
    limit = LIMIT._replace(bytes_max=obvious(group) - refs[0].length - 1, drops_oldest=True)
    group.a.assign(Role.MASTER, limits=(limit,))
    group.wait(1_000)
    assert group.a.master.overflowed == {KEY: 2}


def test_oldest_requeued_messages_are_summed():
    group, client = started()
    log, n = group.a.log, 0
    while len(log.bases) < 2:
        produced(group, 900)
        n += 1
    produced(group, 900, 900, 900)
    while log.state.groups[KEY].position < n + 1:
        client.take(most=1)
    returned(group, client, 0, 1)
    returned(group, client, n, n + 1)
    log.state.kept.start = log.bases[1]
    limit = LIMIT._replace(bytes_max=obvious(group) - 1, drops_oldest=True)
    group.a.assign(Role.MASTER, limits=(limit,))
    group.wait(1_000)
    assert group.a.master.overflowed == {KEY: 2} and not log.state.groups[KEY].requeued
    assert log.state.groups[KEY].position == n + 1


def test_very_many_are_given_up_in_bounded_pieces(monkeypatch):
    monkeypatch.setattr(subject_limits, "SCANNED_PER_TICK", 10)
    monkeypatch.setattr(subject_limits, "SCANNED_AT_ONCE", 5)
    group, _ = started()
    produced(group, *[100] * 60)
    group.a.assign(Role.MASTER, limits=(LIMIT._replace(bytes_max=1_000, drops_oldest=True),))
    group.wait(1_000)
    assert 0 < group.a.master.overflowed[KEY] <= 10
    group.wait(1_000, times=10)
    assert obvious(group) <= 1_000


def test_a_tick_is_spent_when_less_than_half_of_its_walk_is_left():
    counts = Lengths(started()[0].a.log)
    counts._scan_left = subject_limits.SCANNED_PER_TICK // 2
    assert not counts.is_spent
    counts._scan_left -= 1
    assert counts.is_spent


def test_counts_go_on_by_single_frames_and_end_with_their_group(monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_TICK", 1)
    group, _ = started()
    produced(group, 100, 100, 100, 100)
    counts, state = Lengths(group.a.log), group.a.log.state
    seen = []
    for _ in range(4):
        seen.append(counts.waiting(KEY, state.groups[KEY]))
        counts.new_tick()
    assert seen == [obvious(group) * frames // 4 for frames in (1, 2, 3, 4)] and not counts.has_unfinished
    state.groups[KEY].position = 3
    for left in (2, 1, 0):
        assert (counts.waiting(KEY, state.groups[KEY]) == obvious(group)) is not bool(left)
        counts.new_tick()
    produced(group, 100, 100)
    counts.waiting(KEY, state.groups[KEY])
    assert counts.has_unfinished
    del state.groups[KEY]
    counts.new_tick()
    assert not counts.has_unfinished and not counts._counted


def test_counted_frames_are_not_counted_again(monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_TICK", 10)
    group, _ = started()
    produced(group, *[100] * 15)
    counts, state = Lengths(group.a.log), group.progress
    counts.waiting(KEY, state)
    counts.new_tick()
    state.position = 1
    counts.new_tick()
    assert counts.waiting(KEY, state) == obvious(group) and not counts.has_unfinished


@pytest.mark.parametrize("positions", [(3, 0), (0, 5), (5, 5, 2), (2, 6, 1)])
def test_a_group_that_is_moved_is_counted_from_where_it_stands(positions):
    group, _ = started()
    produced(group, 10, 20, 30, 40, 50, 60)
    counts, state = Lengths(group.a.log), group.progress
    for position in positions:
        state.position = position
        assert counts.waiting(KEY, state) == obvious(group)


def test_requeued_messages_are_summed_once_until_others_wait_or_retention_took_some():
    group, client = started()
    produced(group, 10, 200, 400)
    client.take(most=100)
    returned(group, client, 0, 1)
    counts, state = Lengths(group.a.log), group.progress
    assert counts.waiting(KEY, state) == obvious(group)
    left = counts._scan_left
    assert counts.waiting(KEY, state) == obvious(group) and counts._scan_left == left
    changes, state.requeued = state.requeued.changes, Requeued()
    state.requeued.add(RequeuedRange(2, 1, 1, 0))
    state.requeued.changes = changes
    assert counts.waiting(KEY, state) == obvious(group) and counts._scan_left < left, "those of another Requeued"
    counts._summed.clear()
    counts._scan_left = 0
    assert counts.waiting(KEY, state) == 0, "there is no time for that in this tick"
    counts.new_tick()
    assert counts.waiting(KEY, state) == obvious(group)


def test_deleted_messages_are_given_up_first():
    group, _ = started()
    produced(group, 100, 100, 100)
    counts, refs = Lengths(group.a.log), group.a.log.frames("s", 0, 3)
    assert counts.covering("s", [(0, 3)], refs[0].length) == 1
    assert counts.covering("s", [(0, 3)], refs[0].length + 1) == 2
    group.a.log.state.kept.start = refs[1].offset
    assert counts.covering("s", [(0, 3)], 1) == 2
    group.a.log.state.kept.start = group.a.log.end
    assert counts.covering("s", [(0, 3)], 1) == 3
