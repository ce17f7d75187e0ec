"""Core. Messages for operators: bodies as JSON and as short texts, typed properties, harmless characters."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, datetime
from random import Random

import pytest

from qmq import payloads, zstd
from qmq.errors import MissingExtra
from qmq.message_sizes import BODY_BYTES_MAX
from qmq.message_view import (
    ENCRYPTED,
    body_bytes,
    body_json,
    body_line,
    hex_dump,
    json_type_of,
    one_line,
    properties_json,
    typed_properties,
    visible,
)

JSON = "application/json"


def body(data, content_type=None, *, encoding=None, size=None, bytes_max=BODY_BYTES_MAX):
    size = len(data) if size is None else size
    return body_json(data, size, content_type=content_type, encoding=encoding, bytes_max=bytes_max)


@pytest.mark.parametrize(
    ("data", "content_type", "shown"),
    [
        (b'{"a": 1}', JSON, {"body": '{"a": 1}'}),
        ("é".encode(), None, {"body": "é"}),
        (b"a = 1", "application/toml", {"body": "a = 1"}),
        (b"\x1b[2J", "text/plain", {"body": "\x1b[2J"}),
        (b"\x1b[2J", "application/x-own", {"bodyBase64": "G1sySg=="}),
        (b"\xff", "text/plain", {"bodyBase64": "/w=="}),
        (b"abc", "application/octet-stream", {"bodyBase64": "YWJj"}),
        (b"abc", "application/avro;name=shop.order", {"bodyBase64": "YWJj"}),
        (b"abc", ENCRYPTED, {"bodyBase64": "YWJj"}),
        (b"", None, {"body": ""}),
    ],
)
def test_body_is_text_or_base64(data, content_type, shown):
    kind = {"contentType": content_type} if content_type else {}
    assert body(data, content_type) == {"bodyBytes": len(data)} | kind | shown


@pytest.mark.parametrize("seed", range(30))
def test_whole_body_survives_its_json(seed):
    rng = Random(seed)
    data = rng.choice([rng.randbytes(rng.randrange(50)), "äß€😀".encode() * rng.randrange(4)])
    kind = rng.choice([None, JSON, "text/x", "image/png", "application/x-own"])
    encoding = rng.choice([None, zstd.ENCODING])
    stored = zstd.compressed(data) if encoding else data
    assert body_bytes(json.loads(json.dumps(body(stored, kind, encoding=encoding)))) == data


def test_cut_body_ends_with_a_whole_character():
    assert body("aé".encode()[:2], JSON, size=3) == {"bodyBytes": 3, "contentType": JSON, "bodyCut": True, "body": "a"}
    assert body(b"abcd", JSON, bytes_max=2)["body"] == "ab"


def test_begin_of_a_compressed_body_is_shown():
    data = b"".join(b'{"id": %d, "x": %f}' % (at, Random(at).random()) for at in range(25_000))
    stored = zstd.compressed(data)
    assert len(stored) > zstd.BLOCK_BYTES
    shown = body(stored[: zstd.BLOCK_BYTES], JSON, encoding="zstd", size=len(stored), bytes_max=500)
    assert shown["body"] == data[:500].decode() and shown["bodyCut"] and shown["bodyEncoding"] == "zstd"


def test_small_body_does_not_fill_memory():
    stored = zstd.compressed(bytes(BODY_BYTES_MAX + 1))
    assert "more than" in body(stored, JSON, encoding="zstd")["bodyProblem"]
    assert body(stored, "image/png", encoding="zstd", bytes_max=9)["bodyBase64"] == base64.b64encode(bytes(9)).decode()


@pytest.mark.parametrize("bytes_max", [100, BODY_BYTES_MAX])
def test_unreadable_compression_is_named(monkeypatch, bytes_max):
    shown = body(b"garbage!", JSON, encoding="zstd", bytes_max=bytes_max)
    assert "damaged" in shown["bodyProblem"] and base64.b64decode(shown["bodyBase64"]) == b"garbage!"
    assert "unknown" in body(b"x", JSON, encoding="br", bytes_max=bytes_max)["bodyProblem"]

    def missing():
        raise MissingExtra("pip install 'qmq[zstd]'")

    monkeypatch.setattr(zstd, "library", missing)
    shown = body(b"x", JSON, encoding="zstd", bytes_max=bytes_max)
    assert body_line(shown, 9) == "application/json, 1 byte, zstd: pip install 'qmq[zstd]'"
    with pytest.raises(ValueError, match="not readable: pip install"):
        body_bytes(shown)


@pytest.mark.parametrize(
    ("data", "content_type", "line"),
    [
        (b'{"a": 1}', JSON, 'application/json, 8 bytes: {"a": 1}'),
        (b"0123456789", None, "10 bytes: 01234567…"),
        (b"\x00\x01", "image/png", "image/png, 2 bytes: 00 01"),
        (bytes(30), "image/png", "image/png, 30 bytes: " + "00 " * 23 + "00…"),
        (b"secret", ENCRYPTED, "encrypted, 6 bytes"),
        (b"", "text/plain", "text/plain, 0 bytes"),
    ],
)
def test_body_fits_on_a_line(data, content_type, line):
    assert body_line(body(data, content_type), 8) == line


def test_encrypted_bodies_have_their_type():
    assert payloads.Encrypted({"k": bytes(32)}, current="k").content_type == ENCRYPTED


def test_dump_has_hex_and_ascii():
    first, second = hex_dump(b"%PDF-1.7\x00\x01\xffabcdef").splitlines()
    assert first == "000000  25 50 44 46 2d 31 2e 37 00 01 ff 61 62 63 64 65  %PDF-1.7...abcde"
    assert second == f"000010  66{' ' * 45}  f"


@pytest.mark.parametrize(
    "message",
    [
        {"body": "a", "bodyBase64": "YQ=="},
        {"body": "a", "bodyCut": True},
        {"bodyBase64": "?"},
        {"body": 5},
        {"body": "\ud800"},
    ],
)
def test_other_bodies_are_refused(message):
    with pytest.raises(ValueError):
        body_bytes(message)


def test_typed_json_has_a_content_type():
    assert [json_type_of(data) for data in (b"[1]", b"{}", b"5", b"{", b"\xff", b"[" * 10**5, None)] == [
        JSON,
        JSON,
        None,
        None,
        None,
        None,
        None,
    ]


def test_property_types_survive_json():
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    properties = {"at": moment, "no": 7, "paid": True, "x": math.inf, "y": 1.5, "text": "7"}
    shown, types = properties_json(properties)
    assert types == {"at": "datetime", "x": "float"} and shown["at"] == "2026-01-31T12:00:00+00:00"
    assert typed_properties(json.loads(json.dumps(shown, allow_nan=False)), types) == properties
    with pytest.raises(ValueError, match="no type of a text"):
        typed_properties({"no": 7}, {"no": "datetime"})


def test_active_characters_are_escaped():
    assert visible("a\x1b[2J\x9b\u202e\x7f\ud800\U000e0001\r") == (
        "a\\u001b[2J\\u009b\\u202e\\u007f\\ud800\\udb40\\udc01\\r"
    )
    harmless = "é\n\t\u00a0👨\u200d👩 \u06f1"
    assert visible(harmless) == harmless and one_line("a\nb\tc") == "a\\nb\\tc"
    text = json.dumps({"a": "\u202e\x9b\x7f"}, ensure_ascii=False)
    assert json.loads(visible(text)) == json.loads(text)
