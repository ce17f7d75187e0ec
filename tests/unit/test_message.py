"""Core. Content of a message, and its getters."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum, StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.codec import VALUE_BYTES_MAX, decode_message, encode_message, with_subject
from qmq.errors import InvalidMessage
from qmq.message import Message

MOMENT = datetime(2026, 11, 21, 10, 30, 0, 123_000, UTC)


def sent(message: Message) -> Message:
    """The message as its consumer has it."""
    if message.id is None:
        message.id = "id"
    return decode_message(encode_message(message, 0))


def refusal(message: Message) -> str:
    if message.id is None:
        message.id = "the-id"
    with pytest.raises(InvalidMessage) as error:
        encode_message(message, 0)
    return str(error.value)


def test_getters_return_each_type():
    """Rule: boolean, int, long, float, double, date (as ms), string; sent as text, also parsed by typed getters."""
    message = sent(Message("s", {"b": True, "i": -7, "l": 2**62, "f": 0.1, "s": "text", "d": MOMENT}))
    assert (message.get_bool("b"), message.get_int("i"), message.get_int("l")) == (True, -7, 2**62)
    assert (message.get_float("f"), message["s"], message.get_datetime("d")) == (0.1, "text", MOMENT)
    assert message.properties["d"] == MOMENT


class Color(StrEnum):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


@pytest.mark.parametrize(
    "value, received",
    [
        ("5", "5"),
        (5, 5),
        (True, True),
        (2.0, 2.0),
        (-(10**30), -(10**30)),
        (float("-inf"), float("-inf")),
        (MOMENT.astimezone(timezone(timedelta(hours=8))), MOMENT),
        (Color.RED, "red"),
        (Size.LARGE, 3),
    ],
    ids=repr,
)
def test_properties_keep_their_types(value, received):
    back = sent(Message("s", {"text": "1", "x": value, "last": "true"}, order_key="k", retries_max=3))
    assert (back["text"], back["last"]) == ("1", "true")
    assert (back["x"], type(back["x"])) == (received, type(received))
    assert back.copy_to("other").properties == {"text": "1", "x": received, "last": "true"}


def test_text_properties_cost_no_types():
    assert b"qmq_types" not in encode_message(Message("s", {"x": "1", "color": Color.RED}, id="1"), 0)
    assert b"\x00\x09qmq_types\x00\x05sifbd" in encode_message(
        Message("s", {"a": "1", "b": 1, "c": 1.5, "d": True, "e": MOMENT}, id="1"), 0
    )


def test_types_of_too_many_properties_are_left_out():
    """The types of 32,768 properties do not fit into one property."""
    back = sent(Message("s", {str(number): number for number in range(VALUE_BYTES_MAX + 1)}))
    assert (back["7"], back.get_int("7")) == ("7", 7)


@pytest.mark.parametrize("body", [b"", b"\0\xff", bytearray(b"text"), memoryview(b"0123")[::2]])
def test_body_is_received_as_bytes(body):
    back = sent(Message("s", {"n": 1}, body=body, content_type="image/png", order_key="k"))
    assert (back.body, type(back.body), back.content_type) == (bytes(body), bytes, "image/png")
    assert back.properties == {"n": 1, "qmq_orderKey": "k"}
    copy = sent(back.copy_to("other"))
    assert (copy.body, copy.content_type) == (bytes(body), "image/png")
    assert f"<{len(bytes(body))} bytes of image/png>" in repr(back)


def test_message_without_a_body_has_none():
    back = sent(Message("s", {"n": "1"}))
    assert (back.body, back.content_type, "body" in repr(back)) == (None, None, False)


def test_body_is_a_copy_of_changing_bytes():
    given_body = bytearray(b"before")
    message = Message("s", body=given_body)
    given_body[:] = b"after!"
    assert message.body == b"before"


@pytest.mark.parametrize("body", ["text", 7, ["x"], {"a": 1}], ids=repr)
def test_body_must_be_bytes(body):
    with pytest.raises(InvalidMessage, match="a body is bytes, not"):
        Message("s", body=body)
    message = Message("s", id="the-id")
    message.body = body
    assert "message the-id: a body is bytes, not" in refusal(message)


@pytest.mark.parametrize("content_type", [" ", "", 7], ids=["blank", "empty", "number"])
def test_content_type_is_a_word(content_type):
    assert "content type" in refusal(Message("s", body=b"", content_type=content_type))


def test_content_type_needs_a_body():
    assert "content type 'text/plain' needs a body" in refusal(Message("s", content_type="text/plain"))


def test_unsent_message_reads_the_same():
    message = Message("s", {"b": False, "i": 7, "d": MOMENT.astimezone(timezone(timedelta(hours=8)))})
    assert (message.get_bool("b"), message.get_int("i"), message.get_float("i")) == (False, 7, 7.0)
    assert message.get_datetime("d") == MOMENT
    assert "b" in message and "x" not in message


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_moment_keeps_its_milliseconds(moment):
    back = sent(Message("s", {"d": moment})).get_datetime("d")
    assert back is not None
    assert timedelta(0) <= moment - back < timedelta(milliseconds=1)


def test_missing_property_is_the_default():
    """Rule: missing key. None instead of QMQ's 0 and false, which look like values."""
    message = Message("s")
    assert [message.get_int("x"), message.get_float("x"), message.get_bool("x"), message.get_datetime("x")] == [
        None
    ] * 4
    assert (message.get_int("x", 5), message.get_bool("x", True), message.get("x", "y")) == (5, True, "y")
    with pytest.raises(KeyError):
        message["x"]


@pytest.mark.parametrize("name", ["get_int", "get_float", "get_bool", "get_datetime"])
def test_wrong_type_names_property_and_message(name):
    message = sent(Message("s", {"x": "yes"}, id="the-id"))
    with pytest.raises(InvalidMessage, match="property 'x' of message the-id is 'yes', not"):
        getattr(message, name)("x")


@pytest.mark.parametrize("value", [None, [1], b"bytes", datetime(2026, 1, 1)], ids=repr)
def test_other_value_types_are_refused(value):
    """Rule: null value. QMQ drops the property silently."""
    assert "message the-id: property 'x': a " in refusal(Message("s", {"x": value}))


RESERVED_BY_QMQ = (
    "qmq_createTime",
    "qmq_expireTime",
    "qmq_consumerGroupName",
    "qmq_scheduleReceiveTime",
    "qmq_times",
    "qmq_maxRetryNum",
    "qmq_appCode",
    "qmq_pullOffset",
    "qmq_corruptData",
    "qmq_env",
    "qmq_subEnv",
)


@pytest.mark.parametrize("name", [*RESERVED_BY_QMQ, "qmq_orderKey", "qmq_deadReason"])
def test_reserved_names_are_refused(name):
    """Rule: reserved names."""
    assert f"property {name!r}" in refusal(Message("s", {name: "1"}))
    assert f"property {name!r}" in refusal(Message("s", {name: "1"})), "again, as names are kept"


@pytest.mark.parametrize("id", ["", "é" * 51, 7], ids=["empty", "too many bytes", "no text"])
def test_an_id_has_one_to_a_hundred_bytes(id):
    """Rule: id length."""
    assert "id" in refusal(Message("s", id=id))


@pytest.mark.parametrize("tag", ["", 7], ids=["empty", "no text"])
def test_a_tag_is_a_word(tag):
    """Rule: tags."""
    assert "message the-id: a tag" in refusal(Message("s", tags={tag}))


def test_single_str_is_no_tag_set():
    with pytest.raises(InvalidMessage, match="{'pay'}"):
        Message("s", tags="pay")


def test_large_property_is_refused_with_id():
    """Gap of QMQ: the producer takes it, and every consumer drops it silently."""
    assert "message the-id: property 'x' has" in refusal(Message("s", {"n": 1, "x": "é" * 16_384}))


@pytest.mark.parametrize(
    "text, parts",
    [
        pytest.param("x" * 8_192, 0, id="as much as QMQ keeps whole"),
        pytest.param("x" * 8_193, 2, id="one character more"),
        pytest.param("支" * 100_000, 13, id="three bytes each"),
        pytest.param("🚆" * 4_096, 0, id="two units of UTF-16 each"),
        pytest.param("🚆" * 100_000, 25, id="four bytes each"),
        pytest.param("", 0, id="empty"),
    ],
)
def test_large_text_is_cut_into_parts(text, parts):
    """Rule: large string."""
    message = Message("s", {"n": 1})
    message.set_large("x", text)
    back = sent(message)
    assert back.get_large("x") == text
    expected = {f"x#part{number}" for number in range(parts)} or {"x"}
    assert set(back.properties) == {"n"} | expected
    assert all(len(str(value).encode("utf-16-le")) <= 2 * 8_192 for value in back.properties.values())


def test_reset_large_text_leaves_no_parts():
    mine = {"n": 1, "x#party": "other"}
    message = Message("s", mine)
    for text in ("x" * 50_000, "y" * 9_000, "z"):
        message.set_large("x", text)
        assert message.get_large("x") == text
    assert message.properties == {**mine, "x": "z"} and mine == {"n": 1, "x#party": "other"}
    assert message.get_large("missing") is None and message.get_large("missing", "d") == "d"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_json_round_trips(value):
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogates are no text
        return
    assert sent(Message.of_json("s", value)).json() == value


def test_json_of_any_size_fits():
    value = {"items": ["支付" * 10] * 5_000}
    assert sent(Message.of_json("s", value, {"n": 1}, tags={"t"}, order_key="k")).json() == value


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), MOMENT], ids=["set", "nan", "datetime"])
def test_value_without_json_is_refused(value):
    with pytest.raises(InvalidMessage, match="cannot be encoded as JSON"):
        Message.of_json("s", value)


@pytest.mark.parametrize("properties", [{}, {"json": "{"}], ids=["nothing", "broken"])
def test_missing_json_raises(properties):
    with pytest.raises(InvalidMessage, match="message the-id"):
        Message("s", properties, id="the-id").json()


def test_order_key_and_limit_of_retries_travel():
    back = sent(Message("s", {"n": 1}, order_key="k", retries_max=0))
    assert (back.order_key, back.retries_max) == ("k", 0)
    plain = sent(Message("s", {"n": 1}))
    assert (plain.order_key, plain.retries_max) == (None, None)


@pytest.mark.parametrize("options", [{"order_key": ""}, {"order_key": 7}], ids=str)
def test_an_order_key_is_a_word(options):
    """An empty one is a mistake that would lose the order silently."""
    assert "message the-id: " in refusal(Message("s", **options))


@pytest.mark.parametrize("retries_max", [-1, 2**31, True, "3"])
def test_a_limit_of_retries_is_a_whole_number(retries_max):
    """Rule: max retries on message; QMQ's -1 for "not set" is None."""
    assert "retries_max" in refusal(Message("s", retries_max=retries_max))


def test_copy_drops_qmq_properties():
    received = sent(Message("s", {"n": 1}, tags={"t"}, order_key="k", retries_max=3, id="one"))
    copy = received.copy_to("other")
    assert copy.properties == {"n": 1} and copy.id is None
    back = sent(copy)
    assert (back.subject, back["n"], back.tags, back.order_key, back.retries_max) == ("other", 1, {"t"}, "k", 3)


def test_subject_is_replaced_in_the_encoding():
    one = Message("order.changed", {"x": "1"}, id="m1", tags=["vip"], order_key="k")
    moved = decode_message(with_subject(encode_message(one, 7), "t"))
    assert (moved.subject, moved.id, dict(moved.properties), moved.tags) == (
        "t",
        "m1",
        {"x": "1", "qmq_orderKey": "k"},
        {"vip"},
    )
    with pytest.raises(InvalidMessage):
        with_subject(b"\0\0", "t")
