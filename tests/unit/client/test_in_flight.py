"""Core. Batches of one broker group: numbers, batches in flight, repeats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.client.backlog import NUMBERS_SPAN_MAX, GroupBatches, Limits
from qmq.client.batch import BATCH_BYTES_MAX, NotStored, Stored, Unknown
from qmq.errors import BrokerReadOnly
from tests.unit.client.test_batching import batch_of

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
