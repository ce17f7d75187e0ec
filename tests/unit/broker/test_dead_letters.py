"""Core. Dead letters: stored once, on both copies, with the original acked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qmq.broker import dead_letters as module
from qmq.broker import positions, service_queue
from qmq.codec import (
    decode_message,
    encode_labels,
    encode_message,
    join_batch,
    label_of_message,
    split_batch,
    with_properties,
)
from qmq.dead_letters import REDRIVER
from qmq.errors import CorruptFrame, DiskFailed, ErrorCode
from qmq.log.fold import BATCHES_PER_PRODUCER
from qmq.log.frame import FLAG_DEAD, FLAG_ORDERED, FrameKind, decode_frames, label_flags
from qmq.log.group import Consumer as LogConsumer
from qmq.log.progress_frame import DEAD as DONE_AS_DEAD
from qmq.log.progress_frame import decode_progress
from qmq.message import Message
from qmq.operator_limits import OperatorLimits
from qmq.redrive.redriving import Choice
from qmq.remoting import commands
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.selecting import Consumer, Sent, produce
from tests.unit.broker.world import Broker, Client, Group

DEAD = dead_letter_subject("s", "g")
CHOSEN = (OperatorLimits("s", "g", dead_letters_to="t"),)


def a_group(*ids: str, deliveries_max: int = 0, subject: str = "s", **settings) -> tuple[Group, Client, int]:
    """Group whose consumer has these messages unacked, in one batch; returns the first pull sequence."""
    group = Group.made(**settings).start()
    client = group.client()
    client.produce(*ids, subject=subject)
    client.join(subject=subject, deliveries_max=deliveries_max)
    opaque = client.pull()
    group.settle()
    return group, client, client.pulled(opaque)[0][0]


def dead_letters(broker: Broker, subject: str = DEAD) -> list[Message]:
    refs = broker.log.frames(subject, 0, 1_000)
    assert all(ref.end == ref.begin + 1 for ref in refs)
    bodies = [bytes(body) for _, body in broker.log.stored.read_bodies(refs)]
    return [decode_message(body[8 : 8 + int.from_bytes(body[4:8], "little")]) for body in bodies]


def unacked(group: Group) -> list[list[int]]:
    return group.a.log.state.groups["s", "g"].consumers["c1"].unacked


def test_dead_letter_carries_its_fate():
    group, client, first = a_group("m0", "m1", "m2")
    assert (
        commands.decode_acked(
            memoryview(client.done(client.nack(first + 1, first + 2, dead=True, reason="no such order")))
        )
        == first
    )
    (dead,) = dead_letters(group.a)
    assert dead.id == "m1" and dead.subject == "s"
    assert dict(dead.properties) == {"qmq_times": "1", "qmq_deadReason": "no such order", "qmq_deadSequence": "1"}
    assert dead_letters(group.b)[0].id == "m1", "on both copies"
    assert [(one.first, one.count) for one in unacked(group)] == [(0, 1), (2, 1)]
    assert group.a.counters.dead_letters == {("s", "g"): 1}
    told = {one.subject: one.dead_letters for one in positions.of_groups(group.a.log, ())}
    assert told["s"] == 1 and sum(told.values()) == 1
    frames = decode_frames(group.a.log.stored.read(0, group.a.log.end, 1 << 30).data, 0, 0)
    acked = [decode_progress(body) for frame, body in frames if frame.kind == FrameKind.ACK]
    assert acked[-1].entries == ((first + 1, first + 2, DONE_AS_DEAD),), "the audit misses it if it is gone"


def test_dead_letters_are_counted_for_the_subject_that_they_are_of_and_for_no_derived_one():
    group, client, first = a_group("m0")
    client.nack(first, first + 1, dead=True)
    for subject in (retry_subject("s", "g"), DEAD):
        group.subscribed("c1", subject=subject)
    assert {one.subject: one.dead_letters for one in positions.of_groups(group.a.log, ())} == {
        "s": 1,
        retry_subject("s", "g"): 0,
        DEAD: 0,
    }


def test_dead_letters_in_a_chosen_subject_that_retention_took_are_not_counted():
    group, client, first = a_group("m0", "m1")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    client.done(client.nack(first, first + 2, dead=True))
    assert counted(group) == 2
    one, other = group.a.log.frames("t", 0, 2)
    assert one.offset + one.length == other.offset
    group.a.log.state.kept.start = other.offset
    assert counted(group) == 1


def counted(group: Group) -> int:
    return sum(one.dead_letters for one in positions.of_groups(group.a.log, (), subject="s"))


def test_dead_letters_in_a_chosen_subject_are_counted_with_those_in_the_groups_own():
    group, client, first = a_group("m0", "m1", "m2")
    client.produce("another's", subject="t")
    client.done(client.nack(first, first + 1, dead=True))
    group.a.assign(Role.MASTER, limits=CHOSEN)
    client.done(client.nack(first + 1, first + 2, dead=True))
    assert len(dead_letters(group.a)) == len(dead_letters(group.a, "t")) - 1 == 1
    assert counted(group) == 2, "one in each, and not what others sent there"
    group.a.assign(Role.MASTER)
    client.done(client.nack(first + 2, first + 3, dead=True))
    assert counted(group) == 3, "also after it was chosen no more"


def test_dead_letters_that_were_given_back_are_not_counted_any_more():
    """Otherwise a redrive would seem to have no effect."""
    group, client, first = a_group("m0", "m1", "m2")
    client.done(client.nack(first, first + 3, dead=True))
    assert counted(group) == 3
    redriver = group.client(REDRIVER)
    subscription = redriver.join("r", subject=DEAD, group=REDRIVER, start="earliest")
    redriver.take(subscription)
    held = redriver.first
    assert counted(group) == 3, "it has them, and may give none back"
    redriver.done(redriver.ack(held + 1, held + 2, subscription))
    assert counted(group) == 2


@pytest.mark.parametrize(("acked", "gone", "left"), [((), 0, 3), ((), 2, 1), ((1,), 1, 1), ((0,), 2, 1), ((2,), 1, 1)])
def test_dead_letters_that_retention_took_are_not_counted(acked, gone, left):
    group, client, first = a_group("m0", "m1", "m2")
    client.done(client.nack(first, first + 3, dead=True))
    if acked:
        redriver = group.subscribed("r", subject=DEAD, group=REDRIVER)
        redriver.take()
        held = redriver.first
        for one in acked:
            redriver.ack(held + one, held + one + 1)
        group.settle()
    if gone:
        group.a.log.state.kept.start = group.a.log.frames(DEAD, gone, 1)[0].offset
    assert counted(group) == left


def test_dead_letters_of_a_range_from_disk_come_in_order():
    group, client, first = a_group(*[f"m{i}" for i in range(10)], tail_bytes=0)
    client.store("n0", "n1")
    client.pull()
    group.settle()
    client.done(client.nack(first + 3, first + 12, dead=True))
    assert [dead.id for dead in dead_letters(group.a)] == [*[f"m{i}" for i in range(3, 10)], "n0", "n1"]
    assert [(one.first, one.count) for one in unacked(group)] == [(0, 3)]


def test_dead_letter_is_consumed_as_any_message_and_does_not_die_again():
    group, client, first = a_group("m0")
    client.nack(first, first + 1, dead=True)
    people = group.client("people")
    subscription = people.join("c9", subject=DEAD, group="people", deliveries_max=1)
    for times in (1, 2, 3):
        opaque = people.pull(subscription)
        group.settle()
        assert people.times(opaque) == [times], "there is no limit"
        number = people.pulled(opaque)[0][0]
        refused = people.nack(number, number + 1, dead=True)
        people.done(people.nack(number, number + 1))
        assert people.code(refused) == ErrorCode.INVALID_REQUEST


def test_waiting_pull_on_the_dead_letters_wakes_at_once():
    group, client, first = a_group("m0")
    people = group.subscribed("c9", subject=DEAD, group="people")
    waiting = people.pull(timeout_ms=60_000)
    client.done(client.nack(first, first + 1, dead=True))
    assert people.ids(waiting) == ["m0"]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_message_that_is_only_ever_abandoned_becomes_a_dead_letter_after_its_last_delivery(limit):
    """QMQ delivers a message whose consumers crash for ever."""
    group, client, _ = a_group("poison", "m1", deliveries_max=limit)
    for times in range(2, limit + 1):
        opaque = client.subscribe(deliveries_max=limit)  # a new process under the same name
        group.settle()
        opaque = client.pull(client.subscription(opaque))
        group.settle()
        assert client.times(opaque) == [times, times] and not dead_letters(group.a)
    opaque = client.pull(client.join(deliveries_max=limit), timeout_ms=1_000)
    group.settle()
    assert not client.answered(opaque)
    assert [dead.id for dead in dead_letters(group.a)] == ["poison", "m1"]
    assert dead_letters(group.a)[0]["qmq_times"] == str(limit + 1)
    assert not unacked(group)


@pytest.mark.parametrize("limit", [1, 3])
def test_answers_that_never_left_do_not_make_dead_letters(limit):
    """A consumer that reconnects again and again while a damaged copy cannot be read gets nothing."""
    group, client, _ = a_group("m0", deliveries_max=limit)
    for _ in range(10):
        opaque = client.pull(client.join(deliveries_max=limit, is_new=False))
        group.settle()
        assert client.times(opaque) == [1]
    assert not dead_letters(group.a)


def test_dead_letters_of_the_mailbox_lie_beside_the_others():
    mailbox = retry_subject("s", "g")
    group, client, first = a_group("m0", subject=mailbox)
    client.done(client.nack(first, first + 1, dead=True))
    assert [dead.id for dead in dead_letters(group.a)] == ["m0"], "names are never nested"


@pytest.mark.parametrize("limits", [(), CHOSEN], ids=["its own subject", "not a chosen one"])
def test_message_that_cannot_be_decoded_is_kept_as_it_came(monkeypatch, limits):
    """Producers cannot send one; if one is in a log all the same, consumers must be able to settle it."""
    group, client, _ = a_group("m0")
    broken = b"\0" * 40
    monkeypatch.setattr("qmq.server.batch_check.are_usual", lambda *batch: True)
    client.done(client.produce_raw([broken]))
    (piece,) = commands.decode_pulled(memoryview(client.done(client.pull())))
    group.a.assign(Role.MASTER, limits=limits)
    client.done(client.nack(piece.pull_sequence, piece.pull_sequence + 1, dead=True))
    data = group.a.log.stored.read(0, group.a.log.end, 1 << 30).data
    ((frame, body),) = [(frame, body) for frame, body in decode_frames(data, 0, 0) if frame.subject == DEAD]
    assert bytes(body[8:48]) == broken and frame.flags == 0


def test_dead_letters_need_the_slave():
    """P3: nothing new is stored on one copy."""
    group, client, first = a_group("m0")
    group.cut()
    assert client.outcome(client.nack(first, first + 1, dead=True)) == ErrorCode.NOT_SERVED
    assert not dead_letters(group.a) and unacked(group)


def test_burial_that_the_slave_s_absence_stopped_goes_on_when_it_is_back():
    group, client, first = a_group("m0", tail_bytes=0)
    client.produce("n0")  # m0 must be read from disk
    group.settle()
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    opaque = client.nack(first, first + 1, dead=True)
    group.settle()
    group.cut()
    group.a.host.do_read = read
    group.settle()
    assert not client.answered(opaque) and not dead_letters(group.a)
    group.connect()
    group.settle()
    group.wait(1)
    assert client.body(opaque) and [dead.id for dead in dead_letters(group.a)] == ["m0"]


def test_message_that_is_acked_while_it_is_read_does_not_die():
    group, client, first = a_group("m0", "m1", tail_bytes=0)
    client.store("n0")
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    opaque = client.nack(first, first + 2, dead=True)
    client.done(client.ack_ranges((first, first + 1)))
    group.a.host.do_read = read
    group.settle()
    assert client.body(opaque)
    assert [dead.id for dead in dead_letters(group.a)] == ["m1"]


@pytest.mark.parametrize("was_stored", [False, True], ids=["before the copy", "between copy and ack"])
def test_process_that_ends_in_between_stores_a_dead_letter_once(was_stored):
    group, client, first = a_group("m0")
    if was_stored:
        group.a.master._delivery.serving.dead_letters._settle = lambda burial, *_: burial.ranges.clear()
        client.done(client.nack(first, first + 1, dead=True))
        assert unacked(group) and len(dead_letters(group.a)) == 1
    group.swap(2)
    again = group.subscribed(held_end=first + 1)
    assert again.done(again.nack(first, first + 1, dead=True))
    assert [dead.id for dead in dead_letters(group.a)] == ["m0"]
    assert not group.a.log.state.groups["s", "g"].consumers["c1"].unacked


@pytest.mark.parametrize("limits", [(), CHOSEN], ids=["its own subject", "a chosen one"])
def test_copies_whose_ack_is_missing_are_recognized_also_when_later_messages_died_before_them(limits):
    dead = "t" if limits else DEAD
    group, client, first = a_group(*[f"m{number}" for number in range(100)], segment_bytes=1 << 20)
    group.a.assign(Role.MASTER, limits=limits)
    client.done(client.nack(first + 10, first + 100, dead=True))
    group.a.master._delivery.serving.dead_letters._settle = lambda burial, *_: burial.ranges.clear()
    client.done(client.nack(first, first + 10, dead=True))
    assert len(dead_letters(group.a, dead)) == 100 and sum(one.count for one in unacked(group)) == 10
    group.swap(2)
    group.a.assign(Role.MASTER, 2, limits=limits)
    again = group.subscribed(held_end=first + 100)
    again.done(again.nack(first, first + 10, dead=True))
    assert sorted(one.id for one in dead_letters(group.a, dead)) == sorted(f"m{number}" for number in range(100))
    assert not unacked(group)


def a_group_that_loses_acks(dead):
    """Its first messages died without an ack; another consumer has more than a producer's window holds."""
    group, client, first = a_group(*[f"m{number}" for number in range(dead)], segment_bytes=1 << 20)
    group.client("other").produce(*[f"n{number}" for number in range(BATCHES_PER_PRODUCER + 1)])
    other = group.subscribed("c2")
    other.take()
    others_first = other.first
    group.a.master._delivery.serving.dead_letters._settle = lambda burial, *_: burial.ranges.clear()
    client.done(client.nack(first, first + dead, dead=True))
    return group, first, others_first


@pytest.mark.parametrize("masterships", [2, 3], ids=["asked for then", "asked for by the next mastership only"])
def test_copies_whose_ack_is_missing_are_recognized_behind_more_dead_letters_than_a_producer_s_window_has(masterships):
    group, first, others_first = a_group_that_loses_acks(10)
    assert len(dead_letters(group.a)) == 10
    group.swap(2)
    for consumer, begin, count in (("c2", others_first, BATCHES_PER_PRODUCER + 1), ("c1", first, 10)):
        if consumer == "c1" and masterships == 3:
            group.swap(3)
        again = group.subscribed(consumer, held_end=begin + count)
        again.done(again.nack(begin, begin + count, dead=True))
        assert not group.a.log.state.groups["s", "g"].consumers[consumer].unacked
    died = [one.id for one in dead_letters(group.a)]
    assert len(died) == len(set(died)) == 10 + BATCHES_PER_PRODUCER + 1


def test_a_copy_whose_ack_is_missing_is_recognized_when_its_message_was_given_back_and_dies_much_later():
    group, first, others_first = a_group_that_loses_acks(1)
    group.swap(2)
    client = group.subscribed("c1", held_end=first + 1)
    client.nack(first, first + 1)
    again = group.subscribed("c2", held_end=others_first + BATCHES_PER_PRODUCER + 1)
    again.nack(others_first, others_first + BATCHES_PER_PRODUCER + 1, dead=True)
    opaque = client.pull()
    group.settle()
    ((number, _, id),) = client.pulled(opaque)
    client.done(client.nack(number, number + 1, dead=True))
    assert id == "m0" and not any(one.unacked for one in group.a.log.state.groups["s", "g"].consumers.values())
    assert [one.id for one in dead_letters(group.a)].count("m0") == 1


def test_next_master_finishes_dead_letters():
    """Its consumer has later messages: nothing else would request the dead one."""
    group, client, first = a_group("m0", deliveries_max=1, tail_bytes=0)
    client.done(client.nack(first, first + 1))
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    client.store("m1")
    client.pull(timeout_ms=60_000)  # m0 dies instead, once it is read
    group.settle()
    held_end = group.a.log.state.groups["s", "g"].consumers["c1"].next_pull
    group.swap(2)
    again = group.client()
    assert again.done(again.subscribe(held_end=held_end, deliveries_max=1)) and [
        dead.id for dead in dead_letters(group.a)
    ] == ["m0"]
    assert read


def test_burial_under_way_ends_with_the_mastership():
    """A former master writes nothing."""
    group, client, first = a_group("m0", tail_bytes=0)
    client.store("n0")
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    opaque = client.nack(first, first + 1, dead=True)
    group.settle()
    group.swap(2)
    end = group.b.log.end
    group.b.host.do_read = read
    group.settle()
    assert client.code(opaque) == ErrorCode.NOT_MASTER
    assert group.a.log.end == group.b.log.end == end and not dead_letters(group.b)


def test_dead_letters_go_to_the_chosen_subject():
    group, client, first = a_group("m0", "m1", "m2")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    client.done(client.nack(first + 1, first + 2, dead=True, reason="no such order"))
    (dead,) = dead_letters(group.a, "t")
    assert (dead.id, dead.subject) == ("m1", "s") and not dead_letters(group.a)
    fate = {"qmq_times": "1", "qmq_deadReason": "no such order", "qmq_deadSequence": "1"}
    assert dict(dead.properties) == fate | {"qmq_deadSubject": "s", "qmq_deadGroup": "g"}
    assert dead_letters(group.b, "t")[0].id == "m1", "on both copies"
    assert group.a.counters.dead_letters == {("s", "g"): 1}, "alerts look at that, wherever it went"
    assert [(one.first, one.count) for one in unacked(group)] == [(0, 1), (2, 1)]
    group.a.assign(Role.MASTER, limits=())
    client.done(client.nack(first, first + 1, dead=True))
    assert [one.id for one in dead_letters(group.a)] == ["m0"], "from then on, those that die go to their own subject"


def test_those_of_the_retry_subject_go_there_and_those_of_another_group_do_not():
    group, client, first = a_group("m0", subject=retry_subject("s", "g"))
    group.a.assign(Role.MASTER, limits=CHOSEN)
    client.done(client.nack(first, first + 1, dead=True))
    assert [one.id for one in dead_letters(group.a, "t")] == ["m0"]
    client.produce("m1")
    other = group.subscribed("c9", group="h")
    other.take()
    number = other.first
    other.done(other.nack(number, number + 1, dead=True))
    assert [one.id for one in dead_letters(group.a, dead_letter_subject("s", "h"))] == ["m1"]


def test_consumers_of_the_chosen_subject_wake_are_limited_and_find_tags_and_order_keys():
    group, client, first = a_group("m0")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    one = Message("s", {"x": "1"}, id="tagged", tags=["vip"], order_key="k", expires_after=60)
    label = label_of_message(one)
    client.done(client.produce_raw([encode_message(one, 0)], after=encode_labels([label]), flags=label_flags([label])))
    client.take()
    tagged = client.first
    people = group.subscribed("c9", subject="t", group="people", tags=["vip"], deliveries_max=1)
    waiting = people.pull(timeout_ms=60_000)
    client.nack(first, first + 1, dead=True)
    client.done(client.nack(tagged, tagged + 1, dead=True))
    assert people.ids(waiting) == ["tagged"], "those without the tag are passed over"
    dead = dead_letters(group.a, "t")[1]
    assert dead.expires_after is None, "or it would expire before anybody has looked at it"
    frames = list(decode_frames(group.a.log.stored.read(0, group.a.log.end, 1 << 30).data, 0, 0))
    body = next(bytes(body) for frame, body in frames if frame.subject == "t" and frame.kind == FrameKind.MESSAGES)
    assert body == join_batch(list(split_batch(body, 1))), "without a label it has no labels"
    flags = [frame.flags for frame, _ in frames if frame.kind == FrameKind.MESSAGES and frame.subject == "t"]
    assert flags == [FLAG_DEAD, FLAG_DEAD | label_flags([label])] and flags[1] & FLAG_ORDERED
    number = people.pulled(waiting)[0][0]
    people.done(people.nack(number, number + 1, dead=True))
    assert [one.id for one in dead_letters(group.a, dead_letter_subject("t", "people"))] == ["tagged"]


def test_redrive_takes_only_letters_of_the_group():
    """Any producer of the subject could write such properties; only a broker marks its frames."""
    group, client, first = a_group("m0")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    forged = encode_message(Message("s", id="forged"), 0)
    client.produce_raw([with_properties(forged, {"qmq_deadSubject": "s", "qmq_deadGroup": "g"})], subject="t")
    client.nack(first, first + 1, dead=True)
    people = group.subscribed("c9", subject="t", group="people")
    pieces = list(commands.decode_pulled(memoryview(people.done(people.pull()))))

    def chosen(whose):
        return [one.id for one in Choice(whose=whose).of("g1", pieces, (0, 1 << 62))]

    assert chosen(("s", "g")) == ["m0"] and chosen(("s", "h")) == chosen(("other", "g")) == []
    (back,) = Choice(whose=("s", "g")).of("g1", pieces, (0, 1 << 62))
    assert not decode_message(back.data).properties


def test_returning_consumer_with_lower_limit_gets_dead_letters():
    group = Group.made().start()
    produce(group.client(), [Sent(), Sent()], first=0)
    group.settle()
    consumer = Consumer(group, "c1")
    assert consumer.sequences(1) == [0]
    consumer.nack(0)
    assert consumer.sequences(1) == [0]
    consumer.client.lost()
    consumer.held.clear()
    consumer.terms["deliveries_max"] = 1
    consumer.join()
    assert consumer.sequences() == [1]
    assert group.a.log.state.next_sequence["%DEAD_RETRY%s%g"] == 1


def test_messages_before_a_pending_dead_letter_are_redelivered():
    group, client, first = a_group("m0", "m1", "m2")
    client.done(client.nack(first + 2, first + 3))
    client.pull()
    group.settle()
    group.cut()  # nothing dies without the slave
    again = group.client("again")
    opaque = again.subscribe(deliveries_max=1, is_new=False)
    group.a.host.settle()
    again.subscription(opaque)
    got = [again.pull(most=1) for _ in range(3)]
    group.a.host.settle()
    assert [again.pulled(opaque)[0][2] for opaque in got[:2]] == ["m0", "m1"]
    assert again.code(got[2]) == ErrorCode.NO_MESSAGE and len(unacked(group)) == 2


def test_a_pull_that_has_enough_lets_nothing_die_that_lies_behind():
    group, client, first = a_group("m0", "m1", "m2", deliveries_max=2)
    client.done(client.nack(first + 2, first + 3))
    opaque = client.pull()
    group.settle()
    client.nack(client.pulled(opaque)[0][0], client.pulled(opaque)[0][0] + 1)
    client.done(client.nack(first, first + 2))
    assert client.take(most=2) == ["m0", "m1"] and not dead_letters(group.a)
    client.pull(most=2)
    group.settle()
    assert [one.id for one in dead_letters(group.a)] == ["m2"]


def in_frames_of_their_own(count: int, **settings) -> tuple[Group, Client, int]:
    """Group whose consumer has this number of messages, each in its own frame, none of them in the log's tail."""
    group = Group.made(**{"tail_bytes": 0, "segment_bytes": 1024} | settings).start()
    client = group.client()
    for number in range(count):
        client.store(f"m{number}")
    client.produce("last", subject="t")
    client.join()
    opaque = client.pull()
    group.settle()
    assert len(client.pulled(opaque)) == count
    return group, client, client.pulled(opaque)[0][0]


@pytest.mark.parametrize("is_all", [False, True], ids=["the first ones", "all of them"])
def test_deleted_messages_are_counted_the_rest_dies(is_all):
    group, client, first = in_frames_of_their_own(12)
    while len(group.a.log.bases) > 2:
        group.a.drop_oldest_segment()
    gone = group.a.log.frames("s", 0, 1)[0].begin
    assert 1 < gone < 11
    end = gone if is_all else 12
    client.ack(first, first + 1)
    assert commands.decode_acked(memoryview(client.done(client.nack(first + 1, first + end, dead=True)))) == first + end
    assert [settled for _, _, settled in acked(group)[:2]] == [0, 0], "no dead letter of it is said to be stored"
    assert [one.id for one in dead_letters(group.b)] == [f"m{number}" for number in range(gone, end)]
    assert group.a.master.skipped == {("s", "g"): gone - 1}
    assert sum(one.count for one in unacked(group)) == 12 - end


def acked(group: Group, consumer: str = "c1") -> list[tuple[int, int, int]]:
    """Return the entries of a consumer's ack frames."""
    log, found, at = group.b.log, [], 0
    while at < log.end:
        data = log.stored.read(at, log.end, 1 << 30).data
        for frame, body in decode_frames(data, at, None):
            if frame.kind == FrameKind.ACK and (said := decode_progress(body)).consumer == consumer:
                assert said.entries, "an ack of nothing"
                found += said.entries
        at += len(data)
    return found


def test_a_frame_is_read_once_for_all_that_dies_of_it():
    group, client, first = a_group(*[f"m{number}" for number in range(9)], tail_bytes=0)
    client.store("n0")
    readings, read = [], group.a.log.stored.read_bodies
    group.a.log.stored.read_bodies = lambda refs: readings.append([ref.begin for ref in refs]) or read(refs)
    make_dead(group, "c1", *range(first, first + 9, 2))
    group.settle()
    assert readings == [[0]] and [one.id for one in dead_letters(group.a)] == ["m0", "m2", "m4", "m6", "m8"]


def test_frames_are_read_for_dead_letters_up_to_a_number_of_bytes_but_one_at_least(monkeypatch):
    group, client, first = in_frames_of_their_own(6)
    sizes = [ref.length for ref in group.a.log.frames("s", 0, 9)]
    readings, read = [], group.a.log.stored.read_bodies
    group.a.log.stored.read_bodies = lambda refs: readings.append([ref.begin for ref in refs]) or read(refs)
    monkeypatch.setattr(module, "READ_BYTES", sum(sizes[:2]))
    client.done(client.nack(first, first + 4, dead=True))
    monkeypatch.setattr(module, "READ_BYTES", 1)
    client.done(client.nack(first + 4, first + 6, dead=True))
    assert readings == [[0, 1], [2, 3], [4], [5]] and len(dead_letters(group.a)) == 6


def test_as_many_frames_are_read_at_once_as_may_and_none_behind_the_last_message(monkeypatch):
    group, client, first = in_frames_of_their_own(6)
    readings, read = [], group.a.log.stored.read_bodies
    group.a.log.stored.read_bodies = lambda refs: readings.append([ref.begin for ref in refs]) or read(refs)
    monkeypatch.setattr(module, "READ_FRAMES", 3)
    client.done(client.nack(first, first + 5, dead=True))
    assert readings == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("where", ["frame", "index"])
def test_giving_up_damaged_messages_is_refused_once(monkeypatch, where):
    group, client, first = in_frames_of_their_own(4)
    (ref,) = group.a.log.frames("s", 1, 1)
    base = max(base for base in group.a.log.bases if base <= ref.offset)
    group.a.disk.flip(f"log/{base:020d}.log", 8 * (ref.offset - base + ref.length - 1))
    if where == "index":
        monkeypatch.setattr(group.a.log, "frames", lambda *_: raises(CorruptFrame(ref.offset, "test")))
    opaque = client.nack(first, first + 4, dead=True)
    group.settle()
    assert client.code(opaque) == ErrorCode.NOT_SERVED and "is being repaired" in client.text(opaque)
    assert not dead_letters(group.b) and sum(one.count for one in unacked(group)) == 4
    assert "corrupt" in group.a.node.readonly_reasons and not waiting(group)


def raises(error: Exception) -> None:
    raise error


def waiting(group: Group) -> list:
    return list(group.a.master._delivery.serving.dead_letters._jobs)


def stopped(group: Group) -> Callable[[], None]:
    """Block reads; call the returned function to continue."""
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    return lambda: setattr(group.a.host, "do_read", read)


def test_former_master_drops_failed_dead_letter_reads():
    group, client, first = in_frames_of_their_own(2)
    go_on = stopped(group)
    opaque = client.nack(first, first + 1, dead=True)
    group.settle()
    *_, (_, done) = group.a.host.reads
    group.swap(2)
    done(CorruptFrame(88, "test"))
    done(DiskFailed("test"))
    assert client.code(opaque) == ErrorCode.NOT_MASTER and not group.b.node.readonly_reasons
    go_on()
    group.settle()
    assert not dead_letters(group.a)


def test_a_disk_that_fails_while_messages_die_is_the_process_s_end():
    group, client, first = in_frames_of_their_own(2)
    stopped(group)
    client.nack(first, first + 1, dead=True)
    group.settle()
    *_, (_, done) = group.a.host.reads
    with pytest.raises(DiskFailed):
        done(DiskFailed("test"))


def test_partly_cached_messages_die_in_order():
    group, client, first = in_frames_of_their_own(12)
    refs = group.a.log.frames("s", 5, 12)
    group.a.log.tail_body = {found[0].offset: found for found in group.a.log.stored.read_bodies(refs)}.get
    client.done(client.nack(first, first + 12, dead=True))
    assert [one.id for one in dead_letters(group.a)] == [f"m{number}" for number in range(12)]


def make_dead(group: Group, consumer: str, *pulls: int, answer=None) -> None:
    """Make dead letters of the consumer's messages; without `answer`, as the broker does by itself."""
    ranges = [(one, one + 1) for one in pulls]
    group.a.master._delivery.serving.dead_letters.make_dead(("s", "g", consumer), ranges, "test", answer)


def test_postponed_dead_letters_are_kept_once():
    group, client, first = a_group("m0", "m1", "m2", "m3")
    client.produce("n0")
    other = group.subscribed("c2")
    other.take()
    theirs = other.first
    group.cut()
    said = []
    make_dead(group, "c1", first + 2, answer=said.append)
    make_dead(group, "c1", first)
    make_dead(group, "c1", first, first + 1)
    make_dead(group, "c2", theirs)
    make_dead(group, "c1", first + 1, first + 3)
    assert [list(one.ranges) for one in waiting(group)] == [
        [(first + 2, first + 3)],
        [(at, at + 1) for at in (first, first + 1, first + 3)],
        [(theirs, theirs + 1)],
    ]
    assert not said and not dead_letters(group.a)
    group.connect()
    group.settle()
    group.wait(100)
    assert said == [None] and [one.id for one in dead_letters(group.a)] == ["m2", "m0", "m1", "m3", "n0"]
    assert not waiting(group) and not unacked(group)


def test_settled_messages_do_not_die_in_later_passes(monkeypatch):
    monkeypatch.setattr(service_queue, "COPIES_PER_PASS", 4)
    group, client, first = a_group(*[f"m{number}" for number in range(16)])
    group.cut()
    make_dead(group, "c1", *range(first, first + 16))
    client.ack_ranges((first, first + 3), (first + 4, first + 14))
    group.connect()
    group.settle()
    group.a.node.tick()
    assert group.a.counters.dead_letters.total() == 1, "to find that out counts as much as to store one"
    group.settle()
    assert [one.id for one in dead_letters(group.a)] == ["m3", "m14", "m15"]
    assert not waiting(group) and not unacked(group)


def test_one_copy_a_pass_is_enough_to_get_on(monkeypatch):
    monkeypatch.setattr(service_queue, "COPIES_PER_PASS", 1)
    group, client, first = a_group("m0", "m1", "m2")
    assert client.done(client.nack(first, first + 3, dead=True)) and [one.id for one in dead_letters(group.a)] == [
        "m0",
        "m1",
        "m2",
    ]


def test_dead_letters_waiting_for_repair_are_not_reread():
    group, client, first = in_frames_of_their_own(4)
    client.produce("n0")
    other = group.subscribed("c2")
    other.take()
    theirs = other.first
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.disk.flip(f"log/{0:020d}.log", 8 * (ref.offset + ref.length - 1))
    readings, read = [], group.a.log.stored.read_bodies
    group.a.log.stored.read_bodies = lambda refs: readings.append([ref.begin for ref in refs]) or read(refs)
    go_on = stopped(group)
    make_dead(group, "c1", first)
    said = []
    make_dead(group, "c1", first + 3, answer=said.append)
    go_on()
    group.settle()
    assert said == [None] and [one.id for one in dead_letters(group.b)] == ["m3"]
    group.cut()
    make_dead(group, "c2", theirs)
    group.connect()
    for _ in range(3):
        group.settle()
        group.a.wait(100)
    assert group.a.log.damage is not None and readings.count([0]) == 1
    assert [one.key[2] for one in waiting(group)] == ["c1"]
    assert [one.id for one in dead_letters(group.b)] == ["m3", "n0"]


def test_nothing_dies_while_roles_are_swapped_and_all_of_it_if_they_stay():
    group, client, first = a_group("m0")
    group.a.node.changes.prepare_swap(1, 5_000)
    make_dead(group, "c1", first)
    group.settle()
    assert not dead_letters(group.a)
    group.wait(2_000, times=3)
    assert [one.id for one in dead_letters(group.a)] == ["m0"]


def test_dead_letters_of_unknown_consumers_are_ignored():
    group, client, first = a_group("m0")
    said = []
    make_dead(group, "who left", first, answer=said.append)
    group.a.master._delivery.serving.dead_letters.make_dead(("s", "forgotten", "c1"), [(0, 1)], "test", said.append)
    group.settle()
    assert said == [None, None] and not dead_letters(group.a)


def test_of_those_with_a_copy_and_without_its_ack_these_alone_are_acked():
    group = Group.made().start()
    group.client().produce("m0", "m1", "m2", "m3", "m4")
    first, second = group.subscribed("c1"), group.subscribed("c2")
    numbers = []
    for client, most in ((first, 3), (second, 1), (first, 1)):
        opaque = client.pull(most=most)
        group.settle()
        numbers += [(number, id) for number, _, id in client.pulled(opaque)]
    assert [id for _, id in numbers] == ["m0", "m1", "m2", "m3", "m4"]
    group.a.master._delivery.serving.dead_letters._settle = lambda burial, *_: burial.ranges.clear()
    second.done(second.nack(numbers[3][0], numbers[3][0] + 1, dead=True))
    group.swap(2)
    first = group.subscribed("c1", held_end=numbers[4][0] + 1)
    first.done(first.nack(numbers[0][0], numbers[0][0] + 1, dead=True))
    consumers = group.a.log.state.groups["s", "g"].consumers
    assert [(one.first, one.count) for one in consumers["c1"].unacked] == [(1, 2), (4, 1)]
    assert not consumers["c2"].unacked and [one.id for one in dead_letters(group.a)] == ["m3", "m0"]
    assert len(acked(group, "c1")) == len(acked(group, "c2")) == 1


def test_a_copy_from_right_before_its_group_was_moved_counts_no_more_for_the_next_master():
    group, client, first = a_group("m0")
    group.a.master._delivery.serving.dead_letters._settle = lambda burial, *_: burial.ranges.clear()
    client.nack(first, first + 1, dead=True)
    end = group.a.log.end
    group.a.master.move_group("s", "g", "earliest", 0, dry_run=False, answer=lambda error: None)
    assert group.a.log.state.groups["s", "g"].began == end
    group.settle()
    group.swap(2)
    client = group.subscribed("c1")
    client.take()
    number = client.first
    client.done(client.nack(number, number + 1, dead=True))
    assert [one.id for one in dead_letters(group.a)] == ["m0", "m0"] and not unacked(group)


def test_each_copy_in_a_chosen_subject_has_the_label_of_its_own_message():
    group, client, first = a_group("m0")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    labels = [label_of_message(Message("s", id=id, order_key=id)) for id in ("n0", "n1", "n2")]
    some = [encode_message(Message("s", id=id, order_key=id), 0) for id in ("n0", "n1", "n2")]
    client.done(client.produce_raw(some, after=encode_labels(labels), flags=label_flags(labels)))
    client.take()
    number = client.first
    client.done(client.nack(number + 1, number + 3, dead=True))
    refs = group.a.log.frames("t", 0, 9)
    assert [list(one) for one in group.a.log.stored.read_labels(refs)] == [labels[1:2], labels[2:3]]


def test_scattered_dead_letters_cost_linear_time(monkeypatch):
    """A tag leaves gaps: each message is a range of its own. Scanning 100,000 takes 40 ms."""
    group = Group.made().start()
    produce(group.client(), [Sent(("pay",)), Sent()] * 100, first=0)
    consumer = Consumer(group, "c1", tags=["pay"])
    pulls = [got.pull_sequence for got in consumer.pull()]
    seen, overlapping = [], LogConsumer.overlapping
    monkeypatch.setattr(
        LogConsumer, "overlapping", lambda *args: (seen.append(one) or one for one in overlapping(*args))
    )
    consumer.client.done(consumer.client.nack(pulls[0], pulls[-1] + 1, dead=True, subscription=consumer.subscription))
    assert len(dead_letters(group.a)) == len(pulls) == 100 and not unacked(group)
    assert len(seen) <= 4 * len(pulls)
