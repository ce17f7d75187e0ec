"""Core. Filtered pulls: delivery by tags and order keys, wake-ups, readings, frames."""

from __future__ import annotations

import pytest

from qmq.broker import filtered_scan
from qmq.codec import encode_labels, label_of
from qmq.errors import ErrorCode, LogError
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED, FrameKind, decode_frames
from qmq.log.progress_frame import PASSED, decode_progress
from qmq.remoting import commands
from tests.unit.broker.selecting import Consumer, Sent, produce
from tests.unit.broker.world import Group, message

A, B, PLAIN = Sent(key="a"), Sent(key="b"), Sent()
PAY, CANCEL, BOTH, NONE = Sent(("pay",)), Sent(("cancel",)), Sent(("cancel", "pay")), Sent()


def stored(*messages: Sent, **changes) -> Group:
    """Return a group with these messages in one batch."""
    group = Group.made(**changes).start()
    more(group, *messages, first=0)
    return group


def more(group: Group, *messages: Sent, first: int, labelled: bool = True) -> None:
    opaque = produce(client := group.client("producer"), messages, first=first, labelled=labelled)
    group.settle()
    assert client.receipt(opaque).first_sequence == first


# Order keys.


@pytest.mark.parametrize("how", ["ack", "dead", "leave", "vanish", "move"])
def test_free_key_wakes_waiting_consumers(how):
    group = stored(A, A, lease_ms=10_000)
    first, second = Consumer(group, "c1"), Consumer(group, "c2")
    assert first.sequences() == [0]
    waiting = second.waits()
    assert not second.client.answered(waiting)
    expected = [0] if how in ("leave", "vanish") else [1]
    match how:
        case "ack":
            first.ack(0)
        case "dead":
            first.nack(0, dead=True)
        case "leave":
            first.leave()
        case "vanish":
            first.client.lost()
            for _ in range(3):
                second.client.heartbeat()
                group.wait(6_000)
        case "move":
            group.a.master.move_group("s", "g", "sequence", 1, dry_run=False, answer=lambda error: None)
            group.settle()
            assert second.client.code(waiting) == ErrorCode.INVALID_ACK
            second.join()
            waiting = second.waits()
    assert [got.sequence for got in second.got(waiting)] == expected


def test_deferred_messages_of_a_group_are_bounded(monkeypatch):
    monkeypatch.setattr(filtered_scan, "DEFERRED_MESSAGES_MAX", 2)
    group = stored(A, A, A, A, B)
    consumer = Consumer(group, "c1")
    assert consumer.sequences() == [0]
    assert group.progress.position == 3 and group.progress.requeued.messages == 2
    assert consumer.sequences() == []
    for expected in ([1, 4], [2], [3]):
        consumer.ack()
        assert consumer.sequences() == expected


# Tags.


def test_broadcast_consumers_get_their_own_matches():
    """W9: acks of one consumer do not concern messages that it or another one skipped."""
    group = stored(PAY, CANCEL, PAY, CANCEL, BOTH)
    first = Consumer(group, "c1", group="b1", broadcast=True, tags=["pay"])
    second = Consumer(group, "c2", group="b2", broadcast=True, tags=["cancel"])
    assert first.sequences() == [0, 2, 4]
    assert second.sequences() == [1, 3, 4]
    second.ack(1, 4)
    group.swap(2)
    first.join()
    second.join()
    first.ack()
    assert second.held == dict.fromkeys(second.held, 3)
    more(group, PAY, CANCEL, first=5)
    assert first.sequences() == [5]
    assert second.sequences() == [6]


def test_consumers_with_different_tags_skip_for_each_other():
    group = stored(PAY, CANCEL, PAY, CANCEL)
    first, second = Consumer(group, "c1", tags=["pay"]), Consumer(group, "c2", tags=["cancel"])
    assert first.sequences(1) == [0]
    assert second.sequences() == [1, 3]
    assert first.sequences() == []


# Readings.


def test_bytes_are_read_once_for_waiting_pulls():
    group = stored(PAY, CANCEL, PAY, CANCEL, tail_bytes=0)
    more(group, NONE, first=4)
    consumers = [Consumer(group, name, tags=["pay"]) for name in ("c1", "c2")]
    group.a.host.holds_reads = True
    pulls = [consumer.ask(1) for consumer in consumers]
    group.settle()
    group.wait(100)
    assert len(group.a.host.reads) == 2, "one of them asks for the age of the oldest message"
    assert not any(consumer.client.answered(pull) for consumer, pull in zip(consumers, pulls, strict=True))
    group.a.host.holds_reads = False
    group.settle()
    assert [consumer.got(pull)[0].sequence for consumer, pull in zip(consumers, pulls, strict=True)] == [0, 2]


def test_pull_without_matches_ends_after_the_scan():
    group = stored(PAY, PAY, tail_bytes=0)
    more(group, NONE, first=2)
    consumer = Consumer(group, "c1", tags=["cancel"])
    pull = consumer.ask()
    group.settle()
    assert consumer.client.code(pull) == ErrorCode.NO_MESSAGE


@pytest.mark.parametrize("asks", [0, 20])
def test_damaged_labels_are_read_again_after_repair(asks):
    group = stored(A, A, tail_bytes=0)
    more(group, PLAIN, first=2)
    consumer = Consumer(group, "c1")
    (ref,) = group.a.log.frames("s", 0, 1)
    group.a.flip(ref.offset + ref.length - 1)
    readings, read_labels = [], group.a.log.stored.read_labels
    group.a.log.stored.read_labels = lambda refs: readings.append(refs) or read_labels(refs)
    waiting = consumer.waits()
    assert ["corrupt"] == [str(reason) for reason in group.a.master.readonly.reasons]
    for _ in range(asks):
        consumer.waits()
    assert len(readings) == 1
    group.a.flip(ref.offset + ref.length - 1)
    group.wait(600, times=3)
    assert [got.sequence for got in consumer.got(waiting)] == [0, 2]


def test_labels_are_not_delivered():
    group = stored(PAY, PAY)
    more(group, PAY, PAY, first=2, labelled=False)
    consumer = Consumer(group, "c1")
    pull = consumer.ask()
    group.settle()
    labelled, plain = commands.decode_pulled(memoryview(consumer.client.body(pull)))
    assert len(labelled.body) == len(plain.body)


def a_reading() -> tuple[Group, Consumer, int]:
    """Return a group and a consumer with a waiting pull; the labels for it are on disk."""
    group = stored(A, A, tail_bytes=0)
    more(group, PLAIN, first=2)
    consumer = Consumer(group, "c1")
    waiting = consumer.ask(timeout_ms=60_000)
    assert len(group.a.host.reads) == 1
    return group, consumer, waiting


def test_deletion_before_a_reading_is_no_damage():
    group, consumer, waiting = a_reading()
    group.a.log.state.kept.start = group.a.log.frames("s", 2, 1)[0].offset
    group.wait(600, times=3)
    assert group.a.log.damage is None and [got.sequence for got in consumer.got(waiting)] == [2]


def test_disk_failure_while_reading_labels_ends_the_process():
    group, _, _ = a_reading()
    _, done = group.a.host.reads.popleft()
    with pytest.raises(LogError):
        done(LogError("the disk is gone"))


def test_frames_without_candidates_are_not_read():
    group = stored(PAY, PAY, tail_bytes=0)
    more(group, PAY, CANCEL, first=2)
    more(group, NONE, first=4)
    bodies, read_bodies = [], group.a.log.stored.read_bodies
    group.a.log.stored.read_bodies = lambda refs: bodies.extend(refs) or read_bodies(refs)
    assert Consumer(group, "c1", tags=["cancel"]).sequences() == [3]
    assert [ref.begin for ref in bodies] == [2]


def test_adjacent_matches_are_one_piece():
    group = stored(PAY, PAY, CANCEL, PAY, PAY, PAY)
    consumer = Consumer(group, "c1", tags=["pay"])
    pull = consumer.ask()
    group.settle()
    pieces = commands.decode_pulled(memoryview(consumer.client.body(pull)))
    assert [(piece.sequence, piece.count) for piece in pieces] == [(0, 2), (3, 3)]


def test_deleted_messages_are_passed_and_counted():
    group = Group.made(segment_bytes=512, tail_bytes=0).start()
    for at in range(8):
        more(group, PAY, PAY, first=2 * at)
    consumer = Consumer(group, "c1", tags=["pay"])
    for broker in (group.a, group.b):
        while len(broker.log.bases) > 2:
            broker.drop_oldest_segment()
    first = group.a.log.frames("s", 0, 1)[0].begin
    assert first > 0
    assert consumer.sequences() == list(range(first, 16))
    assert group.a.master.skipped == {("s", "g"): first}


def test_unfiltered_consumer_has_no_filter():
    group = stored(PAY, CANCEL)
    assert Consumer(group, "c1").sequences() == [0, 1]
    assert not group.a.master._delivery.serving.filters._filters


# Frames.


def label_section(*messages: Sent) -> bytes:
    return encode_labels([label_of(message.tags, message.key) for message in messages])


@pytest.mark.parametrize(
    "flags, section",
    [
        (FLAG_LABELLED, b""),
        (FLAG_LABELLED, label_section(PAY, PAY)[:-1] + b"?"),
        (FLAG_ORDERED, label_section(A, A)),
        (8, label_section(PAY, PAY)),
    ],
    ids=["no labels", "damaged labels", "ordered alone", "an unknown flag"],
)
def test_malformed_labels_are_refused(flags, section):
    group = Group.made().start()
    client = group.client()
    assert (
        client.outcome(client.produce_raw([message("s", "m0"), message("s", "m1")], after=section, flags=flags))
        == ErrorCode.INVALID_REQUEST
    )
    assert "s" not in group.a.log.state.next_sequence


def test_refused_message_takes_its_label_along():
    group = Group.made(message_bytes_max=1024).start()
    client = group.client()
    data = [message("s", "m0"), message("s", "large", 2_000), message("s", "m1")]
    opaque = client.produce_raw(data, after=label_section(A, B, A), flags=FLAG_LABELLED | FLAG_ORDERED)
    group.settle()
    assert [position for position, _ in client.receipt(opaque).refused] == [1]
    consumer = Consumer(group, "c1")
    assert consumer.sequences() == [0]
    consumer.ack()
    assert consumer.sequences() == [1]


# Entries in the log.


def pulls_of(group: Group, name: str) -> list[list[tuple[int, int, int]]]:
    """Return the entries of each pull frame of a consumer."""
    log = group.a.node.log
    data = log.stored.read(0, log.end, 1 << 30).data
    pulls = [decode_progress(body) for frame, body in decode_frames(data, 0, 0) if frame.kind == FrameKind.PULL]
    return [[tuple(entry) for entry in pull.entries] for pull in pulls if pull.consumer == name]


def test_consecutive_mismatches_are_one_entry():
    group = stored(NONE, NONE)
    more(group, CANCEL, first=2)
    more(group, NONE, PAY, NONE, first=3)
    consumer = Consumer(group, "c1", tags=["pay"])
    assert consumer.sequences() == [4]
    (entries,) = [pull for pull in pulls_of(group, "c1") if pull]
    assert [entry[1:] for entry in entries] == [(0, 4), (4, 1), (5, 1)]
    assert [entry[0] == PASSED for entry in entries] == [True, False, True]


def test_each_requeued_range_is_an_entry():
    """The fold takes the messages of an entry from one place."""
    group = stored(PAY, PAY, PAY)
    consumer = Consumer(group, "c1", tags=["pay"])
    assert consumer.sequences(2) == [0, 1]
    consumer.nack(0)
    assert consumer.sequences(1) == [0]
    consumer.nack(0)
    consumer.nack(1)
    again = consumer.pull()
    assert [(got.sequence, got.times) for got in again] == [(0, 3), (1, 2), (2, 1)]
    assert [entry[1:] for entry in pulls_of(group, "c1")[-1]] == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("moves_on", ["changed", "the same", "left"])
def test_changed_tags_are_recorded_before_the_pull(moves_on):
    group = stored(PAY, CANCEL, PAY, CANCEL)
    first = Consumer(group, "c1", tags=["pay"])
    assert first.sequences() == [0, 2]
    first.ack(0)
    first.ack(2)
    before = len(pulls_of(group, "c1"))
    if moves_on == "left":
        first.leave()
    more(group, PAY, CANCEL, first=4)
    again = Consumer(group, "c1", tags=["pay" if moves_on == "the same" else "cancel"])
    again.held = dict(first.held)
    assert again.sequences() == ([4] if moves_on == "the same" else [5])
    written = pulls_of(group, "c1")[before:]
    assert [not entries for entries in written] == ([True, False] if moves_on == "changed" else [False])
