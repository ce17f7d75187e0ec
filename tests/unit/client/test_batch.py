"""Core. Batches: numbers, lives, receipts, and the rules against storing a message twice."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qmq.client.batch import (
    BATCH_LIFE,
    Batch,
    BatchEvent,
    BatchLife,
    BatchState,
    MessageIds,
    NotStored,
    Outcome,
    Receipts,
    Stored,
    Unknown,
    answer_of,
    stored,
    unknown,
    with_labels,
)
from qmq.client.bulk import encode_run
from qmq.codec import batch_encoder, decode_labels, join_batch, label_of_message, labels_bytes, split_batch
from qmq.errors import (
    AccessError,
    BrokerReadOnly,
    Fenced,
    IllegalTransition,
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


def batch_of(count: int = 1, size: int = 10, deadline_ms: int = 1000, subject: str = "a") -> Batch:
    ids = [f"id{number}" for number in range(count)]
    return Batch(subject, ids, [join_batch([b"x" * size] * count)], deadline_ms, lambda _: None)


def test_receipts_count_sequences_around_refused_messages():
    batch = batch_of(5)
    batch.resolve(stored("g1", Produced(100, 3, 0, [(1, "too large"), (3, "too large")])))
    assert [batch.receipt(at).sequence for at in range(5)] == [100, -1, 101, -1, 102]
    assert batch.receipt(3).reason == "too large"
    assert (batch.count(Outcome.STORED), batch.count(Outcome.REFUSED), batch.count(Outcome.UNKNOWN)) == (3, 2, 0)


def test_split_batch_reads_like_one():
    resolved = []
    batch = Batch("a", list("abcde"), [join_batch([b"1", b"2", b"3", b"4", b"5"])], 1000, resolved.append)
    first, second = batch.split()
    third, fourth = second.split()
    assert [bytes(one) for one in split_batch(b"".join(fourth.blocks), len(fourth))] == [b"4", b"5"]
    first.resolve(stored("g1", Produced(10, 2, 0, [])))
    fourth.resolve(unknown("g2", "late"))
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
    st.text(max_size=40),
    st.integers(),
    st.booleans(),
    st.floats(),
    st.just("x" * 32_768),
    st.just("\ud800"),
    st.just("ü" * 16_384),
    st.just("x" * 32_767),
    st.just(None),
    st.datetimes(),
    st.just(datetime(2026, 1, 2, tzinfo=UTC)),
)


def with_body(message: Message, body: object, content_type: object) -> Message:
    """Set the body as an application may do it: after the message was made, and maybe wrong."""
    message.body, message.content_type = body, content_type
    return message


MESSAGES = st.builds(
    lambda properties, tags, id, retries, body: with_body(
        Message("s.ü", properties, tags=tags, id=id, retries_max=retries), *body
    ),
    st.dictionaries(st.one_of(st.text(max_size=5), st.just("qmq_times")), VALUES, max_size=4),
    st.sets(st.sampled_from(["a", "é", "", "t" * 200]), max_size=3),
    st.one_of(st.none(), st.text(max_size=8), st.just("i" * 101), st.just("ü" * 50)),
    st.sampled_from([None, None, None, 0, 7, -1]),
    st.one_of(
        st.just((None, None)),
        st.tuples(
            st.sampled_from([b"", b"\xff\0", b"x" * 20_000, bytes(range(256)) * 80, bytearray(b"b"), "text", None]),
            st.sampled_from([None, "a/b", "ü/ß", " ", 7]),
        ),
    ),
)


TAGGED = [Message("s.ü", {"n": 1}, tags={"a"}, id=f"m{size}", body=b"b" * size) for size in (1, 20_000)]


@given(st.lists(MESSAGES, max_size=12), st.sampled_from([None, 2, 1_000]))
@example(TAGGED, None)
def test_run_matches_the_codec(messages, compress):
    ids, begin, encode = MessageIds("prefix-"), 0, batch_encoder("s.ü", 77, compress)
    given_ids = [message.id for message in messages]
    while begin < len(messages):
        run = encode_run("s.ü", messages[begin:], ids=ids, now_ms=77, compress_bytes_min=compress)
        taken = messages[begin : begin + len(run.ids)]
        assert run.ids == [message.id for message in taken]
        if taken:
            batch = join_batch([encode(message) for message in taken])
            assert (b"".join(run.blocks), run.flags) == joined(
                *with_labels([batch], list(map(label_of_message, taken)))
            )
        begin += len(run.ids)
        assert run.rest is (messages[begin] if begin < len(messages) else None)
        if run.error is not None:
            with pytest.raises(InvalidMessage) as simple:
                encode(messages[begin])
            assert str(run.error) == str(simple.value)
            begin += 1
    assert all(message.id == id for message, id in zip(messages, given_ids) if id is not None)
    assert all(message.id for message, id in zip(messages, given_ids) if id is None)


def joined(blocks: list[bytes], flags: int) -> tuple[bytes, int]:
    return b"".join(blocks), flags


@pytest.mark.parametrize(
    "other", [Message("a", {"n": "2"}, order_key="k"), Message("b", {"n": "2"})], ids=["order key", "subject"]
)
def test_run_ends_before_another_kind(other):
    source = iter([Message("a", {"n": "1"}), other, Message("a", {"n": "3"})])
    run = encode_run("a", source, ids=MessageIds("p"), now_ms=1)
    assert (len(run.ids), run.rest, run.error, run.flags) == (1, other, None, 0)
    assert len(list(source)) == 1


def test_labels_of_a_split_batch_follow_their_messages():
    blocks, flags = with_labels([join_batch([b"1", b"2", b"3"])], [0, 5, 7 << 32])
    first, second = Batch("a", list("abc"), blocks, 1000, lambda _: None, flags).split()
    assert (first.flags, len(first.blocks), second.flags) == (0, 1, 6)
    assert list(decode_labels(b"".join(second.blocks), 2)) == [5, 7 << 32]
    assert second.body_bytes == len(join_batch([b"2", b"3"])) + labels_bytes(2)


@pytest.mark.parametrize(
    "content", [{"properties": {"v": "x" * 30_000}}, {"body": b"x" * 30_000}], ids=["text", "body"]
)
def test_runs_are_bounded_and_complete(content):
    messages = [Message("a", **content) for _ in range(100)]
    ids, begin, sizes = MessageIds("p"), 0, []
    while begin < len(messages):
        run = encode_run("a", messages[begin:], ids=ids, now_ms=1)
        sizes.append(sum(map(len, run.blocks)))
        assert run.ids
        begin += len(run.ids)
    assert len({message.id for message in messages}) == 100
    assert max(sizes) <= (1 << 20) + 1000


@pytest.mark.parametrize(
    "error, expected",
    [
        pytest.param(OutcomeUnknown("lost"), Unknown, id="lost"),
        pytest.param(BrokerReadOnly("slave_down"), NotStored, id="readonly"),
        pytest.param(NotMaster("old"), NotStored, id="not master"),
        pytest.param(Overloaded("full"), NotStored, id="overloaded"),
        pytest.param(InvalidRequest("garbage"), NotStored, id="invalid"),
        pytest.param(MessageTooLarge("2 MiB"), NotStored, id="too large"),
        pytest.param(AccessError("token"), NotStored, id="token"),
        pytest.param(NotServed("later"), Unknown, id="says not that nothing was stored"),
        pytest.param(Fenced("newer epoch"), Unknown, id="fenced: maybe written"),
        pytest.param(QmqError("broken"), Unknown, id="unknown error: maybe written"),
    ],
)
def test_error_implies_an_answer(error, expected):
    assert type(answer_of(error)) is expected


ANSWERS = st.sampled_from([Stored(0, 1, []), NotStored(BrokerReadOnly("no slave")), Unknown("lost")])


@given(st.booleans(), st.lists(ANSWERS, max_size=20))
def test_not_stored_needs_the_first_answer(was_adopted, answers):
    life, before = BatchLife(BATCH_LIFE), []
    if was_adopted:
        life.on(BatchEvent.ADOPTED)
    for answer in answers:
        life.on(BatchEvent.SENT)
        before.append(type(answer))
        state = life.on(answer)
        if state is BatchState.STORED:
            assert before[-1] is Stored
        if state is BatchState.NOT_STORED:
            assert before == [NotStored] and not was_adopted
        if state is not BatchState.OUTCOME_UNKNOWN:
            with pytest.raises(IllegalTransition):
                life.on(BatchEvent.SENT)  # it has its outcome
            return
        assert life.may_be_stored and not life.is_in_flight
    if life.state is BatchState.OUTCOME_UNKNOWN:
        assert life.on(BatchEvent.GAVE_UP) is BatchState.GIVEN_UP
