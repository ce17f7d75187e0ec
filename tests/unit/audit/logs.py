"""Shell. Writer of message logs for the audit's tests, valid or faulty, with the product's encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from qmq.codec import encode_labels, encode_message, join_batch
from qmq.dead_letters import letters_producer, with_fate
from qmq.log.frame import (
    FLAG_DEAD,
    NO_CHAIN,
    Frame,
    FrameKind,
    encode_header,
    encode_json_body,
    label_flags,
    subject_field,
)
from qmq.log.index import SegmentIndex
from qmq.log.progress_frame import Entry, encode_progress
from qmq.message import Message
from qmq.subjects import dead_letter_subject
from qmq.types import Epoch

HOUR_MS = 3_600_000
BEGIN_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
FIRST_EPOCH = Epoch(1, 1)


class LogWriter:
    """Writes a log's segments, and the indexes of closed ones. The high watermark of a frame is its own offset, or
    `watermark`.
    """

    def __init__(self, data: Path, *, segment_bytes: int = 1 << 62, preallocate: int = 1 << 16, start: int = 0):
        self.folder = data / "log"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.segment_bytes = segment_bytes
        self.preallocate = preallocate
        self.epoch = FIRST_EPOCH
        self.chain = NO_CHAIN
        self.end = start
        self.timestamp_ms = BEGIN_MS
        self.watermark: int | None = None
        self.sequences: dict[str, int] = {}
        self.frames: list[Frame] = []
        self._open(start)

    @classmethod
    def begun(cls, data: Path, *, epoch: Epoch = FIRST_EPOCH, **options: int) -> LogWriter:
        """Return the writer of a log with a mastership in this epoch."""
        log = cls(data, **options)
        log.mastership(epoch)
        return log

    def _open(self, base: int) -> None:
        self._base = base
        self._index = SegmentIndex(base)
        self._file = (self.folder / f"{base:020d}.log").open("wb")

    def frame(
        self,
        kind: FrameKind,
        subject: str,
        body: bytes,
        *,
        count: int = 0,
        first: int = 0,
        flags: int = 0,
        numbers: tuple[int, int] | None = None,
    ) -> Frame:
        """`numbers`: producer id and batch number; by default each frame is a new batch of one producer."""
        producer, batch = numbers or ((7, len(self.frames)) if count else (0, 0))
        if self.end - self._base >= self.segment_bytes:
            self.roll()
        field = subject_field(subject)
        head, frame = encode_header(
            kind=kind,
            flags=flags,
            subject=subject,
            field=field,
            count=count,
            body_bytes=len(body),
            body_crc=crc32(body),
            epoch=self.epoch,
            offset=self.end,
            high_watermark=self.end if self.watermark is None else self.watermark,
            timestamp_ms=self.timestamp_ms,
            first_sequence=first,
            producer=producer,
            batch=batch,
            previous_chain=self.chain,
        )
        self._file.write(head + body)
        self.frames.append(frame)
        if kind == FrameKind.MESSAGES:
            self._index.add(frame)
        self.end = frame.end
        self.chain = frame.chain
        return frame

    def messages(
        self, subject: str, messages: Sequence[bytes], *, first: int | None = None, labels: Sequence[int] = ()
    ) -> Frame:
        begin = self.sequences.get(subject, 0) if first is None else first
        self.sequences[subject] = begin + len(messages)
        body, flags = join_batch(messages), 0
        if labels:
            body, flags = body + encode_labels(labels), label_flags(labels)
        return self.frame(FrameKind.MESSAGES, subject, body, count=len(messages), first=begin, flags=flags)

    def batch(self, subject: str, count: int, *, first: int | None = None, size: int = 40) -> Frame:
        """Append `count` messages with the ids `<subject>-<sequence>` and the properties carrier and text."""
        begin = self.sequences.get(subject, 0) if first is None else first
        messages = [
            encode_message(
                Message(
                    subject,
                    {"carrier": ("AA", "UA", "DL")[sequence % 3], "text": "x" * size},
                    id=f"{subject}-{sequence}",
                    tags=("odd",) if sequence % 2 else (),
                ),
                self.timestamp_ms,
            )
            for sequence in range(begin, begin + count)
        ]
        return self.messages(subject, messages, first=begin)

    def dead_letter(
        self, subject: str, group: str, sequence: int, message: bytes, times: int, *, to: str = ""
    ) -> Frame:
        """`to`: a chosen subject."""
        name, flags, whose = to or dead_letter_subject(subject, group), FLAG_DEAD if to else 0, (subject, group)
        first = self.sequences.get(name, 0)
        self.sequences[name] = first + 1
        body = join_batch([with_fate(message, times, "it failed", sequence, whose if to else None)])
        numbers = letters_producer(subject, group), sequence
        return self.frame(FrameKind.MESSAGES, name, body, count=1, first=first, flags=flags, numbers=numbers)

    def progress(self, kind: FrameKind, subject: str, group: str, consumer: str, *entries: Entry) -> Frame:
        return self.frame(kind, subject, encode_progress(group, consumer, entries))

    def mastership(self, epoch: Epoch) -> Frame:
        self.epoch = epoch
        return self.frame(FrameKind.EPOCH, "", encode_json_body(who="b1", why="test"))

    def roll(self) -> None:
        """Begin the next segment."""
        self._close()
        (self.folder / f"{self._base:020d}.idx").write_bytes(self._index.encode(self.end))
        self._open(self.end)

    def _close(self) -> None:
        self._file.write(bytes(-self._file.tell() % self.preallocate or self.preallocate))
        self._file.close()

    def flush(self) -> None:
        """Flush, so that readers see all frames."""
        self._file.flush()

    def close(self) -> Path:
        """Finish the file with zeros after the last frame, as a broker does; return the data directory."""
        self._close()
        return self.folder.parent
