"""Core. Produce requests at a master: checks a batch, appends it, acknowledges it when enough disks have it.

Work is per batch. The CRC is checked before anything is stored (W4). Messages that cannot be stored are refused one by
one (W7, W22). A repeated batch gets the receipt of the first time (P2).

`check_messages` finds messages above a limit of QMQ, which some consumer could not read. Most clients refuse these
before they send; the check is for clients that do not. Many messages are checked together (`are_usual`): 0.1 µs each.
If they are few, or one has a fault, each is checked in a few places: 0.5 µs. Only unusual messages are parsed, among
them all with properties above 32 KiB: 10 µs.

Keeps I10.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from qmq.codec import (
    BATCH_MESSAGES_MAX,
    FLAG_BODY,
    FLAG_TAGS,
    ID_BYTES_MAX,
    MESSAGE_BYTES_MIN,
    TAGS_MAX,
    VALUE_BYTES_MAX,
    Buffer,
    check_batch,
    decode_envelope,
    decode_labels,
    decode_properties,
    encode_labels,
    join_batch,
    labels_bytes,
    properties_span,
    split_batch,
)
from qmq.crc import crc32
from qmq.errors import (
    CorruptFrame,
    InvalidMessage,
    InvalidRequest,
    LogError,
    MessageTooLarge,
    OutcomeUnknown,
    Overloaded,
    QmqError,
)
from qmq.log.fold import StoredBatch
from qmq.log.frame import FLAG_LABELLED, FLAG_ORDERED, Frame, FrameKind, label_flags
from qmq.remoting import commands
from qmq.remoting.commands import Produce, Produced
from qmq.remoting.packet import Packet, PacketReader
from qmq.replication.mastership import Mastership, answering
from qmq.replication.ports import Link
from qmq.subjects import check_subject
from qmq.types import Durability

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]
else:
    try:
        import numpy as np
    except ImportError:  # the in-memory broker of qmq.testing, which does without
        np = None

log = logging.getLogger(__name__)

_SUBJECT_AT = 19
"""Position of the subject's text (qmq.codec). Its length is before it, the id's length behind it."""
AT_ONCE_MIN = 32
"""Number of messages below which the calls of numpy, 45 µs, cost more than they save. With tags it would be 5."""
_SUBJECT_LENGTH_AT = _SUBJECT_AT - 2
_EMPTY = memoryview(b"")
FSYNC = Durability.FSYNC
NOT_WITH_IT = "the limits at that time refused this message of the batch: send it in a new batch"
REASON_CHARS = 300
SUBJECTS_COUNTED = 64
"""Limit of subjects counted per connection; they take 8 KB."""
PRODUCE_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)


@dataclass(slots=True)
class ProduceCounters:
    """A master's counts of its producers, for metrics; they continue from one mastership to the next."""

    produce_ms_counts: list[int] = field(default_factory=lambda: [0] * (len(PRODUCE_MS_BUCKETS) + 1))
    """Numbers of acknowledged batches by time since arrival; the last number is of batches slower than every bucket."""
    produce_ms_sum: int = 0
    produced_messages: int = 0
    produced_bytes: int = 0
    repeated_batches: int = 0
    refused_messages: int = 0


def check_messages(batch: Buffer, count: int, message_bytes_max: int) -> list[tuple[int, str]]:
    """Check the layout of a batch and each message; return (position, reason) of those that cannot be stored.

    Raises:
        InvalidRequest: the end offsets are invalid, so no message of the batch can be stored.
    """
    if are_usual(batch, count, message_bytes_max):
        return []
    ends, refused = check_batch(batch, count, message_bytes_max)
    data = memoryview(batch)[4 * (count + 1) :]
    wrong = dict(refused)
    for position, (begin, end) in enumerate(pairwise(ends)):
        if position not in wrong and _is_usual(data, begin, end):
            continue
        message = bytes(data[begin:end])
        if (fault := wrong.get(position) or _fault(message)) is not None:
            wrong[position] = f"{_place(message)}{fault}"
    return sorted(wrong.items())


def _is_usual(data: memoryview, begin: int, end: int) -> bool:
    """Return for one message what `are_usual` returns for a batch."""
    try:
        at = begin + _SUBJECT_AT + (data[begin + 17] << 8 | data[begin + 18])
        id_bytes = data[at + 1]
        if data[at] or not 0 < id_bytes <= ID_BYTES_MAX:
            return False
        at += id_bytes + 2
        if data[begin] & FLAG_TAGS:
            if data[at] > TAGS_MAX:
                return False
            tags_left, at = data[at], at + 1
            while tags_left:
                tags_left, at = tags_left - 1, at + 2 + (data[at] << 8 | data[at + 1])
        stated = data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
    except IndexError:
        return False
    at += 4 + stated
    return at <= begin + VALUE_BYTES_MAX and (at == end or (at < end and data[begin] & FLAG_BODY != 0))


def _fault(message: bytes) -> str | None:
    """Return a message's fault, or None."""
    try:
        envelope = decode_envelope(message)
        decode_properties(message)
    except InvalidMessage as error:
        return str(error)
    if not 0 < len(envelope.id.encode()) <= ID_BYTES_MAX:
        return f"its id has {len(envelope.id.encode())} bytes, not 1 to {ID_BYTES_MAX}"
    if len(envelope.tags) > TAGS_MAX:
        return f"{len(envelope.tags)} tags are more than {TAGS_MAX}"
    return _long_string(message, *properties_span(message))


def _long_string(message: bytes, at: int, end: int) -> str | None:
    """Return the fault of the first name or value longer than 32,767 bytes, or None."""
    name = ""
    is_name = True
    while at < end:
        length = message[at] << 8 | message[at + 1]
        if is_name:
            name = str(message[at + 2 : at + 2 + min(length, 50)], "utf-8", "replace")
        if length > VALUE_BYTES_MAX:
            place = "the name" if is_name else "the value"
            return f"{place} of property {name!r} has {length} bytes, more than {VALUE_BYTES_MAX}"
        at += 2 + length
        is_name = not is_name
    return None


def _place(message: bytes) -> str:
    """Return the beginning of a fault's text, which names the message by its id, if it has one."""
    try:
        return f"message {decode_envelope(message).id[:ID_BYTES_MAX]}: "
    except InvalidMessage:
        return ""


def are_usual(batch: Buffer, count: int, message_bytes_max: int) -> bool:
    """Return True if all messages are valid; False if one may be invalid, or if they are too few to check together.

    A usual message has its stated length, and an id and tags within their limits; the part before its body is too small
    for a string that is too long. Strings and properties are not parsed: they may be no UTF-8, and end anywhere.
    """
    data_at = 4 * (count + 1)
    if np is None or not AT_ONCE_MIN <= count <= BATCH_MESSAGES_MAX or len(batch) % 8 or len(batch) <= data_at:
        return False
    bounds = np.frombuffer(batch, "<u4", count + 1).astype(np.int64)
    data = np.frombuffer(batch, np.uint8, offset=data_at)
    begins, ends = bounds[:-1], bounds[1:]
    sizes = ends - begins
    if bounds[0] or not 0 <= len(data) - bounds[-1] < 8 or sizes.min() < MESSAGE_BYTES_MIN:
        return False
    if sizes.max() > message_bytes_max:
        return False
    at = _behind_string(data, begins + _SUBJECT_LENGTH_AT)
    if (at + 2 > ends).any():
        return False
    id_ends = _behind_string(data, at)
    id_bytes = id_ends - at - 2
    if id_bytes.min() < 1 or id_bytes.max() > ID_BYTES_MAX:
        return False
    return _pass_tags(data, begins, id_ends, ends) and _end_there(data, begins, id_ends, ends)


def _length(data: Bytes, at: Ints) -> Ints:
    return data[at].astype(np.int64) << 8 | data[at + 1]


def _behind_string(data: Bytes, at: Ints) -> Ints:
    return at + 2 + _length(data, at)


def _pass_tags(data: Bytes, begins: Ints, at: Ints, ends: Ints) -> bool:
    """Move `at` behind the tags of the messages that have some; return whether the tags are within their limits."""
    tagged = np.flatnonzero(data[begins] & FLAG_TAGS)
    if not tagged.size:
        return True
    place, end = at[tagged], ends[tagged]
    if (place >= end).any():
        return False
    counts = data[place]
    if counts.max() > TAGS_MAX:
        return False
    place += 1
    for number in range(int(counts.max())):
        more = counts > number
        if (place[more] + 2 > end[more]).any():
            return False
        place[more] = _behind_string(data, place[more])
    at[tagged] = place
    return True


def _end_there(data: Bytes, begins: Ints, at: Ints, ends: Ints) -> bool:
    """Return whether the properties of each message end where their four length bytes state: at the message's end, or
    before its body. The first two length bytes must be 0.
    """
    if (at + 4 > ends).any() or _length(data, at).any():
        return False
    stated = _behind_string(data, at + 2)
    if (stated > begins + VALUE_BYTES_MAX).any():
        return False
    other = np.flatnonzero(stated != ends)
    return bool((stated[other] < ends[other]).all() and (data[begins[other]] & FLAG_BODY).all())


class _Batch(NamedTuple):
    """Body of a frame, with its labels if `flags` have them."""

    body: Buffer
    count: int  # type: ignore[assignment]  # shadows tuple.count
    crc: int
    flags: int


def _split(produce: Produce) -> tuple[memoryview, Sequence[int]]:
    """Return the batch and its labels, if any; raises InvalidRequest."""
    if not produce.flags:
        return produce.body, ()
    if produce.flags not in (FLAG_LABELLED, FLAG_LABELLED | FLAG_ORDERED):
        raise InvalidRequest(f"a batch with flags {produce.flags} is unknown to this version")
    try:
        labels = decode_labels(produce.body, produce.count)
    except ValueError as problem:
        raise InvalidRequest(str(problem)) from None
    return produce.body[: len(produce.body) - labels_bytes(produce.count)], labels


class Producing:
    """Produce requests of one mastership. Made by the master; ends with the mastership.

    Args:
        wake: called with a subject that got messages.
        check_room: raises SubjectFull if a subject takes no more from producers.
        check: returns the messages of a batch that cannot be stored, from its bytes, count and largest message; raises
            InvalidRequest.
    """

    def __init__(
        self,
        mastership: Mastership,
        counters: ProduceCounters,
        *,
        wake: Callable[[str], None] = lambda subject: None,
        check_room: Callable[[str], None] = lambda subject: None,
        check: Callable[[Buffer, int, int], list[tuple[int, str]]] = check_messages,
    ) -> None:
        self._mastership = mastership
        self._counters = counters
        self._wake = wake
        self._check_room = check_room
        self._check = check

    def produce(self, link: Link, packet: Packet) -> None:
        mastership = self._mastership
        mastership.check_may_store()
        produce = commands.decode_produce(packet.body)
        state = mastership.log.state
        if (stored := state.repeated(produce.producer, produce.batch)) is not None:
            self._answer_repeated(link, packet, produce, stored)
            return
        if produce.producer and state.is_forgotten(produce.producer, produce.batch):
            raise OutcomeUnknown(f"batch {produce.batch} is too old: its outcome is unknown")
        if produce.subject not in state.next_sequence:
            check_subject(produce.subject)
        mastership.readonly.check(mastership.group, produce.subject)
        if not link.sends_on:
            self._check_room(produce.subject)
        self._check_window(link)
        if produce.producer and produce.producer not in state.producers:
            link.ration.begin_producer(produce.producer)
        batch, refused = self._storable(produce)
        if refused:
            self._counters.refused_messages += len(refused)
            text = "messages refused peer=%s subject=%s count=%d: %s"
            log.warning(text, link.peer, produce.subject, len(refused), refused[0][1][:REASON_CHARS])
        if batch is None:
            link.answer(packet, commands.encode_produced(Produced(0, 0, FSYNC, refused)))
            return
        if len(batch.body) > mastership.frame_bytes_max:
            raise MessageTooLarge(
                f"a batch of {len(batch.body)} bytes is more than {mastership.frame_bytes_max}, which a slave of "
                f"{mastership.group} reads: upgrade it, or send less at once"
            )
        frame = self._append(produce, batch)
        _count(link.produced, produce.subject, batch.count)
        produced = Produced(frame.first_sequence, batch.count, FSYNC, refused)
        self._hold(link, packet, len(produce.body), frame.end, commands.encode_produced(produced))

    def _storable(self, produce: Produce) -> tuple[_Batch | None, list[tuple[int, str]]]:
        """Return the batch without the messages that cannot be stored, and (position, reason) of those."""
        batch, labels = _split(produce)
        refused = self._check(batch, produce.count, self._mastership.settings.message_bytes_max)
        flags = label_flags(labels) if labels else 0
        if not refused:
            return _Batch(produce.body, produce.count, produce.crc, flags), refused
        bad = {position for position, _ in refused}
        messages = [
            bytes(message) for position, message in enumerate(split_batch(batch, produce.count)) if position not in bad
        ]
        if not messages:
            return None, refused
        body = join_batch(messages)
        if labels:
            labels = [label for position, label in enumerate(labels) if position not in bad]
            body, flags = body + encode_labels(labels), label_flags(labels)
        return _Batch(body, len(messages), crc32(body), flags), refused

    def _append(self, produce: Produce, batch: _Batch) -> Frame:
        mastership, subject = self._mastership, produce.subject
        frame = mastership.log.append(
            FrameKind.MESSAGES,
            subject,
            batch.body,
            body_crc=batch.crc,
            epoch=mastership.epoch,
            flags=batch.flags,
            count=batch.count,
            high_watermark=mastership.gate.high_watermark,
            timestamp_ms=mastership.host.now_ms(),
            first_sequence=mastership.log.state.next_sequence.get(subject, 0),
            producer=produce.producer,
            batch=produce.batch,
        )
        self._wake(subject)
        self._counters.produced_messages += batch.count
        self._counters.produced_bytes += len(batch.body)
        mastership.host.pass_soon()
        return frame

    def _answer_repeated(self, link: Link, packet: Packet, produce: Produce, stored: StoredBatch) -> None:
        mastership = self._mastership
        if mastership.gate.too_few_in_sync and stored.end > mastership.gate.high_watermark:
            # The wait has no bound, and waiting repeats would fill the memory of the only running copy.
            raise OutcomeUnknown(
                f"stored on one copy; the other is missing. Repeat the same batch to {mastership.group}"
            )
        refused = self._storable(produce)[1]
        if stored.stored + len(refused) != produce.count:
            self._look_inside(link, packet, produce, stored)
            return
        self._stored_before(link, packet, stored, Produced(stored.first_sequence, stored.stored, FSYNC, refused))

    def _stored_before(self, link: Link, packet: Packet, stored: StoredBatch, produced: Produced) -> None:
        self._counters.repeated_batches += 1
        answer = answering(link, _without_body(packet), commands.encode_produced(produced))
        self._mastership.gate.stored(stored.end, answer)

    def _look_inside(self, link: Link, packet: Packet, produce: Produce, stored: StoredBatch) -> None:
        """Find the messages of a repeated batch that were stored under its number. The repeat differs from the stored
        batch, because rows of an outbox were deleted meanwhile, or other limits rejected other messages.
        """
        message_log = self._mastership.log
        refs = message_log.frames(produce.subject, stored.first_sequence, 1)
        if not refs or refs[0].begin != stored.first_sequence or stored.end > message_log.flushed_end:
            raise OutcomeUnknown(f"{stored.stored} messages were stored under this batch number, and cannot be read")
        ids = _ids(_split(produce)[0], produce.count)
        looked = partial(self._looked_inside, link, _without_body(packet), ids, stored)
        self._mastership.host.read(partial(message_log.stored.read_bodies, refs), looked)

    def _looked_inside(
        self,
        link: Link,
        packet: Packet,
        ids: list[str | None],
        stored: StoredBatch,
        found: list[tuple[Frame, Buffer]] | LogError,
    ) -> None:
        if isinstance(found, LogError) or not self._mastership.may_progress:
            link.refuse(
                packet, OutcomeUnknown("the broker has not decided yet whether the batch was stored: repeat the batch")
            )
            if isinstance(found, CorruptFrame):
                self._mastership.found_damage(found)
            return
        frame, body = found[0]
        there = {*_ids(body, frame.count)} - {None}
        refused = [(position, NOT_WITH_IT) for position, id in enumerate(ids) if id not in there]
        produced = Produced(stored.first_sequence, len(ids) - len(refused), FSYNC, refused)
        self._stored_before(link, packet, stored, produced)

    def _hold(self, link: Link, packet: Packet, size: int, end: int, body: bytes) -> None:
        """Answer once enough disks have everything before `end`. `size` is that of the batch, which the client also
        counts.
        """
        mastership = self._mastership
        link.unacked_bytes += size
        packet = _without_body(packet)
        began_ms = mastership.host.monotonic_ms()

        def answer(error: QmqError | None) -> None:
            link.unacked_bytes -= size
            if error is not None:
                link.refuse(packet, error)
                return
            link.answer(packet, body)
            took_ms = mastership.host.monotonic_ms() - began_ms
            self._counters.produce_ms_counts[bisect_left(PRODUCE_MS_BUCKETS, took_ms)] += 1
            self._counters.produce_ms_sum += took_ms

        mastership.gate.stored(end, answer)

    def _check_window(self, link: Link) -> None:
        """Reject batches beyond the window and beyond one read of the socket. They arrive only on connections that also
        consume, which are always read (qmq.server.overload).
        """
        window = self._mastership.settings.window_bytes
        if link.unacked_bytes >= window + min(window, PacketReader.STAGING_BYTES):
            raise Overloaded(f"this connection has {link.unacked_bytes} un-acknowledged bytes; wait", "window_bytes")


def _count(produced: dict[str, int], subject: str, messages: int) -> None:
    """Count a connection's messages by subject; beyond `SUBJECTS_COUNTED` the oldest subject is dropped."""
    if subject not in produced and len(produced) >= SUBJECTS_COUNTED:
        del produced[next(iter(produced))]
    produced[subject] = produced.get(subject, 0) + messages


def _ids(batch: Buffer, count: int) -> list[str | None]:
    """Return the id of each message, or None for one without a whole envelope, which is never stored."""
    found: list[str | None] = []
    for message in split_batch(batch, count):
        try:
            found.append(decode_envelope(bytes(message)).id)
        except InvalidMessage:
            found.append(None)
    return found


def _without_body(packet: Packet) -> Packet:
    """Return the packet without its batch, which a waiting answer does not need; the log has it."""
    return packet._replace(body=_EMPTY)
