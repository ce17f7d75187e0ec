"""Core. Scan of one filtered pull: costs, notes, readings, and its end."""

from __future__ import annotations

import pytest

from qmq.broker import filtered_scan, serving
from qmq.broker.labels import TagRule
from qmq.log.group import Consumer as Progress
from tests.unit.broker.selecting import Consumer, Got, Sent, produce
from tests.unit.broker.test_filtered_pulls import CANCEL, NONE, PAY, more, pulls_of, stored
from tests.unit.broker.world import Group

KEY = ("s", "g")
PAYS = {"tags": ["pay"]}


def batches(*sizes: int, of: Sent = PAY, **changes) -> Group:
    """Return a group with batches of these sizes, none of them in the log's tail."""
    group = Group.made(tail_bytes=0, **changes).start()
    first = 0
    for size in sizes:
        more(group, *[of] * size, first=first)
        first += size
    more(group, NONE, first=first)  # a later commit: the batches leave the tail
    return group


def readings_of(group: Group) -> list[list[int]]:
    """Record which frames are read together, by their first sequences."""
    found, read_labels = [], group.a.log.stored.read_labels
    group.a.log.stored.read_labels = lambda refs: found.append([ref.begin for ref in refs]) or read_labels(refs)
    return found


# As without a filter.


def history(terms: dict) -> list[object]:
    """Return deliveries and log entries while messages fail, return and die."""
    group = stored(PAY, PAY, PAY, lease_ms=10_000)
    more(group, PAY, PAY, PAY, PAY, first=3)
    seen: list[object] = []

    def note(*got: list[Got]) -> None:
        progress = group.progress
        consumers = {
            name: (consumer.next_pull, list(consumer.unacked)) for name, consumer in progress.consumers.items()
        }
        seen.append((got, progress.position, list(progress.requeued), consumers))

    first = Consumer(group, "c1", deliveries_max=3, **terms)
    note(first.pull())
    first.nack(0, 1, 5, delay_ms=2_000)
    first.nack(2)
    note(first.pull())
    first.client.lost()
    second = Consumer(group, "c2", deliveries_max=3, **terms)
    for _ in range(3):
        second.client.heartbeat()
        group.wait(6_000)
    note(second.pull(2))
    note(second.pull())
    for _ in range(3):
        if second.held:
            second.nack()
        note(second.pull())
    assert group.a.log.state.next_sequence["%DEAD_RETRY%s%g"] == 7
    return seen


def test_matching_filter_delivers_as_no_filter():
    assert history(PAYS) == history({})


def test_messages_at_the_limit_die_in_one_pull():
    group = stored(PAY, CANCEL, PAY, PAY, PAY)
    consumer = Consumer(group, "c1", deliveries_max=1, **PAYS)
    assert consumer.sequences() == [0, 2, 3, 4]
    consumer.nack(2, 3, 4)
    more(group, PAY, first=5)
    assert consumer.sequences() == [5]
    assert group.a.log.state.next_sequence["%DEAD_RETRY%s%g"] == 3
    progress = group.progress
    assert not progress.requeued and sum(span.count for span in progress.consumers["c1"].unacked) == 2


def test_dead_letters_of_a_pass_are_bounded(monkeypatch):
    """Gaps between messages make each an entry of the frame, and a range of the fold."""
    group = stored(*[PAY, NONE] * 30, segment_bytes=1 << 20)
    consumer = Consumer(group, "c1", deliveries_max=1, **PAYS)
    assert len(consumer.sequences()) == 30
    monkeypatch.setattr(serving, "LOOKS_PER_PASS", 4 * filtered_scan.LOOKS_PER_DEAD)
    consumer.nack()
    before = len(pulls_of(group, "c1"))
    assert consumer.sequences() == [] and group.a.log.state.next_sequence["%DEAD_RETRY%s%g"] == 30
    assert [len(entries) for entries in pulls_of(group, "c1")[before:]] == [4] * 7 + [2]


@pytest.mark.parametrize(
    ("ahead", "frames", "at_once"), [(20_000, 512, 20), (2, 512, 4), (20_000, 5, 5)], ids=["all", "messages", "frames"]
)
def test_frames_of_a_requeued_range_are_read_together(monkeypatch, ahead, frames, at_once):
    group = batches(*[1] * 20, segment_bytes=1 << 20)
    consumer = Consumer(group, "c1", **PAYS)
    assert len(consumer.sequences()) == 20
    consumer.leave()
    group.swap(2)  # the new master has no labels
    assert len(group.progress.requeued) == 1
    monkeypatch.setattr(filtered_scan, "LOOKS_AHEAD", ahead)
    monkeypatch.setattr(filtered_scan, "READ_FRAMES", frames)
    listed, frames_of, found = [], filtered_scan.frames_of, readings_of(group)
    monkeypatch.setattr(filtered_scan, "frames_of", lambda *args: (listed.append(1) or ref for ref in frames_of(*args)))
    got, other = [], Consumer(group, "c2", **PAYS)
    while some := other.sequences():
        got.append(some)
    assert found == got == [list(range(at, at + at_once)) for at in range(0, 20, at_once)]
    assert len(listed) <= 20


def test_frame_of_several_ranges_is_read_once(monkeypatch):
    group = batches(*[10] * 4, segment_bytes=1 << 20)
    consumer = Consumer(group, "c1", **PAYS)
    assert len(consumer.sequences()) == 40
    consumer.ack(*range(0, 40, 2))
    consumer.leave()
    group.swap(2)  # the new master has no labels
    monkeypatch.setattr(filtered_scan, "LOOKS_AHEAD", 15)
    found, other = readings_of(group), Consumer(group, "c2", **PAYS)
    assert other.sequences() == list(range(1, 30, 2)) and found[0] == [0, 10, 20]


def test_requeued_message_that_does_not_match_frees_its_key():
    group = stored(Sent(("pay",), "k"), Sent(("cancel",), "k"), Sent(("cancel",), "l"))
    first, second = Consumer(group, "c1", **PAYS), Consumer(group, "c2", tags=["cancel"])
    assert first.sequences() == [0]
    first.nack(0)
    assert second.sequences() == []
    more(group, Sent(("cancel",), "k"), first=3)
    assert second.sequences() == [3]


@pytest.mark.parametrize("terms", [PAYS, {}], ids=["tags", "keys"])
def test_bounded_filtered_pulls_keep_the_order(terms):
    group = stored(*[Sent(("pay",), f"k{number}") for number in range(7)])
    consumer, got = Consumer(group, "c1", **terms), []
    (ref,) = group.a.log.frames("s", 0, 1)
    for size in (0.5, 1.2, 2.5, 9):
        opaque = consumer.ask(bytes_max=int(size * ref.length / 7))
        group.settle()
        got.append([found.sequence for found in consumer.got(opaque)])
    assert got == [[0], [1], [2, 3], [4, 5, 6]]


# Passed messages.


def test_unreplicated_messages_are_not_passed_over(monkeypatch):
    """Another message may have this sequence after the next swap."""
    monkeypatch.setattr(filtered_scan, "PASSED_MESSAGES", 1)
    group = stored(PAY)
    consumer = Consumer(group, "c1", tags=["cancel"])
    produce(group.client("producer"), [PAY, PAY], first=1)
    group.a.host.turn()
    group.cut()
    consumer.ask(timeout_ms=60_000)
    group.a.host.settle()
    assert group.a.log.state.next_sequence["s"] == 3 and group.progress.position == 1
    group.agree()
    assert group.progress.position == 3


def test_unwritten_scan_position_is_kept_per_rule():
    group = stored(PAY, PAY, PAY)
    first, second = Consumer(group, "c1", tags=["cancel"]), Consumer(group, "c2", **PAYS)
    first.waits()
    assert second.sequences() == [0, 1, 2]


def looked_at(monkeypatch) -> list[tuple[int, int]]:
    """Record which labels of a batch are checked."""
    found, candidates = [], TagRule.candidates

    def noted(self, labels, begin, end):
        found.append((begin, end))
        return candidates(self, labels, begin, end)

    monkeypatch.setattr(TagRule, "candidates", noted)
    return found


def test_passed_messages_are_not_scanned_again(monkeypatch):
    group, looked = stored(PAY, PAY, PAY), looked_at(monkeypatch)
    consumer = Consumer(group, "c1", tags=["cancel"])
    waiting = consumer.waits()
    more(group, PAY, PAY, first=3)
    more(group, PAY, CANCEL, PAY, first=5)
    assert looked == [(0, 3), (0, 2), (0, 3)]
    assert [got.sequence for got in consumer.got(waiting)] == [6]
    (entries,) = [pull for pull in pulls_of(group, "c1") if pull]
    assert [entry[1:] for entry in entries] == [(0, 6), (6, 1), (7, 1)]


def test_passed_messages_are_written_after_a_second():
    group = stored(PAY)
    consumer = Consumer(group, "c1", tags=["cancel"])
    consumer.waits()
    for number in range(1, 4):
        group.a.wait(300)
        more(group, PAY, first=number)
    group.wait(99)
    assert group.progress.position == 0
    group.wait(1)
    assert group.progress.position == 4
    more(group, PAY, first=4)
    group.wait(999)
    assert group.progress.position == 4, "the time of what comes later begins anew"
    group.wait(1)
    assert group.progress.position == 5


@pytest.mark.parametrize(("count", "position"), [(3, 0), (4, 4)])
def test_long_mismatch_is_written_at_once(monkeypatch, count, position):
    monkeypatch.setattr(filtered_scan, "PASSED_MESSAGES", 4)
    group = stored(*[PAY] * count)
    Consumer(group, "c1", tags=["cancel"]).waits()
    assert group.progress.position == position


@pytest.mark.parametrize("count", [0, 1], ids=["nothing new", "something new"])
def test_requeued_mismatch_is_settled_at_once(count):
    group = stored(PAY)
    first = Consumer(group, "c1", **PAYS)
    assert first.sequences() == [0]
    first.nack()
    first.leave()
    if count:
        more(group, PAY, first=1)
    second = Consumer(group, "c2", tags=["cancel"])
    second.waits()
    progress = group.progress
    assert (progress.position, progress.requeued.messages) == (1 + count, 0)
    assert progress.consumers.get("c2", Progress()).unacked == []


def test_empty_subject_is_not_passed():
    group = stored(PAY)
    Consumer(group, "c1", subject="t", tags=["cancel"]).ask(timeout_ms=60_000)
    group.wait(1_000, times=3)
    assert group.a.log.state.groups["t", "g"].position == 0 and pulls_of(group, "c1") == []


def test_deleted_messages_leave_nothing_to_scan():
    group = stored(PAY, PAY)
    consumer = Consumer(group, "c1", **PAYS)
    assert consumer.sequences() == [0, 1]
    consumer.nack()
    more(group, PAY, PAY, first=2)
    group.a.log.state.kept.start = group.a.log.end
    assert consumer.sequences() == []
    progress = group.progress
    assert (progress.position, progress.requeued.messages) == (4, 0) and group.a.master.skipped == {KEY: 4}


# Notes only point to ranges.


def filter_of(group: Group):
    return group.a.master._delivery.serving.filters._filters[KEY]


def test_noted_range_waits_until_it_is_due():
    group = stored(PAY)
    consumer = Consumer(group, "c1", **PAYS)
    assert consumer.sequences() == [0]
    consumer.nack(0, delay_ms=5_000)
    waiting = consumer.ask(timeout_ms=60_000)
    filter_of(group)._later.clear()
    filter_of(group).note(0, 1, 0)
    group.a.master._delivery.serving.wake("s")
    group.wait(4_900)
    assert not consumer.client.answered(waiting)
    more(group, CANCEL, first=1)
    assert not consumer.client.answered(waiting)
    group.wait(100)
    assert [got.sequence for got in consumer.got(waiting)] == [0]


def test_range_noted_twice_is_delivered_once():
    group = stored(PAY, PAY, PAY)
    consumer = Consumer(group, "c1", **PAYS)
    assert consumer.sequences() == [0, 1, 2]
    consumer.nack()
    for begin, end in ((0, 2), (1, 3), (0, 3), (1, 2)):
        filter_of(group).note(begin, end, 0)
    assert consumer.sequences() == [0, 1, 2]
    assert consumer.sequences() == []


# Readings.


@pytest.mark.parametrize(
    ("bound", "most", "expected"),
    [
        ("READ_FRAMES", 3, [[0, 2, 4], [6, 8, 10]]),
        ("LOOKS_AHEAD", 3, [[0, 2, 4], [6, 8, 10]]),
        ("LOOKS_AHEAD", 4, [[0, 2, 4, 6], [8, 10]]),
    ],
)
def test_reading_ahead_is_bounded(monkeypatch, bound, most, expected):
    monkeypatch.setattr(filtered_scan, bound, most)
    group = batches(2, 2, 2, 2, 2)
    readings, consumer = readings_of(group), Consumer(group, "c1", **PAYS)
    last = expected[0][-1] + 2
    assert [consumer.sequences() for _ in range(2)] == [list(range(last)), list(range(last, 10))]
    assert readings == expected


@pytest.mark.parametrize(("most", "expected"), [(512, [0, 2, 6]), (2, [0, 2])])
def test_labels_of_requeued_ranges_alone_are_read(monkeypatch, most, expected):
    monkeypatch.setattr(filtered_scan, "READ_FRAMES", most)
    group = batches(2, 2, 2, 2)
    consumer = Consumer(group, "c1", **PAYS)
    while len(consumer.held) < 8:
        assert consumer.sequences()
    consumer.nack(0, 3, 6)
    group.swap(2)
    consumer.join()
    readings = readings_of(group)
    assert consumer.sequences() + consumer.sequences() == [0, 3, 6]
    assert readings[0] == expected


def test_frames_in_the_tail_are_not_read():
    group = Group.made(tail_bytes=0).start()
    more(group, PAY, PAY, first=0)
    more(group, PAY, first=2)
    consumer, readings, tail_body = Consumer(group, "c1", **PAYS), readings_of(group), group.a.log.tail_body
    (last,) = group.a.log.frames("s", 2, 1)
    ((frame, body),) = group.a.log.stored.read_bodies([last])
    group.a.log.tail_body = lambda offset: (frame, body) if offset == last.offset else tail_body(offset)
    assert consumer.sequences() == [0, 1, 2]
    assert readings == [[0]]


def test_body_check_costs_several_label_checks(monkeypatch):
    monkeypatch.setattr(serving, "LOOKS_PER_PASS", 30)
    monkeypatch.setattr(filtered_scan, "LOOKS_PER_BODY", 10)
    group = Group.made().start()
    more(group, *[PAY] * 8, CANCEL, first=0, labelled=False)
    opened, matches = [], TagRule.matches
    monkeypatch.setattr(TagRule, "matches", lambda self, message: opened.append(message) or matches(self, message))
    consumer = Consumer(group, "c1", tags=["cancel"])
    waiting, counts = consumer.ask(timeout_ms=60_000), []
    counts.append(len(opened))
    while not consumer.client.answered(waiting):
        before = len(opened)
        assert (
            group.a.host.turn()
            or group.a.host.fsync()
            or group.to_slave()
            or group.b.host.fsync()
            or (group.b.host.turn() or group.to_master())
        )
        counts.append(len(opened) - before)
    assert [count for count in counts if count] == [3, 3, 3]
    assert [got.sequence for got in consumer.got(waiting)] == [8]
    (entries,) = [pull for pull in pulls_of(group, "c1") if pull]
    assert [entry[1:] for entry in entries] == [(0, 8), (8, 1)]


def test_scan_continues_in_the_next_pass(monkeypatch):
    monkeypatch.setattr(serving, "LOOKS_PER_PASS", 10)
    monkeypatch.setattr(filtered_scan, "LOOKS_AT_ONCE", 4)
    group = Group.made().start()
    for at in range(4):
        more(group, *[PAY] * 10, first=10 * at)
    looked, run_pass = looked_at(monkeypatch), group.a.master._delivery.serving.run_pass
    group.a.master._delivery.serving.run_pass = lambda: looked.append(None) or run_pass()
    Consumer(group, "c1", tags=["cancel"]).waits()
    of_a_pass = [[], *([] for look in looked if look is None)]
    at = 0
    for look in looked:
        at += look is None
        of_a_pass[at] += [look] if look else []
    assert [look for look in of_a_pass if look] == [[(0, 4), (4, 8), (8, 10)]] * 4


# Order keys.
