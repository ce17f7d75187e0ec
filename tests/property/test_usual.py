"""Core. The bulk check of many messages equals the check of each."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.codec import VALUE_BYTES_MAX, join_batch
from qmq.errors import InvalidRequest
from qmq.server.producing import AT_ONCE_MIN, are_usual, check_messages

MESSAGE_BYTES_MAX = 2_000


def string(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def encoded(
    flag: int, subject: bytes, id: bytes, tags: list[bytes], properties: bytes, says: int = 0, body: bytes = b""
) -> bytes:
    """Return a message; `says`: the excess of its stated length."""
    section = bytes([len(tags)]) + b"".join(map(string, tags)) if flag & 4 else b""
    head = struct.pack(">Bqq", flag, 1, 1) + string(subject) + string(id) + section
    return head + struct.pack(">i", len(properties) + says) + properties + body


words = st.binary(max_size=12).map(bytes.hex).map(str.encode)
properties = st.lists(words, max_size=3).map(lambda texts: b"".join(map(string, texts * 2)))
usual = st.builds(
    lambda flag, *fields, body: encoded(flag, *fields, body=body if flag & 8 else b""),
    st.sampled_from([0, 2, 4, 6, 8, 12]),
    words,
    words.filter(bool),
    st.lists(words, max_size=10),
    properties,
    body=st.binary(max_size=40),
)
GOOD = encoded(0, b"s", b"id", [], b"")
wrong = st.one_of(
    st.builds(encoded, st.just(0), words, st.sampled_from([b"", b"i" * 101, b"i" * 300]), st.just([]), properties),
    st.builds(encoded, st.just(4), words, st.just(b"id"), st.lists(words, min_size=11, max_size=14), properties),
    st.builds(
        encoded, st.sampled_from([0, 4, 8]), words, st.just(b"id"), st.just([b"t"]), properties, st.integers(-9, 9)
    ),
    st.builds(encoded, st.sampled_from([0, 4]), words, st.just(b"id"), st.just([]), properties, body=st.just(b"body")),
    st.binary(max_size=80),
    st.just(b"x" * (MESSAGE_BYTES_MAX + 1)),
    usual.flatmap(lambda good: st.integers(0, len(good)).map(lambda end: good[:end])),
    usual.flatmap(
        lambda good: st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)).map(
            lambda damage: good[: damage[0]] + bytes([damage[1]]) + good[damage[0] + 1 :]
        )
    ),
)


@given(st.lists(usual, min_size=1, max_size=5), wrong, st.integers(0, AT_ONCE_MIN))
def test_bulk_check_equals_single_checks(kinds, odd, at):
    messages = (kinds * AT_ONCE_MIN)[:AT_ONCE_MIN]
    assert are_usual(join_batch(messages), len(messages), MESSAGE_BYTES_MAX)
    messages.insert(at, odd)
    batch = join_batch(messages)
    refused = [position for position, _ in check_messages(batch, len(messages), MESSAGE_BYTES_MAX)]
    alone = check_messages(join_batch([odd]), 1, MESSAGE_BYTES_MAX)
    if are_usual(batch, len(messages), MESSAGE_BYTES_MAX):
        assert refused == [] == alone
    else:
        assert refused == ([at] if alone else [])


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(GOOD[:17] + b"\xff\xff" + GOOD[19:], id="a subject far beyond its end"),
        pytest.param(encoded(4, b"s", b"id", [], b"")[:-5] + b"\0\6padded", id="an id beyond its end"),
        pytest.param(struct.pack(">Bqq", 0, 1, 1) + string(b"s") + string(b"longer"), id="shorter than its id"),
        pytest.param(struct.pack(">Bqq", 4, 1, 1) + string(b"s") + string(b"longer"), id="shorter than its tags"),
        pytest.param(encoded(4, b"s", b"id", [b"longer"], b"")[:-4], id="ends after its tags"),
        pytest.param(encoded(0, b"s", b"id", [], b"", 1 << 16), id="the length of a much larger one"),
        pytest.param(encoded(0, b"s", b"id", [], b"", -1), id="a negative length"),
        pytest.param(encoded(0, b"s", b"id", [], b"", body=b"b"), id="a body without its flag"),
        pytest.param(encoded(8, b"s", b"id", [], b"", 9, body=b"b" * 8), id="a body shorter than its properties"),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_message_with_wrong_length_is_refused_alone(odd, is_last):
    """As the last message its length leads out of the batch, otherwise into the next message."""
    for more in range(8):  # the number of zeros behind it in the batch
        messages = [encoded(0, b"s", b"id" + b"x" * more, [], b""), *[GOOD] * AT_ONCE_MIN]
        messages.insert(len(messages) if is_last else 3, odd)
        [(position, _)] = check_messages(join_batch(messages), len(messages), MESSAGE_BYTES_MAX)
        assert position == (len(messages) - 1 if is_last else 3)


@given(st.lists(st.integers(0, 200), min_size=AT_ONCE_MIN, max_size=AT_ONCE_MIN + 5), st.binary(max_size=2_000))
def test_arbitrary_end_offsets_are_safe(ends, data):
    """As end offsets, arbitrary bytes lead anywhere."""
    count = len(ends) - 1
    batch = struct.pack(f"<{count + 1}I", *ends) + data
    batch += b"\0" * (-len(batch) % 8)
    if are_usual(batch, count, MESSAGE_BYTES_MAX):
        assert check_messages(batch, count, MESSAGE_BYTES_MAX) == []


@pytest.mark.parametrize("size", [VALUE_BYTES_MAX - 100, VALUE_BYTES_MAX + 1])
def test_large_messages_are_checked_singly(size):
    large = encoded(
        0, b"s", b"id", [], string(b"n") + string(b"x" * 20_000) + string(b"m") + string(b"x" * (size - 20_040))
    )
    batch = join_batch([GOOD] * AT_ONCE_MIN + [large])
    assert are_usual(batch, AT_ONCE_MIN + 1, 1 << 20) is (len(large) <= VALUE_BYTES_MAX)
    assert check_messages(batch, AT_ONCE_MIN + 1, 1 << 20) == []


@pytest.mark.parametrize("size", [10, 20_000])
def test_large_body_needs_no_parsing(size):
    """Only long properties of a message with a body are parsed."""
    large = encoded(8, b"s", b"id", [], string(b"n") + string(b"x" * size) * 3, body=b"b" * 100_000)
    batch = join_batch([GOOD] * AT_ONCE_MIN + [large])
    assert are_usual(batch, AT_ONCE_MIN + 1, 1 << 20) is (size == 10)
    assert check_messages(batch, AT_ONCE_MIN + 1, 1 << 20) == []
    assert check_messages(join_batch([large]), 1, 1 << 20) == []
    long = encoded(8, b"s", b"id", [], string(b"n") + string(b"x" * 32_768), body=b"b" * 100_000)
    for count in (1, AT_ONCE_MIN):
        [(position, fault)] = check_messages(join_batch([long] + [GOOD] * (count - 1)), count, 1 << 20)
        assert (position, "32768 bytes" in fault) == (0, True)


def test_batch_shorter_than_its_offsets_is_refused():
    batch = join_batch([GOOD] * AT_ONCE_MIN)
    for length in (0, 8, 4 * AT_ONCE_MIN, 4 * (AT_ONCE_MIN + 1)):
        with pytest.raises(InvalidRequest):
            check_messages(batch[:length], AT_ONCE_MIN, 1 << 20)
