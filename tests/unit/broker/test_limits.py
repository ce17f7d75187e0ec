"""Core. Operators' limits: expiry, rates and lengths, with counters and log lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qmq.broker import subject_limits
from qmq.broker.group_status import Cause
from qmq.broker.subject_limits import SubjectLimits
from qmq.codec import decode_message, encode_labels, encode_message, label_of_message, split_batch
from qmq.errors import CorruptFrame, ErrorCode
from qmq.log.fold import State
from qmq.log.frame import NO_CHAIN, FrameKind, decode_frames, label_flags
from qmq.log.group import Group as LogGroup
from qmq.log.progress_frame import EXPIRED, decode_progress
from qmq.message import Message
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.remoting import commands
from qmq.remoting.commands import Command, Nack, NackEntry, Verdict
from qmq.replication.assignment import Assignment
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.world import Client, Group

KEY = ("s", "g")
HOUR = OperatorLimits("s", OF_SUBJECT, expires_after_s=3600)


def started(*limits: OperatorLimits) -> tuple[Group, Client]:
    group = Group.made(lease_ms=7_200_000).start()
    group.a.assign(Role.MASTER, limits=limits)
    return group, group.subscribed("c")


def hours_pass(group: Group, hours: float = 1.1) -> None:
    for broker in (group.a, group.b):
        broker.host.clock_ms += int(hours * 3_600_000)
    group.hear_clocks()
    group.a.node.tick()
    group.settle()


def dead_letters(group: Group, subject: str = "s") -> list[Message]:
    support = group.subscribed("support", subject=dead_letter_subject(subject, "g"), group="support")
    opaque = support.pull()
    group.settle()
    if support.link.answers[opaque][0]:
        return []
    pieces = commands.decode_pulled(memoryview(support.body(opaque)))
    return [decode_message(bytes(data)) for piece in pieces for data in split_batch(piece.body, piece.count)]


# Expiry.


def test_expired_messages_are_settled_and_counted():
    group, client = started(HOUR)
    group.client().produce("m0", "m1")
    group.settle()
    hours_pass(group)
    group.client().produce("m2")
    group.settle()
    assert client.take() == ["m2"]
    assert group.a.master.expired == {KEY: 2}
    assert group.progress == group.b.log.state.groups[KEY], "the slave folds the same"


def test_a_new_master_limits_the_groups_that_are_in_its_log():
    group, client = started()
    client.store("m0")
    group.swap(2)
    group.a.assign(Role.MASTER, 2, limits=(HOUR,))
    hours_pass(group)
    assert group.a.master.expired == {KEY: 1}


def test_a_broadcast_is_limited_from_when_its_consumer_is_there():
    group, _ = started(HOUR)
    group.subscribed("host", group="host", broadcast=True)
    group.client().produce("m0")
    group.settle()
    hours_pass(group)
    assert group.a.master.expired == {KEY: 1, ("s", "host"): 1}


def test_of_many_limited_subjects_some_are_looked_at_in_each_tick(monkeypatch):
    monkeypatch.setattr(subject_limits, "SUBJECTS_AT_ONCE", 2)
    subjects = [f"s{number}" for number in range(5)]
    group, _ = started(*(HOUR._replace(subject=subject) for subject in subjects))
    for subject in subjects:
        group.subscribed("c", subject=subject).produce("m", subject=subject)
    group.settle()
    hours_pass(group)
    counts = []
    for _ in range(4):
        counts.append(len(group.a.master.expired))
        group.a.node.tick()
        group.settle()
    assert counts == [2, 4, 5, 5]


def test_young_messages_cost_no_search(monkeypatch):
    group, client = started(HOUR)
    client.store("m0")
    with monkeypatch.context() as searched:
        searched.setattr(subject_limits.positions, "first_since", lambda *_: pytest.fail("a search"))
        hours_pass(group, 0.9)
    hours_pass(group, 0.2)
    assert group.a.master.expired == {KEY: 1}


def test_a_group_without_consumers_keeps_nothing_that_has_expired():
    group, client = started(HOUR)
    client.produce("m0")
    client.lost()
    group.settle()
    hours_pass(group)
    assert group.progress.position == 1


def test_requeued_messages_expire_unacked_ones_do_not():
    group, client = started(HOUR)
    client.store("m0", "m1", "m2")
    assert client.take(most=3) == ["m0", "m1", "m2"]
    begin = group.progress.consumers["c"].unacked[0].pull
    client.done(client.nack(begin, begin + 2, delay_ms=80_000_000))
    hours_pass(group)
    state = group.progress
    assert not state.requeued and state.consumers["c"].unacked_messages == 1 and group.a.master.expired == {KEY: 2}


def test_nothing_expires_while_the_masters_clock_disagrees_with_another():
    group, client = started(HOUR)
    client.store("m0")
    group.a.host.wall_skew_ms = 7_200_000
    group.hear_clocks()
    group.wait(2_000)
    assert not group.a.master.expired and client.take() == ["m0"]
    unheard, other = started(HOUR)
    other.produce("m0")
    unheard.a.host.clock_ms += 7_200_000
    unheard.a.node.tick()
    assert not unheard.a.master.expired, "nobody says that this clock is right"


def test_expired_messages_become_dead_letters_if_set():
    group, client = started(HOUR._replace(expired_die=True))
    client.store("m0", "m1")
    hours_pass(group)
    group.wait(200, times=3)
    fates = [(one.id, one.properties["qmq_deadReason"], one.properties["qmq_times"]) for one in dead_letters(group)]
    assert fates == [("m0", "expired", "0"), ("m1", "expired", "0")], "no consumer ever had them"
    assert client.take() == [] and group.a.master.expired == {KEY: 2}
    assert not group.progress.consumers[subject_limits.PRUNER].unacked


def test_a_broadcast_that_stays_away_is_forgotten_though_its_messages_expire_into_dead_letters():
    group = Group.made(lease_ms=30_000, broadcast_forget_hours=2.0).start()
    group.a.assign(Role.MASTER, limits=(HOUR._replace(expired_die=True),))
    group.subscribed("b", group="b", broadcast=True).lost()
    for _ in range(6):
        group.a.wait(7_500)  # its lease ends
        group.settle()
    for _ in range(5):
        group.client().produce("m")
        group.settle()
        hours_pass(group)
        group.wait(1_000)
    assert 1 <= group.a.log.state.next_sequence[dead_letter_subject("s", "b")] < 5
    assert not group.a.log.state.groups and not group.a.master.expired


def test_broadcast_with_expired_messages_is_not_forgotten():
    group = Group.made(lease_ms=7_200_000, tail_bytes=0, broadcast_forget_hours=1.0).start()
    group.a.assign(Role.MASTER, limits=(HOUR._replace(expired_die=True),))
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


def test_dead_letters_of_many_expired_messages_are_made_in_bounded_pieces(monkeypatch):
    monkeypatch.setattr(subject_limits, "EXPIRED_AT_ONCE", 3)
    group, client = started(HOUR._replace(expired_die=True))
    client.store(*(f"m{n}" for n in range(10)))
    hours_pass(group)
    held = group.progress
    assert held.position <= 3
    for _ in range(6):
        group.hear_clocks()
        group.wait(1_000)
    assert len(dead_letters(group)) == 10 and held.position == 10


def test_an_expired_message_frees_its_order_key():
    group, client = started(HOUR)
    messages = [Message("s", {}, id=f"m{n}", order_key="k") for n in range(2)]
    labels = [label_of_message(one) for one in messages]
    encoded = [encode_message(one, 0) for one in messages]
    group.client().produce_raw(encoded, after=encode_labels(labels), flags=label_flags(labels))
    group.settle()
    assert client.take() == ["m0"]
    begin = group.progress.consumers["c"].unacked[0].pull
    client.done(client.nack(begin, begin + 1, delay_ms=80_000_000))
    assert client.take() == []
    hours_pass(group)
    new = Message("s", {}, id="m2", order_key="k")
    label = [label_of_message(new)]
    group.client().produce_raw([encode_message(new, 0)], after=encode_labels(label), flags=label_flags(label))
    group.settle()
    assert group.a.master.expired == {KEY: 2} and client.take() == ["m2"]


def produce_keyed(group: Group, *ids: str) -> None:
    messages = [Message("s", {}, id=id, order_key="k") for id in ids]
    labels, encoded = [label_of_message(one) for one in messages], [encode_message(one, 0) for one in messages]
    group.client().produce_raw(encoded, after=encode_labels(labels), flags=label_flags(labels))
    group.settle()


def test_expired_message_behind_unacked_one_frees_its_key():
    group, client = started(HOUR)
    produce_keyed(group, "m0", "m1", "m2")
    assert client.take() == ["m0"], "the others wait behind it"
    hours_pass(group)
    assert group.a.master.expired == {KEY: 2}
    produce_keyed(group, "m3")
    assert client.take() == []
    begin = group.progress.consumers["c"].unacked[0].pull
    client.done(client.ack(begin, begin + 1))
    assert client.take() == ["m3"]


def test_message_back_from_the_pruner_waits_for_its_key():
    """A slave was missing, so no dead letter was stored, and then the operator ended the limit."""
    dying = HOUR._replace(expired_die=True)
    group, client = started(dying)
    produce_keyed(group, "m0")
    hours_pass(group)
    group.swap(2)  # a master ends the leases of all consumers in its log
    group.a.assign(Role.MASTER, 2, limits=(dying,))
    client = group.subscribed("c")
    produce_keyed(group, "m1")
    assert client.take() == ["m1"]
    produce_keyed(group, "m2", "m3")
    group.cut()
    hours_pass(group)
    state = group.progress
    assert state.consumers[subject_limits.PRUNER].unacked_messages == 2
    group.a.assign(Role.MASTER, 2)
    for _ in range(5):
        client.heartbeat()
        group.a.wait(1_800_000)
    group.settle()
    assert subject_limits.PRUNER not in state.consumers and state.requeued.messages == 2
    assert client.take() == [], "m1 is not done"
    begin = state.consumers["c"].unacked[0].pull
    for id in ("m2", "m3"):
        client.ack(begin, begin + 1)
        begin += 1
        group.settle()
        assert client.take() == [id]


def expire(group: Group, client: Client, *, subject: str = "s") -> int:
    consumer = group.a.log.state.groups[subject, "g"].consumers["c"]
    begin = consumer.unacked[0].pull
    entry = NackEntry(begin, begin + 1, 0, Verdict.EXPIRED)
    opaque = client.send(Command.NACK, commands.encode_nack(Nack(client.last_subscription, [entry], "expired")))
    group.settle()
    return opaque


def test_expiry_found_by_a_consumer_is_counted():
    group, client = started()
    client.store("m0", "m1")
    assert client.take() == ["m0", "m1"]
    client.body(expire(group, client))
    assert group.a.master.expired == {KEY: 1}
    log = group.a.log
    frames = decode_frames(log.stored.read_bytes(0, log.end), 0, NO_CHAIN)
    (said,) = [decode_progress(body) for frame, body in frames if frame.kind == FrameKind.ACK]
    assert [settled for _, _, settled in said.entries] == [EXPIRED], "the audit knows it from what was handled"
    assert group.progress.consumers["c"].unacked_messages == 1


def test_expiry_found_by_a_consumer_needs_no_slave():
    group, client = started()
    client.store("m0")
    assert client.take() == ["m0"]
    group.cut()
    assert client.code(expire(group, client)) == ErrorCode.SUCCESS
    assert not group.progress.consumers["c"].unacked_messages


def test_expiry_found_by_a_consumer_becomes_a_dead_letter():
    group, client = started(OperatorLimits("s", OF_SUBJECT, expired_die=True))
    client.store("m0")
    assert client.take() == ["m0"]
    client.body(expire(group, client))
    (dead,) = dead_letters(group)
    assert (dead.id, dead.properties["qmq_deadReason"]) == ("m0", "expired")


def test_of_a_mailbox_the_limits_are_those_of_its_subject():
    group, _ = started(OperatorLimits("s", OF_SUBJECT, expired_die=True))
    mailbox = retry_subject("s", "g")
    client = group.subscribed("c", subject=mailbox)
    client.store("m0", subject=mailbox)
    assert client.take() == ["m0"]
    client.body(expire(group, client, subject=mailbox))
    assert [one.id for one in dead_letters(group)] == ["m0"]


# Rates.


def messages_in(group: Group, client: Client, seconds: float, **terms) -> int:
    """Return the messages that a consumer with constant demand gets in this number of seconds."""
    got, opaque = 0, client.pull(timeout_ms=60_000, **terms)
    for _ in range(int(seconds * 10)):
        group.wait(100)
        while client.answered(opaque):
            got += len(client.pulled(opaque))
            opaque = client.pull(timeout_ms=60_000, **terms)
            group.settle()
    return got


@pytest.mark.parametrize("per_second", [1, 7, 100])
def test_rate_limits_messages_per_second(per_second):
    group, client = started(OperatorLimits("s", "g", per_second=per_second))
    for _ in range(12):
        client.produce(*(f"m{n}" for n in range(100)))
    group.settle()
    assert abs(messages_in(group, client, 10) - 10 * per_second) <= 1 + 0.2 * per_second
    assert Cause.RATE in group.a.master.causes.of(KEY)
    group.a.assign(Role.MASTER)
    group.settle()
    opaque = client.pull(timeout_ms=0, most=500)
    group.settle()
    assert client.answered(opaque)
    group.a.wait(3_000)
    assert Cause.RATE not in group.a.master.causes.of(KEY)


def test_consumers_of_a_limited_group_share_its_rate_and_other_groups_have_none():
    group, first = started(OperatorLimits("s", "g", per_second=10))
    second, other = group.subscribed("d"), group.subscribed("e", group="other")
    first.store(*(f"m{n}" for n in range(100)))
    assert len(other.take()) == 100
    got = [0, 0]
    waiting = [one.pull(timeout_ms=60_000, most=1) for one in (first, second)]
    for _ in range(50):
        group.wait(100)
        for at, one in enumerate((first, second)):
            while one.answered(waiting[at]):
                got[at] += 1
                waiting[at] = one.pull(timeout_ms=60_000, most=1)
                group.settle()
    assert 48 <= sum(got) <= 52 and min(got) > 15


def test_retry_subject_counts_towards_the_rate():
    group, client = started(OperatorLimits("s", "g", per_second=10))
    mailbox = retry_subject("s", "g")
    again = group.subscribed("c", subject=mailbox)
    client.store(*(f"m{n}" for n in range(100)), subject=mailbox)
    assert 48 <= messages_in(group, again, 5) <= 52


def test_a_master_remembers_limits_for_a_start_without_the_metaserver():
    limits = (HOUR, OperatorLimits("s", "g", per_second=7))
    assigned = Assignment("g1", 1, Role.MASTER, limits=limits)
    assert Assignment.from_json(assigned.to_json()) == assigned
    fields = assigned.to_json()
    del fields["limits"]
    assert Assignment.from_json(fields).limits == ()


# Length.

TEN = OperatorLimits("s", OF_SUBJECT, messages_max=10)


def test_producers_are_refused_while_as_many_messages_wait_for_a_group_as_may():
    group, client = started(TEN)
    producer = group.client()
    stored = producer.produce(*(f"m{n}" for n in range(10)))
    group.settle()
    refused, other = producer.produce("m10"), producer.produce("n0", subject="t")
    group.settle()
    assert producer.receipt(stored).stored == 10 and producer.receipt(other).stored == 1
    assert producer.code(refused) == ErrorCode.SUBJECT_FULL
    assert "10 messages of s wait for g at g1" in producer.text(refused)
    assert len(client.take(most=1)) == 1
    assert producer.store("m11").stored == 1, "what a consumer has does not wait"


@pytest.mark.parametrize("limit", ["messages_max", "bytes_max"])
def test_a_refusal_of_a_full_subject_names_its_limit_and_the_subject(limit):
    """It left nothing on the broker: no count, no log line, no finding."""
    group, _ = started(OperatorLimits("s", OF_SUBJECT, **{limit: 10}))
    producer, refusals = group.client(), []
    producer.link.refuse = lambda request, error: refusals.append((error.limit, error.limited_subject))
    producer.store(*(f"m{n}" for n in range(10)))
    producer.produce("more")
    assert refusals == [({"messages_max": "messagesMax", "bytes_max": "bytesMax"}[limit], "s")]


def test_internal_producers_are_never_refused():
    group, _ = started(TEN)
    delay_server = group.client()
    delay_server.link.sends_on = True
    opaques = [delay_server.produce(*(f"m{n}-{k}" for n in range(8))) for k in range(3)]
    group.settle()
    assert [delay_server.receipt(one).stored for one in opaques] == [8, 8, 8]


def test_absent_broadcast_refuses_no_producer():
    group, client = started(TEN)
    group.subscribed("b", group="b", broadcast=True).lost()
    producer = group.client()
    for k in range(3):
        stored = producer.produce(*(f"m{n}-{k}" for n in range(8)))
        group.settle()
        assert producer.receipt(stored).stored == 8 and len(client.take()) == 8


def test_of_too_many_the_oldest_are_given_up_for_each_group_by_itself_and_counted():
    group, client = started(TEN._replace(drops_oldest=True))
    client.store(*(f"m{n}" for n in range(8)))
    assert len(client.take(most=3)) == 3
    begin = group.progress.consumers["c"].unacked[0].pull
    client.nack(begin, begin + 2)
    group.subscribed("e", group="other").lost()
    client.store(*(f"m{n}" for n in range(8, 15)))
    group.wait(1_000)
    assert group.a.master.overflowed == {KEY: 2 + 2, ("s", "other"): 5}
    assert client.take() == [f"m{n}" for n in range(5, 15)]
    assert group.progress == group.b.log.state.groups[KEY]
    assert not group.a.master.expired


def test_a_message_that_waits_for_its_retry_is_not_given_up_when_many_others_went_past_it():
    group, client = started(TEN._replace(drops_oldest=True))
    client.store("m0")
    assert client.take() == ["m0"]
    begin = group.progress.consumers["c"].unacked[0].pull
    client.nack(begin, begin + 1, delay_ms=60_000)
    for k in range(4):
        client.store(*(f"n{k}{n}" for n in range(5)))
        assert len(client.take()) == 5
    group.wait(1_000)
    state = group.progress
    assert state.requeued.messages == 1 and not group.a.master.overflowed, "one of the ten that may wait does"


def test_requeued_ranges_overflow_before_new_messages(monkeypatch):
    monkeypatch.setattr(subject_limits, "RANGES_AT_ONCE", 1)
    group, client = started(TEN._replace(drops_oldest=True))
    client.store(*(f"m{n}" for n in range(8)))
    assert len(client.take(most=3)) == 3
    begin = group.progress.consumers["c"].unacked[0].pull
    client.nack(begin, begin + 1)
    client.nack(begin + 2, begin + 3)
    client.store(*(f"m{n}" for n in range(8, 15)))
    seen = []
    for _ in range(3):
        group.wait(1_000)
        seen.append((group.a.master.overflowed[KEY], group.progress.position))
    assert seen == [(1, 3), (4, 5), (4, 5)], "a second later it goes on"


def test_damage_found_while_counting_bytes_is_reported():
    """Until the repair, uncounted messages count as zero."""
    problem, found = CorruptFrame(88, "test"), []

    def fails(*_):
        raise problem

    message_log = SimpleNamespace(state=State(next_sequence={"s": 9}), frames=fails)
    mastership = SimpleNamespace(log=message_log, found_damage=found.append)
    made = SubjectLimits(mastership, None, None, lambda subject: None)
    assert made._gone("s", LogGroup(3)) == made._bytes(KEY, LogGroup(3)) == made._covering("s", [(3, 6)], 100) == 0
    assert found == [problem] * 3
    made._lengths = SimpleNamespace(new_tick=fails)
    made.tick(0)
    assert found == [problem] * 4
