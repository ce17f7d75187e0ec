"""Core. Content of a row: encoded messages decode unchanged; QMQ's rows are accepted, others refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qmq import InvalidMessage, Message
from qmq.codec import batch_encoder, expires_after_ms
from qmq.message import text_of
from qmq.outbox.row import decode_row, encode_row

NOW_MS = 1_760_000_000_123

MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)).map(
    lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = TEXTS | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.booleans() | MOMENTS
NAMES = TEXTS.filter(lambda name: not name.startswith("qmq_"))


@given(
    properties=st.dictionaries(NAMES, VALUES, max_size=5),
    tags=st.sets(TEXTS, max_size=3),
    order_key=st.none() | TEXTS,
    retries_max=st.none() | st.integers(0, 1000),
    body=st.just({}) | st.fixed_dictionaries({"body": st.binary()}, optional={"content_type": TEXTS}),
)
def test_row_round_trip_keeps_types(properties, tags, order_key, retries_max, body):
    message = Message("s", properties, tags=tags, id="i", order_key=order_key, retries_max=retries_max, **body)
    read = decode_row(encode_row(message, NOW_MS))
    assert (read.subject, read.id, read.created_ms) == ("s", "i", NOW_MS)
    assert (set(read.tags), read.order_key, read.retries_max) == (tags, order_key, retries_max)
    assert (read.body, read.content_type) == (body.get("body"), body.get("content_type"))
    assert dict(read.properties) == properties
    assert [type(read[name]) for name in properties] == [type(value) for value in properties.values()]


def test_repeated_row_encodes_identically():
    message = Message("s", {"a": 5, "b": 5.0, "c": True, "d": "é\0", "e": 1 << 62}, tags=["t"], id="i", order_key="k")
    encode = batch_encoder("s", NOW_MS)
    assert encode(decode_row(encode_row(message, NOW_MS))) == encode(message)


def test_earlier_readers_park_a_row_with_a_body():
    """They would send it without its body. QMQ's reader ignores `types`."""
    row = json.loads(encode_row(Message("s", {"a": 5}, id="i", body=b"hello", content_type="text/plain"), NOW_MS))
    assert row == {
        "messageId": "i",
        "subject": "s",
        "tags": [],
        "storeAtFailed": False,
        "durable": True,
        "attrs": {"qmq_createTime": str(NOW_MS), "a": "5"},
        "types": [["a", "int"]],
        "body": "aGVsbG8=",
        "contentType": "text/plain",
    }
    assert isinstance(json.loads(encode_row(Message("s", {"a": 5}, id="i"), NOW_MS))["types"], dict)


@given(st.integers(1, 366 * 86_400_000).map(lambda ms: ms / 1000) | st.floats(0.001, 366 * 86_400.0))
@example(1.001)
@example(1.0011)
def test_expiry_is_the_same_in_each_send(seconds):
    message = Message("s", id="i", expires_after=seconds)
    encode = batch_encoder("s", NOW_MS)
    assert encode(decode_row(encode_row(message, NOW_MS))) == encode(message)
    assert abs(expires_after_ms(seconds) - seconds * 1000) <= 0.5


def test_decimal_parsers_keep_the_digits():
    """Like QMQ's watchdog, which needs every property as the text on the wire."""
    content = encode_row(Message("s", {"a": 5, "b": 1e16, "c": True}, id="i"), NOW_MS)
    attributes = json.loads(content, parse_int=float)["attrs"]
    assert [attributes[name] for name in "abc"] == [text_of(5), text_of(1e16), text_of(True)]


def test_row_is_ascii():
    assert encode_row(Message("s", {"städt": "☃ \0"}, id="i"), NOW_MS).isascii()


def test_a_row_that_qmq_wrote_is_read():
    content = json.dumps(
        {
            "messageId": "251009.1",
            "subject": "order.paid",
            "tags": ["vip"],
            "durable": True,
            "storeAtFailed": False,
            "attrs": {
                "count": 5,
                "orderNo": "9007199254740993",
                "price": 2.5,
                "isVip": True,
                "name": "Li",
                "none": None,
                "qmq_createTime": "1760000000123",
                "qmq_maxRetryNum": 7,
                "qmq_appCode": "shop",
            },
        }
    )
    message = decode_row(content)
    assert (message.subject, message.id, set(message.tags)) == ("order.paid", "251009.1", {"vip"})
    assert (message.created_ms, message.retries_max, message.order_key) == (NOW_MS, 7, None)
    assert dict(message.properties) == {
        "count": 5,
        "orderNo": "9007199254740993",
        "price": 2.5,
        "isVip": True,
        "name": "Li",
    }
    assert message.get_int("orderNo") == 9007199254740993
    assert type(message["count"]) is int


GOOD = {"messageId": "i", "subject": "s", "attrs": {}}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="null"),
        pytest.param("", id="empty"),
        pytest.param("{", id="cut"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param("[1]", id="no object"),
        pytest.param(json.dumps(GOOD | {"subject": ""}), id="no subject"),
        pytest.param(json.dumps(GOOD | {"subject": 7}), id="subject no text"),
        pytest.param(json.dumps(GOOD | {"messageId": None}), id="no id"),
        pytest.param(json.dumps(GOOD | {"attrs": [1]}), id="attrs no object"),
        pytest.param(json.dumps(GOOD | {"attrs": {"a": {"b": 1}}}), id="nested value"),
        pytest.param(json.dumps(GOOD | {"attrs": {"a": "x"}, "types": {"a": "int"}}), id="no int"),
        pytest.param(json.dumps(GOOD | {"attrs": {"a": "x"}, "types": {"a": "eval"}}), id="unknown type"),
        pytest.param(json.dumps(GOOD | {"attrs": {"a": "9" * 30}, "types": {"a": "datetime"}}), id="no moment"),
        pytest.param(json.dumps(GOOD | {"types": 1}), id="types no object"),
        pytest.param(json.dumps(GOOD | {"body": 7}), id="body no text"),
        pytest.param(json.dumps(GOOD | {"body": "?"}), id="body no base64"),
        pytest.param(json.dumps(GOOD | {"body": "", "types": {"a": "int"}}), id="types of a body no list"),
        pytest.param(json.dumps(GOOD | {"body": "", "types": [["a", []]]}), id="types of a body no pairs"),
        pytest.param(json.dumps(GOOD | {"body": "", "contentType": 7}), id="content type no text"),
        pytest.param(json.dumps(GOOD | {"tags": "vip"}), id="tags no list"),
        pytest.param(json.dumps(GOOD | {"tags": [1]}), id="tag no text"),
        pytest.param(json.dumps(GOOD | {"attrs": {"qmq_maxRetryNum": "x"}}), id="limit no number"),
        pytest.param(json.dumps(GOOD | {"attrs": {"qmq_createTime": []}}), id="moment no number"),
        pytest.param(json.dumps(GOOD | {"attrs": {"qmq_scheduleReceiveTime": "1"}}), id="delayed"),
    ],
)
def test_invalid_row_is_refused_with_a_reason(content):
    with pytest.raises(InvalidMessage, match="row"):
        decode_row(content)


KEYS = ["messageId", "subject", "attrs", "types", "body", "contentType", "tags", "a", "qmq_createTime", "qmq_orderKey"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ROWS = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS), inner))


@given(st.text() | ROWS.map(json.dumps))
def test_anything_else_is_a_message_or_refused(content):
    try:
        decode_row(content)
    except InvalidMessage:
        pass


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Message("s"), id="no id"),
        pytest.param(Message("s", {"qmq_x": "1"}, id="i"), id="reserved name"),
        pytest.param(Message("s", {1: "1"}, id="i"), id="name no text"),
        pytest.param(Message("s", {"a": None}, id="i"), id="none"),
        pytest.param(Message("s", {"a": datetime(2026, 1, 1)}, id="i"), id="no time zone"),
    ],
)
def test_unsendable_property_is_not_written(message):
    with pytest.raises(InvalidMessage):
        encode_row(message, NOW_MS)
