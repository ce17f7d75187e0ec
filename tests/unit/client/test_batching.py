"""Core. Batches, numbers, receipts: the rules that keep a message from being stored twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.client.batching import (
    NUMBERS_SPAN_MAX,
    Batch,
    GroupBatches,
    Limits,
    MessageIds,
    Next,
    Outcome,
    Receipts,
    SubjectQueue,
    Waiting,
    after_error,
    not_stored,
    stored,
)
from qmq.client.encoding import encode_run
from qmq.codec import batch_encoder, join_batch, split_batch
from qmq.errors import (
    AccessError,
    BrokerReadOnly,
    Fenced,
    InvalidMessage,
    InvalidRequest,
    MessageTooLarge,
    NotMaster,
    NotServed,
    OutcomeUnknown,
    Overloaded,
    QmqError,
)
from qmq.message import Message
from qmq.remoting.commands import Produced


def batch_of(count: int = 1, size: int = 10, deadline_ms: int = 1000) -> Batch:
    ids = [f"id{number}" for number in range(count)]
    return Batch("a", ids, [join_batch([b"x" * size] * count)], deadline_ms, lambda _: None)


@pytest.mark.parametrize(
    "error, doubtful, expected",
    [
        pytest.param(OutcomeUnknown("lost"), False, Next.REPEAT, id="lost"),
        pytest.param(BrokerReadOnly("slave_down"), False, Next.MOVE, id="readonly at once"),
        pytest.param(NotMaster("old"), False, Next.MOVE, id="not master at once"),
        pytest.param(Overloaded("full"), False, Next.MOVE, id="overloaded at once"),
        pytest.param(BrokerReadOnly("slave_down"), True, Next.REPEAT, id="readonly after a lost answer"),
        pytest.param(NotMaster("old"), True, Next.REPEAT, id="not master after a lost answer"),
        pytest.param(InvalidRequest("garbage"), False, Next.REFUSED, id="invalid"),
        pytest.param(AccessError("token"), False, Next.REFUSED, id="token"),
        pytest.param(InvalidRequest("number too old"), True, Next.UNKNOWN, id="invalid after a lost answer"),
        pytest.param(NotServed("later"), False, Next.REPEAT, id="says not that nothing was stored"),
        pytest.param(Fenced("newer epoch"), False, Next.REPEAT, id="fenced: maybe written"),
        pytest.param(QmqError("broken"), False, Next.REPEAT, id="unknown error: maybe written"),
    ],
)
def test_only_a_batch_without_doubt_goes_elsewhere_or_ends(error, doubtful, expected):
    batch = batch_of()
    batch.doubtful = doubtful
    assert after_error(batch, error) is expected
    assert batch.doubtful == (expected is Next.REPEAT or doubtful)


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


STEPS = st.tuples(st.sampled_from(["send", "answer", "fail", "lose", "repeat"]), st.integers(0, 63))


@given(st.lists(STEPS, max_size=400))
def test_numbers_never_span_more_than_a_group_remembers(steps):
    group = GroupBatches(in_flight_max=64)
    group.limits = Limits(packet_bytes_max=10_000, window_bytes=3_000)
    open_batches: dict[int, Batch] = {}
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


def test_a_message_that_is_alone_larger_than_the_room_is_taken_alone():
    queue = SubjectQueue("a")
    for size in (500, 10, 10):
        queue.add(Waiting(b"x" * size, "id", 1000, lambda _: None))
    assert [len(queue.next_batch(100)), len(queue.next_batch(100))] == [1, 2]
    assert not queue
    assert queue.waiting_bytes == 0


def test_batches_that_come_back_stand_where_they_were():
    queue = SubjectQueue("a")
    made = [batch_of() for _ in range(4)]
    for batch in made:
        queue.add_batch(batch)
    taken = [queue.next_batch(100), queue.next_batch(100), queue.next_batch(100)]
    for batch in taken:
        queue.put_back(batch)
    assert list(queue.ready) == made


def test_what_waited_past_its_deadline_is_refused_not_unknown():
    queue, receipts = SubjectQueue("a"), []
    queue.add(Waiting(b"x", "one", 1000, receipts.append))
    queue.add(Waiting(b"x", "two", 2000, receipts.append))
    late = batch_of(deadline_ms=900)
    queue.add_batch(late)
    queue.expire(1500, "nobody took it")
    assert [(receipt.message_id, receipt.outcome) for receipt in receipts] == [("one", Outcome.REFUSED)]
    assert late.receipt(0).outcome is Outcome.REFUSED
    assert len(queue.waiting) == 1


def test_receipts_count_sequences_around_refused_messages():
    batch = batch_of(5)
    batch.resolve(stored("g1", Produced(100, 3, 0, [(1, "too large"), (3, "too large")])))
    assert [batch.receipt(at).sequence for at in range(5)] == [100, -1, 101, -1, 102]
    assert batch.receipt(3).reason == "too large"
    assert (batch.count(Outcome.STORED), batch.count(Outcome.REFUSED), batch.count(Outcome.UNKNOWN)) == (3, 2, 0)


def test_a_split_batch_is_resolved_when_both_halves_are_and_reads_like_one():
    resolved = []
    batch = Batch("a", list("abcde"), [join_batch([b"1", b"2", b"3", b"4", b"5"])], 1000, resolved.append)
    first, second = batch.split()
    third, fourth = second.split()
    assert [bytes(one) for one in split_batch(b"".join(fourth.blocks), len(fourth))] == [b"4", b"5"]
    first.resolve(stored("g1", Produced(10, 2, 0, [])))
    fourth.resolve(not_stored(Outcome.UNKNOWN, "g2", "late"))
    assert resolved == []
    third.resolve(stored("g2", Produced(7, 1, 0, [])))
    assert resolved == [batch]
    assert [batch.receipt(at).sequence for at in range(5)] == [10, 11, 7, -1, -1]
    assert "".join(batch.receipt(at).message_id for at in range(5)) == "abcde"
    assert batch.count(Outcome.UNKNOWN) == 2


def test_receipts_read_like_a_list():
    receipts, expected = Receipts(), []
    for count in (3, 1, 4):
        batch = batch_of(count)
        batch.resolve(stored("g1", Produced(len(expected), count, 0, [])))
        receipts.add(batch)
        expected += [batch.receipt(at) for at in range(count)]
    assert list(receipts) == expected == receipts[:]
    assert (receipts[-1], receipts[3], receipts[2:5], len(receipts)) == (expected[-1], expected[3], expected[2:5], 8)
    assert receipts.all_stored
    with pytest.raises(IndexError):
        receipts[8]


VALUES = st.one_of(
    st.text(max_size=40), st.integers(), st.booleans(), st.floats(), st.just("x" * 32_768), st.just("\ud800"),
    st.just("ü" * 16_384), st.just("x" * 32_767), st.just(None),
)  # fmt: skip
MESSAGES = st.builds(
    lambda properties, tags, id: Message("s.ü", properties, tags=tags, id=id),
    st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    st.sets(st.sampled_from(["a", "é", "", "t" * 200]), max_size=3),
    st.one_of(st.none(), st.text(max_size=8), st.just("i" * 101), st.just("ü" * 50)),
)


@given(st.lists(MESSAGES, max_size=12))
def test_a_run_is_encoded_to_the_bytes_of_the_codec(messages):
    ids, begin, encode = MessageIds("prefix-"), 0, batch_encoder("s.ü", 77)
    given_ids = [message.id for message in messages]
    while begin < len(messages):
        run = encode_run("s.ü", messages, begin, ids=ids, now_ms=77)
        taken = messages[begin : run.end]
        assert run.ids == [message.id for message in taken]
        if taken:
            assert b"".join(run.blocks) == join_batch([encode(message) for message in taken])
        begin = run.end
        if run.error is not None:
            with pytest.raises(InvalidMessage) as simple:
                encode(messages[begin])
            assert str(run.error) == str(simple.value)
            begin += 1
    assert all(message.id == id for message, id in zip(messages, given_ids) if id is not None)
    assert all(message.id for message, id in zip(messages, given_ids) if id is None)


def test_runs_end_before_they_grow_too_large_and_lose_nothing():
    messages = [Message("a", {"v": "x" * 30_000}) for _ in range(100)]
    ids, begin, sizes = MessageIds("p"), 0, []
    while begin < len(messages):
        run = encode_run("a", messages, begin, ids=ids, now_ms=1)
        sizes.append(sum(map(len, run.blocks)))
        assert run.end > begin
        begin = run.end
    assert len({message.id for message in messages}) == 100
    assert max(sizes) <= (1 << 20) + 1000


def test_too_large_is_a_refusal_of_one_message():
    assert after_error(batch_of(), MessageTooLarge("2 MiB")) is Next.REFUSED
