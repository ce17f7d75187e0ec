"""Core. Compressed bodies: sizes, damage, and a missing library."""

from __future__ import annotations

import importlib

import pytest

from qmq import zstd
from qmq.codec import batch_encoder, decode_body, decode_content, decode_message, with_properties
from qmq.errors import InvalidMessage, MessageTooLarge, MissingExtra
from qmq.message import Message

TEXT = b"the same words again and again, " * 100


def encoded(body: bytes, compress_bytes_min: int | None = 1_000) -> bytes:
    return batch_encoder("s", 0, compress_bytes_min)(Message("s", {"n": "1"}, id="m1", body=body, content_type="a/b"))


def test_large_body_travels_compressed():
    data = encoded(TEXT)
    assert len(data) < 200
    back = decode_message(data)
    assert (back.body, back.content_type, back.properties) == (TEXT, "a/b", {"n": "1"})


@pytest.mark.parametrize(
    "body", [TEXT[:999], bytes(range(256)) * 0 + zstd.compressed(TEXT * 50)], ids=["small", "dense"]
)
def test_body_is_not_compressed_in_vain(body):
    data = encoded(body, 1_000 if body in TEXT else 10)
    assert data.endswith(body) and decode_content(data).encoding is None
    assert decode_body(data) == body


def test_body_is_plain_by_default():
    assert encoded(TEXT, None).endswith(TEXT)


def test_damaged_compression_is_an_invalid_message():
    data = encoded(TEXT)
    begin = len(data) - len(zstd.compressed(TEXT))
    for at in range(begin, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        try:
            decode_body(bytes(damaged))
        except (InvalidMessage, MessageTooLarge):
            pass
    for end in range(begin, len(data)):
        with pytest.raises(InvalidMessage):
            decode_body(data[:end])


def test_bomb_takes_no_memory(monkeypatch):
    """Two kilobytes stand for 64 MiB."""
    data = encoded(bytes(64 << 20))
    assert len(data) < 4_000
    monkeypatch.setattr("qmq.codec.BODY_BYTES_MAX", 1 << 20)
    with pytest.raises(MessageTooLarge, match="more than 1048576 bytes"):
        decode_body(data)


def test_unknown_compression_is_named():
    with pytest.raises(InvalidMessage, match="compression 'br' of the body is unknown"):
        decode_body(with_properties(encoded(TEXT), {"qmq_contentEncoding": "br"}))


def test_missing_library_names_the_extra(monkeypatch):
    data = encoded(TEXT)

    def import_module(name: str) -> object:
        raise ImportError(name)

    zstd.library.cache_clear()
    monkeypatch.setattr(zstd, "import_module", import_module)
    with pytest.raises(MissingExtra, match=r"pip install 'qmq\[zstd\]'"):
        decode_body(data)
    assert decode_content(data).properties == {"n": "1"}, "all else is readable"
    zstd.library.cache_clear()
    monkeypatch.setattr(zstd, "import_module", importlib.import_module)
    assert decode_body(data) == TEXT
