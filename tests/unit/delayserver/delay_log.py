"""Core. Log of delayed messages for tests, with frames as a master writes them."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.codec import encode_labels, encode_message, join_batch, with_properties
from qmq.delayserver.schedule import Filed, Records, Schedule
from qmq.log.delay_frames import Outcome, Place, encode_dispatch, encode_places, encode_settled
from qmq.log.frame import FLAG_LABELLED, NO_CHAIN, Frame, FrameKind, encode_header, subject_field
from qmq.message import DELAY_KEY, Message
from qmq.types import Epoch

HOUR_MS = 3_600_000


def delayed(subject: str, id: str, due_ms: int, *, key: str | None = None, size: int = 0) -> bytes:
    """Encode a message that is due at `due_ms`."""
    data = bytearray(encode_message(Message(subject, {"x": "y" * size} if size else {}, id=id), 1))
    data[0] |= 2
    data[9:17] = due_ms.to_bytes(8, "big", signed=True)
    return bytes(data) if key is None else with_properties(bytes(data), {DELAY_KEY: key})


def places(records: Records) -> list[Place]:
    return [(int(record["number"]), int(record["due"])) for record in records]


class DelayLog:
    """`frames` holds the written frames; `file_into` files those that a schedule lacks."""

    def __init__(self, start: int = 4096) -> None:
        self.start = self.end = start
        self.chain = NO_CHAIN
        self.frames: list[tuple[Frame, bytes]] = []

    def append(
        self,
        kind: FrameKind,
        body: bytes,
        *,
        count: int = 0,
        subject: str = "",
        producer: int = 0,
        batch: int = 0,
        flags: int = 0,
    ) -> Frame:
        body += bytes(-len(body) % 8)
        _, frame = encode_header(
            kind=kind,
            flags=flags,
            subject=subject,
            field=subject_field(subject),
            count=count,
            body_bytes=len(body),
            body_crc=0,
            epoch=Epoch(1, 1),
            offset=self.end,
            high_watermark=0,
            timestamp_ms=0,
            first_sequence=0,
            producer=producer,
            batch=batch,
            previous_chain=self.chain,
        )
        self.frames.append((frame, body))
        self.end = frame.end
        self.chain = frame.chain
        return frame

    def messages(self, messages: Sequence[bytes], subject: str = "s", labels: Sequence[int] = ()) -> list[Place]:
        """Append messages; return their places: (number, due time)."""
        batch = join_batch(messages) + (encode_labels(labels) if labels else b"")
        frame = self.append(
            FrameKind.MESSAGES, batch, count=len(messages), subject=subject, flags=FLAG_LABELLED if labels else 0
        )
        return self._places(frame, 0, messages)

    def carry(self, old: Sequence[Place], messages: Sequence[bytes], subject: str = "s") -> list[Place]:
        frame = self.append(
            FrameKind.CARRY, encode_places(old) + join_batch(messages), count=len(messages), subject=subject
        )
        return self._places(frame, 16 * len(messages), messages)

    def _places(self, frame: Frame, at: int, messages: Sequence[bytes]) -> list[Place]:
        number, found = frame.offset + frame.body_at + at + 4 * (len(messages) + 1), []
        for message in messages:
            found.append((number, int.from_bytes(message[9:17], "big")))
            number += len(message)
        return found

    def dispatch(self, group: str, old: Sequence[Place], *, producer: int, batch: int, subject: str = "s") -> Frame:
        body = encode_dispatch(group, encode_places(old))
        return self.append(FrameKind.DISPATCH, body, count=len(old), subject=subject, producer=producer, batch=batch)

    def settled(self, producer: int, batch: int, outcome: Outcome) -> Frame:
        return self.append(FrameKind.SETTLED, encode_settled([(producer, batch, outcome)]), count=1)

    def cancel(self, old: Sequence[Place]) -> Frame:
        return self.append(FrameKind.CANCEL, encode_places(old), count=len(old))

    def file_into(self, schedule: Schedule) -> list[Filed]:
        return [schedule.file(*entry) for entry in self.frames if entry[0].offset >= schedule.filed_end]


def drop_before(log: DelayLog, offset: int) -> None:
    """Apply retention: the log begins at the first frame from `offset` on."""
    log.frames = [entry for entry in log.frames if entry[0].offset >= offset]
    log.start = log.frames[0][0].offset if log.frames else log.end


def flush_all(schedule: Schedule, now_ms: int = 0) -> None:
    """Flush everything, with a checkpoint."""
    if (flush := schedule.take_flush(now_ms, stop=True)) is not None:
        flush.perform()
        schedule.flushed(flush)


def load(schedule: Schedule, until_ms: int) -> list[int]:
    """Load everything that begins before; return the numbers."""
    numbers: list[int] = []
    while (piece := schedule.next_piece(until_ms)) is not None:
        numbers += schedule.handed(piece, piece.read())["number"].tolist()
    return numbers
