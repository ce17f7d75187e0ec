"""Core. Rows become messages as they were written; an invalid row stops no other."""

from __future__ import annotations

from datetime import UTC, datetime
from zlib import crc32

import pytest

import qmq
from qmq.codec import decode_labels, decode_message, labels_bytes, split_batch
from qmq.outbox.claims import ClaimName, batch_of, candidate_of
from qmq.outbox.row import encode_row
from qmq.proto import qmq_pb2 as pb
from qmq.sql_drivers import Tls
from qmq.watchdog.meta_link import sources_of
from qmq.watchdog.settings import Source, UnusableSource


def candidate(content, id=1):
    return candidate_of(id, content, 0, 5_000)


def test_candidate_keeps_all_fields_of_the_message():
    values = {"n": 5, "x": 1.5, "yes": True, "at": datetime(2026, 1, 31, tzinfo=UTC), "name": "Ünïcode"}
    message = qmq.Message("order.paid", values, tags=("paid",), id="m-1", order_key="k", retries_max=3)
    found = candidate(encode_row(message, 1_234))
    assert not found.problem and found.is_ordered
    read = decode_message(found.data)
    assert (read.id, read.tags, read.order_key, read.retries_max) == ("m-1", frozenset({"paid"}), "k", 3)
    assert (read.get_int("n"), read.get_float("x"), read.get_bool("yes")) == (5, 1.5, True)
    assert read.get_datetime("at") == values["at"] and read["name"] == "Ünïcode"
    assert read.created_ms == 1_234


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "no JSON",
        "[]",
        "{}",
        '{"messageId": "m", "subject": "a/b"}',
        '{"messageId": "m", "subject": ""}',
        '{"messageId": "m", "subject": "a", "attrs": {"x": [1]}}',
        "[" * 100_000,
        '{"messageId": "m", "subject": "a", "attrs": {"qmq_createTime": "99999999999999999999999"}}',
        '{"messageId": "m", "subject": "a", "attrs": {"x": "\\ud800"}}',
        '{"messageId": 5, "subject": "a"}',
        '{"messageId": "m", "subject": "%RETRY%a%group"}',
        '{"messageId": "m", "subject": "%DEAD_RETRY%a%group"}',
        '{"messageId": "m", "subject": "a", "attrs": {"x": "' + "y" * 40_000 + '"}}',
        '{"messageId": "' + "m" * 200 + '", "subject": "a"}',
        '{"messageId": "m", "subject": "a", "n": ' + "9" * 5_000 + "}",
        5,
    ],
)
def test_invalid_row_has_a_problem(content):
    found = candidate(content)
    assert found.problem and found.data == b""


def test_batch_has_ordered_rows_and_labels():
    plain = [candidate(encode_row(qmq.Message("a", {"n": str(n)}, id=f"m-{n}"), 1), n) for n in range(3)]
    batch = batch_of(ClaimName(7, 8, 9, "g1"), plain)
    [body] = batch.blocks
    assert (batch.producer, batch.number, batch.subject, batch.count, batch.flags) == (7, 8, "a", 3, 0)
    assert batch.crc == crc32(body)
    assert [decode_message(bytes(data)).id for data in split_batch(body, 3)] == ["m-0", "m-1", "m-2"]
    tagged = [*plain, candidate(encode_row(qmq.Message("a", {}, id="t", tags=("x",)), 1))]
    labelled = batch_of(ClaimName(7, 8, 9, "g1"), tagged)
    labels = decode_labels(labelled.blocks[0], 4)
    assert labelled.flags and list(labels)[:3] == [0, 0, 0] and labels[3] and labels_bytes(4)


@pytest.mark.parametrize(
    "url, kind, place",
    [
        ("mmm://db1:3306", "mariadb", ("db1", 3306, "qmq_produce")),
        ("mysql://db1:3306/shop", "mariadb", ("db1", 3306, "shop")),
        ("postgresql://db1:5432/shop", "postgresql", ("db1", 5432, "shop")),
        ("sqlite://here:1//var/shop.db", "sqlite", ("here", 1, "/var/shop.db")),
    ],
)
def test_registration_yields_the_database_address(url, kind, place):
    source = Source(url)
    assert (source.kind, source.place) == (kind, place)


def test_registration_carries_its_tls():
    sound = pb.Source(url="postgresql://db1:1/shop?sslmode=require", user="app", table="t", rate=5, age_s=2)
    wrong = pb.Source(url="mariadb://db2:1?sslmode=sometimes", table="t")
    locked = pb.Source(url="mariadb://db3:1", problem="no key")
    sources, problems = sources_of([sound, wrong, locked])
    tls = Tls("require")
    assert sources == [Source("postgresql://db1:1/shop", "app", table="t", rate=5, age_ms=2000, tls=tls)]
    assert set(problems) == {"mariadb://db2:1", "mariadb://db3:1"} and problems["mariadb://db3:1"] == "no key"


def test_unknown_database_type_is_refused():
    with pytest.raises(UnusableSource, match="oracle"):
        Source("oracle://db1:1").kind  # noqa: B018


def test_source_shows_no_password():
    assert "hunter2" not in repr(Source("mmm://db1:3306", "app", "hunter2"))
