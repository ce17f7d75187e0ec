"""Core. Limits of a subject's length, in messages and bytes: refusals, overflow, and the count of waiting bytes."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest

from qmq.broker import subject_limits
from qmq.broker.subject_limits import Lengths, SubjectLimits, _oldest
from qmq.errors import CorruptFrame, ErrorCode
from qmq.log.fold import State
from qmq.log.group import Group as LogGroup
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.types import Role
from tests.unit.broker.limited import HOUR, KEY, hours_pass, started
from tests.unit.broker.world import Client, Group

TEN = OperatorLimits("s", OF_SUBJECT, messages_max=10)
BYTES = OperatorLimits("s", OF_SUBJECT, bytes_max=5_000)


def produced(group: Group, *sizes: int) -> None:
    """Store messages of these sizes, each in its own frame."""
    client = group.client()
    for number, size in enumerate(sizes):
        client.store(f"m{number}", size=size)


def returned(group: Group, client: Client, first: int, end: int) -> None:
    """Requeue these of the consumer's messages, for later."""
    begin = group.progress.consumers["c"].next_pull - group.progress.position
    client.done(client.nack(begin + first, begin + end, delay_ms=3_600_000))


def limited_to(group: Group, **limits) -> None:
    """Limit the subject, and let the master give up the oldest messages."""
    group.a.assign(Role.MASTER, limits=(OperatorLimits("s", OF_SUBJECT, drops_oldest=True, **limits),))
    group.wait(1_000)


def delete_before(group: Group, sequence: int) -> None:
    group.a.log.state.kept.start = group.a.log.frames("s", sequence, 1)[0].offset


# Refusals.


@pytest.mark.parametrize("limit", [TEN, BYTES], ids=["messages", "bytes"])
def test_full_subject_refuses_producers(limit):
    group, client = started(limit)
    producer, count = group.client(), 10 if limit is TEN else 7
    for number in range(count):  # 6 frames of 744 bytes are less than 5,000
        assert producer.store(f"m{number}", size=600).stored == 1
    refused = producer.produce("more")
    assert producer.code(refused) == ErrorCode.SUBJECT_FULL and producer.store("other", subject="t").stored == 1
    text = "10 messages of s wait for g at g1" if limit is TEN else "bytes of s wait for g at g1, and 5,000 may"
    assert text in producer.text(refused)
    assert f"(SetLimits --{'messagesMax' if limit is TEN else 'bytesMax'})" in producer.text(refused)
    client.take(most=2)
    assert producer.store("again").stored == 1, "unacked messages do not wait"


@pytest.mark.parametrize("limit", ["messages_max", "bytes_max"])
def test_refusal_names_its_limit_and_subject(limit):
    """The refusal left no count, no log line and no finding on the broker."""
    group, _ = started(OperatorLimits("s", OF_SUBJECT, **{limit: 10}))
    producer, refusals = group.client(), []
    producer.link.refuse = lambda request, error: refusals.append((error.limit, error.limited_subject))
    producer.store(*(f"m{number}" for number in range(10)))
    producer.produce("more")
    assert refusals == [({"messages_max": "messagesMax", "bytes_max": "bytesMax"}[limit], "s")]


def test_one_message_fills_a_subject_of_one():
    group, client = started(OperatorLimits("s", OF_SUBJECT, messages_max=1))
    assert client.store("m0").stored == 1
    assert client.outcome(client.produce("m1")) == ErrorCode.SUBJECT_FULL


def test_internal_producers_are_never_refused():
    group, _ = started(TEN)
    delay_server = group.client()
    delay_server.link.sends_on = True
    for batch in range(3):
        assert delay_server.store(*(f"m{batch}-{number}" for number in range(8))).stored == 8


def test_absent_broadcast_refuses_no_producer():
    group, client = started(TEN)
    group.subscribed("b", group="b", broadcast=True).lost()
    for batch in range(3):
        assert group.client().store(*(f"m{batch}-{number}" for number in range(8))).stored == 8
        assert len(client.take()) == 8


@pytest.mark.parametrize("ranges", [0, 1, 10], ids=["new", "requeued", "requeued one by one"])
def test_deleted_messages_do_not_wait(ranges, monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_AT_ONCE", 1)
    group, client = started(TEN)
    produced(group, *[900] * 10)
    if ranges:
        assert len(client.take()) == 10
        begin = client.first
        for number in range(ranges):
            end = begin + 10 // ranges
            client.done(client.nack(begin, end, delay_ms=60_000 + number))
            begin = end
        assert len(group.progress.requeued) == ranges
    group.a.drop_segments(left=2)
    first = group.a.log.frames("s", 0, 1)[0].begin
    assert first > 1
    for number in range(first):
        assert client.store(f"n{number}").stored == 1
    refused = client.produce("more")
    assert client.outcome(refused) == ErrorCode.SUBJECT_FULL and "10 messages" in client.text(refused)


def test_refusing_limit_gives_nothing_up():
    group, client = started()
    client.store(*(f"m{number}" for number in range(12)))
    group.a.assign(Role.MASTER, limits=(TEN,))
    hours_pass(group)
    group.wait(1_000)
    assert not group.a.master.overflowed and not group.a.master.expired and group.progress.position == 0


# Overflow.

WAITING = Requeued([RequeuedRange(2, 2, 1, 0), RequeuedRange(5, 1, 1, 9_000), RequeuedRange(8, 1, 1, 0)])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (-1, []),
        (0, []),
        (1, [(2, 1)]),
        (2, [(2, 2)]),
        (3, [(2, 2), (5, 1)]),
        (4, [(2, 2), (5, 1), (8, 1)]),
        (9, [(2, 2), (5, 1), (8, 1), (10, 5)]),
    ],
)
def test_oldest_are_requeued_ranges_then_new_messages(messages, expected):
    assert list(_oldest(LogGroup(10, requeued=WAITING), messages)) == expected


def test_new_messages_are_not_oldest_behind_many_ranges(monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_AT_ONCE", 2)
    assert list(_oldest(LogGroup(10, requeued=WAITING), 9)) == [(2, 2), (5, 1)]


def test_oldest_messages_overflow_per_group(caplog):
    group, client = started(TEN._replace(drops_oldest=True))
    client.store(*(f"m{number}" for number in range(8)))
    assert len(client.take(most=3)) == 3
    client.nacked("m0", "m1")
    group.subscribed("e", group="other").lost()
    client.store(*(f"m{number}" for number in range(8, 15)))
    with caplog.at_level(logging.WARNING, "qmq.broker.subject_limits"):
        group.wait(1_000)
    assert group.a.master.overflowed == {KEY: 2 + 2, ("s", "other"): 5} and len(caplog.records) == 2
    assert client.take() == [f"m{number}" for number in range(5, 15)]
    assert group.progress == group.b.log.state.groups[KEY] and not group.a.master.expired
    client.store(*(f"n{number}" for number in range(11)))
    with caplog.at_level(logging.WARNING, "qmq.broker.subject_limits"):
        group.wait(1_000)
    assert len(caplog.records) == 2, "logged once per group"


def test_message_waiting_for_its_retry_does_not_overflow():
    """Later messages were delivered past the requeued one."""
    group, client = started(TEN._replace(drops_oldest=True))
    client.store("m0")
    client.take()
    client.nacked("m0", delay_ms=60_000)
    for batch in range(4):
        client.store(*(f"n{batch}{number}" for number in range(5)))
        assert len(client.take()) == 5
    group.wait(1_000)
    assert group.progress.requeued.messages == 1 and not group.a.master.overflowed


def test_requeued_ranges_overflow_before_new_messages(monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_AT_ONCE", 1)
    group, client = started(TEN._replace(drops_oldest=True))
    client.store(*(f"m{number}" for number in range(8)))
    client.take(most=3)
    client.nacked("m0", "m2")
    client.store(*(f"m{number}" for number in range(8, 15)))
    counts = []
    for _ in range(3):
        group.wait(1_000)
        counts.append((group.a.master.overflowed[KEY], group.progress.position))
    assert counts == [(1, 3), (4, 5), (4, 5)], "it continues a second later"


@pytest.mark.parametrize(
    ("messages_max", "bytes_max", "expected"),
    [(8, 0, 2), (0, 3_000, 7), (8, 3_000, 7), (2, 3_000, 8), (10, 1 << 20, 0), (0, 1 << 20, 0)],
)
def test_stricter_of_two_limits_counts(messages_max, bytes_max, expected):
    group, _ = started()
    produced(group, *[700] * 10)
    size = group.a.log.frames("s", 0, 1)[0].length
    assert 3 * size < 3_000 < 4 * size
    limited_to(group, messages_max=messages_max, bytes_max=bytes_max)
    assert group.a.master.overflowed.get(KEY, 0) == expected


def test_subject_may_have_a_length_and_an_age():
    group, client = started(HOUR._replace(messages_max=2, drops_oldest=True))
    client.store("m0", "m1", "m2")
    hours_pass(group)
    assert (group.a.master.overflowed, group.a.master.expired) == ({KEY: 1}, {KEY: 2})


@pytest.mark.parametrize(("frames", "more", "expected"), [(1, 0, 1), (1, 1, 2), (2, 0, 2), (2, 1, 3)])
def test_no_more_overflow_than_the_excess(frames, more, expected):
    group, _ = started()
    produced(group, 900, 900)
    group.client().store(*(f"n{number}" for number in range(50)), size=10)
    excess = sum(ref.length for ref in group.a.log.frames("s", 0, frames)) + more
    limited_to(group, bytes_max=waiting_bytes(group) - excess)
    assert group.a.master.overflowed == {KEY: expected}


def test_deleted_messages_overflow_first():
    group, _ = started()
    produced(group, 100, 100, 100)
    counts, refs = Lengths(group.a.log), group.a.log.frames("s", 0, 3)
    size = refs[0].length
    assert [counts.covering("s", [(0, 3)], least) for least in (size, size + 1)] == [1, 2]
    delete_before(group, 1)
    assert counts.covering("s", [(0, 3)], 1) == 2
    limited_to(group, bytes_max=sum(ref.length for ref in refs[1:]))
    assert not group.a.master.overflowed, "bytes at the limit are not too many"
    group.a.log.state.kept.start = group.a.log.end
    assert counts.covering("s", [(0, 3)], 1) == 3


def test_overflow_is_bounded_per_tick(monkeypatch):
    monkeypatch.setattr(subject_limits, "SCANNED_PER_TICK", 10)
    monkeypatch.setattr(subject_limits, "SCANNED_AT_ONCE", 5)
    group, _ = started()
    produced(group, *[100] * 60)
    limited_to(group, bytes_max=1_000)
    assert 0 < group.a.master.overflowed[KEY] <= 10
    group.wait(1_000, times=10)
    assert waiting_bytes(group) <= 1_000
    counts = Lengths(group.a.log)
    counts._scan_left = 5
    assert not counts.is_spent
    counts._scan_left = 4
    assert counts.is_spent, "less than half of the scan is left"


# The count of waiting bytes.


def waiting_bytes(group: Group) -> int:
    """Sum the waiting bytes over all frames, the slow and obvious way."""
    log, progress = group.a.log, group.progress
    size = 0
    for ref in log.frames("s", progress.position, 1_000_000):
        size += ref.length - ref.length * max(progress.position - ref.begin, 0) // (ref.end - ref.begin)
    for span in progress.requeued:
        for ref in log.frames("s", span.first, 1_000_000):
            part = min(span.end, ref.end) - max(span.first, ref.begin)
            size += ref.length * max(part, 0) // (ref.end - ref.begin)
    return size


def count(counts: Lengths, group: Group) -> int:
    return counts.waiting(KEY, group.progress)


@pytest.mark.parametrize("seed", range(20))
def test_count_equals_the_sum_over_all_frames(seed, monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_LOOK_UP", 2)
    rng = random.Random(seed)
    group, client = started()
    counts = Lengths(group.a.log)
    for step in range(60):
        match rng.choice(["produce", "produce", "pull", "nack", "look"]):
            case "produce":
                client.store(*(f"m{step}-{n}" for n in range(rng.randint(1, 4))), size=rng.randint(1, 900))
            case "pull":
                client.take(most=rng.randint(1, 9))
            case "nack":
                consumer = group.progress.consumers.get("c")
                if consumer is not None and consumer.unacked:
                    begin = consumer.unacked[0].pull
                    client.done(client.nack(begin, begin + 1, delay_ms=3_600_000))
            case "look":
                assert count(counts, group) == waiting_bytes(group)
    assert count(counts, group) == waiting_bytes(group)


@pytest.mark.parametrize("positions", [(3, 0), (0, 5), (5, 5, 2), (2, 6, 1)])
def test_moved_group_is_counted_from_its_position(positions):
    group, _ = started()
    produced(group, 10, 20, 30, 40, 50, 60)
    counts = Lengths(group.a.log)
    for position in positions:
        group.progress.position = position
        assert count(counts, group) == waiting_bytes(group)


def test_count_continues_frame_by_frame_until_its_group_ends(monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_TICK", 1)
    group, _ = started()
    produced(group, 100, 100, 100, 100)
    counts, seen = Lengths(group.a.log), []
    for _ in range(4):
        seen.append(count(counts, group))
        counts.new_tick()
    assert seen == [waiting_bytes(group) * frames // 4 for frames in (1, 2, 3, 4)] and not counts.has_unfinished
    group.progress.position = 3
    for left in (2, 1, 0):  # frames before the position are subtracted first
        assert (count(counts, group) == waiting_bytes(group)) is not bool(left)
        counts.new_tick()
    produced(group, 100, 100)
    count(counts, group)
    assert counts.has_unfinished
    del group.a.log.state.groups[KEY]
    counts.new_tick()
    assert not counts.has_unfinished and not counts._counted


def test_uncounted_frames_count_zero():
    group, _ = started()
    produced(group, *[100] * 12)
    counts = Lengths(group.a.log)
    assert count(counts, group) == waiting_bytes(group) and not counts.has_unfinished
    counts._left = 0  # of this tick
    group.progress.position = 9
    assert count(counts, group) == 0 and counts.has_unfinished
    counts.new_tick()
    assert count(counts, group) == waiting_bytes(group) > 0 and not counts.has_unfinished


def test_counts_of_several_groups_take_turns(monkeypatch):
    monkeypatch.setattr(subject_limits, "FRAMES_PER_TICK", 10)
    group, _ = started()
    group.subscribed("o", group="other").lost()
    produced(group, *[100] * 45)
    counts, other = Lengths(group.a.log), group.a.log.state.groups["s", "other"]
    assert count(counts, group) > 0 == counts.waiting(("s", "other"), other)
    for _ in range(2):
        counts.new_tick()
    assert counts.waiting(("s", "other"), other) > 0
    for _ in range(6):
        assert counts.has_unfinished
        counts.new_tick()
    assert not counts.has_unfinished
    assert count(counts, group) == counts.waiting(("s", "other"), other) == waiting_bytes(group)


def test_deleted_frames_do_not_count():
    group, _ = started()
    while len(group.a.log.bases) < 3:
        produced(group, 900)
    counts = Lengths(group.a.log)
    before = count(counts, group)
    assert before == waiting_bytes(group)
    group.a.log.state.kept.start = group.a.log.bases[1]
    assert count(counts, group) == waiting_bytes(group) < before


# Requeued messages.


def test_requeued_messages_count_as_their_frames():
    """The first of them is much larger than the others."""
    group, client = started()
    produced(group, 900, *[10] * 30)
    assert len(client.take(most=100)) == 31
    returned(group, client, 0, 31)
    assert count(Lengths(group.a.log), group) == waiting_bytes(group) < 10_000
    limited_to(group, bytes_max=waiting_bytes(group))
    assert not group.a.master.overflowed and group.progress.requeued.messages == 31


def test_many_requeued_ranges_are_counted_in_part(monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_SUMMED", 3)
    group, client = started()
    produced(group, *[100] * 20)
    assert len(client.take(most=100)) == 20
    for number in range(0, 20, 2):
        returned(group, client, number, number + 1)
    refs = group.a.log.frames("s", 0, 20)
    assert count(Lengths(group.a.log), group) == sum(refs[number].length for number in (0, 2, 4))


def requeued_over_segments(group: Group, client: Client) -> int:
    """Store messages until there is a third segment, deliver all, requeue every other one and the last."""
    number = 0
    while len(group.a.log.bases) < 3:
        produced(group, 900)
        number += 1
    while group.progress.position < number:
        client.take(most=100)
    for at in [*range(0, number - 1, 2), number - 1]:
        returned(group, client, at, at + 1)
    return number


def test_deleted_requeued_messages_hide_no_others(monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_SUMMED", 2)
    group, client = started()
    requeued_over_segments(group, client)
    counts, log = Lengths(group.a.log), group.a.log
    assert count(counts, group) > 0
    log.state.kept.start = log.bases[1]
    assert 0 < count(counts, group) <= waiting_bytes(group)
    log.state.kept.start = log.end
    assert count(counts, group) == waiting_bytes(group) == 0


def test_kept_requeued_messages_overflow_with_deleted_ones():
    group, client = started()
    number = requeued_over_segments(group, client)
    group.a.log.state.kept.start = group.a.log.bases[1]
    before = group.progress.requeued.messages
    limited_to(group, bytes_max=waiting_bytes(group) - 1)
    first = group.a.log.frames("s", 0, 1)[0].begin
    deleted = len(range(0, min(first, number - 1), 2))
    assert group.a.master.overflowed == {KEY: deleted + 1} and group.progress.requeued.messages == before - deleted - 1


def test_requeued_messages_are_summed_once_per_change():
    group, client = started()
    produced(group, 10, 200, 400)
    client.take(most=100)
    returned(group, client, 0, 1)
    counts, progress = Lengths(group.a.log), group.progress
    assert count(counts, group) == waiting_bytes(group)
    left = counts._scan_left
    assert count(counts, group) == waiting_bytes(group) and counts._scan_left == left
    changes, progress.requeued = progress.requeued.changes, Requeued()
    progress.requeued.add(RequeuedRange(2, 1, 1, 0))
    progress.requeued.changes = changes
    assert count(counts, group) == waiting_bytes(group) and counts._scan_left < left, "another Requeued"
    counts._summed.clear()
    counts._scan_left = 0
    assert count(counts, group) == 0, "this tick is spent"
    counts.new_tick()
    assert count(counts, group) == waiting_bytes(group)


def test_damage_found_while_counting_bytes_is_reported():
    """Until the repair, uncounted messages count as zero."""
    problem, found = CorruptFrame(88, "test"), []

    def fails(*_):
        raise problem

    message_log = SimpleNamespace(state=State(next_sequence={"s": 9}), frames=fails)
    limits = SubjectLimits(
        SimpleNamespace(log=message_log, found_damage=found.append), None, None, lambda subject: None
    )
    assert limits._gone("s", LogGroup(3)) == limits._bytes(KEY, LogGroup(3)) == 0
    assert limits._covering("s", [(3, 6)], 100) == 0 and found == [problem] * 3
    limits._lengths = SimpleNamespace(new_tick=fails)
    limits.tick(0)
    assert found == [problem] * 4
