"""Core. Messages given up without delivery: which, when, and the counters."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from qmq.broker import subject_limits
from qmq.broker.subject_limits import PRUNE_EVERY_MS, PRUNER, SubjectLimits, _before, _oldest
from qmq.errors import CorruptFrame, ErrorCode
from qmq.log.fold import State
from qmq.log.frame import NO_CHAIN, FrameKind, decode_frames
from qmq.log.group import Group as LogGroup
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.operator_limits import OF_SUBJECT, OperatorLimits, by_key
from qmq.replication.mastership import Mastership
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.test_limits import HOUR, KEY, TEN, hours_pass, started
from tests.unit.broker.world import Client, Group

WAITING = Requeued([RequeuedRange(2, 2, 1, 0), RequeuedRange(5, 1, 1, 9_000), RequeuedRange(8, 1, 1, 0)])


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (2, []),
        (3, [(2, 1)]),
        (8, [(2, 2), (5, 1)]),
        (10, [(2, 2), (5, 1), (8, 1)]),
        (13, [(2, 2), (5, 1), (8, 1), (10, 3)]),
    ],
)
def test_expired_are_requeued_ranges_then_new_messages(end, expected):
    assert list(_before(LogGroup(10, requeued=WAITING), end)) == expected


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
def test_the_oldest_are_those_requeued_and_then_new_ones(messages, expected):
    assert list(_oldest(LogGroup(10, requeued=WAITING), messages)) == expected


@pytest.mark.parametrize(("most", "expected"), [(2, [(2, 2), (5, 1)]), (3, [(2, 2), (5, 1), (8, 1), (10, 5)])])
def test_new_ones_are_not_the_oldest_while_more_ranges_wait_than_are_looked_at(monkeypatch, most, expected):
    monkeypatch.setattr(subject_limits, "RANGES_AT_ONCE", most)
    assert list(_oldest(LogGroup(10, requeued=WAITING), 9)) == expected


def made(log: object = None) -> SubjectLimits:
    """`SubjectLimits` over a log without messages."""
    return SubjectLimits(SimpleNamespace(log=log or SimpleNamespace(state=State())), None, None, lambda subject: None)


def limits(*some: OperatorLimits) -> dict[tuple[str, str], OperatorLimits]:
    return by_key(some)


def test_limited_subjects_are_looked_at_once_a_second_and_those_left_over_in_the_next_tick(monkeypatch):
    monkeypatch.setattr(subject_limits, "SUBJECTS_AT_ONCE", 2)
    one = made()
    assert [one.due_in_ms(now_ms) for now_ms in (0, 7_000)] == [PRUNE_EVERY_MS] * 2, "nothing is limited"
    one.limit(limits(*(HOUR._replace(subject=subject) for subject in "abc"), OperatorLimits("d", "g", per_second=1)))
    assert [one.due_in_ms(now_ms) for now_ms in (0, 400, 1_000, 2_000)] == [1_000, 600, 0, 0]
    one.tick(999)
    assert one.due_in_ms(999) == 1
    one.tick(1_000)
    assert one.due_in_ms(1_000) == 0, "of three there is one left"
    one.tick(1_100)
    assert one.due_in_ms(1_100) == 900
    one.tick(1_500)
    assert one.due_in_ms(1_500) == 500, "a round a second"


def test_long_round_continues_and_drops_removed_limits(monkeypatch):
    monkeypatch.setattr(subject_limits, "SUBJECTS_AT_ONCE", 1)
    one, seen = made(), []
    one._overflow = lambda subject, limits: seen.append(subject)
    for subject in "abcd":
        one.changing((subject, "g"), is_known=True)
    one.limit(limits(*(HOUR._replace(subject=subject, drops_oldest=True, expires_after_s=0) for subject in "abcd")))
    for now_ms in (1_000, 1_800, 2_600):
        one.tick(now_ms)
    one.limit({})
    one.tick(3_400)
    assert seen == ["a", "b", "c"]


def test_a_count_that_is_not_finished_is_gone_on_with_in_the_next_tick():
    one = made()
    one._lengths = SimpleNamespace(has_unfinished=True)
    assert one.due_in_ms(0) == 0


def test_no_subject_is_looked_at_when_a_tick_has_walked_enough():
    group, client = started(HOUR)
    client.store("m0")
    lengths = group.a.master._delivery.pruning._lengths
    lengths.new_tick = lambda: setattr(lengths, "_scan_left", 0)
    hours_pass(group)
    assert not group.a.master.expired
    del lengths.new_tick
    group.a.node.tick()
    assert group.a.master.expired == {KEY: 1}


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("s", True),
        (retry_subject("s", "g"), True),
        (dead_letter_subject("s", "g"), False),
        ("t", False),
        ("u", False),
    ],
)
def test_dead_letters_do_not_expire_into_dead_letters(subject, expected):
    one = made()
    one.limit(limits(HOUR._replace(expired_die=True), HOUR._replace(subject="t")))
    assert one.expired_die(subject) is expected


def test_a_group_that_is_forgotten_is_counted_no_more_and_one_that_begins_anew_begins_at_nothing(caplog):
    one, forgotten = made(), []
    one._lengths = SimpleNamespace(forget=forgotten.append)
    one.changing(KEY, is_known=True)
    with caplog.at_level(logging.WARNING, "qmq.broker.subject_limits"):
        for _ in range(2):
            one.note_expired(KEY, 3)
        assert one.expired == {KEY: 6} and len(caplog.records) == 1, "the log names it once"
        one.overflowed[KEY] = 1
        one.changing(KEY, is_known=False)
        one.changing(("t", "g"), is_known=False)
        assert not one.expired and not one.overflowed and forgotten == [KEY, ("t", "g")]
        one.note_expired(KEY, 2)
    assert one.expired == {KEY: 2} and len(caplog.records) == 2


def test_a_new_master_goes_on_with_the_groups_that_it_finds():
    group, client = started(HOUR)
    client.store("m0")
    group.b.host.clock_ms = group.a.host.clock_ms
    group.swap(2)
    group.a.assign(Role.MASTER, 2, limits=(HOUR,))
    hours_pass(group)
    assert group.a.master.expired == {KEY: 1}


def segments_of_ten() -> tuple[Group, Client]:
    group, client = started(TEN)
    for number in range(10):
        group.client().produce(f"m{number}", size=900)
        group.settle()
    assert len(group.a.log.bases) > 2
    return group, client


@pytest.mark.parametrize("ranges", [0, 1, 10], ids=["new", "requeued", "requeued one by one"])
def test_deleted_messages_do_not_wait(ranges, monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_AT_ONCE", 1)
    group, client = segments_of_ten()
    if ranges:
        assert len(client.take()) == 10
        begin = group.progress.consumers["c"].unacked[0].pull
        for number in range(ranges):
            end = begin + 10 // ranges
            client.nack(begin, end, delay_ms=60_000 + number)
            begin = end
        group.settle()
        assert len(group.progress.requeued) == ranges
    while len(group.a.log.bases) > 2:
        group.a.drop_oldest_segment()
    first = group.a.log.frames("s", 0, 1)[0].begin
    assert first > 1
    producer = group.client()
    for number in range(first):
        stored = producer.produce(f"n{number}")
        group.settle()
        assert producer.receipt(stored).stored == 1
    refused = producer.produce("more")
    group.settle()
    assert producer.code(refused) == ErrorCode.SUBJECT_FULL and "10 messages" in producer.text(refused)


@pytest.mark.parametrize(
    ("messages_max", "bytes_max", "expected"),
    [(8, 0, 2), (0, 3_000, 7), (8, 3_000, 7), (2, 3_000, 8), (10, 1 << 20, 0), (0, 1 << 20, 0)],
)
def test_of_two_limits_the_one_that_gives_up_more_counts(messages_max, bytes_max, expected):
    group, _ = started()
    for number in range(10):
        group.client().produce(f"m{number}", size=700)
        group.settle()
    size = group.a.log.frames("s", 0, 1)[0].length
    assert 3 * size < 3_000 < 4 * size
    one = OperatorLimits("s", OF_SUBJECT, messages_max=messages_max, bytes_max=bytes_max, drops_oldest=True)
    group.a.assign(Role.MASTER, limits=(one,))
    group.wait(1_000)
    assert group.a.master.overflowed.get(KEY, 0) == expected


def test_bytes_at_the_limit_do_not_overflow():
    group, _ = started()
    for number in range(5):
        group.client().produce(f"m{number}", size=600)
        group.settle()
    refs = group.a.log.frames("s", 0, 9)
    group.a.log.state.kept.start = refs[1].offset
    one = OperatorLimits("s", OF_SUBJECT, bytes_max=sum(ref.length for ref in refs[1:]), drops_oldest=True)
    group.a.assign(Role.MASTER, limits=(one,))
    group.wait(1_000)
    assert not group.a.master.overflowed


def test_the_first_message_of_a_subject_is_never_too_much():
    group, client = started(OperatorLimits("s", OF_SUBJECT, messages_max=1))
    first = client.produce("m0")
    group.settle()
    assert client.receipt(first).stored == 1 and client.outcome(client.produce("m1")) == ErrorCode.SUBJECT_FULL


def test_a_limit_of_length_alone_that_refuses_gives_nothing_up():
    group, client = started()
    client.store(*(f"m{number}" for number in range(12)))
    group.a.assign(Role.MASTER, limits=(TEN,))
    hours_pass(group)
    group.wait(1_000)
    assert not group.a.master.overflowed and not group.a.master.expired
    assert group.progress.position == 0


def test_where_nothing_is_given_up_nothing_is_written():
    group, client = started(HOUR, TEN._replace(subject="t", drops_oldest=True))
    other = group.subscribed("c", subject="t")
    other.produce("n0", subject="t")
    ahead = group.subscribed("d", group="ahead")
    client.store("m0")
    assert ahead.take() == ["m0"]
    hours_pass(group)
    assert group.a.master.expired == {KEY: 1}, "of two groups, the one that did not consume it"
    group.wait(1_000, times=3)
    frames = group.a.log.stored.read(0, group.a.log.end, 1 << 30).data
    pulls = [frame for frame, _ in decode_frames(frames, 0, NO_CHAIN) if frame.kind == FrameKind.PULL]
    assert [frame.subject for frame in pulls] == ["s", "s"]


def test_a_message_expires_when_it_is_older_than_it_may_be_and_is_no_dead_letter():
    group, client = started(HOUR)
    client.store("m0")
    counts = []
    for ms in (3_599_000, 1_000, 1_000):
        for broker in (group.a, group.b):
            broker.host.clock_ms += ms
        group.hear_clocks()
        group.a.node.tick()
        group.settle()
        counts.append(group.a.master.expired.get(KEY, 0))
    assert counts == [0, 0, 1]
    assert dead_letter_subject("s", "g") not in group.a.log.state.next_sequence


def test_that_messages_are_given_up_is_logged_once_for_each_group(caplog):
    group, client = started(TEN._replace(drops_oldest=True))
    with caplog.at_level(logging.WARNING, "qmq.broker.subject_limits"):
        for number in range(3):
            client.store(*(f"m{number}-{at}" for at in range(11)))
            group.wait(1_000)
    assert group.a.master.overflowed == {KEY: 23} and len(caplog.records) == 1


def test_a_subject_may_have_a_length_and_an_age():
    group, client = started(HOUR._replace(messages_max=2, drops_oldest=True))
    client.store("m0", "m1", "m2")
    hours_pass(group)
    assert (group.a.master.overflowed, group.a.master.expired) == ({KEY: 1}, {KEY: 2})


def test_consumers_are_woken_when_something_is_given_up():
    """Its order key may be free now."""
    group, client = started(HOUR)
    woken = []
    wake = group.a.master._delivery.pruning._wake
    group.a.master._delivery.pruning._wake = lambda subject: woken.append(subject) or wake(subject)
    client.store("m0")
    hours_pass(group)
    assert woken == ["s"]


def test_damage_found_during_expiry_is_reported(monkeypatch):
    group, client = started(HOUR, HOUR._replace(subject="t"))
    group.subscribed("c", subject="t").produce("n0", subject="t")
    client.store("m0")
    found, first_since = [], subject_limits.positions.first_since
    monkeypatch.setattr(Mastership, "found_damage", lambda self, problem: found.append(problem))

    def damaged(log, subject, since_ms):
        if subject == "s":
            raise CorruptFrame(88, "test")
        return first_since(log, subject, since_ms)

    monkeypatch.setattr(subject_limits.positions, "first_since", damaged)
    hours_pass(group)
    assert len(found) == 1 and group.a.master.expired == {("t", "g"): 1}


def test_expired_messages_that_wait_for_their_burial_are_not_given_twice_and_others_as_there_is_room(monkeypatch):
    monkeypatch.setattr(subject_limits, "EXPIRED_AT_ONCE", 5)
    group, client = started(HOUR._replace(expired_die=True))
    client.store(*(f"m{number}" for number in range(9)))
    assert len(client.take(most=4)) == 4
    begin = group.progress.consumers["c"].unacked[0].pull
    client.nack(begin, begin + 1, delay_ms=80_000_000)
    client.nack(begin + 2, begin + 4, delay_ms=80_000_000)
    client.done(client.ack(begin + 1, begin + 2))
    buried, dead_letters = [], group.a.master._delivery.pruning._dead_letters
    group.a.master._delivery.pruning._dead_letters = SimpleNamespace(make_dead=lambda *args: buried.append(args))
    hours_pass(group)
    group.hear_clocks()
    group.wait(1_000)
    pruner = group.progress.consumers[PRUNER]
    assert [(one.first, one.count) for one in pruner.unacked] == [(0, 1), (2, 2), (4, 2)]
    ((key, ranges, *rest),) = buried
    assert (key, rest) == ((*KEY, PRUNER), ["expired", None])
    assert ranges == [(one.pull, one.pull_end) for one in pruner.unacked]
    assert group.a.master.expired == {KEY: 5}
    group.a.master._delivery.pruning._dead_letters = dead_letters
    dead_letters.make_dead(key, ranges, *rest)
    for _ in range(3):
        group.hear_clocks()
        group.wait(1_000)
    assert group.a.master.expired == {KEY: 8} and not pruner.unacked
