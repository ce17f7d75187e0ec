"""Core. A message that a group cannot handle becomes a dead letter once: stored on both copies, its original acked."""

from __future__ import annotations

import pytest

from qmq.codec import check_batch, decode_message
from qmq.errors import ErrorCode
from qmq.log.frame import FrameKind, decode_frames
from qmq.message import Message
from qmq.remoting import commands
from qmq.subjects import dead_letter_subject, retry_subject
from tests.unit.broker.world import Broker, Client, Group

DEAD = dead_letter_subject("s", "g")


def a_group(*ids: str, deliveries_max: int = 0, subject: str = "s", **settings) -> tuple[Group, Client, int]:
    """A group whose consumer holds these messages, stored in one batch; the first one's pull sequence."""
    group = Group.made(**settings).start()
    client = Client(group.a)
    client.produce(*ids, subject=subject)
    client.subscribe(subject=subject, deliveries_max=deliveries_max)
    group.settle()
    opaque = client.pull()
    group.settle()
    return group, client, client.pulled(opaque)[0][0]


def dead_letters(broker: Broker, subject: str = DEAD) -> list[Message]:
    found = []
    data = broker.log.read(0, broker.log.end, 1 << 30).data
    for frame, body in decode_frames(data, 0, 0):
        if frame.kind == FrameKind.MESSAGES and frame.subject == subject:
            assert frame.count == 1
            found.append(decode_message(bytes(body[8 : 8 + int.from_bytes(body[4:8], "little")])))
    return found


def unacked(group: Group) -> list[list[int]]:
    return group.a.log.state.groups["s", "g"].consumers["c1"].unacked


def test_dead_letter_is_the_message_and_says_what_became_of_it():
    group, client, first = a_group("m0", "m1", "m2")
    opaque = client.nack(first + 1, first + 2, dead=True, reason="no such order")
    group.settle()
    assert commands.decode_acked(memoryview(client.body(opaque))) == first
    (dead,) = dead_letters(group.a)
    assert dead.id == "m1" and dead.subject == "s"
    assert dict(dead.properties) == {"qmq_times": "1", "qmq_deadReason": "no such order", "qmq_deadSequence": "1"}
    assert dead_letters(group.b)[0].id == "m1", "on both copies"
    assert [(one.first, one.count) for one in unacked(group)] == [(0, 1), (2, 1)]
    assert group.a.counters.dead_letters == 1


def test_dead_letters_of_a_range_from_disk_come_in_order():
    group, client, first = a_group(*[f"m{i}" for i in range(10)], tail_bytes=0)
    client.produce("n0", "n1")
    group.settle()
    client.pull()
    group.settle()
    client.nack(first + 3, first + 12, dead=True)
    group.settle()
    assert [dead.id for dead in dead_letters(group.a)] == [*[f"m{i}" for i in range(3, 10)], "n0", "n1"]
    assert [(one.first, one.count) for one in unacked(group)] == [(0, 3)]


def test_dead_letter_is_consumed_as_any_message_and_does_not_die_again():
    group, client, first = a_group("m0")
    client.nack(first, first + 1, dead=True)
    people = Client(group.a, "people")
    opaque = people.subscribe("c9", subject=DEAD, group="people", deliveries_max=1)
    group.settle()
    subscription = people.subscription(opaque)
    for times in (1, 2, 3):
        opaque = people.pull(subscription)
        group.settle()
        assert people.times(opaque) == [times], "there is no limit"
        number = people.pulled(opaque)[0][0]
        refused = people.nack(number, number + 1, dead=True)
        people.nack(number, number + 1)
        group.settle()
        assert people.code(refused) == ErrorCode.INVALID_REQUEST


def test_waiting_pull_on_the_dead_letters_wakes_at_once():
    group, client, first = a_group("m0")
    people = Client(group.a, "people")
    opaque = people.subscribe("c9", subject=DEAD, group="people")
    group.settle()
    waiting = people.pull(people.subscription(opaque), timeout_ms=60_000)
    client.nack(first, first + 1, dead=True)
    group.settle()
    assert [id for _, _, id in people.pulled(waiting)] == ["m0"]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_message_that_is_only_ever_abandoned_becomes_a_dead_letter_after_its_last_delivery(limit):
    """QMQ: a message whose consumers die is delivered for ever."""
    group, client, _ = a_group("poison", "m1", deliveries_max=limit)
    for times in range(2, limit + 1):
        opaque = client.subscribe(deliveries_max=limit)  # a new process under the same name
        group.settle()
        opaque = client.pull(client.subscription(opaque))
        group.settle()
        assert client.times(opaque) == [times, times] and not dead_letters(group.a)
    opaque = client.subscribe(deliveries_max=limit)
    group.settle()
    opaque = client.pull(client.subscription(opaque), timeout_ms=1_000)
    group.settle()
    assert not client.answered(opaque)
    assert [dead.id for dead in dead_letters(group.a)] == ["poison", "m1"]
    assert dead_letters(group.a)[0]["qmq_times"] == str(limit + 1)
    assert not unacked(group)


def test_answers_that_never_left_do_not_make_dead_letters():
    """A consumer that reconnects again and again, because a damaged copy cannot be read, was handed nothing."""
    group, client, _ = a_group("m0", deliveries_max=3)
    for _ in range(10):
        opaque = client.subscribe(deliveries_max=3, is_new=False)
        group.settle()
        opaque = client.pull(client.subscription(opaque))
        group.settle()
        assert client.times(opaque) == [1]
    assert not dead_letters(group.a)


def test_dead_letters_of_the_mailbox_lie_beside_the_others():
    mailbox = retry_subject("s", "g")
    group, client, first = a_group("m0", subject=mailbox)
    client.nack(first, first + 1, dead=True)
    group.settle()
    assert [dead.id for dead in dead_letters(group.a)] == ["m0"], "names are never nested"


def test_message_that_cannot_be_decoded_is_kept_as_it_came(monkeypatch):
    """Producers cannot send one; whatever is in a log all the same, its consumers must get rid of it."""
    group, client, _ = a_group("m0")
    broken = b"\0" * 40
    monkeypatch.setattr("qmq.server.producing.check_messages", check_batch)
    client.produce_raw([broken])
    group.settle()
    opaque = client.pull()
    group.settle()
    (piece,) = commands.decode_pulled(memoryview(client.body(opaque)))
    client.nack(piece.pull_sequence, piece.pull_sequence + 1, dead=True)
    group.settle()
    data = group.a.log.read(0, group.a.log.end, 1 << 30).data
    (body,) = [body for frame, body in decode_frames(data, 0, 0) if frame.subject == DEAD]
    assert bytes(body[8:48]) == broken


def test_without_its_slave_a_group_stores_no_dead_letter_and_says_so():
    """P3: nothing new on one copy."""
    group, client, first = a_group("m0")
    group.cut()
    opaque = client.nack(first, first + 1, dead=True)
    group.settle()
    assert client.code(opaque) == ErrorCode.NOT_SERVED
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
    group.a.wait(1)
    group.settle()
    assert client.body(opaque) and [dead.id for dead in dead_letters(group.a)] == ["m0"]


def test_message_that_is_acked_while_it_is_read_does_not_die():
    group, client, first = a_group("m0", "m1", tail_bytes=0)
    client.produce("n0")
    group.settle()
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    opaque = client.nack(first, first + 2, dead=True)
    client.ack_ranges((first, first + 1))
    group.settle()
    group.a.host.do_read = read
    group.settle()
    assert client.body(opaque)
    assert [dead.id for dead in dead_letters(group.a)] == ["m1"]


@pytest.mark.parametrize("was_stored", [False, True], ids=["before the copy", "between copy and ack"])
def test_process_that_ends_in_between_stores_a_dead_letter_once(was_stored):
    group, client, first = a_group("m0")
    if was_stored:
        group.a.master._delivery._dead_letters._settle = lambda burial, messages: burial.ranges.clear()
        client.nack(first, first + 1, dead=True)
        group.settle()
        assert unacked(group) and len(dead_letters(group.a)) == 1
    group.swap(2)
    again = Client(group.a)
    opaque = again.subscribe(held_end=first + 1)
    group.settle()
    again.subscription(opaque)
    opaque = again.nack(first, first + 1, dead=True)
    group.settle()
    assert again.body(opaque)
    assert [dead.id for dead in dead_letters(group.a)] == ["m0"]
    assert not group.a.log.state.groups["s", "g"].consumers["c1"].unacked


def test_copies_whose_ack_is_missing_are_recognized_also_when_later_messages_died_before_them():
    group, client, first = a_group(*[f"m{number}" for number in range(100)], segment_bytes=1 << 20)
    client.nack(first + 10, first + 100, dead=True)
    group.settle()
    group.a.master._delivery._dead_letters._settle = lambda burial, messages: burial.ranges.clear()
    client.nack(first, first + 10, dead=True)
    group.settle()
    assert len(dead_letters(group.a)) == 100 and sum(one.count for one in unacked(group)) == 10
    group.swap(2)
    again = Client(group.a)
    opaque = again.subscribe(held_end=first + 100)
    group.settle()
    again.subscription(opaque)
    again.nack(first, first + 10, dead=True)
    group.settle()
    assert sorted(dead.id for dead in dead_letters(group.a)) == sorted(f"m{number}" for number in range(100))
    assert not unacked(group)


def test_next_master_buries_what_the_former_one_was_about_to():
    """Its consumer holds later messages: nothing else would ever ask for the one that is dead."""
    group, client, first = a_group("m0", deliveries_max=1, tail_bytes=0)
    client.nack(first, first + 1)
    group.settle()
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    client.produce("m1")
    group.settle()
    client.pull(timeout_ms=60_000)  # m0 dies instead, once it is read
    group.settle()
    held_end = group.a.log.state.groups["s", "g"].consumers["c1"].next_pull
    group.swap(2)
    again = Client(group.a)
    opaque = again.subscribe(held_end=held_end, deliveries_max=1)
    group.settle()
    assert again.body(opaque) and [dead.id for dead in dead_letters(group.a)] == ["m0"]
    assert read


def test_burial_under_way_ends_with_the_mastership():
    """Who is no master any more writes nothing."""
    group, client, first = a_group("m0", tail_bytes=0)
    client.produce("n0")
    group.settle()
    read, group.a.host.do_read = group.a.host.do_read, lambda: False
    opaque = client.nack(first, first + 1, dead=True)
    group.settle()
    group.swap(2)
    end = group.b.log.end
    group.b.host.do_read = read
    group.settle()
    assert client.code(opaque) == ErrorCode.NOT_MASTER
    assert group.a.log.end == group.b.log.end == end and not dead_letters(group.b)
