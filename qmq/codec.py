"""Core. Messages to bytes and back: QMQ's encoding of one message, and the body that carries a batch of them.

One message (QMQ, from the flag byte on; all integers big-endian; `str` is an i16 length and UTF-8):

    0   u8    flag: 1 low reliability, 2 delayed, 4 tag section present, 8 body present
    1   i64   created, ms
    9   i64   moment of encoding (delayed: due time), ms
    17  str   subject
        str   message id
        u8 n, n x str    tags, only with flag 4
        i32   length of the properties
        (str name, str value)*    properties
        bytes     body: the rest of the message, only with flag 8

QMQ's messages have no body. QMQ's readers, and qmq's before it had bodies, refuse messages with one (decision 100). The
properties `qmq_contentType` and `qmq_contentEncoding` describe the body, `qmq_types` the types of the application's
properties (`types_of`).

A batch is the body of a messages frame: the layout of an Arrow binary array, so that a part of it is a slice
and Spark reads it without copying (all integers little-endian):

    0         u32 x (n + 1)   end offsets: message i is data[ends[i]:ends[i + 1]], ends[0] = 0
    4(n + 1)  data            the messages back to back
              0 to 7 zeros    so that the length is a multiple of 8

The producer builds a batch and its CRC-32; broker, slave, consumer and Spark get the same bytes.

A batch with tags or order keys is followed by its labels. From them a broker selects the messages for a consumer, and
those that must wait for another message, without decoding messages (all integers little-endian; a multiple of 8 bytes):

    0     u64 x n  labels: bits 0 to 31: bit `crc32(tag) % 32` of each tag; bits 32 to 63: the order key, 0 without one
    8n    u32      CRC-32 of the labels
    8n+4  u32      magic "QML1"

Source: reference of QMQ's wire protocol, sections 3 and 4.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple, cast

from qmq.crc import crc32
from qmq.errors import InvalidMessage, InvalidRequest, MessageTooLarge
from qmq.message import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    EXPIRES_AFTER,
    ORDER_KEY,
    RESERVED,
    RETRIES_MAX,
    TYPES,
    Message,
    Value,
    body_bytes,
    text_of,
    types_of,
    with_types,
)
from qmq.message_sizes import BODY_BYTES_MAX, LARGE_BYTES_MIN
from qmq.plain import plain
from qmq.zstd import ENCODING, compressed, decompressed

FLAG_DELAYED, FLAG_TAGS, FLAG_BODY = 2, 4, 8
DUE_AT = 9
"""Offset of the due time in a delayed message."""
TAGS_MAX = 10
ID_BYTES_MAX = 100
VALUE_BYTES_MAX = 32_767
"""Limit of a value. A Java client reads a longer value's length as negative, acks the message and never delivers it."""
MESSAGE_BYTES_MIN = 1 + 8 + 8 + 2 + 2 + 4
EXPIRES_S_MAX = 36_500 * 86_400
"""A hundred years."""
RETRIES_MOST = 2**31 - 1
"""QMQ's consumers read the number into 32 bits."""
BATCH_MESSAGES_MAX = 65_535
"""The answer to a batch counts its refused messages in 16 bits."""

Buffer = bytes | bytearray | memoryview

_FIXED = struct.Struct(">BqqH")
_I32 = struct.Struct(">i")
_U16 = struct.Struct(">H")
_FLAGS = [bytes((flag,)) for flag in range(256)]
_LENGTHS = [n.to_bytes(2, "big") for n in range(VALUE_BYTES_MAX + 1)]
"""Packed lengths by value. A look-up is three times faster than packing, and strings take most of a producer's time."""
KEPT_MAX = 10_000
_names: dict[str, bytes] = {}
_tags: dict[frozenset[str], TagSection] = {}


def _string(noun: str, text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{noun} is not valid Unicode") from None
    if len(data) > VALUE_BYTES_MAX:
        raise InvalidMessage(f"{noun} has {len(data)} bytes, more than {VALUE_BYTES_MAX}")
    return _LENGTHS[len(data)] + data


def _name(name: str) -> bytes:
    """Encode a property's name. Names repeat, so they are cached, up to a bound."""
    if not isinstance(name, str):
        raise InvalidMessage(f"a property's name is a str, not {type(name).__name__}: write str() around it")
    if name.startswith(RESERVED):
        raise InvalidMessage(f"property {name!r}: names that begin with {RESERVED!r} are reserved")
    data = _string("a property's name", name)
    if len(_names) < KEPT_MAX and len(data) < 100:
        _names[name] = data
    return data


def _properties(message: Message, encoding: str) -> bytes:
    parts = []
    is_typed = False
    names = _names
    try:
        properties = message.properties.items()
    except AttributeError:
        kind = type(message.properties).__name__
        raise InvalidMessage(f"properties are a dict, such as {{'orderNo': '42'}}, not a {kind}") from None
    for name, value in properties:
        key = names.get(name) or _name(name)
        if value.__class__ is not str:
            is_typed = True
            try:
                value = text_of(value)
            except InvalidMessage as error:
                raise InvalidMessage(f"property {name!r}: {error}") from None
        try:
            data = value.encode()
            parts.append(key + _LENGTHS[len(data)] + data)
        except UnicodeEncodeError:
            raise InvalidMessage(f"property {name!r} is not valid Unicode") from None
        except IndexError:
            raise InvalidMessage(
                f"property {name!r} has {len(data)} bytes, more than {VALUE_BYTES_MAX}: set_large cuts it into parts"
            ) from None
    if (
        is_typed
        or encoding
        or message.content_type is not None
        or message.order_key is not None
        or message.retries_max is not None
        or message.expires_after is not None
    ):
        parts.append(encode_own(message, is_typed=is_typed, encoding=encoding))
    return b"".join(parts)


def encode_own(message: Message, *, is_typed: bool, encoding: str) -> bytes:
    """Encode the properties that qmq sets; raises InvalidMessage.

    Args:
        is_typed: whether some property may be no text.
        encoding: compression of the body, or "".
    """
    data, key, retries, content_type = b"", message.order_key, message.retries_max, message.content_type
    if content_type is not None:
        if not isinstance(content_type, str) or not content_type.strip():
            raise InvalidMessage(f"a content type is a str that is not blank, not {content_type!r:.50}")
        if message.body is None:
            raise InvalidMessage(f"content type {content_type!r:.50} needs a body: give body=, or leave it out")
    if is_typed or content_type is not None:
        data = encode_content(tuple(map(type, message.properties.values())) if is_typed else (), content_type)
    if encoding:
        data += _string("", CONTENT_ENCODING) + _string("", encoding)
    if key is not None:
        if not isinstance(key, str) or not key.strip():
            raise InvalidMessage(f"an order key is a str that is not blank, not {key!r:.50}: write str() around it")
        data += _string("", ORDER_KEY) + _string("the order key", key)
    if retries is not None:
        if not isinstance(retries, int) or retries.__class__ is bool or not 0 <= retries <= RETRIES_MOST:
            raise InvalidMessage(f"retries_max is a whole number from 0 to {RETRIES_MOST}, not {retries!r}")
        data += _string("", RETRIES_MAX) + _string("", str(plain(retries)))
    if message.expires_after is not None:
        data += _string("", EXPIRES_AFTER) + _string("", str(expires_after_ms(message.expires_after)))
    return data


@lru_cache(1_000)
def encode_content(classes: tuple[type, ...], content_type: str | None) -> bytes:
    """Encode the properties that describe the content; raises InvalidMessage.

    Args:
        classes: classes of the values of the application's properties; more than 32,767 values are received as texts.
    """
    data, types = b"", types_of(classes)
    if 0 < len(types) <= VALUE_BYTES_MAX:
        data = _string("", TYPES) + _string("", types)
    if content_type is not None:
        data += _string("", CONTENT_TYPE) + _string("the content type", content_type)
    return data


def pack_body(body: object, compress_bytes_min: int | None) -> tuple[bytes, str]:
    """Return a message's body as it is sent, and its compression, or "".

    Raises:
        InvalidMessage: the body is not bytes, or too large.
    """
    data = body if body.__class__ is bytes else body_bytes(body)
    assert isinstance(data, bytes)
    if len(data) > BODY_BYTES_MAX:
        raise MessageTooLarge(f"a body of {len(data)} bytes is more than {BODY_BYTES_MAX}: cut it into parts")
    if compress_bytes_min is not None and len(data) >= compress_bytes_min:
        if len(small := compressed(data)) < len(data):
            return small, ENCODING
    return data, ""


def expires_after_ms(after: float | timedelta) -> int:
    """Return the lifetime of a message in ms; raises InvalidMessage."""
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if not isinstance(seconds, int | float) or seconds.__class__ is bool or not 0.001 <= seconds <= EXPIRES_S_MAX:
        raise InvalidMessage(f"expires_after is 0.001 to {EXPIRES_S_MAX} seconds, or a timedelta, not {after!r:.50}")
    return round(seconds * 1000)  # 1.001 is slightly below its decimal value


class TagSection(NamedTuple):
    """Tags of a message, encoded, and their bits in its label."""

    data: bytes
    bits: int


def encode_tags(tags: Iterable[str]) -> TagSection:
    """Encode the tag section; raises InvalidMessage. Sets of tags repeat, so they are cached, up to a bound."""
    section = _tags.get(tags := frozenset(tags))
    if section is None:
        tags = frozenset(map(plain, tags))
        if len(tags) > TAGS_MAX:
            raise InvalidMessage(f"{len(tags)} tags are more than {TAGS_MAX}")
        for tag in tags:
            if not isinstance(tag, str) or not tag.strip():
                raise InvalidMessage(f"a tag is a str that is not blank, not {tag!r:.50}: write str() around it")
        data = bytes([len(tags)]) + b"".join(_string("a tag", tag) for tag in sorted(tags))
        section = TagSection(data, tag_bits(tags))
        if len(_tags) < KEPT_MAX and len(data) < 100:
            _tags[tags] = section
    return section


def batch_encoder(subject: str, now_ms: int, compress_bytes_min: int | None = None) -> Encoder:
    """Return a function `(message) -> bytes` for messages of one subject, encoded at one time.

    Args:
        compress_bytes_min: smallest body that is compressed; None for no compression.
    """
    return Encoder(subject, now_ms, now_ms, 0, compress_bytes_min)


def delayed_encoder(subject: str, now_ms: int, due_ms: int, compress_bytes_min: int | None = None) -> Encoder:
    """Return a function as `batch_encoder` does, for messages that are due at one time."""
    return Encoder(subject, now_ms, due_ms, FLAG_DELAYED, compress_bytes_min)


class Encoder:
    """Encoder of a batch: the common part of all its messages is packed once, which halves a producer's time.

    `front` follows the flag byte of every message; `flag` is common to all.
    """

    __slots__ = ("flag", "front", "compress_bytes_min")

    def __init__(self, subject: str, now_ms: int, due_ms: int, flag: int, compress_bytes_min: int | None) -> None:
        data = subject.encode()
        self.flag: int = flag
        self.front: bytes = _FIXED.pack(0, now_ms, due_ms, len(data))[1:] + data
        self.compress_bytes_min: int | None = compress_bytes_min

    def __call__(self, message: Message) -> bytes:
        """Encode one message; raises InvalidMessage with its id, for this message alone."""
        identity = _id(message.id)
        flag, tags, body, encoding = self.flag, b"", message.body, ""
        try:
            if body is not None:
                flag |= FLAG_BODY
                body, encoding = pack_body(body, self.compress_bytes_min)
            properties = _properties(message, encoding)
            if message.tags:
                flag |= FLAG_TAGS
                tags = encode_tags(message.tags).data
        except InvalidMessage as error:
            raise type(error)(f"message {message.id}: {error}") from None
        length = _LENGTHS[len(identity)]
        return b"".join(
            (_FLAGS[flag], self.front, length, identity, tags, _I32.pack(len(properties)), properties, body or b"")
        )


def _id(id: str | None) -> bytes:
    if not isinstance(id, str):
        raise InvalidMessage(f"a message's id is a str, not {type(id).__name__}: write str() around it")
    try:
        identity = id.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"message id {id[:20]!r} is not valid Unicode") from None
    if not 0 < len(identity) <= ID_BYTES_MAX:
        raise InvalidMessage(f"message id {id[:20]!r}… has {len(identity)} bytes, not 1 to {ID_BYTES_MAX}")
    return identity


def label_of_message(message: Message) -> int:
    """Return the label of an encoded message: 0 without tags and order key."""
    bits = encode_tags(message.tags).bits if message.tags else 0
    return bits if message.order_key is None else label_of((), message.order_key) | bits


def join_batch(messages: Sequence[bytes]) -> bytes:
    """Return the body of a messages frame, made of encoded messages."""
    return b"".join(_batch_parts(messages))


def batch_blocks(messages: Sequence[bytes]) -> list[bytes]:
    """Return the body of `join_batch` as blocks: a single one, or the parts of a large message, which is not copied."""
    parts = _batch_parts(messages)
    return parts if max(map(len, messages)) >= LARGE_BYTES_MIN else [b"".join(parts)]


def _batch_parts(messages: Sequence[bytes]) -> list[bytes]:
    ends = array("I", accumulate(map(len, messages), initial=0))
    return [ends.tobytes(), *messages, b"\0" * (-(4 * len(ends) + ends[-1]) % 8)]


def batch_ends(body: Buffer, count: int) -> tuple[int, ...]:
    """Return the `count + 1` end offsets of a batch; raises InvalidRequest if the body is too short for them."""
    if not 0 < count <= BATCH_MESSAGES_MAX or len(body) < 4 * (count + 1):
        raise InvalidRequest(f"a batch of {count} messages does not fit into {len(body)} bytes")
    return struct.unpack_from(f"<{count + 1}I", body)


class BatchCheck(NamedTuple):
    """Result of checking a batch: `refused` are positions of messages that cannot be stored, with the reason."""

    ends: tuple[int, ...]
    refused: list[tuple[int, str]]


def check_batch(body: Buffer, count: int, message_bytes_max: int) -> BatchCheck:
    """Check the layout of a batch without decoding its messages: about 70 ns a message.

    Raises:
        InvalidRequest: the end offsets are not valid, so no message of the batch can be stored.
    """
    ends = batch_ends(body, count)
    sizes = list(map(sub, ends[1:], ends))
    data_bytes = len(body) - 4 * (count + 1)
    if ends[0] != 0 or len(body) % 8 or not 0 <= data_bytes - ends[-1] < 8 or min(sizes) < 0:
        raise InvalidRequest("the end offsets of the batch do not describe its data")
    if min(sizes) >= MESSAGE_BYTES_MIN and max(sizes) <= message_bytes_max:
        return BatchCheck(ends, [])
    refused = []
    for position, size in enumerate(sizes):
        if size < MESSAGE_BYTES_MIN:
            refused.append((position, f"{size} bytes are no message"))
        elif size > message_bytes_max:
            refused.append((position, f"{size} bytes are more than {message_bytes_max} (message_bytes_max)"))
    return BatchCheck(ends, refused)


def slice_batch(body: Buffer, count: int, begin: int, end: int) -> bytes:
    """Return messages `[begin, end)` of a batch of `count` as a batch."""
    ends = struct.unpack_from(f"<{end - begin + 1}I", body, 4 * begin)
    data = 4 * (count + 1)
    base = ends[0]
    rebased = array("I", ends if base == 0 else [e - base for e in ends])
    padding = b"\0" * (-(4 * len(rebased) + rebased[-1]) % 8)
    return b"".join((rebased.tobytes(), memoryview(body)[data + base : data + ends[-1]], padding))


def split_batch(body: Buffer, count: int) -> Iterator[memoryview]:
    """Yield the encoded messages of a batch."""
    ends = batch_ends(body, count)
    data = memoryview(body)[4 * (count + 1) :]
    return map(lambda begin, end: data[begin:end], ends, ends[1:])


class Envelope(NamedTuple):
    """Fields of a message that come before its properties."""

    flag: int
    created_ms: int
    subject: str
    id: str
    tags: frozenset[str] | tuple[()]


def decode_envelope(data: bytes) -> Envelope:
    """Decode all fields of a message except its properties and body.

    Raises:
        InvalidMessage: the bytes are no message in QMQ's encoding.
    """
    try:
        flag, created_ms, _, length = _FIXED.unpack_from(data)
        at = _FIXED.size + length
        subject = data[_FIXED.size : at].decode()
        (length,) = _U16.unpack_from(data, at)
        identity = data[at + 2 : at + 2 + length].decode()
        at += 2 + length
        tags: frozenset[str] | tuple[()] = ()
        if flag & FLAG_TAGS:
            words = []
            count = data[at]
            at += 1
            for _ in range(count):
                (length,) = _U16.unpack_from(data, at)
                words.append(data[at + 2 : at + 2 + length].decode())
                at += 2 + length
            tags = frozenset(words)
        _check_end(data, at)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"not a message in QMQ's encoding: {error}") from None
    return Envelope(flag, created_ms, subject, identity, tags)


def _check_end(data: Buffer, at: int) -> int:
    """Return the end of the properties by their length, which stands at offset `at`; raises InvalidMessage."""
    (length,) = _I32.unpack_from(data, at)
    end: int = at + 4 + length
    if end > len(data) or length < 0 or (end < len(data) and not data[0] & FLAG_BODY):
        raise InvalidMessage(f"a message of {len(data)} bytes claims to end at {end}")
    return end


def due_of(data: Buffer) -> int | None:
    """Return the due time of an encoded message, in ms since 1970 UTC; None without a delay.

    Raises:
        InvalidMessage: the bytes are too few for a message.
    """
    if len(data) < MESSAGE_BYTES_MIN:
        raise InvalidMessage(f"{len(data)} bytes are no message")
    flag, _, due_ms, _ = _FIXED.unpack_from(data)
    return due_ms if flag & FLAG_DELAYED else None


def counts_from(data: Buffer) -> int:
    """Return the start of an encoded message's lifetime, in ms since 1970 UTC: its send time, or its due time if it was
    delayed; raises InvalidMessage.
    """
    if len(data) < MESSAGE_BYTES_MIN:
        raise InvalidMessage(f"{len(data)} bytes are no message")
    flag, created_ms, due_ms, _ = _FIXED.unpack_from(data)
    return int(due_ms if flag & FLAG_DELAYED else created_ms)


def properties_span(data: Buffer) -> tuple[int, int]:
    """Return the place of an encoded message's properties, as offsets `(begin, end)`. The body, if any, is behind them.

    Raises:
        InvalidMessage: the bytes are no message in QMQ's encoding.
    """
    try:
        at = _FIXED.size + (data[17] << 8 | data[18])
        at += 2 + (data[at] << 8 | data[at + 1])
        if data[0] & FLAG_TAGS:
            count = data[at]
            at += 1
            for _ in range(count):
                at += 2 + (data[at] << 8 | data[at + 1])
        (length,) = _I32.unpack_from(data, at)
    except (struct.error, IndexError) as error:
        raise InvalidMessage(f"not a message in QMQ's encoding: {error}") from None
    end = at + 4 + length
    if end != len(data):
        _check_end(data, at)
    return at + 4, end


def decode_properties(data: bytes) -> dict[str, str]:
    """Decode the properties of a message as texts, those of qmq included; raises InvalidMessage."""
    return _properties_and_end(data)[0]


def _properties_and_end(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the properties, all as texts, and their end."""
    properties = {}
    at, end = properties_span(data)
    try:
        while at < end:  # indexing is a third faster than unpacking, and this takes most of a consumer's time
            name_end = at + 2 + (data[at] << 8 | data[at + 1])
            value_end = name_end + 2 + (data[name_end] << 8 | data[name_end + 1])
            properties[data[at + 2 : name_end].decode()] = data[name_end + 2 : value_end].decode()
            at = value_end
    except (IndexError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"not QMQ's encoding of properties: {error}") from None
    if at > end:
        raise InvalidMessage("a string ends past its message")
    return properties, end


def pick_properties(data: bytes, wanted: Mapping[bytes, str]) -> dict[str, str]:
    """Decode only some properties of a message, as `decode_properties` does; raises InvalidMessage.

    Args:
        wanted: encoded names, each with its text.
    """
    found = {}
    at, end = properties_span(data)
    try:
        while at < end:
            name_end = at + 2 + (data[at] << 8 | data[at + 1])
            value_end = name_end + 2 + (data[name_end] << 8 | data[name_end + 1])
            if (name := wanted.get(data[at + 2 : name_end])) is not None:
                found[name] = data[name_end + 2 : value_end].decode()
            at = value_end
    except (IndexError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"not QMQ's encoding of properties: {error}") from None
    if at > end:
        raise InvalidMessage("a string ends past its message")
    return found


_DESCRIBING = frozenset((CONTENT_TYPE, CONTENT_ENCODING, TYPES))


class Content(NamedTuple):
    """Properties of a message with their types, without those that describe the content."""

    properties: dict[str, Value]
    type: str | None
    encoding: str | None
    body_at: int | None = None
    """Offset of the body in the message, or of its end."""


def decode_content(data: bytes) -> Content:
    """Decode the properties of a message, without those that describe the content; raises InvalidMessage."""
    return content_of(*_properties_and_end(data))


def decode_typed_properties(data: bytes) -> dict[str, Value]:
    """Return the properties of `decode_content`, of most messages in less time; raises InvalidMessage."""
    texts, _ = _properties_and_end(data)
    return texts if _DESCRIBING.isdisjoint(texts) else content_of(texts).properties


def content_of(texts: dict[str, str], body_at: int | None = None) -> Content:
    """Return the result of `decode_properties` for an application. Removes from `texts` those that describe the
    content.
    """
    take = texts.pop
    kind, encoding, types = take(CONTENT_TYPE, None), take(CONTENT_ENCODING, None), take(TYPES, None)
    properties = cast(dict[str, Value], texts) if types is None else with_types(texts, types)
    return Content(properties, kind, encoding, body_at)


def has_body(data: Buffer) -> bool:
    return bool(data) and data[0] & FLAG_BODY != 0


def stored_body(data: bytes) -> bytes | None:
    """Return the body of a message as it is stored, maybe compressed, or None without one; raises InvalidMessage."""
    return data[properties_span(data)[1] :] if has_body(data) else None


def decode_body(data: bytes, content: Content | None = None) -> bytes | None:
    """Return the body of a message, decompressed, or None without one.

    Args:
        content: the result of `decode_content` for this message, if the caller has it.

    Raises:
        InvalidMessage: the body is damaged, has an unknown compression, or is larger than 64 MiB.
        MissingExtra: the library of its compression is not installed here.
    """
    if not has_body(data):
        return None
    _, _, encoding, at = content or decode_content(data)
    if encoding is None:
        return data[at:]
    return decompressed(memoryview(data)[at:], encoding, BODY_BYTES_MAX)


def without_body(data: Buffer) -> bytes:
    """Return an encoded message without its body, or all bytes of an invalid one."""
    try:
        return bytes(data[: properties_span(data)[1]])
    except InvalidMessage:
        return bytes(data)


def encode_message(message: Message, now_ms: int) -> bytes:
    """Encode one message; raises InvalidMessage."""
    return batch_encoder(message.subject, now_ms)(message)


def decode_message(data: bytes) -> Message:
    """Decode one message; raises InvalidMessage, or MissingExtra."""
    envelope = decode_envelope(data)
    texts, content = decode_properties(data), decode_content(data)
    message = Message(
        envelope.subject,
        content.properties,
        body=decode_body(data, content),
        content_type=content.type,
        tags=envelope.tags,
        id=envelope.id,
    )
    message.created_ms = envelope.created_ms
    message.order_key = texts.get(ORDER_KEY)
    retries = texts.get(RETRIES_MAX, "")
    message.retries_max = int(retries) if retries.isascii() and retries.isdecimal() else None
    return message


def with_properties(data: Buffer, extra: Mapping[str, str], without: Collection[str] = ()) -> bytes:
    """Return an encoded message with added or replaced properties; the rest stays byte for byte.

    Args:
        without: names of properties to remove.

    Raises:
        InvalidMessage: the bytes are no message, or a name or value is longer than 32,767 bytes.
    """
    begin, end = properties_span(data)
    head = bytes(data[:end])
    added = {_string("a property's name", name): _string(f"property {name!r}", value) for name, value in extra.items()}
    gone = added.keys() | {_string("a property's name", name) for name in without}
    kept, at = [], begin
    try:
        while at < end:
            name_end = at + 2 + (head[at] << 8 | head[at + 1])
            value_end = name_end + 2 + (head[name_end] << 8 | head[name_end + 1])
            if head[at:name_end] not in gone:
                kept.append(head[at:value_end])
            at = value_end
    except IndexError:
        raise InvalidMessage("not QMQ's encoding of properties: the last string is cut off") from None
    if at > end:
        raise InvalidMessage("a string ends past its message")
    properties = b"".join((*kept, *(name + value for name, value in added.items())))
    return b"".join((head[: begin - 4], _I32.pack(len(properties)), properties, memoryview(data)[end:]))


def with_subject(data: bytes, subject: str) -> bytes:
    """Return an encoded message with another subject; raises InvalidMessage."""
    properties_span(data)  # raises if `data` is not valid
    begin = _FIXED.size - 2
    rest = memoryview(data)[_FIXED.size + (data[begin] << 8 | data[begin + 1]) :]
    return b"".join((data[:begin], _string("the subject", subject), rest))


def delayed_copy(data: bytes, due_ms: int, extra: Mapping[str, str]) -> bytes:
    """Return an encoded message, due at `due_ms` and with more properties; raises InvalidMessage."""
    copy = with_properties(data, extra)
    return bytes((copy[0] | FLAG_DELAYED,)) + copy[1:9] + due_ms.to_bytes(8, "big", signed=True) + copy[17:]


_LABELS_END = struct.Struct("<I4s")
_LABELS_MAGIC = b"QML1"


def tag_bits(tags: Iterable[str]) -> int:
    """Return the bits of `tags` in a label. Two tags may share a bit: a set bit means "maybe", a clear one "no"."""
    bits = 0
    for tag in tags:
        bits |= 1 << crc32(tag.encode()) % 32
    return bits


def label_of(tags: Iterable[str], order_key: str | None) -> int:
    """Return a message's label. Two order keys may share one; their messages then wait for each other too."""
    key = 0 if order_key is None else crc32(order_key.encode()) or 1
    return key << 32 | tag_bits(tags)


def labels_bytes(count: int) -> int:
    """Return the size of the label section of a batch of `count`."""
    return 8 * count + _LABELS_END.size


def encode_labels(labels: Sequence[int]) -> bytes:
    """Return the label section that follows a batch."""
    data = array("Q", labels).tobytes()
    return data + _LABELS_END.pack(crc32(data), _LABELS_MAGIC)


def decode_labels(tail: Buffer, count: int) -> array[int]:
    """Decode the labels of a batch of `count`; `tail` is their section, or ends with it.

    Raises:
        ValueError: there is no such section, or it is damaged.
    """
    size = labels_bytes(count)
    if len(tail) < size:
        raise ValueError(f"the labels of {count} messages do not fit into {len(tail)} bytes")
    section = memoryview(tail)[len(tail) - size :]
    crc, magic = _LABELS_END.unpack_from(section, 8 * count)
    if magic != _LABELS_MAGIC or crc32(section[: 8 * count]) != crc:
        raise ValueError("the labels of the batch do not match their CRC")
    labels = array("Q")
    labels.frombytes(section[: 8 * count])
    return labels
