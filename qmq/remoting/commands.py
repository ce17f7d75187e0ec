"""Core. Commands of qmq in QMQ's packets, and the bodies of their requests and answers.

    code  command        from -> to            answer
    200   AUTHENTICATE   anyone -> broker      Welcome
    201   PRODUCE        producer -> broker    Produced
    202   SUBSCRIBE      consumer -> broker    Subscribed
    203   PULL           consumer -> broker    Pulled, or NO_MESSAGE after `timeout_ms`
    204   ACK            consumer -> broker    Acked
    205   HEARTBEAT      consumer -> broker    empty
    206   UNSUBSCRIBE    consumer -> broker    empty
    207   NACK           consumer -> broker    Acked
    208   CANCEL         producer -> delay server   Cancelled
    209   RESCHEDULE     producer -> delay server   Rescheduled
    210   HELLO          slave -> master       Agreement (qmq.replication)
    211   FRAMES         master <-> slave      one-way: u64 offset, frames
    212   CONFIRM        slave -> master       one-way: Confirmation
    213   SNAPSHOT       master -> slave       one-way: u64 offset, snapshot of the state at that offset
    214   BEAT           master <-> slave      one-way: Beat, every second
    215   ACKNOWLEDGED   master -> slave       one-way: the acknowledged point, as a Confirmation
    216   PARTED         master -> slave       one-way: u64 offset at which the logs part; the refused HELLO follows
    220   RECUR          producer -> delay server   Recurring schedules
    221   BEGIN          consumer -> broker    empty

The body of an answer with an error code is the error's text in UTF-8. Fixed bodies are little-endian, as frames are;
rare ones are JSON. AUTHENTICATE comes first on every connection; other requests before it are rejected.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.errors import InvalidRequest
from qmq.types import Epoch


class Command(IntEnum):
    AUTHENTICATE = 200
    PRODUCE = 201
    SUBSCRIBE = 202
    PULL = 203
    ACK = 204
    HEARTBEAT = 205
    UNSUBSCRIBE = 206
    NACK = 207
    CANCEL = 208
    RESCHEDULE = 209
    HELLO = 210
    FRAMES = 211
    CONFIRM = 212
    SNAPSHOT = 213
    BEAT = 214
    ACKNOWLEDGED = 215
    PARTED = 216
    RECUR = 220
    BEGIN = 221


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_encode = json.JSONEncoder(sort_keys=True).encode  # building an encoder takes as long as encoding a small object


def encode_json(**fields: Any) -> bytes:
    return _encode(fields).encode()


def decode_json(body: Buffer, **kinds: type) -> dict[str, Any]:
    """Decode a JSON object and check the type of each named field.

    Raises:
        InvalidRequest: names the field that is missing or of another type.
    """
    data = bytes(body)
    try:
        fields = json.loads(data)
        if b"\\u" in data:  # JSON can hold half a character, which fails later when it is hashed, stored or forwarded
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body is not a JSON object")
    for name, kind in kinds.items():
        value = fields.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRequest(f"field {name!r} must be {kind.__name__}, not {repr(value)[:100]}")
    return fields


# AUTHENTICATE: JSON token str, app str, optional wall_ms int (the client's clock) -> JSON broker_group str,
# packet_bytes_max int, message_bytes_max int, window_bytes int (unacknowledged bytes that a producer may have on this
# connection).

# PRODUCE:  0 u64 producer id, 8 u64 batch number, 16 u32 messages, 20 u32 CRC-32 of the body, 24 u16 s, 26 u16 flags
#           (2 labelled, 4 ordered: qmq.log.frame), 28 subject s, then the body: the batch, and its labels if flagged
#           (qmq.codec).
_PRODUCE = struct.Struct("<QQIIHH")


class Produce(NamedTuple):
    producer: int
    batch: int
    count: int  # type: ignore[assignment]  # shadows tuple.count
    crc: int
    subject: str
    flags: int
    body: memoryview


def produce_header(producer: int, batch: int, count: int, crc: int, subject: str, flags: int = 0) -> bytes:
    """Pack the bytes before the batch."""
    name = subject.encode()
    return _PRODUCE.pack(producer, batch, count, crc, len(name), flags) + name


def decode_produce(body: memoryview) -> Produce:
    """Parse a PRODUCE; the CRC is checked here, before anything is stored (W4)."""
    try:
        producer, batch, count, crc, length, flags = _PRODUCE.unpack_from(body)
        data = body[_PRODUCE.size + length :]
        subject = str(body[_PRODUCE.size : _PRODUCE.size + length], "utf-8")
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not a PRODUCE: {error}") from None
    if crc32(data) != crc:
        raise InvalidRequest("the batch does not match its CRC: it was damaged on its way; send it again")
    return Produce(producer, batch, count, crc, subject, flags, data)


def produced_subject(body: memoryview) -> bytes:
    """Return the subject's name in a PRODUCE, as it was sent, without parsing the rest."""
    try:
        length = _PRODUCE.unpack_from(body)[4]
    except struct.error as error:
        raise InvalidRequest(f"not a PRODUCE: {error}") from None
    return bytes(body[_PRODUCE.size : _PRODUCE.size + length])


# Produced: 0 u64 sequence of the first stored message, 8 u32 stored, 12 u8 durability, 13 u16 refused r,
#           then r x (u32 position in the batch, u16 n, reason n). Stored messages keep their order, without gaps.
#           While a quiet client produces here as well, a u32 follows: the advised maximum size of a batch, because
#           that client's acknowledgements wait for this batch on two disks. A larger batch is accepted.
_PRODUCED = struct.Struct("<QIBH")
_REFUSED = struct.Struct("<IH")
_BATCH_BYTES = struct.Struct("<I")


class Produced(NamedTuple):
    first_sequence: int
    stored: int
    durability: int
    refused: list[tuple[int, str]]
    batch_bytes: int = 0
    """Advised maximum size of the next batches; 0 for no advice."""


def encode_produced(produced: Produced) -> bytes:
    parts = [_PRODUCED.pack(produced.first_sequence, produced.stored, produced.durability, len(produced.refused))]
    for position, reason in produced.refused:
        text = reason.encode()[:1000]
        parts.append(_REFUSED.pack(position, len(text)) + text)
    return b"".join(parts) + encode_batch_bytes(produced.batch_bytes)


def encode_batch_bytes(batch_bytes: int) -> bytes:
    """Encode the advice at the end of a Produced."""
    return _BATCH_BYTES.pack(batch_bytes) if batch_bytes else b""


def decode_produced(body: memoryview) -> Produced:
    try:
        first_sequence, stored, durability, count = _PRODUCED.unpack_from(body)
        refused, at = [], _PRODUCED.size
        for _ in range(count):
            position, length = _REFUSED.unpack_from(body, at)
            at += _REFUSED.size + length
            refused.append((position, str(body[at - length : at], "utf-8", "replace")))
        (batch_bytes,) = _BATCH_BYTES.unpack_from(body, at) if len(body) > at else (0,)
    except struct.error as error:
        raise InvalidRequest(f"not an answer to PRODUCE: {error}") from None
    return Produced(first_sequence, stored, durability, refused, batch_bytes)


# SUBSCRIBE: JSON subject str, group str, consumer str, start "latest"|"earliest"|"since" and since_ms int (for a new
#            group: messages stored at that time or later), broadcast bool (a new group is this consumer's own),
#            held_end int: the first pull sequence that this consumer does not hold, is_new bool: the process has not
#            subscribed before, so the unacked messages of its name return to the group, as delivered,
#            deliveries_max int: deliveries of a message before it is a dead letter (0: no limit), tags list of str
#            (none: all messages), tag_mode "any"|"all"; and, true or missing, begins: this client sends BEGIN for
#            suspected messages, and `times` of its Pulled has attempts only. ephemeral, true or missing: a broadcast
#            consumer whose name never returns, so the cluster does not store its beginning.
#            -> JSON subscription int (valid on this connection), acked_end int, lease_ms int, unacked list of
#            [begin, end]: unsettled pull sequences below held_end. The consumer holds them, or sends its decision
#            again: a master without a slave may have answered it, and the next master lacks it. And begins, expires,
#            worn_out true: this broker accepts BEGIN and the verdicts NOT_BEGUN, EXPIRED, WORN_OUT (missing: it does
#            not).


def encode_subscribe(
    *,
    subject: str,
    group: str,
    consumer: str,
    start: str = "latest",
    since_ms: int = 0,
    broadcast: bool = False,
    held_end: int = 0,
    is_new: bool = True,
    deliveries_max: int = 0,
    tags: Iterable[str] = (),
    tag_mode: str = "any",
    begins: bool = False,
    exclusive_ms: int = 0,
    ephemeral: bool = False,
) -> bytes:
    return encode_json(
        subject=subject,
        group=group,
        consumer=consumer,
        start=start,
        since_ms=since_ms,
        broadcast=broadcast,
        held_end=held_end,
        is_new=is_new,
        deliveries_max=deliveries_max,
        tags=list(tags),
        tag_mode=tag_mode,
        **({"begins": True} if begins else {}),
        **({"exclusive_ms": exclusive_ms} if exclusive_ms else {}),
        **({"ephemeral": True} if ephemeral else {}),
    )


# PULL:     0 u32 subscription, 4 u32 messages at most, 8 u32 bytes at most (a larger message comes alone),
#           12 u32 timeout ms.
_PULL = struct.Struct("<IIII")


class Pull(NamedTuple):
    subscription: int
    messages_max: int
    bytes_max: int
    timeout_ms: int


def encode_pull(pull: Pull) -> bytes:
    return _PULL.pack(*pull)


def decode_pull(body: memoryview) -> Pull:
    if len(body) != _PULL.size:
        raise InvalidRequest(f"a PULL has {_PULL.size} bytes, not {len(body)}")
    return Pull(*_PULL.unpack(body))


# Pulled:   one or more pieces of one batch each, back to back, in order of pull sequence:
#           0 u64 pull sequence of its first message, 8 u64 its sequence, 16 u32 messages, 20 u32 batch bytes,
#           24 u32 CRC-32 of the batch, 28 u16 flags (1: progress is on the master alone, 4: its batch has messages with
#           an order key, 8: suspected, its consumer vanished, 16: a dead letter in a chosen subject),
#           30 u16 times: delivery attempts, this one included (65,535: or more), then the batch.
FLAG_SUSPECTED, FLAG_IS_DEAD = 8, 16
TIMES_MAX = 65_535
_PIECE = struct.Struct("<QQIIIHH")
PIECE_BYTES = _PIECE.size


class Piece(NamedTuple):
    pull_sequence: int
    sequence: int
    count: int  # type: ignore[assignment]  # shadows tuple.count
    flags: int
    times: int
    body: memoryview


def piece_header(
    pull_sequence: int, sequence: int, count: int, body_bytes: int, crc: int, flags: int, times: int
) -> bytes:
    return _PIECE.pack(pull_sequence, sequence, count, body_bytes, crc, flags, min(times, TIMES_MAX))


def decode_pulled(body: memoryview) -> Iterator[Piece]:
    """Yield the pieces of an answer to PULL; each batch is checked against its CRC."""
    at = 0
    while at < len(body):
        try:
            pull_sequence, sequence, count, body_bytes, crc, flags, times = _PIECE.unpack_from(body, at)
        except struct.error as error:
            raise InvalidRequest(f"not an answer to PULL: {error}") from None
        batch = body[at + PIECE_BYTES : at + PIECE_BYTES + body_bytes]
        if len(batch) != body_bytes or crc32(batch) != crc:
            raise InvalidRequest("pulled messages do not match their CRC: they were damaged on their way")
        yield Piece(pull_sequence, sequence, count, flags, times, batch)
        at += PIECE_BYTES + body_bytes


# ACK:      0 u32 subscription, then n x (u64 begin, u64 end): pull sequences, half-open, ascending, anywhere among the
#           unacked. Settled ones are ignored. Answer: 0 u64 acked end: everything below is settled.
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_RANGE = struct.Struct("<QQ")
RANGES_MAX = 10_000
"""Limit of ranges in one ACK or NACK."""


class Ack(NamedTuple):
    subscription: int
    ranges: list[tuple[int, int]]


def encode_ack(ack: Ack) -> bytes:
    return _U32.pack(ack.subscription) + b"".join(_RANGE.pack(*range_) for range_ in ack.ranges)


def decode_ack(body: memoryview) -> Ack:
    count, rest = divmod(len(body) - _U32.size, _RANGE.size)
    if rest or not 0 < count <= RANGES_MAX:
        raise InvalidRequest(f"{len(body)} bytes are no ACK of 1 to {RANGES_MAX} ranges")
    return Ack(_U32.unpack_from(body)[0], _ascending(list(_RANGE.iter_unpack(body[_U32.size :]))))


def _ascending(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if any(before[1] > after[0] for before, after in pairwise(ranges)):
        raise InvalidRequest("ranges of pull sequences ascend and do not overlap")
    return ranges


# NACK:     0 u32 subscription, 4 u32 n, n x (u64 begin, u64 end, u64 delay ms, u32 verdict), then the reason, UTF-8.
#           The messages of a range are delivered again after the delay, or become dead letters. Answer: as for ACK.
DELAY_MS_MAX = 24 * 3600 * 1000
REASON_BYTES_MAX = 1_000
_NACK = struct.Struct("<II")
_NACK_ENTRY = struct.Struct("<QQQI")


class Verdict(IntEnum):
    """Verdicts of a consumer on messages that it could not handle."""

    RETRY = 0
    DEAD_LETTER = 1
    NOT_BEGUN = 2
    """Deliver again at once, without counting this delivery. For brokers that answer SUBSCRIBE with `begins`."""
    EXPIRED = 3
    """Expired before a handler began: settled, or dead letters if the subject is set so. For brokers that answer
    SUBSCRIBE with `expires`.
    """
    WORN_OUT = 4
    """Dead letter before a handler began: this delivery does not count. For brokers that answer SUBSCRIBE with
    `worn_out`.
    """


class NackEntry(NamedTuple):
    begin: int
    end: int
    delay_ms: int
    verdict: int


class Nack(NamedTuple):
    subscription: int
    entries: list[NackEntry]
    reason: str


def encode_nack(nack: Nack) -> bytes:
    """Pack a NACK; a long reason is cut."""
    entries = b"".join(_NACK_ENTRY.pack(*entry) for entry in nack.entries)
    reason = nack.reason.encode("utf-8", "replace")[:REASON_BYTES_MAX]
    return _NACK.pack(nack.subscription, len(nack.entries)) + entries + reason


def decode_nack(body: memoryview) -> Nack:
    try:
        subscription, count = _NACK.unpack_from(body)
        end = _NACK.size + count * _NACK_ENTRY.size
        if not 0 < count <= RANGES_MAX or not end <= len(body) <= end + REASON_BYTES_MAX:
            raise InvalidRequest(f"{len(body)} bytes are no NACK of {count} entries and a reason")
        entries = [NackEntry(*entry) for entry in _NACK_ENTRY.iter_unpack(body[_NACK.size : end])]
    except struct.error as error:
        raise InvalidRequest(f"not a NACK: {error}") from None
    for entry in entries:
        if entry.delay_ms > DELAY_MS_MAX or entry.verdict not in Verdict._value2member_map_:
            raise InvalidRequest(f"a NACK asks for at most {DELAY_MS_MAX} ms, with verdict 0 to 4; not {entry}")
    _ascending([(entry.begin, entry.end) for entry in entries])
    return Nack(subscription, entries, str(body[end:], "utf-8", "replace"))


def encode_acked(acked_end: int) -> bytes:
    return _U64.pack(acked_end)


def decode_acked(body: memoryview) -> int:
    if len(body) != 8:
        raise InvalidRequest("not an answer to ACK")
    return int(_U64.unpack(body)[0])


# HEARTBEAT: empty; renews the lease of every subscription of the connection.
# BEGIN:    as ACK: pull sequences of suspected messages that a handler begins now. Answer: empty. If the consumer
#           vanishes, only messages named by a BEGIN count as attempts.
# UNSUBSCRIBE: JSON subscription int. The consumer's unacked messages return to its group at once.

# CANCEL:   JSON subject str, ids list of str, keys list of str (qmq_delayKey of pending messages), due_ms int: about
#           the due time, where the search begins; 0: unknown. Answered when both disks have it; a repeated request
#           gets the same answer.
#           -> Cancelled: JSON ids, keys: for each a DelayState. A key may name several pending messages: all of them.
# RESCHEDULE: JSON subject str, id str, key str (one of the two is ""), due_ms int -> Rescheduled: JSON outcome.
DELAY_KEY_BYTES_MAX = 100
RECALLED_MAX = 10_000
"""Limit of ids and keys in one CANCEL."""


class DelayState(StrEnum):
    """State of a delayed message, as a delay server reports it."""

    CANCELLED = "cancelled"
    """Removed, now or by an earlier CANCEL."""
    RESCHEDULED = "rescheduled"
    SENT = "sent"
    """Sent to a broker, or planned to be: a plan is not revoked."""
    UNKNOWN = "unknown"


class Cancel(NamedTuple):
    subject: str
    ids: list[str]
    keys: list[str]
    due_ms: int


def encode_cancel(cancel: Cancel) -> bytes:
    return encode_json(**cancel._asdict())


def decode_cancel(body: Buffer) -> Cancel:
    fields = decode_json(body, subject=str, ids=list, keys=list, due_ms=int)
    cancel = Cancel(fields["subject"], fields["ids"], fields["keys"], fields["due_ms"])
    words = [*cancel.ids, *cancel.keys]
    if not 0 < len(words) <= RECALLED_MAX or not all(isinstance(word, str) and word for word in words):
        raise InvalidRequest(f"a CANCEL names 1 to {RECALLED_MAX} ids and keys, all of them words")
    return cancel


class Cancelled(NamedTuple):
    """States of messages, in the order of the request."""

    ids: list[DelayState]
    keys: list[DelayState]


def encode_cancelled(cancelled: Cancelled) -> bytes:
    return encode_json(**cancelled._asdict())


def decode_cancelled(body: Buffer) -> Cancelled:
    fields = decode_json(body, ids=list, keys=list)
    try:
        return Cancelled(list(map(DelayState, fields["ids"])), list(map(DelayState, fields["keys"])))
    except ValueError as error:
        raise InvalidRequest(f"not an answer to CANCEL: {error}") from None


class Reschedule(NamedTuple):
    subject: str
    id: str
    key: str
    due_ms: int


def encode_reschedule(reschedule: Reschedule) -> bytes:
    return encode_json(**reschedule._asdict())


def decode_reschedule(body: Buffer) -> Reschedule:
    fields = decode_json(body, subject=str, id=str, key=str, due_ms=int)
    if bool(fields["id"]) == bool(fields["key"]):
        raise InvalidRequest("a RESCHEDULE names an id or a key")
    return Reschedule(fields["subject"], fields["id"], fields["key"], fields["due_ms"])


def encode_rescheduled(outcome: DelayState) -> bytes:
    return encode_json(outcome=outcome)


def decode_rescheduled(body: Buffer) -> DelayState:
    try:
        return DelayState(decode_json(body, outcome=str)["outcome"])
    except ValueError as error:
        raise InvalidRequest(f"not an answer to RESCHEDULE: {error}") from None


# RECUR:    JSON action "put"|"delete"|"list", subject str, name str ("" for list: all), owner str, cron str,
#           timezone str, message str: base64 of an encoded message (these four for put). Answered when both disks have
#           it; a repeated request gets the same answer.
#           -> JSON schedules list of RecurringSchedule: the one that was put, those that were deleted, or all.
RECUR_NAME_BYTES_MAX = 60
"""Prefix of an occurrence's id; the occurrence's time follows."""


class RecurAction(StrEnum):
    PUT = "put"
    DELETE = "delete"
    LIST = "list"


class Recur(NamedTuple):
    action: RecurAction
    subject: str
    name: str = ""
    owner: str = ""
    cron: str = ""
    timezone: str = ""
    message: bytes = b""


class RecurringSchedule(NamedTuple):
    """Schedule of a recurring message; `due_ms`: its next time, in ms since 1970 UTC."""

    subject: str
    name: str
    owner: str
    cron: str
    timezone: str
    due_ms: int

    @property
    def next_at(self) -> datetime:
        """Next due time of the schedule."""
        return _EPOCH + timedelta(milliseconds=self.due_ms)


def encode_recur(recur: Recur) -> bytes:
    return encode_json(**recur._replace(message=b"")._asdict() | {"message": b64encode(recur.message).decode()})


def decode_recur(body: Buffer) -> Recur:
    kinds = dict.fromkeys(Recur._fields, str)
    fields = decode_json(body, **kinds)
    try:
        action, message = RecurAction(fields["action"]), b64decode(fields["message"], validate=True)
    except ValueError as error:
        raise InvalidRequest(f"not a RECUR: {error}") from None
    recur = Recur(**{name: fields[name] for name in kinds} | {"action": action, "message": message})
    if not recur.name and action is not RecurAction.LIST:
        raise InvalidRequest("a recurring schedule has a name")
    return recur


def encode_recurring(schedules: Iterable[RecurringSchedule]) -> bytes:
    return encode_json(schedules=[schedule._asdict() for schedule in schedules])


def decode_recurring(body: Buffer) -> list[RecurringSchedule]:
    try:
        return [RecurringSchedule(**schedule) for schedule in decode_json(body, schedules=list)["schedules"]]
    except TypeError as error:
        raise InvalidRequest(f"not an answer to RECUR: {error}") from None


# FRAMES and SNAPSHOT: 0 u64 offset of the first byte, then the bytes.


def offset_header(offset: int) -> bytes:
    return _U64.pack(offset)


def split_offset(body: memoryview) -> tuple[int, memoryview]:
    if len(body) < 8:
        raise InvalidRequest("a body that begins with an offset has 8 bytes or more")
    return _U64.unpack_from(body)[0], body[8:]


# BEAT:  0 u64 ms since 1970 UTC, then, if any is set, 8 u8 flags: 1 the sender's disk is nearly full.
_DISK_IS_FULL = b"\x01"


class Beat(NamedTuple):
    wall_ms: int
    is_disk_full: bool = False


def encode_beat(beat: Beat) -> bytes:
    return _U64.pack(beat.wall_ms) + (_DISK_IS_FULL if beat.is_disk_full else b"")


def decode_beat(body: memoryview) -> Beat:
    if len(body) < _U64.size:
        raise InvalidRequest(f"a BEAT has {_U64.size} bytes or more, not {len(body)}")
    return Beat(_U64.unpack_from(body)[0], bool(body[_U64.size :] and body[_U64.size] & _DISK_IS_FULL[0]))


# CONFIRM:  0 u32 term, 4 u32 boot, 8 u64 matched end, 16 u64 chain at that end.
_CONFIRM = struct.Struct("<IIQQ")


class Confirmation(NamedTuple):
    epoch: Epoch
    matched_end: int
    chain: int


def encode_confirmation(confirmation: Confirmation) -> bytes:
    return _CONFIRM.pack(*confirmation.epoch, confirmation.matched_end, confirmation.chain)


def decode_confirmation(body: memoryview) -> Confirmation:
    if len(body) != _CONFIRM.size:
        raise InvalidRequest(f"a CONFIRM has {_CONFIRM.size} bytes, not {len(body)}")
    term, boot, matched_end, chain = _CONFIRM.unpack(body)
    return Confirmation(Epoch(term, boot), matched_end, chain)
