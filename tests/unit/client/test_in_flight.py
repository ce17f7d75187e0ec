"""Core. What a broker group has of a producer: numbers, what is in flight, what is repeated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.client.in_flight import NUMBERS_SPAN_MAX, GroupBatches, Limits
from tests.unit.client.test_batching import batch_of


def test_a_lost_connection_puts_all_in_flight_in_doubt_and_repeats_them_in_order():
    group = GroupBatches(in_flight_max=8)
    batches = [batch_of() for _ in range(4)]
    for batch in batches:
        group.admit(batch)
    group.release(batches[1])
    group.connection_lost()
    assert group.room_bytes() == 0, "new batches wait until the repeats are sent"
    assert [group.next_repeat(), group.next_repeat(), group.next_repeat()] == [batches[0], batches[2], batches[3]]
    assert [batch.number for batch in batches] == [1, 2, 3, 4]
    assert all(batch.doubtful for batch in (batches[0], batches[2], batches[3]))
    assert group.next_repeat() is None
    assert group.room_bytes() > 0


def test_a_batch_that_another_group_had_takes_no_number_away_from_this_one():
    one, other = GroupBatches(in_flight_max=8), GroupBatches(in_flight_max=8)
    moved, sent = batch_of(), batch_of(size=500)
    one.admit(moved)
    one.release(moved)
    other.admit(sent)
    other.release(moved)
    assert (other.unresolved(), other.load) == ([sent], 1)
    other.connection_lost()
    assert other.next_repeat() is sent


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
            group.release(open_batches.pop(victim))
            flying.discard(victim)
        elif step == "fail" and victim is not None:
            group.returned(open_batches[victim])
            flying.discard(victim)
        elif step == "lose":
            group.connection_lost()
            flying.clear()
        elif step == "repeat" and (repeated := group.next_repeat()):
            assert repeated.number == min(set(open_batches) - flying), "the oldest first"
            flying.add(repeated.number)
        assert not open_batches or newest - min(open_batches) < NUMBERS_SPAN_MAX
        assert sum(open_batches[number].body_bytes for number in flying) <= 3_000
        assert group.load == len(flying)
        assert group.unresolved() == [open_batches[number] for number in sorted(open_batches)]


def test_an_unresolved_batch_stops_new_numbers_before_the_group_forgets_it():
    group = GroupBatches(in_flight_max=16)
    stuck = batch_of()
    group.admit(stuck)
    for _ in range(NUMBERS_SPAN_MAX - 1):
        assert group.room_bytes() > 0
        batch = batch_of()
        group.admit(batch)
        group.release(batch)
    assert group.room_bytes() == 0, "number 65 would make the group forget number 1"
    group.release(stuck)
    assert group.room_bytes() > 0


def test_a_subject_has_its_share_in_flight_whatever_others_have():
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
    group.release(busy[0])
    group.release(busy[0])
    assert group.room_bytes("busy") > 0
    group.admit(batch_of(subject="busy"))
    assert not group.room_bytes("busy")
