"""Core. Backlog of a producer: fair shares of the room, order, batches in flight and repeats."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.client.backlog import (
    NUMBERS_SPAN_MAX,
    Backlog,
    GroupBatches,
    Lanes,
    Limits,
    QueuedMessage,
    SendOrder,
    SubjectQueue,
)
from qmq.client.batch import BATCH_BYTES_MAX, Batch, NotStored, Outcome, Receipt, Result, Stored, Unknown, stored
from qmq.client.routes import group_of_key
from qmq.codec import decode_labels, label_of, split_batch
from qmq.errors import BrokerReadOnly, NoRoute
from qmq.remoting.commands import Produced
from tests.unit.client.test_batch import batch_of

LARGE = 1 << 30


def queue_of(subject: str = "a", backlog: Backlog | None = None) -> SubjectQueue:
    return SubjectQueue(subject, backlog or Backlog(LARGE, LARGE))


def waiting(text: str = "x", *, key: str | None = None, deadline_ms: int = 1000, done=lambda _: None) -> QueuedMessage:
    return QueuedMessage(text.encode(), text, deadline_ms, done, label_of((), key))


def test_oversized_message_is_taken_alone():
    queue = queue_of()
    for size in (500, 10, 10):
        queue.add(QueuedMessage(b"x" * size, "id", 1000, lambda _: None))
    assert [len(queue.next_batch(100)), len(queue.next_batch(100))] == [1, 2]
    assert not queue
    assert queue.waiting_bytes == 0


def test_batches_that_come_back_stand_where_they_were():
    queue = queue_of()
    made = [batch_of() for _ in range(4)]
    for batch in made:
        queue.add_batch(batch)
    taken = [queue.next_batch(100), queue.next_batch(100), queue.next_batch(100)]
    for batch in taken:
        queue.put_back(batch)
    assert list(queue.ready) == made


def test_expired_messages_are_refused_with_the_error():
    queue, receipts, error = queue_of(), [], NoRoute("no broker group serves 'a'")
    queue.add(QueuedMessage(b"x", "one", 1000, receipts.append))
    queue.add(QueuedMessage(b"x", "two", 2000, receipts.append))
    late = batch_of(deadline_ms=900)
    queue.add_batch(late)
    queue.expire(1000, error)
    assert receipts == [Receipt(Outcome.REFUSED, "one", "a", "", -1, None, str(error), error)]
    assert late.receipt(0).outcome is Outcome.REFUSED
    assert len(queue.waiting) == 1
    with pytest.raises(NoRoute):
        receipts[0].check()


def test_single_subject_uses_all_room():
    backlog = Backlog(10, LARGE)
    queue, added = queue_of("a", backlog), 0
    while backlog.has_room(queue, 1):
        queue.add(waiting())
        added += 1
    assert added == 10
    queue.next_batch(LARGE)
    assert (backlog.messages, backlog.bytes) == (0, 0)


def test_empty_backlog_takes_any_size():
    backlog = Backlog(LARGE, 100)
    queue = queue_of("a", backlog)
    assert backlog.has_room(queue, 5_000)
    queue.add(waiting("x" * 60))
    assert backlog.has_room(queue, 40) and not backlog.has_room(queue, 41)


@given(st.integers(1, 12), st.integers(1, 3_000))
def test_stuck_subjects_leave_room(stuck, messages_max):
    """Gap of QMQ: three subjects without a broker stop a producer."""
    backlog = Backlog(messages_max, LARGE)
    queues = [queue_of(str(number), backlog) for number in range(stuck)]
    moved = True
    while moved:
        moved = False
        for queue in queues:
            if backlog.has_room(queue, 1):
                queue.add(waiting())
                moved = True
    assert backlog.messages <= messages_max * 9 / 8
    room = 0
    other = queue_of("moves", backlog)
    while backlog.has_room(other, 1):
        other.add(waiting())
        room += 1
    assert room >= messages_max // 9 // (8 * stuck + 1)


def test_labels_follow_the_batch():
    queue = queue_of()
    queue.add(waiting("plain"))
    queue.add(QueuedMessage(b"tagged", "2", 1000, lambda _: None, label_of({"pay"}, None)))
    batch = queue.next_batch(LARGE)
    body = b"".join(batch.blocks)
    assert batch.flags == 2
    assert list(decode_labels(body, 2)) == [0, label_of({"pay"}, None)]
    assert [bytes(one) for one in split_batch(body, 2)] == [b"plain", b"tagged"]


def test_a_queue_without_labels_sends_none():
    queue = queue_of()
    queue.add(waiting())
    batch = queue.next_batch(LARGE)
    assert batch.flags == 0 and len(batch.blocks) == 1


def lanes_of(*groups: str) -> Lanes:
    lanes = Lanes("a", Backlog(LARGE, LARGE))
    lanes.set_groups(groups)
    return lanes


def texts(lanes: Lanes) -> dict[str, list[str]]:
    return {str(lane.group): [one.id for one in lane.waiting] for lane in lanes if lane.waiting}


def test_ordered_message_waits_in_its_lane():
    lanes = lanes_of()
    for number in range(20):
        one = waiting(str(number), key=f"k{number % 5}")
        lanes.lane(one.label).add(one)
    assert texts(lanes) == {"": [str(number) for number in range(20)]}
    lanes.set_groups(["g2", "g1", "g3"])
    for group, ids in texts(lanes).items():
        assert ids == sorted(ids, key=int)
        for id in ids:
            assert group_of_key(label_of((), f"k{int(id) % 5}") >> 32, ["g1", "g2", "g3"]) == group


def test_lane_sends_one_batch_at_a_time():
    lanes = lanes_of("g1")
    lane = lanes.lane(label_of((), "k"))
    for text in "abc":
        lane.add(waiting(text, key="k"))
    batch = lane.next_batch(20)
    assert (batch.ids, lane.under_way is not None) == (["a"], True)
    lane.put_back(batch)
    assert texts(lanes) == {"g1": ["a", "b", "c"]} and lane.under_way is None
    batch = lane.next_batch(LARGE)
    batch.resolve(stored("g1", Produced(0, 3, 0, [])))
    assert lane.under_way is None and not lane


def test_lanes_move_after_batches_in_flight():
    lanes = lanes_of("g1")
    label = label_of((), "k")
    lanes.lane(label).add(waiting("first", key="k"))
    batch = lanes.lane(label).next_batch(LARGE)
    lanes.lane(label).add(waiting("second", key="k"))
    lanes.set_groups(["g2"])
    assert lanes.are_moving
    lanes.lane(label).add(waiting("third", key="k"))
    assert not lanes.move()
    batch.resolve(stored("g1", Produced(0, 1, 0, [])))
    assert lanes.move()
    assert texts(lanes) == {"g2": ["second", "third"]}


def test_a_route_without_groups_moves_no_key():
    lanes = lanes_of("g1", "g2")
    lanes.set_groups([])
    assert not lanes.are_moving
    assert lanes.lane(label_of((), "k")).group in ("g1", "g2")


@given(
    st.lists(st.tuples(st.sampled_from(["add", "send", "answer", "back", "route"]), st.integers(0, 11)), max_size=120)
)
def test_key_order_survives_faults(steps):
    """Neither retries nor changes of groups overtake: a slow model keeps each key's order of storing."""
    lanes, under_way = lanes_of(), {}
    stored_of: dict[str, list[int]] = defaultdict(list)
    given_of: dict[str, int] = defaultdict(int)

    def send() -> None:
        for lane in lanes:
            if lane and lane.group and lane.under_way is None and not lanes.are_moving:
                under_way[lane] = lane.next_batch(60)

    def answer(lane: SubjectQueue, batch: Batch) -> None:
        for id in batch.ids:
            key, number = id.split(":")
            stored_of[key].append(int(number))
        batch.resolve(stored("g", Produced(0, len(batch), 0, [])))
        lanes.move()

    for step, choice in steps:
        if step == "add":
            key = f"k{choice % 4}"
            one = waiting(f"{key}:{given_of[key]}", key=key)
            given_of[key] += 1
            lanes.lane(one.label).add(one)
        elif step == "send":
            send()
        elif step == "route":
            lanes.set_groups(f"g{number}" for number in range(4) if choice >> number & 1)
        elif under_way:
            lane = list(under_way)[choice % len(under_way)]
            batch = under_way.pop(lane)
            if step == "answer":
                answer(lane, batch)
            else:
                lane.put_back(batch)
                lanes.move()
    lanes.set_groups(["last"])
    while under_way or any(lanes):
        send()
        for lane in list(under_way):
            answer(lane, under_way.pop(lane))
    assert stored_of == {key: list(range(count)) for key, count in given_of.items()}


STORED = Stored(0, 1, [])


def lose(group):
    """Lose the connection: no batch in flight gets an answer."""
    for batch in group.unresolved():
        if batch.life.is_in_flight:
            group.answered(batch, Unknown("lost"))


def store(group, batch):
    group.answered(batch, STORED)
    group.release(batch)


def test_lost_batches_are_repeated_in_order():
    group = GroupBatches(in_flight_max=8)
    batches = [batch_of() for _ in range(4)]
    for batch in batches:
        group.admit(batch)
    store(group, batches[1])
    lose(group)
    assert all(batch.life.may_be_stored for batch in group.unresolved())
    assert group.room_bytes() == 0, "new batches wait until the repeats are sent"
    assert [group.next_repeat(), group.next_repeat(), group.next_repeat()] == [batches[0], batches[2], batches[3]]
    assert [batch.number for batch in batches] == [1, 2, 3, 4]
    assert [str(one) for one in list(group.history)[-2:]] == ["0 OUTCOME_UNKNOWN -- SENT -> REPEATED"] * 2
    assert group.next_repeat() is None
    assert group.room_bytes() > 0


def test_repeats_wait_for_room_in_the_window():
    group = GroupBatches(in_flight_max=8)
    group.limits = Limits(packet_bytes_max=10_000, window_bytes=1_200)
    batches = [batch_of(size=500) for _ in range(3)]
    for batch in batches:
        group.admit(batch)
    lose(group)
    assert [group.next_repeat(), group.next_repeat(), group.next_repeat()] == [batches[0], batches[1], None]
    store(group, batches[0])
    assert group.next_repeat() is batches[2]


def test_foreign_batch_releases_no_number():
    one, other = GroupBatches(in_flight_max=8), GroupBatches(in_flight_max=8)
    moved, sent = batch_of(), batch_of(size=500)
    one.admit(moved)
    one.answered(moved, NotStored(BrokerReadOnly("no slave in sync")))
    one.release(moved)
    other.admit(sent)
    other.release(moved)
    assert (other.unresolved(), other.load) == ([sent], 1)
    lose(other)
    assert other.next_repeat() is sent


def test_batch_size_follows_advice():
    group = GroupBatches(in_flight_max=8)
    assert group.batch_bytes_max == BATCH_BYTES_MAX
    for advice, most in ((256 << 10, 256 << 10), (16 << 20, BATCH_BYTES_MAX), (0, BATCH_BYTES_MAX)):
        group.advised(advice)
        assert group.batch_bytes_max == most


STEPS = st.tuples(st.sampled_from(["send", "answer", "fail", "lose", "repeat"]), st.integers(0, 63))


@given(st.lists(STEPS, max_size=400))
def test_numbers_never_span_more_than_a_group_remembers(steps):
    group = GroupBatches(in_flight_max=64)
    group.limits = Limits(packet_bytes_max=10_000, window_bytes=3_000)
    open_batches: dict[int, object] = {}
    flying: set[int] = set()
    newest = 0
    for step, choice in steps:
        victim = sorted(flying)[choice % len(flying)] if flying else None
        if step == "send" and group.room_bytes() >= 200:
            batch = batch_of(size=100)
            group.admit(batch)
            open_batches[batch.number] = batch
            flying.add(batch.number)
            assert batch.number == newest + 1
            newest = batch.number
        elif step == "answer" and victim is not None:
            store(group, open_batches.pop(victim))
            flying.discard(victim)
        elif step == "fail" and victim is not None:
            group.answered(open_batches[victim], Unknown("no answer"))
            flying.discard(victim)
        elif step == "lose":
            lose(group)
            flying.clear()
        elif step == "repeat" and (repeated := group.next_repeat()):
            assert repeated.number == min(set(open_batches) - flying), "the oldest first"
            flying.add(repeated.number)
        assert not open_batches or newest - min(open_batches) < NUMBERS_SPAN_MAX
        assert sum(open_batches[number].body_bytes for number in flying) <= 3_000
        assert group.load == len(flying)
        assert group.unresolved() == [open_batches[number] for number in sorted(open_batches)]


def test_number_window_is_bounded():
    group = GroupBatches(in_flight_max=16)
    stuck = batch_of()
    group.admit(stuck)
    for _ in range(NUMBERS_SPAN_MAX - 1):
        assert group.room_bytes() > 0
        batch = batch_of()
        group.admit(batch)
        store(group, batch)
    assert group.room_bytes() == 0, "number 65 would make the group forget number 1"
    store(group, stuck)
    assert group.room_bytes() > 0


def test_each_subject_has_its_limit():
    group = GroupBatches(in_flight_max=2)
    busy = [batch_of(subject="busy") for _ in range(2)]
    for batch in busy:
        group.admit(batch)
    assert not group.room_bytes("busy"), "what waits gathers to the next batch"
    others = [batch_of(subject=f"s{number}") for number in range(NUMBERS_SPAN_MAX - 2)]
    for batch in others:
        assert group.room_bytes(batch.subject) > 0
        group.admit(batch)
    assert not group.room_bytes(), "the group remembers no more"
    store(group, busy[0])
    group.release(busy[0])
    assert group.room_bytes("busy") > 0
    group.admit(batch_of(subject="busy"))
    assert not group.room_bytes("busy")


def test_queues_send_in_order_and_crowded_ones_follow_answers():
    order = SendOrder()
    a, b, c = queues = [queue_of(subject) for subject in "abc"]
    for queue in queues:
        order.note(queue, is_active=True)
    order.note(a, is_active=True)
    assert list(order.active) == queues, "a noted queue keeps its place"
    for queue in queues:
        assert next(iter(order.active)) is queue
        order.crowd(queue, ["g1", "g2"])
    order.remove(b)
    assert not order.active and list(order.waiting) == [a, c]
    assert list(order.take_crowd("g1", 1)) == [a]
    order.note(a, is_active=True)
    assert list(order.take_crowd("g2", 9)) == [c], "neither active queues nor empty ones"
    assert list(order.take_crowd("g2", 9)) == list(order.take_crowd("g3", 9)) == []


def test_deadlines_of_all_queues_are_checked_in_turn():
    order, queues = SendOrder(), [queue_of(subject) for subject in "abcd"]
    for queue in queues:
        order.note(queue, is_active=False)
    checked = [*order.take_to_expire(2), *order.take_to_expire(2)]
    assert sorted(queue.subject for queue in checked) == ["a", "b", "c", "d"]
    for queue in order.take_to_expire(9):
        order.remove(queue)
    assert not order.waiting and list(order.take_to_expire(9)) == []


def test_messages_that_a_broker_refuses_are_counted():
    backlog = Backlog(10, 1 << 20)
    batch = Batch("a", ["1", "2", "3"], [b"x"], 0, lambda batch: None)
    backlog.resolve(batch, Result(Outcome.STORED, "g1", 0, None, None, {1: "too long"}))
    assert backlog.outcomes == {Outcome.STORED: 2, Outcome.REFUSED: 1, Outcome.UNKNOWN: 0}
