"""Shell. Messages in QMQ's encoding, and batches of them: bytes with their meaning, written by hand."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

import pytest

from qmq.codec import (
    check_batch,
    decode_envelope,
    decode_message,
    decode_properties,
    encode_message,
    join_batch,
    split_batch,
)
from qmq.errors import InvalidMessage
from qmq.message import Message

FOLDER = Path(__file__).parent / "message_qmq"
MESSAGES, FOREIGN, REFUSED, BATCHES, VALUES = (
    json.loads((FOLDER / f"{name}.json").read_text())
    for name in ("messages", "foreign", "refused", "batches", "values")
)


@pytest.mark.parametrize("row", MESSAGES, ids=itemgetter("name"))
def test_message_encodes_to_golden_bytes(row):
    message = Message(row["subject"], row["properties"], tags=row["tags"], id=row["id"])
    assert encode_message(message, row["moment_ms"]).hex() == row["bytes"]


@pytest.mark.parametrize("row", MESSAGES + FOREIGN, ids=itemgetter("name"))
def test_golden_bytes_decode(row):
    message = decode_message(bytes.fromhex(row["bytes"]))
    assert (message.subject, message.id, message.created_ms) == (row["subject"], row["id"], row["created_ms"])
    assert dict(message.properties) == row["properties"]
    assert sorted(message.tags) == sorted(row["tags"])
    assert decode_envelope(bytes.fromhex(row["bytes"])).flag == row["flag"]


@pytest.mark.parametrize("row", REFUSED, ids=itemgetter("name"))
def test_malformed_message_is_refused(row):
    with pytest.raises(InvalidMessage):
        decode_message(bytes.fromhex(row["bytes"]))


@pytest.mark.parametrize("row", VALUES, ids=lambda row: repr(row["value"]))
def test_value_has_golden_spelling(row):
    data = encode_message(Message("s", {"value": row["value"]}, id="1"), 0)
    assert decode_properties(data)["value"] == row["text"]


@pytest.mark.parametrize("row", BATCHES, ids=itemgetter("name"))
def test_batch_has_golden_bytes(row):
    messages = [bytes.fromhex(message) for message in row["messages"]]
    body = join_batch(messages)
    assert body.hex() == row["bytes"]
    assert list(split_batch(body, len(messages))) == messages
    assert check_batch(body, len(messages), 1 << 20).refused == []
