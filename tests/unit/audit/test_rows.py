"""Shell. Rows of a piece of a log, from real files: one per message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq import zstd
from qmq.audit.copies import PathCopy
from qmq.audit.selection import selection_of
from qmq.audit.tables import table_batches
from qmq.audit.walk import Walk
from qmq.codec import batch_encoder, encode_labels, encode_message, join_batch, label_of
from qmq.log.frame import FrameKind, label_flags
from qmq.message import Message
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_messages import facts_of

TAGS: list[tuple[str, ...]] = [("pay",), (), ("pay", "cancel"), ("x",), ()]
LABELS = [label_of(tags, "k" if at == 4 else None) for at, tags in enumerate(TAGS)]
MESSAGES = [
    encode_message(Message("s", {"n": at}, tags=tags, id=f"m{at}", order_key="k" if at == 4 else None), 1)
    for at, tags in enumerate(TAGS)
]


def written(data: Path, *sections: bytes) -> tuple[Path, int]:
    """Write a log with one batch per section of labels; return its end, too."""
    log = LogWriter.begun(data)
    for number, section in enumerate(sections):
        log.frame(
            FrameKind.MESSAGES,
            "s",
            join_batch(MESSAGES) + section,
            count=5,
            first=5 * number,
            flags=label_flags(LABELS) if section else 0,
        )
    return log.close(), log.end


def test_labels_behind_a_batch_are_no_messages(tmp_path):
    data, _ = written(tmp_path, encode_labels(LABELS), b"", encode_labels(LABELS))
    facts = facts_of(data)
    assert (facts.problems, facts.messages) == ([], 15)


def messages(data: Path, end: int, *columns: str, **options: str) -> list[dict[str, Any]]:
    copy, selection = PathCopy(data), selection_of(options)
    try:
        walk = Walk(copy, 0, end, is_start=True)
        return [row for batch in table_batches(walk, "messages", columns, selection, {}) for row in batch.to_pylist()]
    finally:
        copy.close()


def test_messages_with_labels_are_rows_with_their_tags(tmp_path):
    data, end = written(tmp_path, encode_labels(LABELS))
    rows = messages(data, end, "sequence", "id", "tags")
    assert [(row["id"], row["tags"]) for row in rows] == [(f"m{at}", sorted(tags)) for at, tags in enumerate(TAGS)]


def test_body_and_its_type_are_columns(tmp_path):
    log = LogWriter(tmp_path)
    encode = batch_encoder("s", 1, 1_000)
    log.messages(
        "s",
        [
            encode(Message("s", {"n": 1}, id="m0", body=b"\xff\0", content_type="image/png")),
            encode(Message("s", {"n": 1}, id="m1")),
            encode(Message("s", id="m2", body=b"x" * 1_000)),
        ],
    )
    log.close()
    wide = messages(tmp_path, log.end, "id", "body", "content_type", "properties")
    assert [(row["body"], row["content_type"]) for row in wide[:2]] == [(b"\xff\0", "image/png"), (None, None)]
    assert dict(wide[0]["properties"]) == {"n": "1", "qmq_types": "i", "qmq_contentType": "image/png"}
    assert zstd.library().decompress(wide[2]["body"]) == b"x" * 1_000
    assert dict(wide[2]["properties"]) == {"qmq_contentEncoding": "zstd"}
    for column in ("body", "content_type"):
        assert [row[column] for row in messages(tmp_path, log.end, column)] == [row[column] for row in wide]


def test_only_named_properties_are_decoded(tmp_path):
    """A broken text of another property does not matter to this reader."""
    log = LogWriter(tmp_path)
    message = encode_message(Message("s", {"carrier": "UA", "flight": "odd"}, id="m", body=b"b", content_type="a/b"), 1)
    log.messages("s", [message.replace(b"odd", b"\xff\xffd")])
    log.close()
    for columns in (("properties",), ("properties", "content_type"), ("properties", "id")):
        [row] = messages(tmp_path, log.end, *columns, "problem", properties="carrier, absent")
        assert (row["properties"], row["problem"]) == ([("carrier", "UA")], None)
        assert row.get("content_type", "a/b") == "a/b" and row.get("id", "m") == "m"
    [row] = messages(tmp_path, log.end, "properties", "problem")
    assert row["properties"] is None and row["problem"]


@pytest.mark.parametrize("count", [3, 1000], ids=["ends that make no sense", "more than there is room for"])
@pytest.mark.parametrize("column", ["id", "sequence"])
def test_invalid_batch_is_a_row_with_its_problem(tmp_path, count, column):
    """Its CRC is right: a faulty master sent it so."""
    log = LogWriter(tmp_path)
    wrong = log.frame(FrameKind.MESSAGES, "s", b"\xff" * 800, count=count, first=0)
    log.messages("s", MESSAGES, first=count)
    log.close()
    first, *others = messages(tmp_path, log.end, "offset", "subject", "problem", column)
    assert (first["offset"], first["subject"]) == (wrong.offset, "s") and first["problem"]
    assert [row["problem"] for row in others] == [None] * 5


@pytest.mark.parametrize(
    "section", [encode_labels(LABELS)[:-8] + bytes(8), encode_labels(LABELS[1:])], ids=["end", "few"]
)
def test_invalid_labels_are_a_problem_of_their_frame(tmp_path, section):
    data, _ = written(tmp_path, section)
    [problem] = facts_of(data).problems
    assert problem["subject"] == "s" and "labels" in str(problem["text"])
