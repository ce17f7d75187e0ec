"""Core. Delayed messages: their due time in the encoding, their check at intake, their records, and how they are read.

A record has 48 bytes: a message's due time and its place in the log. A batch's records are made column by column; only
the checksums need a loop over its messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmq.codec import DUE_AT, FLAG_DELAYED, Buffer, decode_properties, labels_bytes
from qmq.crc import crc32
from qmq.errors import CorruptFrame, InvalidMessage
from qmq.log import MessageLog
from qmq.log.frame import FLAG_LABELLED, Frame
from qmq.message import DELAY_KEY
from qmq.server.producing import check_messages

RECORD = np.dtype(
    [
        ("number", "<u8"),  # offset in the log of the message's first byte
        ("due", "<u8"),  # ms since 1970 UTC
        ("label", "<u8"),  # qmq.codec: tags and order key
        ("size", "<u4"),
        ("subject", "<u4"),  # position in the schedule's list of subjects
        ("crc", "<u4"),  # CRC-32 of the message's bytes
        ("id_hash", "<u4"),  # CRC-32 of its id
        ("key_hash", "<u4"),  # of the caller's key for cancelling, 0 without one
        ("row", "<u4"),  # place in its segment
    ]
)
RECORD_BYTES = RECORD.itemsize
_BYTES = np.dtype((np.void, RECORD_BYTES))
DAY_MS = 86_400_000
GAP_BYTES = 16 * 1024
"""Messages closer than this are read together."""
DUE_MAX_MS = 1 << 62
"""Upper bound of stored due times, for safe arithmetic. Intake refuses such times long before."""

Records = NDArray[np.void]
"""An array of RECORD."""
Numbers = NDArray[np.uint64]

_DUE_BYTES = np.arange(DUE_AT, DUE_AT + 8)
_DUE = struct.Struct(">q")
_KEY_NAME = DELAY_KEY.encode()


class State(IntEnum):
    """State of a message. It is final from SENT on."""

    PENDING = 0
    IN_FLIGHT = 1
    SENT = 2
    CANCELLED = 3
    MOVED = 4
    """Replaced by a later copy of the message."""


def dues_of(data: Buffer | NDArray[np.uint8], begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the due time of each message that begins at `data[begins[i]]`."""
    text = np.frombuffer(data, np.uint8)
    dues: NDArray[np.int64] = text[begins[:, None] + _DUE_BYTES].view(">i8").ravel().astype(np.int64)
    return dues


def with_due(message: bytes, due_ms: int) -> bytes:
    """Return the message with another due time."""
    return message[:DUE_AT] + _DUE.pack(due_ms) + message[DUE_AT + 8 :]


def check_delayed(
    batch: Buffer, count: int, *, message_bytes_max: int, now_ms: int, longest_ms: int
) -> list[tuple[int, str]]:
    """Check a batch as brokers do, and that each message has a due time at most `longest_ms` from now.

    Returns (position, fault) of each wrong message.

    Raises:
        InvalidRequest: the end offsets are invalid, so the batch cannot be stored.
    """
    wrong = dict(check_messages(batch, count, message_bytes_max))
    data_at = 4 * (count + 1)
    data, bounds = memoryview(batch)[data_at:], np.frombuffer(batch, "<u4", count + 1).astype(np.int64)
    whole = np.flatnonzero(np.diff(bounds) >= DUE_AT + 8)
    begins = bounds[whole]
    dues = dues_of(data, begins)
    delayed = np.frombuffer(data, np.uint8)[begins] & FLAG_DELAYED != 0
    for at in np.nonzero(~delayed | (dues > now_ms + longest_ms) | (dues < 0))[0].tolist():
        wrong.setdefault(int(whole[at]), _fault(bool(delayed[at]), int(dues[at]), now_ms, longest_ms))
    return sorted(wrong.items())


def _fault(is_delayed: bool, due_ms: int, now_ms: int, longest_ms: int) -> str:
    if not is_delayed:
        return "it has no due time; send it to a broker, or with a delay"
    if due_ms < 0:
        return f"due time {due_ms} is before 1970"
    most = f"{longest_ms / DAY_MS:g} (delay_days_max)"
    return f"due in {(due_ms - now_ms) / DAY_MS:.1f} days; this delay server takes at most {most}"


def id_hash(id: str) -> int:
    return crc32(id.encode())


def key_hash(key: str) -> int:
    """Return the hash of a caller's key; never 0, which means no key."""
    return crc32(key.encode()) or 1


def no_records() -> Records:
    return np.empty(0, RECORD)


def join(parts: Sequence[Records]) -> Records:
    """Concatenate arrays of RECORD, as bytes: by fields, numpy takes 20 µs for each."""
    if not parts:
        return no_records()
    joined: Records = np.concatenate([part.view(_BYTES) for part in parts]).view(RECORD)
    return joined


def order_of(dues: Numbers, numbers: Numbers) -> NDArray[np.intp]:
    """Return the order by (due time, number).

    Both go into one integer: numpy sorts that four times as fast as two keys.
    """
    if not len(dues):
        return np.empty(0, np.intp)
    begin, bits = dues.min(), len(dues).bit_length()
    if int(dues.max() - begin) >> (63 - bits):
        return np.lexsort((numbers, dues))
    rank = np.empty(len(dues), np.uint64)
    rank[np.argsort(numbers)] = np.arange(len(dues), dtype=np.uint64)
    return np.argsort((dues - begin) << np.uint64(bits) | rank)


def read_batch(frame: Frame, body: Buffer, at: int, subject: int) -> Records:
    """Make the records of the batch at `body[at]`, in its order.

    Raises:
        ValueError: the body does not match the header; in a checked log it always does.
    """
    count, data_at = frame.count, at + 4 * (frame.count + 1)
    data = np.frombuffer(body, np.uint8)
    ends = np.frombuffer(body, "<u4", count + 1, at).astype(np.int64) + data_at
    begins, stops = ends[:-1], ends[1:]
    if count == 0 or stops[-1] > len(data) or (stops - begins).min() < _DUE_BYTES[-1] + 3:
        raise ValueError(f"no batch of {count} delayed messages at offset {frame.offset}")
    records = np.zeros(count, RECORD)
    records["number"] = begins + (frame.offset + frame.body_at)
    records["due"] = np.clip(dues_of(data, begins), 0, DUE_MAX_MS).astype(np.uint64)
    records["size"] = stops - begins
    records["subject"] = subject
    if frame.flags & FLAG_LABELLED:
        records["label"] = np.frombuffer(body, "<u8", count, len(data) - labels_bytes(count))
    view, places = memoryview(body), list(zip(begins.tolist(), stops.tolist(), strict=True))
    records["crc"] = [crc32(view[begin:end]) for begin, end in places]
    id_begins, id_ends = _ids(data, begins, stops)
    ids = zip(id_begins.tolist(), id_ends.tolist(), strict=True)
    records["id_hash"] = [crc32(view[begin:end]) for begin, end in ids]
    text = bytes(body)
    if text.find(_KEY_NAME, data_at) >= 0:
        records["key_hash"] = [_key_hash(text, begin, end) for begin, end in places]
    return records


def _ids(
    data: NDArray[np.uint8], begins: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return begin and end of each message's id, which follows its subject."""
    at = np.minimum(begins + 19 + _lengths(data, begins + 17), stops - 2)
    id_begins = at + 2
    return id_begins, np.minimum(id_begins + _lengths(data, at), stops)


def _lengths(data: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.int64]:
    high: NDArray[np.int64] = data[at].astype(np.int64)
    return (high << 8) | data[at + 1]


def _key_hash(data: bytes, begin: int, end: int) -> int:
    if data.find(_KEY_NAME, begin, end) < 0:
        return 0
    message = data[begin:end]
    try:
        key = decode_properties(message).get(DELAY_KEY)
    except InvalidMessage:
        return 0
    return key_hash(key) if key else 0


class Messages(NamedTuple):
    """Messages to read, as plain values: a thread may use them."""

    numbers: list[int]
    sizes: list[int]
    crcs: list[int]

    @classmethod
    def of(cls, records: Records) -> Messages:
        return cls(records["number"].tolist(), records["size"].tolist(), records["crc"].tolist())


def read_messages(message_log: MessageLog, wanted: Messages) -> list[bytes]:
    """Return the bytes of each message, in the requested order. Blocks; may run on a thread.

    Raises:
        CorruptFrame: this copy is damaged there.
    """
    found: dict[int, bytes] = {}
    order = sorted(range(len(wanted.numbers)), key=wanted.numbers.__getitem__)
    at = 0
    while at < len(order):
        begin = wanted.numbers[order[at]]
        stop, end = at, begin
        while stop < len(order) and wanted.numbers[order[stop]] - end <= GAP_BYTES:
            end = wanted.numbers[order[stop]] + wanted.sizes[order[stop]]
            stop += 1
        data = message_log.stored.read_bytes(begin, end)
        for place in order[at:stop]:
            number = wanted.numbers[place]
            message = data[number - begin : number - begin + wanted.sizes[place]]
            if crc32(message) != wanted.crcs[place]:
                message_log.stored.check_readable(number)
                raise CorruptFrame(number, "the message is not the one that was scheduled")
            found[place] = message
        at = stop
    return [found[place] for place in range(len(order))]
