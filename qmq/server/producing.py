"""Core. A master's side of producers: checks a batch, appends it, acknowledges it when enough disks have it.

Work is per batch. The CRC is checked before anything is stored (W4). Messages that cannot be stored are refused one by
one (W7, W22). A repeated batch gets the receipt of the first time (P2).

Keeps I10.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from qmq.codec import (
    Buffer,
    decode_envelope,
    decode_labels,
    encode_labels,
    join_batch,
    labels_bytes,
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
from qmq.server.batch_check import check_messages
from qmq.subjects import check_subject
from qmq.types import Durability

log = logging.getLogger(__name__)

_EMPTY = memoryview(b"")
FSYNC = Durability.FSYNC
NOT_WITH_IT = "the limits at that time refused this message of the batch: send it in a new batch"
REASON_CHARS = 300
SUBJECTS_COUNTED = 64
"""Of each connection: 8 KB."""
PRODUCE_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)


@dataclass(slots=True)
class ProduceCounters:
    """A master's counts of its producers, for metrics; they continue from one mastership to the next."""

    produce_ms_counts: list[int] = field(default_factory=lambda: [0] * (len(PRODUCE_MS_BUCKETS) + 1))
    """Batches acknowledged, by time from arrival; the last place is for those slower than every bucket."""
    produce_ms_sum: int = 0
    produced_messages: int = 0
    produced_bytes: int = 0
    repeated_batches: int = 0
    refused_messages: int = 0


class _Batch(NamedTuple):
    """Body of a frame, with its labels if `flags` have them."""

    body: Buffer
    count: int  # type: ignore[assignment]  # shadows tuple.count
    crc: int
    flags: int


def _split(produce: Produce) -> tuple[memoryview, Sequence[int]]:
    """Return the batch, and its labels, if it has some; raises InvalidRequest."""
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
    """Made by the master; ends with the mastership.

    Args:
        wake: called when a subject got messages.
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
        """Find the messages of a repeated batch that were stored under its number. The batch differs from the stored
        one: rows of an outbox were deleted meanwhile, or other limits rejected other messages.
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
                packet, OutcomeUnknown("this broker cannot tell yet whether the batch was stored: repeat the batch")
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
        """Answer when both disks have everything before `end`; `size`: of the batch, which its client counts too."""
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
        """Reject batches beyond the window and beyond one read of the socket. Only a connection that consumes as well
        is read on (qmq.server.overload).
        """
        window = self._mastership.settings.window_bytes
        if link.unacked_bytes >= window + min(window, PacketReader.STAGING_BYTES):
            raise Overloaded(f"this connection has {link.unacked_bytes} un-acknowledged bytes; wait", "window_bytes")


def _count(produced: dict[str, int], subject: str, messages: int) -> None:
    """Count messages of a connection; of many subjects, one that began long ago gives way."""
    if subject not in produced and len(produced) >= SUBJECTS_COUNTED:
        del produced[next(iter(produced))]
    produced[subject] = produced.get(subject, 0) + messages


def _ids(batch: Buffer, count: int) -> list[str | None]:
    """Return the id of each message; None: it has no whole envelope, and is never stored."""
    found: list[str | None] = []
    for message in split_batch(batch, count):
        try:
            found.append(decode_envelope(bytes(message)).id)
        except InvalidMessage:
            found.append(None)
    return found


def _without_body(packet: Packet) -> Packet:
    """The waiting answer does not need the batch; the log has it."""
    return packet._replace(body=_EMPTY)
