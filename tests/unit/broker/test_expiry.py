"""Core. Expiry of messages by operators' limits: which, when, counters, dead letters."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from qmq.broker import subject_limits
from qmq.broker.subject_limits import PRUNE_EVERY_MS, PRUNER, SubjectLimits, _before
from qmq.errors import CorruptFrame, ErrorCode
from qmq.log.fold import State
from qmq.log.frame import FrameKind
from qmq.log.group import Group as LogGroup
from qmq.log.progress_frame import EXPIRED
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.message import Message
from qmq.operator_limits import OF_SUBJECT, OperatorLimits, by_key
from qmq.remoting.commands import Verdict
from qmq.replication.mastership import Mastership
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.limited import HOUR, KEY, hours_pass, started
from tests.unit.broker.test_dead_letters import dead_letters
from tests.unit.broker.world import Client, Group

DYING = HOUR._replace(expired_die=True)
DAY_MS = 80_000_000


# Which messages, and when.


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
    ranges = [RequeuedRange(2, 2, 1, 0), RequeuedRange(5, 1, 1, 9_000), RequeuedRange(8, 1, 1, 0)]
    assert list(_before(LogGroup(10, requeued=Requeued(ranges)), end)) == expected


def test_message_expires_when_older_than_the_limit(monkeypatch):
    group, client = started(HOUR)
    joined = group.subscribed("host", group="host", broadcast=True)
    client.store("m0", "m1")
    client.lost()
    with monkeypatch.context() as searched:
        searched.setattr(subject_limits.positions, "first_since", lambda *_: pytest.fail("a search for young messages"))
        hours_pass(group, 3_599 / 3600)
    counts = []
    for _ in range(2):
        hours_pass(group, 1 / 3600)
        counts.append(group.a.master.expired.get(KEY, 0))
    assert counts == [0, 2] and group.a.master.expired == {KEY: 2, ("s", "host"): 2}
    group.client().store("m2")
    assert joined.take() == ["m2"] and dead_letter_subject(*KEY) not in group.a.log.state.next_sequence
    assert group.progress == group.b.log.state.groups[KEY], "the slave folds the same"


def test_new_master_expires_the_groups_in_its_log():
    group, client = started()
    client.store("m0")
    group.b.host.clock_ms = group.a.host.clock_ms
    group.swap(2)
    group.a.assign(Role.MASTER, 2, limits=(HOUR,))
    hours_pass(group)
    assert group.a.master.expired == {KEY: 1}


def test_nothing_expires_without_an_agreeing_clock():
    group, client = started(HOUR)
    client.store("m0")
    group.a.host.wall_skew_ms = 7_200_000
    group.hear_clocks()
    group.wait(2_000)
    assert not group.a.master.expired and client.take() == ["m0"]
    other, client = started(HOUR)
    client.produce("m0")
    other.a.host.clock_ms += 7_200_000
    other.a.node.tick()
    assert not other.a.master.expired, "no other clock reported"


def test_only_groups_with_expired_messages_get_a_frame():
    group, client = started(HOUR, OperatorLimits("t", OF_SUBJECT, messages_max=10, drops_oldest=True))
    group.subscribed("c", subject="t").store("n0", subject="t")
    ahead = group.subscribed("d", group="ahead")
    client.store("m0")
    assert ahead.take() == ["m0"]
    hours_pass(group)
    assert group.a.master.expired == {KEY: 1}
    group.wait(1_000, times=3)
    assert [frame.subject for frame, _ in group.frames(FrameKind.PULL)] == ["s", "s"]


def test_expiry_wakes_consumers():
    """An order key may be free now."""
    group, client = started(HOUR)
    woken, pruning = [], group.a.master._delivery.pruning
    wake = pruning._wake
    pruning._wake = lambda subject: woken.append(subject) or wake(subject)
    client.store("m0")
    hours_pass(group)
    assert woken == ["s"]


def produce_keyed(group: Group, *ids: str) -> None:
    group.client().store_labelled(*(Message("s", id=id, order_key="k") for id in ids))


@pytest.mark.parametrize("first", ["requeued", "unacked"])
def test_expired_message_frees_its_order_key(first):
    group, client = started(HOUR)
    produce_keyed(group, "m0", "m1")
    assert client.take() == ["m0"], "the other one waits behind it"
    begin = client.first
    if first == "requeued":
        client.nacked("m0", delay_ms=DAY_MS)
        assert client.take() == []
    hours_pass(group)
    assert group.a.master.expired == {KEY: 2 if first == "requeued" else 1}
    produce_keyed(group, "m2")
    if first == "unacked":
        assert client.take() == []
        client.done(client.ack(begin, begin + 1))
    assert client.take() == ["m2"]


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


# Dead letters.


def test_expired_messages_become_dead_letters_if_set():
    group, client = started(DYING)
    client.store("m0", "m1")
    hours_pass(group)
    group.wait(200, times=3)
    fates = [(letter.id, letter["qmq_deadReason"], letter["qmq_times"]) for letter in dead_letters(group.a)]
    assert fates == [("m0", "expired", "0"), ("m1", "expired", "0")], "delivered to no consumer"
    assert client.take() == [] and group.a.master.expired == {KEY: 2}
    assert not group.progress.consumers[PRUNER].unacked


def test_expired_messages_wait_for_room_and_die_once(monkeypatch):
    monkeypatch.setattr(subject_limits, "EXPIRED_AT_ONCE", 5)
    group, client = started(DYING)
    client.store(*(f"m{number}" for number in range(9)))
    assert len(client.take(most=4)) == 4
    client.nacked("m0", "m2", "m3", delay_ms=DAY_MS)
    client.acked("m1")
    calls, pruning = [], group.a.master._delivery.pruning
    writer = pruning._dead_letters
    pruning._dead_letters = SimpleNamespace(make_dead=lambda *args: calls.append(args))
    hours_pass(group)
    group.hear_clocks()
    group.wait(1_000)
    pruner = group.progress.consumers[PRUNER]
    assert [(span.first, span.count) for span in pruner.unacked] == [(0, 1), (2, 2), (4, 2)]
    ((key, ranges, *rest),) = calls
    assert (key, rest) == ((*KEY, PRUNER), ["expired", None])
    assert ranges == [(span.pull, span.pull_end, False) for span in pruner.unacked] and group.a.master.expired == {
        KEY: 5
    }
    pruning._dead_letters = writer
    writer.make_dead(key, ranges, *rest)
    for _ in range(3):
        group.hear_clocks()
        group.wait(1_000)
    assert group.a.master.expired == {KEY: 8} and not pruner.unacked


@pytest.mark.parametrize(
    ("subject", "expected"),
    [("s", True), (retry_subject(*KEY), True), (dead_letter_subject(*KEY), False), ("t", False), ("u", False)],
)
def test_dead_letters_do_not_expire_into_dead_letters(subject, expected):
    limits = made()
    limits.limit(by_key([DYING, HOUR._replace(subject="t")]))
    assert limits.expired_die(subject) is expected


def test_absent_broadcast_is_forgotten_despite_expired_messages():
    group = Group.made(lease_ms=30_000, broadcast_forget_hours=2.0).start()
    group.a.assign(Role.MASTER, limits=(DYING,))
    group.subscribed("b", group="b", broadcast=True).lost()
    group.wait(7_500, times=6)  # its lease ends
    for _ in range(5):
        group.client().store("m")
        hours_pass(group)
        group.wait(1_000)
    assert 1 <= group.a.log.state.next_sequence[dead_letter_subject("s", "b")] < 5
    assert not group.a.log.state.groups and not group.a.master.expired


def test_broadcast_with_unfinished_dead_letters_is_not_forgotten():
    group, _ = started(DYING, tail_bytes=0, broadcast_forget_hours=1.0)
    host = group.subscribed("b", group="b", broadcast=True)
    host.leave()
    host.store("m")
    host.store("o", subject="other")
    group.a.host.holds_reads = True
    for _ in range(2):
        hours_pass(group)
    assert ("s", "b") in group.a.log.state.groups
    group.a.host.holds_reads = False
    group.settle()
    assert group.a.log.state.next_sequence[dead_letter_subject("s", "b")] == 1
    hours_pass(group)
    assert ("s", "b") not in group.a.log.state.groups


# Expiry found by a consumer.


def expire(client: Client) -> int:
    """Report the first message of the last pull as expired."""
    return client.nack(client.first, client.first + 1, verdict=Verdict.EXPIRED, reason="expired")


def test_expiry_found_by_a_consumer_is_counted_and_recorded():
    group, client = started()
    client.store("m0", "m1")
    client.take()
    group.cut()
    assert client.outcome(expire(client)) == ErrorCode.SUCCESS, "it needs no slave"
    assert group.a.master.expired == {KEY: 1} and group.progress.consumers["c"].unacked_messages == 1
    ((_, ack),) = group.frames(FrameKind.ACK)
    assert [entry[2] for entry in ack.entries] == [EXPIRED], "the audit tells it from handled messages"


@pytest.mark.parametrize("subject", ["s", retry_subject(*KEY)])
def test_expiry_found_by_a_consumer_becomes_a_dead_letter(subject):
    group, _ = started(OperatorLimits("s", OF_SUBJECT, expired_die=True))
    client = group.subscribed("c", subject=subject)
    client.store("m0", subject=subject)
    client.take()
    client.done(expire(client))
    (dead,) = dead_letters(group.a)
    assert (dead.id, dead["qmq_deadReason"]) == ("m0", "expired")


# Rounds over the limited subjects.


def made() -> SubjectLimits:
    """Return `SubjectLimits` over a log without messages."""
    return SubjectLimits(SimpleNamespace(log=SimpleNamespace(state=State())), None, None, lambda subject: None)


def test_limited_subjects_are_checked_once_a_second(monkeypatch):
    monkeypatch.setattr(subject_limits, "SUBJECTS_AT_ONCE", 2)
    limits = made()
    assert [limits.due_in_ms(now_ms) for now_ms in (0, 7_000)] == [PRUNE_EVERY_MS] * 2, "nothing is limited"
    some = [HOUR._replace(subject=subject) for subject in "abc"]
    limits.limit(by_key([*some, OperatorLimits("d", "g", per_second=1)]))
    assert [limits.due_in_ms(now_ms) for now_ms in (0, 400, 1_000, 2_000)] == [1_000, 600, 0, 0]
    due = []
    for now_ms in (999, 1_000, 1_100, 1_500):  # of three subjects, the third is left at 1,000
        limits.tick(now_ms)
        due.append(limits.due_in_ms(now_ms))
    assert due == [1, 0, 900, 500]
    limits._lengths = SimpleNamespace(has_unfinished=True)
    assert limits.due_in_ms(1_500) == 0


def test_long_round_continues_and_drops_removed_limits(monkeypatch):
    monkeypatch.setattr(subject_limits, "SUBJECTS_AT_ONCE", 1)
    limits, seen = made(), []
    limits._overflow = lambda subject, limit: seen.append(subject)
    for subject in "abcd":
        limits.changing((subject, "g"), is_known=True)
    dropping = HOUR._replace(drops_oldest=True, expires_after_s=0)
    limits.limit(by_key([dropping._replace(subject=subject) for subject in "abcd"]))
    for now_ms in (1_000, 1_800, 2_600):
        limits.tick(now_ms)
    limits.limit({})
    limits.tick(3_400)
    assert seen == ["a", "b", "c"]


def test_spent_tick_checks_no_subject():
    group, client = started(HOUR)
    client.store("m0")
    lengths = group.a.master._delivery.pruning._lengths
    lengths.new_tick = lambda: setattr(lengths, "_scan_left", 0)
    hours_pass(group)
    assert not group.a.master.expired
    del lengths.new_tick
    group.a.node.tick()
    assert group.a.master.expired == {KEY: 1}


def test_forgotten_group_has_no_counts(caplog):
    limits, forgotten = made(), []
    limits._lengths = SimpleNamespace(forget=forgotten.append)
    limits.changing(KEY, is_known=True)
    with caplog.at_level(logging.WARNING, "qmq.broker.subject_limits"):
        for _ in range(2):
            limits.note_expired(KEY, 3)
        assert limits.expired == {KEY: 6} and len(caplog.records) == 1, "logged once"
        limits.overflowed[KEY] = 1
        limits.changing(KEY, is_known=False)
        limits.changing(("t", "g"), is_known=False)
        assert not limits.expired and not limits.overflowed and forgotten == [KEY, ("t", "g")]
        limits.note_expired(KEY, 2)
    assert limits.expired == {KEY: 2} and len(caplog.records) == 2
