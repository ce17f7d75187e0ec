"""Core. Frame: the entry of a message log.

All integers little-endian; version 1; every frame begins at a multiple of 8.

    offset  size  field
    0       4     magic "QMF1" (its last byte is the version)
    4       1     kind: 1 messages, 2 pull, 3 ack, 4 position, 5 epoch, 6 nack, 12 retention (qmq.log.retention); of a
                  delay server's group also 7 carry, 8 dispatch, 9 settled, 10 cancel (qmq.log.delay_frames)
    5       1     flags: 1 written while the slave was missing, 2 labelled, 4 ordered (qmq.codec: labels of a batch),
                  8 dead letter in a chosen subject
    6       2     subject bytes s
    8       4     count: messages in the body; entries of kinds 7 to 10; 0 for other kinds
    12      4     body bytes b, a multiple of 8
    16      4     epoch: term
    20      4     epoch: boot
    24      8     own offset in the message log
    32      8     high watermark known to the master when it was written
    40      8     timestamp, ms since 1970 UTC, of the master's clock
    48      8     sequence of the first message; 0 for other kinds
    56      8     producer id, also of a dispatch; 0 for other kinds
    64      8     batch number, also of a dispatch; 0 for other kinds
    72      8     chain: blake2b-64 of (the chain before this frame, bytes 0-71, body CRC, subject field)
    80      4     body CRC-32
    84      4     header CRC-32, of bytes 0-83 and the subject field
    88      s     subject, UTF-8, then zeros up to a multiple of 8 (both are the subject field)
            b     body

So one CRC covers every header byte, and another every body byte. A frame at another place than its own offset does not
parse. Two logs with the same chain at an offset are equal in every byte before it. A reader that finds bytes that do
not parse looks for a frame behind them: if there is one, the bytes are damaged; if there is none, they are a torn tail
(see `qmq.log.recovery`).

Keeps I3.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.errors import CorruptFrame, NewerFormat
from qmq.message_sizes import FRAME_BYTES_MAX
from qmq.types import Epoch

MAGIC = int.from_bytes(b"QMF1", "little")
HEADER = struct.Struct("<IBBHIIIIQQqQQQQII")
HEADER_BYTES = HEADER.size
_CHAINED = struct.Struct("<IBBHIIIIQQqQQQ")
_TAIL = struct.Struct("<QI")
_SEALED = struct.Struct("<6xH4xI8xQ48xII")
"""Parts of a header: subject bytes, body bytes, own offset, body CRC, header CRC."""
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_epoch = lru_cache(8)(Epoch)
"""Cache of epochs: nearly all frames in the tail have the same one."""

FLAG_NO_SLAVE_IN_SYNC = 1
FLAG_LABELLED = 2
"""The messages' labels follow the batch in the body."""
FLAG_ORDERED = 4
"""Some message of the batch has an order key."""
FLAG_DEAD = 8
"""A dead letter in a subject that an operator chose: producer and batch name its original."""
NO_CHAIN = 0
"""The chain before the first frame of a log."""


def label_flags(labels: Sequence[int]) -> int:
    """Return the flags of a batch with these labels."""
    return FLAG_LABELLED | (FLAG_ORDERED if max(labels) >> 32 else 0)


class FrameKind(IntEnum):
    MESSAGES = 1
    PULL = 2
    ACK = 3
    POSITION = 4
    EPOCH = 5
    NACK = 6
    CARRY = 7
    DISPATCH = 8
    SETTLED = 9
    CANCEL = 10
    RETENTION = 12
    """11 is unused and refused, as tests/golden/frame_v1 states."""


_KINDS = frozenset(map(int, FrameKind))
PROGRESS = frozenset({FrameKind.PULL, FrameKind.ACK, FrameKind.POSITION, FrameKind.NACK})
"""Progress of consumers (qmq.log.progress_frame)."""
DELAYS = frozenset({FrameKind.CARRY, FrameKind.DISPATCH, FrameKind.SETTLED, FrameKind.CANCEL})
"""Decisions of a delay server (qmq.log.delay_frames)."""


class Frame(NamedTuple):
    """A frame's header, parsed and checked. The body lies at `[offset + body_at, end)` of the log."""

    kind: int
    flags: int
    subject: str
    count: int  # type: ignore[assignment]  # shadows tuple.count, which has no caller
    body_bytes: int
    epoch: Epoch
    offset: int
    high_watermark: int
    timestamp_ms: int
    first_sequence: int
    producer: int
    batch: int
    chain: int
    body_crc: int
    body_at: int
    end: int
    """Offset of the next frame. A field, because each frame's end is read a dozen times."""


def subject_field(subject: str) -> bytes:
    """Return the subject field of a frame: UTF-8, padded with zeros to a multiple of 8."""
    data = subject.encode()
    return data + bytes(-len(data) % 8)


def encode_json_body(**fields: Any) -> bytes:
    """Return a JSON body, for rare frames that people read; padded to 8 bytes."""
    body = json.dumps(fields, sort_keys=True).encode()
    return body + b" " * (-len(body) % 8)


def chain_of(previous: int, chained: bytes, body_crc: int, field: bytes) -> int:
    """Return the chain behind a frame. `chained` is its header up to the chain field."""
    digest = blake2b(_U64.pack(previous) + chained + _U32.pack(body_crc) + field, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def encode_header(
    *,
    kind: FrameKind,
    flags: int,
    subject: str,
    field: bytes,
    count: int,
    body_bytes: int,
    body_crc: int,
    epoch: Epoch,
    offset: int,
    high_watermark: int,
    timestamp_ms: int,
    first_sequence: int,
    producer: int,
    batch: int,
    previous_chain: int,
) -> tuple[bytes, Frame]:
    """Return the packed header of a body, and the header parsed. `field` is `subject_field(subject)`."""
    subject_bytes = len(subject) if subject.isascii() else len(subject.encode())
    chained = _CHAINED.pack(
        MAGIC,
        kind,
        flags,
        subject_bytes,
        count,
        body_bytes,
        epoch.term,
        epoch.boot,
        offset,
        high_watermark,
        timestamp_ms,
        first_sequence,
        producer,
        batch,
    )
    chain = chain_of(previous_chain, chained, body_crc, field)
    head = chained + _TAIL.pack(chain, body_crc)
    header_crc = crc32(field, crc32(head))
    body_at = HEADER_BYTES + len(field)
    frame = Frame(
        kind,
        flags,
        subject,
        count,
        body_bytes,
        epoch,
        offset,
        high_watermark,
        timestamp_ms,
        first_sequence,
        producer,
        batch,
        chain,
        body_crc,
        body_at,
        offset + body_at + body_bytes,
    )
    return head + _U32.pack(header_crc) + field, frame


def decode_header(data: Buffer, at: int, offset: int, previous_chain: int | None) -> Frame:
    """Parse and check the header of the frame at `data[at]`, which is at `offset` of the log.

    Raises:
        CorruptFrame: no frame is there, the frame belongs elsewhere, or it does not continue `previous_chain` (None:
            unknown).
    """
    if len(data) - at < HEADER_BYTES:
        raise CorruptFrame(offset, "the bytes end within a header")
    (
        magic,
        kind,
        flags,
        subject_bytes,
        count,
        body_bytes,
        term,
        boot,
        own_offset,
        high_watermark,
        timestamp_ms,
        first_sequence,
        producer,
        batch,
        chain,
        body_crc,
        header_crc,
    ) = HEADER.unpack_from(data, at)
    if magic != MAGIC:
        raise CorruptFrame(offset, "no magic number")
    body_at = HEADER_BYTES + subject_bytes + (-subject_bytes % 8)
    if body_bytes > FRAME_BYTES_MAX or len(data) - at < body_at:
        raise CorruptFrame(offset, "the bytes end within a header")
    field = bytes(data[at + HEADER_BYTES : at + body_at])
    if crc32(field, crc32(data[at : at + HEADER_BYTES - 4])) != header_crc:
        raise CorruptFrame(offset, "wrong header CRC")
    if own_offset != offset:
        raise CorruptFrame(offset, f"this frame belongs to offset {own_offset}")
    if previous_chain is not None:
        if chain_of(previous_chain, bytes(data[at : at + _CHAINED.size]), body_crc, field) != chain:
            raise CorruptFrame(offset, "it continues another history (wrong chain)")
    if kind not in _KINDS:
        raise NewerFormat(offset, f"a frame of kind {kind}")
    if body_bytes % 8:
        raise CorruptFrame(offset, f"a body of {body_bytes} bytes, no multiple of 8, is unknown to this version")
    return Frame(
        kind,
        flags,
        field[:subject_bytes].decode("utf-8", "replace"),
        count,
        body_bytes,
        _epoch(term, boot),
        own_offset,
        high_watermark,
        timestamp_ms,
        first_sequence,
        producer,
        batch,
        chain,
        body_crc,
        body_at,
        offset + body_at + body_bytes,
    )


def check_body(frame: Frame, body: Buffer) -> None:
    """Raise CorruptFrame unless `body` has the CRC in the header."""
    if len(body) != frame.body_bytes:
        raise CorruptFrame(frame.offset, "the bytes end within the body")
    if crc32(body) != frame.body_crc:
        raise CorruptFrame(frame.offset, "wrong body CRC")


def decode_frames(data: Buffer, offset: int, previous_chain: int | None) -> Iterator[tuple[Frame, memoryview]]:
    """Yield each frame of `data`, which begins at `offset` of a log, with its body; everything is checked.

    Raises:
        CorruptFrame: at the first byte that does not continue the log, after the frames before it.
    """
    view = memoryview(data)
    at, base, chain = 0, offset, previous_chain
    while at < len(view):
        frame = decode_header(data, at, base + at, chain)
        end = frame.end - base
        body = view[at + frame.body_at : end]
        check_body(frame, body)
        yield frame, body
        at, chain = end, frame.chain


def intact_bytes(data: memoryview, offset: int) -> int:
    """Return the number of bytes of `data`, which begins at `offset` of a log, that are whole frames by their CRCs.

    Takes a quarter of the time of `decode_frames`, without a check of the chain: for bytes that a receiver decodes
    anyway.
    """
    at = 0
    while len(data) - at >= HEADER_BYTES:
        subject_bytes, body_bytes, own_offset, body_crc, header_crc = _SEALED.unpack_from(data, at)
        body_at = at + HEADER_BYTES + subject_bytes + (-subject_bytes % 8)
        end = body_at + body_bytes
        if end > len(data) or own_offset != offset + at:
            break
        if crc32(data[at + HEADER_BYTES : body_at], crc32(data[at : at + HEADER_BYTES - 4])) != header_crc:
            break
        if crc32(data[body_at:end]) != body_crc:
            break
        at = end
    return at


def find_frame(data: bytes | bytearray, offset: int, begin: int = 0) -> int | None:
    """Return the first position at or after `begin` of a valid header; `data` begins at `offset` of a log.

    A header contains its own offset under a CRC, so a body that quotes a frame does not match. Body CRC and chain are
    not checked: a frame with a damaged body still ends a damaged range.
    """
    magic = _U32.pack(MAGIC)
    at = data.find(magic, begin)
    while at >= 0:
        if (offset + at) % 8 == 0:
            try:
                decode_header(data, at, offset + at, None)
                return at
            except CorruptFrame:
                pass
        at = data.find(magic, at + 1)
    return None
