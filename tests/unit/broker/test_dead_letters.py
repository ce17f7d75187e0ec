"""Core. Dead letters: stored once, on both copies, with the original acked."""

from __future__ import annotations

import pytest

from qmq.broker import dead_letters as module
from qmq.broker import positions, serving
from qmq.codec import decode_message, encode_message, join_batch, split_batch, with_properties
from qmq.dead_letters import REDRIVER
from qmq.errors import CorruptFrame, DiskFailed, ErrorCode
from qmq.log.fold import BATCHES_PER_PRODUCER
from qmq.log.frame import FLAG_DEAD, FLAG_ORDERED, Frame, FrameKind, decode_frames, label_flags
from qmq.log.group import Consumer as LogConsumer
from qmq.log.progress_frame import DEAD as DONE_AS_DEAD
from qmq.message import Message
from qmq.operator_limits import OperatorLimits
from qmq.redrive.redriving import Choice
from qmq.remoting import commands
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.selecting import Consumer, Sent, produce
from tests.unit.broker.world import Broker, Client, Group

KEY = ("s", "g")
DEAD = dead_letter_subject(*KEY)
CHOSEN = (OperatorLimits(*KEY, dead_letters_to="t"),)


def a_group(*ids: str, deliveries_max: int = 0, subject: str = "s", **settings) -> tuple[Group, Client, int]:
    """Return a group, its consumer with these messages unacked in one batch, and their first pull sequence."""
    group = Group.made(**settings).start()
    client = group.client()
    client.produce(*ids, subject=subject)
    client.join(subject=subject, deliveries_max=deliveries_max)
    assert client.take(most=1_000) == list(ids)
    return group, client, client.first


def in_frames_of_their_own(count: int, **settings) -> tuple[Group, Client, int]:
    """Return a group and a consumer of messages in their own frames, none of them in the log's tail."""
    group = Group.made(**{"tail_bytes": 0, "segment_bytes": 1024} | settings).start()
    client = group.client()
    for number in range(count):
        client.store(f"m{number}")
    client.produce("last", subject="t")
    client.join()
    assert len(client.take()) == count
    return group, client, client.first


def dead_letters(broker: Broker, subject: str = DEAD) -> list[Message]:
    refs = broker.log.frames(subject, 0, 1_000)
    assert all(ref.end == ref.begin + 1 for ref in refs)
    bodies = [bytes(body) for _, body in broker.log.stored.read_bodies(refs)]
    return [decode_message(body[8 : 8 + int.from_bytes(body[4:8], "little")]) for body in bodies]


def dead_ids(group: Group, subject: str = DEAD) -> list[str]:
    return [letter.id for letter in dead_letters(group.a, subject)]


def make_dead(group: Group, consumer: str, *pulls: int, answer=None) -> None:
    """Make dead letters of the consumer's messages; without `answer`, as the broker does by itself."""
    ranges = [module.DeadRange(pull, pull + 1, True) for pull in pulls]
    group.a.master._delivery.serving.dead_letters.make_dead((*KEY, consumer), ranges, "test", answer)


def lose_acks(group: Group) -> None:
    """Let the master store copies without the acks of their originals."""
    group.a.master._delivery.serving.dead_letters._settle = lambda job, *_: job.ranges.clear()


def jobs(group: Group) -> list:
    return list(group.a.master._delivery.serving.dead_letters._jobs)


def unacked(group: Group, consumer: str = "c1") -> list[tuple[int, int]]:
    return [(span.first, span.count) for span in group.progress.consumers[consumer].unacked]


def progress_of(group: Group) -> list[positions.GroupProgress]:
    log = group.a.log
    return list(positions.of_groups(log, lambda *_: (), positions.keys_of(log)))


def counted(group: Group) -> int:
    return sum(progress.dead_letters for progress in progress_of(group) if progress.subject == "s")


def message_frames(group: Group, subject: str) -> list[tuple[Frame, bytes]]:
    frames = decode_frames(group.a.log.stored.read_bytes(0, group.a.log.end), 0, 0)
    return [(frame, bytes(body)) for frame, body in frames if (frame.kind, frame.subject) == (1, subject)]


# One dead letter.


def test_dead_letter_carries_its_fate():
    group, client, first = a_group("m0", "m1", "m2")
    client.nacked("m1", dead=True, reason="no such order")
    (dead,) = dead_letters(group.a)
    assert dead.id == "m1" and dead.subject == "s"
    assert dict(dead.properties) == {"qmq_times": "1", "qmq_deadReason": "no such order", "qmq_deadSequence": "1"}
    assert dead_letters(group.b)[0].id == "m1", "on both copies"
    assert unacked(group) == [(0, 1), (2, 1)] and group.a.counters.dead_letters == {KEY: 1}
    *_, (_, ack) = group.frames(FrameKind.ACK)
    assert ack.entries == ((first + 1, first + 2, DONE_AS_DEAD),), "the audit reports it as missing if it is gone"
    for subject in (retry_subject(*KEY), DEAD):
        group.subscribed("c1", subject=subject)
    counts = {progress.subject: progress.dead_letters for progress in progress_of(group)}
    assert counts == {"s": 1, retry_subject(*KEY): 0, DEAD: 0}


def test_dead_letter_is_delivered_without_a_limit():
    group, client, _ = a_group("m0")
    people = group.subscribed("c9", subject=DEAD, group="people", deliveries_max=1)
    waiting = people.pull(timeout_ms=60_000)
    client.nacked("m0", dead=True)
    for times in (1, 2, 3):
        assert people.ids(waiting) == ["m0"] and people.times(waiting) == [times]
        refused = people.nack(people.first, people.first + 1, dead=True)
        assert people.outcome(refused) == ErrorCode.INVALID_REQUEST, "it does not die again"
        people.nacked("m0")
        waiting = people.pull()
        group.settle()


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_abandoned_message_dies_after_its_last_delivery(limit):
    """QMQ redelivers a message for ever if each of its consumers crashes."""
    group, client, _ = a_group("poison", "m1", deliveries_max=limit)
    for times in range(2, limit + 1):
        client.join(deliveries_max=limit)  # a new process of the same name
        assert client.take() == ["poison", "m1"] and client.times(client.last_pull) == [times, times]
        assert not dead_ids(group)
    client.join(deliveries_max=limit)
    waiting = client.pull(timeout_ms=1_000)
    group.settle()
    assert not client.answered(waiting) and not unacked(group)
    assert dead_ids(group) == ["poison", "m1"] and dead_letters(group.a)[0]["qmq_times"] == str(limit)


def test_repeated_answers_make_no_dead_letters():
    """A consumer that reconnects again and again while a damaged copy cannot be read gets nothing."""
    group, client, _ = a_group("m0", deliveries_max=1)
    for _ in range(10):
        client.join(deliveries_max=1, is_new=False)
        assert client.take() == ["m0"] and client.times(client.last_pull) == [1]
    assert not dead_ids(group)


def test_messages_before_a_pending_dead_letter_are_redelivered():
    group, client, _ = a_group("m0", "m1", "m2")
    client.nacked("m2")
    client.take()
    group.cut()  # nothing dies without the slave
    again = group.client("again")
    again.join(deliveries_max=1, is_new=False)
    assert [again.take(most=1) for _ in range(3)] == [["m0"], ["m1"], []] and len(unacked(group)) == 2


def test_full_pull_makes_no_dead_letter_behind_it():
    group, client, first = a_group("m0", "m1", "m2", deliveries_max=2)
    client.nacked("m2")
    assert client.take() == ["m2"]
    client.nacked("m2")
    client.done(client.nack(first, first + 2))
    assert client.take(most=2) == ["m0", "m1"] and not dead_ids(group)
    assert client.take(most=2) == [] and dead_ids(group) == ["m2"]


@pytest.mark.parametrize("limits", [(), CHOSEN], ids=["its own subject", "not a chosen one"])
def test_undecodable_message_is_kept_unchanged(monkeypatch, limits):
    """Producers cannot send one; if one is in a log all the same, consumers must be able to settle it."""
    group, client, _ = a_group("m0")
    broken = b"\0" * 40
    monkeypatch.setattr("qmq.server.producing.are_usual", lambda *batch: True)
    client.done(client.produce_raw([broken]))
    (piece,) = commands.decode_pulled(memoryview(client.done(client.pull())))
    group.a.assign(Role.MASTER, limits=limits)
    client.done(client.nack(piece.pull_sequence, piece.pull_sequence + 1, dead=True))
    ((frame, body),) = message_frames(group, DEAD)
    assert body[8:48] == broken and frame.flags == 0


# Counts.


def test_letters_in_all_subjects_of_a_group_are_counted():
    group, client, _ = a_group("m0", "m1", "m2", "m3")
    client.produce("another's", subject="t")
    client.nacked("m0", dead=True)
    group.a.assign(Role.MASTER, limits=CHOSEN)
    client.nacked("m1", "m2", dead=True)
    assert (dead_ids(group), dead_ids(group, "t")) == (["m0"], ["another's", "m1", "m2"])
    assert counted(group) == 3, "not the message that others sent there"
    group.a.assign(Role.MASTER)
    client.nacked("m3", dead=True)
    assert counted(group) == 4, "also when the subject is not chosen any more"
    group.a.log.state.kept.start = group.a.log.frames("t", 2, 1)[0].offset
    assert counted(group) == 2, "m0 and m1 are deleted"


@pytest.mark.parametrize(
    ("acked", "deleted", "expected"),
    [((), 0, 3), ((1,), 0, 2), ((), 2, 1), ((1,), 1, 1), ((0,), 2, 1), ((2,), 1, 1)],
)
def test_redriven_and_deleted_letters_are_not_counted(acked, deleted, expected):
    group, client, first = a_group("m0", "m1", "m2")
    client.done(client.nack(first, first + 3, dead=True))
    redriver = group.subscribed("r", subject=DEAD, group=REDRIVER)
    redriver.take()
    assert counted(group) == 3, "the redriver may return none"
    for number in acked:
        redriver.acked(f"m{number}")
    if deleted:
        group.a.log.state.kept.start = group.a.log.frames(DEAD, deleted, 1)[0].offset
    assert counted(group) == expected


# Without the slave, and while roles change.


def test_dead_letters_need_the_slave():
    """P3: nothing new is stored on one copy."""
    group, client, first = a_group("m0")
    group.cut()
    assert client.outcome(client.nack(first, first + 1, dead=True)) == ErrorCode.NOT_SERVED
    assert not dead_ids(group) and unacked(group)


def test_dead_letters_continue_when_the_slave_returns():
    group, client, first = in_frames_of_their_own(1)
    group.a.host.holds_reads = True
    opaque = client.nack(first, first + 1, dead=True)
    group.settle()
    group.cut()
    group.a.host.holds_reads = False
    group.settle()
    assert not client.answered(opaque) and not dead_ids(group)
    group.agree()
    group.wait(1)
    assert client.body(opaque) and dead_ids(group) == ["m0"]


def test_postponed_dead_letters_are_kept_once():
    """Each new connection of a consumer finds the same messages while the slave is missing."""
    group, client, first = a_group("m0", "m1", "m2", "m3")
    client.produce("n0")
    other = group.subscribed("c2")
    other.take()
    theirs = other.first
    group.cut()
    answers = []
    make_dead(group, "c1", first + 2, answer=answers.append)
    make_dead(group, "c1", first)
    make_dead(group, "c1", first, first + 1)
    make_dead(group, "c2", theirs)
    make_dead(group, "c1", first + 1, first + 3)
    assert [list(job.ranges) for job in jobs(group)] == [
        [(first + 2, first + 3, True)],
        [(at, at + 1, True) for at in (first, first + 1, first + 3)],
        [(theirs, theirs + 1, True)],
    ]
    assert not answers and not dead_ids(group)
    group.agree()
    group.wait(100)
    assert answers == [None] and dead_ids(group) == ["m2", "m0", "m1", "m3", "n0"]
    assert not jobs(group) and not unacked(group)


def test_dead_letters_wait_for_the_end_of_a_swap():
    group, _, first = a_group("m0")
    group.a.node.changes.prepare_swap(1, 5_000)
    make_dead(group, "c1", first)
    group.settle()
    assert not dead_ids(group)
    group.wait(2_000, times=3)
    assert dead_ids(group) == ["m0"]


def test_former_master_stores_no_dead_letters():
    group, client, first = in_frames_of_their_own(2)
    group.a.host.holds_reads = True
    opaque = client.nack(first, first + 1, dead=True)
    group.settle()
    *_, (_, done) = group.a.host.reads
    group.swap(2)
    end = group.b.log.end
    for failed in (CorruptFrame(88, "test"), DiskFailed("test")):
        done(failed)
    group.b.host.holds_reads = False
    group.settle()
    assert client.code(opaque) == ErrorCode.NOT_MASTER and not group.b.node.readonly_reasons
    assert group.a.log.end == group.b.log.end == end and not dead_ids(group)


def test_next_master_finishes_dead_letters():
    """The consumer has later messages: nothing else would request the dead one."""
    group, client, _ = a_group("m0", deliveries_max=1, tail_bytes=0)
    client.nacked("m0")
    group.a.host.holds_reads = True
    client.store("m1")
    client.pull(timeout_ms=60_000)  # m0 dies instead, once it is read
    group.settle()
    held_end = group.progress.consumers["c1"].next_pull
    group.swap(2)
    group.subscribed(held_end=held_end, deliveries_max=1)
    assert dead_ids(group) == ["m0"]


# Copies without an ack behind them.


@pytest.mark.parametrize("was_stored", [False, True], ids=["before the copy", "between copy and ack"])
def test_interrupted_dead_letter_is_stored_once(was_stored):
    group, client, first = a_group("m0")
    if was_stored:
        lose_acks(group)
        client.nacked("m0", dead=True)
        assert unacked(group) and dead_ids(group) == ["m0"]
    group.swap(2)
    again = group.subscribed(held_end=first + 1)
    assert again.done(again.nack(first, first + 1, dead=True))
    assert dead_ids(group) == ["m0"] and not unacked(group)


@pytest.mark.parametrize("limits", [(), CHOSEN], ids=["its own subject", "a chosen one"])
def test_copies_before_later_ones_are_recognized(limits):
    subject, all_ids = "t" if limits else DEAD, [f"m{number}" for number in range(100)]
    group, client, first = a_group(*all_ids, segment_bytes=1 << 20)
    group.a.assign(Role.MASTER, limits=limits)
    client.done(client.nack(first + 10, first + 100, dead=True))
    lose_acks(group)
    client.done(client.nack(first, first + 10, dead=True))
    assert len(dead_ids(group, subject)) == 100 and unacked(group) == [(0, 10)]
    group.swap(2)
    group.a.assign(Role.MASTER, 2, limits=limits)
    again = group.subscribed(held_end=first + 100)
    again.done(again.nack(first, first + 10, dead=True))
    assert sorted(dead_ids(group, subject)) == sorted(all_ids) and not unacked(group)


MANY = BATCHES_PER_PRODUCER + 1


@pytest.mark.parametrize("step", ["this mastership", "the next one", "redelivered before"])
def test_copies_behind_a_full_window_are_recognized(step):
    """After the swap another consumer's dead letters fill the producer's window."""
    group, client, first = a_group(*[f"m{number}" for number in range(10)], segment_bytes=1 << 20)
    group.client("other").produce(*[f"n{number}" for number in range(MANY)])
    other = group.subscribed("c2")
    other.take()
    theirs = other.first
    lose_acks(group)
    client.done(client.nack(first, first + 10, dead=True))
    assert len(dead_ids(group)) == 10
    group.swap(2)
    if step == "redelivered before":
        client = group.subscribed("c1", held_end=first + 10)
        client.nack(first, first + 10)
    other = group.subscribed("c2", held_end=theirs + MANY)
    other.done(other.nack(theirs, theirs + MANY, dead=True))
    if step == "the next one":
        group.swap(3)
    if step == "redelivered before":
        assert len(client.take()) == 10
        first = client.first
    else:
        client = group.subscribed("c1", held_end=first + 10)
    client.done(client.nack(first, first + 10, dead=True))
    assert not any(consumer.unacked for consumer in group.progress.consumers.values())
    assert len(dead_ids(group)) == len(set(dead_ids(group))) == 10 + MANY


def test_only_messages_with_a_copy_are_acked_by_it():
    group = Group.made().start()
    group.client().produce("m0", "m1", "m2", "m3", "m4")
    first, second = group.subscribed("c1"), group.subscribed("c2")
    assert first.take(most=3) == ["m0", "m1", "m2"] and second.take(most=1) == ["m3"]
    begin = first.first
    assert first.take() == ["m4"]
    end = first.first + 1
    lose_acks(group)
    second.nacked("m3", dead=True)
    group.swap(2)
    first = group.subscribed("c1", held_end=end)
    first.done(first.nack(begin, begin + 1, dead=True))
    assert unacked(group) == [(1, 2), (4, 1)] and not unacked(group, "c2")
    assert dead_ids(group) == ["m3", "m0"]
    assert sorted(ack.consumer for _, ack in group.frames(FrameKind.ACK)) == ["c1", "c2"]


@pytest.mark.parametrize("acked", [True, False])
def test_message_of_a_moved_group_dies_anew(acked):
    """Also if the copy from before the move has no ack."""
    group, client, _ = a_group("m0")
    if not acked:
        lose_acks(group)
    client.nacked("m0", dead=True)
    group.a.master.move_group("s", "g", "earliest", 0, dry_run=False, answer=lambda error: None)
    group.settle()
    if not acked:
        group.swap(2)
    client = group.subscribed("c1")
    client.take()
    client.nacked("m0", dead=True)
    assert dead_ids(group) == ["m0", "m0"] and not unacked(group)


def test_acks_follow_within_the_window_of_a_producer():
    """The next master recognizes no more copies without an ack."""
    group, client, first = a_group(*[f"m{number}" for number in range(300)], segment_bytes=1 << 20)
    client.done(client.nack(first + 10, first + 300, dead=True))
    assert len(dead_ids(group)) == 290
    waiting = 0
    for frame, _ in decode_frames(group.a.log.stored.read_bytes(0, group.a.log.end), 0, 0):
        if frame.kind == FrameKind.MESSAGES and frame.subject == DEAD:
            waiting += 1
            assert waiting <= BATCHES_PER_PRODUCER
        elif frame.kind == FrameKind.ACK:
            waiting = 0


# A subject that an operator chose.


def test_dead_letters_go_to_the_chosen_subject():
    group, client, _ = a_group("m0", "m1", "m2")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    client.nacked("m1", dead=True, reason="no such order")
    (dead,) = dead_letters(group.a, "t")
    assert (dead.id, dead.subject) == ("m1", "s") and not dead_ids(group)
    fate = {"qmq_times": "1", "qmq_deadReason": "no such order", "qmq_deadSequence": "1"}
    assert dict(dead.properties) == fate | {"qmq_deadSubject": "s", "qmq_deadGroup": "g"}
    assert dead_letters(group.b, "t")[0].id == "m1", "on both copies"
    assert group.a.counters.dead_letters == {KEY: 1} and unacked(group) == [(0, 1), (2, 1)]
    other = group.subscribed("c9", group="h")
    other.take()
    other.nacked("m0", dead=True)
    assert dead_ids(group, dead_letter_subject("s", "h")) == ["m0"], "another group has no chosen subject"
    group.a.assign(Role.MASTER, limits=())
    client.nacked("m0", dead=True)
    assert dead_ids(group) == ["m0"]


@pytest.mark.parametrize(("limits", "expected"), [((), DEAD), (CHOSEN, "t")])
def test_dead_letters_of_the_retry_subject_join_the_others(limits, expected):
    group, client, _ = a_group("m0", subject=retry_subject(*KEY))
    group.a.assign(Role.MASTER, limits=limits)
    client.nacked("m0", dead=True)
    assert dead_ids(group, expected) == ["m0"], "names are never nested"


def test_chosen_subject_is_filtered_and_limited():
    group, client, _ = a_group("m0")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    tagged = Message("s", {"x": "1"}, id="tagged", tags=["vip"], order_key="k", expires_after=60)
    (label,) = client.store_labelled(tagged)
    people = group.subscribed("c9", subject="t", group="people", tags=["vip"], deliveries_max=1)
    waiting = people.pull(timeout_ms=60_000)
    client.nacked("m0", dead=True)
    client.take()
    client.nacked("tagged", dead=True)
    assert people.ids(waiting) == ["tagged"], "messages without the tag are passed over"
    assert dead_letters(group.a, "t")[1].expires_after is None, "it would expire before it is read"
    (plain, body), (labelled, _) = message_frames(group, "t")
    assert body == join_batch(list(split_batch(body, 1))), "a message without a label has no labels section"
    assert (plain.flags, labelled.flags) == (FLAG_DEAD, FLAG_DEAD | label_flags([label]))
    assert labelled.flags & FLAG_ORDERED
    people.nacked("tagged", dead=True)
    assert dead_ids(group, dead_letter_subject("t", "people")) == ["tagged"]


def test_each_copy_in_a_chosen_subject_has_its_own_label():
    group, client, _ = a_group("m0")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    labels = client.store_labelled(*(Message("s", id=id, order_key=id) for id in ("n0", "n1", "n2")))
    client.take()
    client.done(client.nack(client.number("n1"), client.number("n2") + 1, dead=True))
    refs = group.a.log.frames("t", 0, 9)
    assert [list(found) for found in group.a.log.stored.read_labels(refs)] == [labels[1:2], labels[2:3]]


def test_redrive_takes_only_letters_of_the_group():
    """Any producer of the subject could write such properties; only a broker marks its frames."""
    group, client, _ = a_group("m0")
    group.a.assign(Role.MASTER, limits=CHOSEN)
    forged = encode_message(Message("s", id="forged"), 0)
    client.produce_raw([with_properties(forged, {"qmq_deadSubject": "s", "qmq_deadGroup": "g"})], subject="t")
    client.nacked("m0", dead=True)
    people = group.subscribed("c9", subject="t", group="people")
    pieces = list(commands.decode_pulled(memoryview(people.done(people.pull()))))

    def chosen(owner):
        return list(Choice(owner=owner).of("g1", pieces, (0, 1 << 62)))

    (back,) = chosen(KEY)
    assert back.id == "m0" and not decode_message(back.data).properties
    assert chosen(("s", "h")) == chosen(("other", "g")) == []


# Reading the messages.


def test_partly_cached_messages_die_in_order():
    group, client, first = in_frames_of_their_own(12)
    refs = group.a.log.frames("s", 5, 12)
    group.a.log.tail_body = {found[0].offset: found for found in group.a.log.stored.read_bodies(refs)}.get
    client.done(client.nack(first, first + 12, dead=True))
    assert dead_ids(group) == [f"m{number}" for number in range(12)]


def readings_of(group: Group) -> list[list[int]]:
    """Record which frames are read together, by their first sequences."""
    readings, read = [], group.a.log.stored.read_bodies
    group.a.log.stored.read_bodies = lambda refs: readings.append([ref.begin for ref in refs]) or read(refs)
    return readings


def test_frame_is_read_once_for_all_its_messages():
    group, client, first = a_group(*[f"m{number}" for number in range(9)], tail_bytes=0)
    client.store("n0")
    readings = readings_of(group)
    make_dead(group, "c1", *range(first, first + 9, 2))
    group.settle()
    assert readings == [[0]] and dead_ids(group) == ["m0", "m2", "m4", "m6", "m8"]


@pytest.mark.parametrize(
    ("bound", "expected"),
    [("two frames", [[0, 1], [2, 3], [4]]), ("one byte", [[0], [1], [2], [3], [4]]), ("three", [[0, 1, 2], [3, 4]])],
)
def test_reading_is_bounded_in_bytes_and_frames(monkeypatch, bound, expected):
    group, client, first = in_frames_of_their_own(6)
    size = sum(ref.length for ref in group.a.log.frames("s", 0, 2))
    if bound == "three":
        monkeypatch.setattr(module, "READ_FRAMES", 3)
    else:
        monkeypatch.setattr(module, "READ_BYTES", size if bound == "two frames" else 1)
    readings = readings_of(group)
    client.done(client.nack(first, first + 5, dead=True))
    assert readings == expected, "and no frame behind the last message"


@pytest.mark.parametrize("is_all", [False, True], ids=["the first ones", "all of them"])
def test_deleted_messages_are_counted_the_rest_dies(is_all):
    group, client, first = in_frames_of_their_own(12)
    group.a.drop_segments(left=2)
    gone = group.a.log.frames("s", 0, 1)[0].begin
    assert 1 < gone < 11
    end = gone if is_all else 12
    client.acked("m0")
    opaque = client.nack(first + 1, first + end, dead=True)
    assert commands.decode_acked(memoryview(client.done(opaque))) == first + end
    settled = [entry[2] for _, ack in group.frames(FrameKind.ACK) for entry in ack.entries]
    assert settled[:2] == [0, 0], "no dead letters are recorded for the deleted ones"
    assert dead_ids(group) == [f"m{number}" for number in range(gone, end)]
    assert group.a.master.skipped == {KEY: gone - 1}
    assert sum(count for _, count in unacked(group)) == 12 - end


@pytest.mark.parametrize("where", ["frame", "index"])
def test_request_for_damaged_messages_is_refused(monkeypatch, where):
    group, client, first = in_frames_of_their_own(4)
    (ref,) = group.a.log.frames("s", 1, 1)
    group.a.flip(ref.offset + ref.length - 1)

    def fails(*_):
        raise CorruptFrame(ref.offset, "test")

    if where == "index":
        monkeypatch.setattr(group.a.log, "frames", fails)
    opaque = client.nack(first, first + 4, dead=True)
    assert client.outcome(opaque) == ErrorCode.NOT_SERVED and "is being repaired" in client.text(opaque)
    assert not dead_letters(group.b) and unacked(group) == [(0, 4)]
    assert "corrupt" in group.a.node.readonly_reasons and not jobs(group)


def test_own_dead_letters_wait_for_the_repair():
    """Damaged messages are not read again before the repair; others continue."""
    group, client, first = in_frames_of_their_own(4)
    client.produce("n0")
    other = group.subscribed("c2")
    other.take()
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.flip(ref.offset + ref.length - 1)
    readings, answers = readings_of(group), []
    group.a.host.holds_reads = True
    make_dead(group, "c1", first)
    make_dead(group, "c1", first + 3, answer=answers.append)
    group.a.host.holds_reads = False
    group.settle()
    assert answers == [None] and dead_letters(group.b)[0].id == "m3"
    group.cut()
    make_dead(group, "c2", other.first)
    group.connect()
    group.wait(100, times=3)
    assert group.a.log.damage is not None and readings.count([0]) == 1
    assert [job.key[2] for job in jobs(group)] == ["c1"] and dead_ids(group) == ["m3", "n0"]
    group.a.flip(ref.offset + ref.length - 1)
    group.a.log.damage = None
    group.a.node.repaired()
    group.wait(100)
    assert dead_ids(group) == ["m3", "n0", "m0"]


def test_disk_failure_while_reading_ends_the_process():
    group, client, first = in_frames_of_their_own(2)
    group.a.host.holds_reads = True
    client.nack(first, first + 1, dead=True)
    group.settle()
    *_, (_, done) = group.a.host.reads
    with pytest.raises(DiskFailed):
        done(DiskFailed("test"))


def test_message_acked_while_it_is_read_does_not_die():
    group, client, first = a_group("m0", "m1", tail_bytes=0)
    client.store("n0")
    group.a.host.holds_reads = True
    opaque = client.nack(first, first + 2, dead=True)
    client.done(client.ack(first, first + 1))
    group.a.host.holds_reads = False
    assert client.done(opaque) and dead_ids(group) == ["m1"]


# Passes.


@pytest.mark.parametrize(("copies", "counts"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_copies_of_a_pass_are_bounded(monkeypatch, copies, counts):
    monkeypatch.setattr(serving, "COPIES_PER_PASS", copies)
    group, client, first = a_group(*[f"m{number}" for number in range(5)])
    group.a.master._delivery.serving._queue.begin()
    opaque, found = client.nack(first, first + 5, dead=True), []
    while not found or found[-1] < 5:
        found.append(group.a.counters.dead_letters.total())
        assert group.a.host.turn()
    assert found == counts
    assert client.done(opaque) and dead_ids(group) == [f"m{number}" for number in range(5)] and not unacked(group)


def test_settled_messages_do_not_die_in_later_passes(monkeypatch):
    monkeypatch.setattr(serving, "COPIES_PER_PASS", 4)
    group, client, first = a_group(*[f"m{number}" for number in range(16)])
    group.cut()
    make_dead(group, "c1", *range(first, first + 16))
    client.ack_ranges((first, first + 3), (first + 4, first + 14))
    group.agree()
    group.a.node.tick()
    assert group.a.counters.dead_letters.total() == 1, "finding a settled message costs as much as a copy"
    group.settle()
    assert dead_ids(group) == ["m3", "m14", "m15"] and not jobs(group) and not unacked(group)


def test_unknown_consumers_have_no_dead_letters():
    group, _, first = a_group("m0")
    answers = []
    make_dead(group, "a consumer that left", first, answer=answers.append)
    group.a.master._delivery.serving.dead_letters.make_dead(("s", "forgotten", "c1"), [(0, 1)], "test", answers.append)
    group.settle()
    assert answers == [None, None] and not dead_ids(group)


def test_scattered_dead_letters_cost_linear_time(monkeypatch):
    """A tag leaves gaps: each message is a range of its own. Scanning 100,000 takes 40 ms."""
    group = Group.made().start()
    produce(group.client(), [Sent(("pay",)), Sent()] * 100, first=0)
    consumer = Consumer(group, "c1", tags=["pay"])
    pulls = [got.pull_sequence for got in consumer.pull()]
    looks, overlapping = [], LogConsumer.overlapping
    monkeypatch.setattr(
        LogConsumer, "overlapping", lambda *args: (looks.append(span) or span for span in overlapping(*args))
    )
    consumer.client.nack(pulls[0], pulls[-1] + 1, dead=True, subscription=consumer.subscription)
    group.settle()
    assert len(dead_ids(group)) == len(pulls) == 100 and not unacked(group)
    assert len(looks) <= 4 * len(pulls)
