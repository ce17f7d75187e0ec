"""Shell. Any message and batch survives encoding; damaged bytes raise a typed error."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq import codec
from qmq.dead_letters import fingerprint, with_fate
from qmq.errors import InvalidMessage, InvalidRequest
from qmq.message import CONTENT_ENCODING, CONTENT_TYPE, TYPES, Message
from qmq.redrive.redriving import without_fate

CONTENT = CONTENT_TYPE, CONTENT_ENCODING, TYPES
texts = st.text(max_size=40)
names = texts.filter(lambda name: not name.startswith("qmq_"))  # reserved names
words = st.text(min_size=1, max_size=20)
times = st.integers(-(2**40), 2**42).map(lambda ms: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms))
values = st.one_of(texts, st.integers(), st.booleans(), st.floats(allow_nan=False), times)
bodies = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries(
        {"body": st.binary(max_size=100)}, optional={"content_type": st.sampled_from(["text/plain", "Ä/ß"])}
    ),
)
messages = st.builds(
    lambda subject, properties, tags, id, body: Message(subject, properties, tags=tags, id=id, **body),
    words,
    st.dictionaries(names, values, max_size=6),
    st.sets(words.filter(str.strip), max_size=codec.TAGS_MAX),  # a blank tag is refused
    words,
    bodies,
)
moments = st.integers(min_value=0, max_value=2**62)
encoded = st.builds(codec.encode_message, messages, moments)
batches = st.lists(encoded, min_size=1, max_size=12)


@given(messages, moments)
def test_message_survives_encoding(message, now_ms):
    back = codec.decode_message(codec.encode_message(message, now_ms))
    assert (back.subject, back.id, back.created_ms) == (message.subject, message.id, now_ms)
    assert back.properties == message.properties
    assert list(map(type, back.properties.values())) == list(map(type, message.properties.values()))
    assert (back.body, back.content_type) == (message.body, message.content_type)
    assert frozenset(back.tags) == frozenset(message.tags)


@given(encoded)
def test_message_cut_before_its_body_is_refused(data):
    for length in range(codec.properties_span(data)[1]):
        with pytest.raises(InvalidMessage):
            codec.decode_message(data[:length])


@given(encoded)
def test_damaged_message_decodes_or_is_refused(data):
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        try:
            codec.decode_message(bytes(damaged))
        except InvalidMessage:
            pass


@given(st.binary(max_size=300))
def test_garbage_is_no_message(data):
    try:
        codec.decode_message(data)
    except InvalidMessage:
        pass


@given(batches)
def test_batch_survives_encoding(messages):
    body = codec.join_batch(messages)
    assert list(codec.split_batch(body, len(messages))) == messages
    assert len(body) % 8 == 0
    assert codec.check_batch(body, len(messages), 1 << 20).refused == []


@given(batches, st.data())
def test_slice_of_a_batch(messages, data):
    begin = data.draw(st.integers(0, len(messages) - 1))
    end = data.draw(st.integers(begin + 1, len(messages)))
    sliced = codec.slice_batch(codec.join_batch(messages), len(messages), begin, end)
    assert sliced == codec.join_batch(messages[begin:end])


@given(batches, st.integers(min_value=0, max_value=200))
@pytest.mark.slow
def test_messages_of_wrong_size_are_refused(messages, message_bytes_max):
    messages = [message if position % 3 else message[:10] for position, message in enumerate(messages)]
    verdict = codec.check_batch(codec.join_batch(messages), len(messages), message_bytes_max)
    wrong = [
        position
        for position, message in enumerate(messages)
        if not codec.MESSAGE_BYTES_MIN <= len(message) <= message_bytes_max
    ]
    assert [position for position, _ in verdict.refused] == wrong


@given(batches)
def test_cut_batch_is_refused(messages):
    body = codec.join_batch(messages)
    for length in range(len(body)):
        with pytest.raises(InvalidRequest):
            codec.check_batch(body[:length], len(messages), 1 << 20)


@given(batches, st.integers(min_value=0, max_value=70_000))
def test_batch_with_damaged_ends(messages, claimed):
    body = codec.join_batch(messages)
    for bit in range(32 * (len(messages) + 1)):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            ends = codec.check_batch(damaged, len(messages), 1 << 20).ends
        except InvalidRequest:
            continue
        assert ends[0] == 0 and list(ends) == sorted(ends) and 4 * len(ends) + ends[-1] <= len(body)
    try:
        codec.check_batch(body, claimed, 1 << 20)
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Message("s", {"k": "v" * 32_768}, id="1"), id="value too long"),
        pytest.param(Message("s", {"k" * 32_768: "v"}, id="1"), id="name too long"),
        pytest.param(Message("s", {"k": "\ud800"}, id="1"), id="value is not Unicode"),
        pytest.param(Message("s", {"\ud800": "v"}, id="1"), id="name is not Unicode"),
        pytest.param(Message("s", {"k": None}, id="1"), id="value is nothing"),
        pytest.param(Message("s", {"k": b"v"}, id="1"), id="value is bytes"),
        pytest.param(Message("s", {1: "v"}, id="1"), id="name is a number"),
        pytest.param(Message("s", tags={str(n) for n in range(11)}, id="1"), id="eleven tags"),
        pytest.param(Message("s", tags={""}, id="1"), id="empty tag"),
        pytest.param(Message("s", tags={"t" * 32_768}, id="1"), id="tag too long"),
        pytest.param(Message("s", id="i" * 101), id="id too long"),
        pytest.param(Message("s", id=""), id="empty id"),
        pytest.param(Message("s"), id="no id"),
        pytest.param(Message("s", id="\ud800"), id="id is not Unicode"),
    ],
)
def test_unencodable_value_is_refused(message):
    with pytest.raises(InvalidMessage):
        codec.encode_message(message, 0)


def test_longest_value_is_encoded():
    longest = "v" * 32_767
    assert codec.decode_message(codec.encode_message(Message("s", {"k": longest}, id="1"), 0))["k"] == longest


@given(encoded, st.dictionaries(texts, texts, max_size=4), st.dictionaries(texts, texts, max_size=4))
def test_added_properties_replace_equal_names(data, first, second):
    changed = codec.with_properties(codec.with_properties(data, first), second)
    assert codec.decode_properties(changed) == {**codec.decode_properties(data), **first, **second}
    before, after = codec.decode_message(data), codec.decode_message(changed)
    assert (after.body, after.content_type) == (before.body, before.content_type)
    assert (after.subject, after.id, after.tags, after.created_ms) == (
        before.subject,
        before.id,
        before.tags,
        before.created_ms,
    )
    assert codec.with_properties(changed, second) == changed
    removed = codec.decode_properties(codec.with_properties(changed, {}, without=second))
    assert removed == {name: text for name, text in codec.decode_properties(changed).items() if name not in second}


@given(messages, st.dictionaries(names, texts, max_size=4), st.sets(names, max_size=2), st.data())
def test_picked_properties_are_those_of_a_full_decoding(message, properties, others, data):
    encoded_message = codec.with_properties(codec.encode_message(message, 0), properties)
    every = codec.decode_properties(encoded_message)
    wanted = data.draw(st.sets(st.sampled_from(sorted(every)))) | others if every else others
    picked = codec.pick_properties(encoded_message, {name.encode(): name for name in wanted})
    assert picked == {name: text for name, text in every.items() if name in wanted}


@given(encoded, words, moments)
def test_rewritten_message_keeps_its_body(data, subject, due_ms):
    body = codec.decode_body(data)
    assert codec.decode_body(codec.with_subject(data, subject)) == body
    delayed = codec.delayed_copy(data, due_ms, {"qmq_times": "2"})
    assert (codec.decode_body(delayed), codec.due_of(delayed)) == (body, due_ms)
    assert codec.decode_content(delayed).properties == {**codec.decode_content(data).properties, "qmq_times": "2"}


@given(encoded, st.none() | st.just(("s", "g")))
def test_redriven_message_is_the_original(data, owner):
    letter = with_fate(data, 2, "no such order", 7, owner)
    assert letter != data and codec.decode_body(letter) == codec.decode_body(data)
    assert fingerprint(letter) == fingerprint(data)
    assert without_fate(letter, codec.decode_properties(letter)) == data


@given(messages, st.dictionaries(names, texts, max_size=3), st.text(max_size=6))
def test_foreign_types_leave_texts(message, properties, types):
    """Changed properties, or types that another program wrote, never make a message unreadable."""
    data = codec.with_properties(codec.encode_message(message, 0), {**properties, "qmq_types": types})
    found = codec.decode_content(data).properties
    assert "qmq_types" not in found
    assert list(found) == [name for name in codec.decode_properties(data) if name not in CONTENT]


@given(encoded)
def test_adding_properties_needs_a_message(data):
    for length in range(codec.properties_span(data)[1]):
        with pytest.raises(InvalidMessage):
            codec.with_properties(data[:length], {"name": "value"})


labels = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=12)


@given(labels, st.binary(max_size=40))
def test_labels_survive_encoding(labels, front):
    section = codec.encode_labels(labels)
    assert len(section) == codec.labels_bytes(len(labels)) and len(section) % 8 == 0
    assert list(codec.decode_labels(section, len(labels))) == labels
    assert list(codec.decode_labels(memoryview(front + section), len(labels))) == labels


@given(labels)
def test_damaged_labels_are_refused(labels):
    section = codec.encode_labels(labels)
    for position in range(len(section)):
        damaged = bytearray(section)
        damaged[position] ^= 1
        with pytest.raises(ValueError, match="CRC"):
            codec.decode_labels(damaged, len(labels))
        with pytest.raises(ValueError, match="do not fit"):
            codec.decode_labels(section[:position], len(labels))
    with pytest.raises(ValueError, match="do not fit"):
        codec.decode_labels(section, len(labels) + 1)


@given(st.sets(words), st.sets(words), st.one_of(st.none(), words))
def test_label_matches_every_tag_of_its_message(tags, wanted, key):
    label = codec.label_of(tags | wanted, key)
    assert label & codec.tag_bits(wanted) == codec.tag_bits(wanted)
    assert label >> 32 == (0 if key is None else label >> 32)
    assert (label >> 32 == 0) == (key is None)
    assert label < 2**64
