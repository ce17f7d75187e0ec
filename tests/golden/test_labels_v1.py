"""Shell. Labels of tags and order keys: bytes with their meaning, computed apart from the codec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qmq.codec import decode_labels, decode_message, encode_labels, encode_message, label_of
from qmq.log.frame import label_flags
from qmq.message import Message

FOLDER = Path(__file__).parent / "labels_v1"
LABELS, MESSAGES = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("labels", "messages"))


@pytest.mark.parametrize("row", LABELS, ids=[row["name"] for row in LABELS])
def test_batch_has_golden_labels(row):
    labels = [label_of(message["tags"], message["order_key"]) for message in row["messages"]]
    assert [f"{label:016x}" for label in labels] == [message["label"] for message in row["messages"]]
    assert encode_labels(labels).hex() == row["bytes"]
    assert list(decode_labels(bytes.fromhex(row["bytes"]), len(labels))) == labels
    assert label_flags(labels) == row["flags"]


@pytest.mark.parametrize("row", MESSAGES, ids=[row["name"] for row in MESSAGES])
def test_order_key_has_golden_bytes(row):
    message = Message(
        row["subject"], row["properties"], id=row["id"], order_key=row["order_key"], retries_max=row["retries_max"]
    )
    assert encode_message(message, row["moment_ms"]).hex() == row["bytes"]
    back = decode_message(bytes.fromhex(row["bytes"]))
    assert (back.order_key, back.retries_max) == (row["order_key"], row["retries_max"])
