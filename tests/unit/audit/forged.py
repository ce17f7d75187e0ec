"""Shell. Forged logs with valid CRCs, offsets and chains, as a faulty broker would write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qmq.codec import decode_labels, encode_labels, encode_message, join_batch, label_of, labels_bytes, split_batch
from qmq.log.fold import State, apply, encode_snapshot
from qmq.log.frame import (
    FLAG_LABELLED,
    Frame,
    FrameKind,
    decode_frames,
    label_flags,
)
from qmq.log.index import SegmentIndex
from qmq.log.progress_frame import DEAD as DONE_AS_DEAD
from qmq.log.progress_frame import PASSED
from qmq.message import Message
from qmq.types import Epoch
from tests.unit.audit.logs import LogWriter


@dataclass
class Draft:
    """A frame to change. Sizes, CRCs, offset and chain are computed when it is written.

    `at`: its offset when read, and then where it was written.
    """

    kind: FrameKind
    flags: int
    subject: str
    count: int
    epoch: Epoch
    high_watermark: int
    timestamp_ms: int
    first_sequence: int
    producer: int
    batch: int
    body: bytes
    base: int
    at: int = -1

    @property
    def messages(self) -> list[bytes]:
        return [bytes(message) for message in split_batch(self._batch(), self.count)]

    @messages.setter
    def messages(self, messages: list[bytes]) -> None:
        labels = self.labels
        self.count = len(messages)
        self.body = join_batch(messages)
        if labels:
            self.body += encode_labels(labels)

    @property
    def labels(self) -> list[int]:
        return list(decode_labels(self.body, self.count)) if self.flags & FLAG_LABELLED else []

    @labels.setter
    def labels(self, labels: list[int]) -> None:
        self.body = self._batch() + encode_labels(labels)
        self.flags = label_flags(labels)

    def _batch(self) -> bytes:
        return self.body[: len(self.body) - labels_bytes(self.count)] if self.flags & FLAG_LABELLED else self.body

    def of(self, sequence: int) -> int:
        """Return the index in the frame of this sequence."""
        return sequence - self.first_sequence


def read_frames(data: Path) -> list[tuple[int, Frame, bytes]]:
    """Yield (base of the segment, frame, body) of a log, up to its zeros."""
    found = []
    for path in sorted((data / "log").glob("*.log")):
        content, base = path.read_bytes(), int(path.stem)
        try:
            for frame, body in decode_frames(content, base, None):
                found.append((base, frame, bytes(body)))
        except Exception:
            assert not content[frame.end - base :].strip(b"\0")
    return found


@contextmanager
def forged(data: Path) -> Iterator[list[Draft]]:
    """Yield the frames of a log for changes, then write the log anew, with indexes and snapshots."""
    drafts = [
        Draft(
            FrameKind(frame.kind),
            frame.flags,
            frame.subject,
            frame.count,
            frame.epoch,
            frame.high_watermark,
            frame.timestamp_ms,
            frame.first_sequence,
            frame.producer,
            frame.batch,
            body,
            base,
            frame.offset,
        )
        for base, frame, body in read_frames(data)
    ]
    yield drafts
    for path in (data / "log").glob("*.*"):
        path.unlink()
    _write(data, drafts)
    derive(data)


def _write(data: Path, drafts: list[Draft]) -> None:
    log, base = LogWriter(data), drafts[0].base
    for draft in drafts:
        if draft.base != base:
            base = draft.base
            log.roll()
        log.epoch, log.timestamp_ms = draft.epoch, draft.timestamp_ms
        is_moved = draft.high_watermark <= 1 << 32
        log.watermark = min(draft.high_watermark, log.end) if is_moved else draft.high_watermark
        frame = log.frame(
            draft.kind,
            draft.subject,
            draft.body,
            count=draft.count,
            first=draft.first_sequence,
            flags=draft.flags,
            numbers=(draft.producer, draft.batch),
        )
        draft.at = frame.offset
    log.close()


def derive(data: Path) -> None:
    """Write indexes and snapshots as a broker does, as far as its fold accepts the log."""
    folder, frames = data / "log", read_frames(data)
    bases = sorted({base for base, _, _ in frames})
    state, index = State(), SegmentIndex(bases[0])
    for base, frame, body in frames:
        if base != index.base:
            (folder / f"{index.base:020d}.idx").write_bytes(index.encode(base))
            (folder / f"{base:020d}.snap").write_bytes(encode_snapshot(state))
            index = SegmentIndex(base)
        try:
            apply(state, frame, body)
        except Exception:  # no fold accepts this frame, so nothing can be derived from here on
            return
        if frame.kind == FrameKind.MESSAGES:
            index.add(frame)


A, B, C = "order.changed", "user.created", "stock.moved"
DEAD = "%DEAD_RETRY%stock.moved%k"
PULL = 1 << 32


def a_message(subject: str, sequence: int, text: str = "x") -> bytes:
    tags = ("odd",) if sequence % 2 else ("even", "more")
    body = b"\xff\0\x80" if sequence % 4 == 2 else None
    return encode_message(Message(subject, {"text": text * 60}, body=body, id=f"{subject}-{sequence}", tags=tags), 1)


def _write_a_failure(log: LogWriter, turn: int) -> None:
    """Nack the second of four messages of C; the one of the turn before fails again and becomes a dead letter."""
    sequence, number = 4 * turn, PULL + 5 * turn - bool(turn)
    log.messages(C, [a_message(C, at) for at in range(sequence, sequence + 4)])
    log.progress(FrameKind.PULL, C, "k", "e", (number, sequence, 4))
    log.progress(FrameKind.ACK, C, "k", "e", (number, number + 1, 0), (number + 2, number + 4, 0))
    log.progress(FrameKind.NACK, C, "k", "e", (number + 1, number + 2, 0))
    if turn:
        failed = sequence - 3
        log.progress(FrameKind.PULL, C, "k", "e", (number + 4, failed, 1))
        log.dead_letter(C, "k", failed, a_message(C, failed), 2)
        log.progress(FrameKind.ACK, C, "k", "e", (number + 4, number + 5, DONE_AS_DEAD))


def write_world(data: Path, rounds: int = 60) -> LogWriter:
    """Write a typical log: labels, a consumer of all of A, one of the odd messages of B, one that fails every fourth
    message of C twice; two epochs.
    """
    log = LogWriter.begun(data, segment_bytes=40_000)
    log.progress(FrameKind.POSITION, A, "g", "", (0, 0, 0))
    log.progress(FrameKind.POSITION, B, "f", "", (0, 0, 0))
    log.progress(FrameKind.POSITION, C, "k", "", (0, 0, 0))
    for turn in range(rounds):
        log.timestamp_ms += 300_000
        if turn == 40:
            log.mastership(Epoch(2, 1))
        for subject in (A, B):
            sequences = range(10 * turn, 10 * turn + 10)
            log.messages(
                subject,
                [a_message(subject, at) for at in sequences],
                labels=[label_of(("odd",) if at % 2 else ("even", "more"), None) for at in sequences],
            )
        first = PULL + 10 * turn
        log.progress(FrameKind.PULL, A, "g", "c", (first, 10 * turn, 10))
        entries = [(PASSED if at % 2 == 0 else PULL + 5 * turn + at // 2, 10 * turn + at, 1) for at in range(10)]
        log.progress(FrameKind.PULL, B, "f", "d", *entries)
        log.progress(FrameKind.ACK, A, "g", "c", (first, first + 10, 0))
        _write_a_failure(log, turn)
    log.close()
    derive(data)
    return log
