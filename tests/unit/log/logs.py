"""Core. Real logs on a disk in memory, with any history."""

from __future__ import annotations

from random import Random
from typing import Any
from zlib import crc32

from qmq.codec import encode_message, join_batch
from qmq.log import MessageLog
from qmq.log.fold import State, apply
from qmq.log.frame import Frame, FrameKind, decode_frames, encode_json_body
from qmq.log.memory_disk import MemoryDisk
from qmq.log.progress_frame import DEFERRED, EXPIRED, PASSED, encode_progress
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.log.segments import log_name, read_raw, segment_bases
from qmq.message import Message
from qmq.types import Epoch

SEGMENT_BYTES = 2048


class Copy:
    """One copy of a log and its writer."""

    def __init__(
        self, disk: MemoryDisk | None = None, *, segment_bytes: int = SEGMENT_BYTES, tail_bytes: int = 1 << 20
    ) -> None:
        self.disk = disk if disk is not None else MemoryDisk()
        self.segment_bytes, self.tail_bytes, self.epoch = segment_bytes, tail_bytes, Epoch(1, 1)
        self.log = MessageLog(self.disk, segment_bytes=segment_bytes, tail_bytes=tail_bytes)

    @classmethod
    def begun(cls, *args: Any, **layout: Any) -> Copy:
        """Return a copy with one epoch frame in its log."""
        copy = cls(*args, **layout)
        copy.begin_epoch()
        return copy

    @classmethod
    def filled(cls, frames: int, *, name: str = "m", size: int = 100, **layout: Any) -> Copy:
        """Return a copy with one epoch frame and flushed messages of three subjects; 60 fill several segments."""
        copy = cls.begun(**layout)
        copy.fill(frames, name=name, size=size)
        return copy

    def flip(self, offset: int) -> None:
        """Flip a bit of the byte at an offset of the log."""
        base = max(base for base in self.log.bases if base <= offset)
        self.disk.flip(log_name(base), 8 * (offset - base))

    def read_sizes(self) -> list[int]:
        """Return a list that collects the sizes of later reads."""
        sizes, read = [], self.disk.read
        self.disk.read = lambda *args: sizes.append(len(data := read(*args))) or data
        return sizes

    def reopen(self) -> MessageLog:
        self.log = MessageLog(self.disk, segment_bytes=self.segment_bytes, tail_bytes=self.tail_bytes)
        return self.log

    def append(self, kind: FrameKind, subject: str, body: bytes, **fields) -> Frame:
        plain = {"epoch": self.epoch, "high_watermark": 0, "timestamp_ms": 5}
        return self.log.append(kind, subject, body, body_crc=crc32(body), **(plain | fields))

    def begin_epoch(self, epoch: Epoch | None = None) -> Frame:
        self.epoch = epoch or self.epoch
        return self.append(FrameKind.EPOCH, "", encode_json_body(broker="b", why="test"))

    def messages(self, *ids: str, subject: str = "s", size: int = 20, **fields) -> Frame:
        body = join_batch([message(subject, id, size) for id in ids])
        first = self.log.state.next_sequence.get(subject, 0)
        return self.append(FrameKind.MESSAGES, subject, body, count=len(ids), first_sequence=first, **fields)

    def progress(self, kind: FrameKind, consumer: str, *entries, subject: str = "s", group: str = "g") -> Frame:
        return self.append(kind, subject, encode_progress(group, consumer, list(entries)))

    def flush(self) -> None:
        while (commit := self.log.take_commit()) is not None:
            self.log.perform(commit)
            self.log.flushed(commit)

    def drop_oldest_segment(self) -> None:
        self.log.drop_oldest_segment()
        self.flush()

    def fill(self, frames: int, *, name: str = "m", size: int = 100) -> None:
        """Append messages, one commit each; segments roll."""
        for i in range(frames):
            self.messages(f"{name}{i}", size=size, subject=f"s{i % 3}")
            self.flush()

    def whole(self) -> bytes:
        """Return the log's bytes from its start to its end, as the disk holds them."""
        return read_raw(self.disk, segment_bases(self.disk), self.log.start, self.log.flushed_end)

    def image(self) -> dict[str, bytes]:
        """Return every file below log/, without zeros at its end."""
        names = [f"log/{name}" for name in self.disk.names("log")]
        return {name: self.disk.read(name, 0, self.disk.size(name)).rstrip(b"\0") for name in names}


def message(subject: str, id: str, size: int = 20) -> bytes:
    return encode_message(Message(subject, {"x": "y" * size} if size else {}, id=id), 0)


def fold_of(data: bytes, state: State | None = None) -> State:
    """Fold frames into a new state, or into `state`; `data` begins at the state's end."""
    state = state or State()
    for frame, body in decode_frames(data, state.end, state.chain):
        apply(state, frame, body)
    return state


def a_history(copy: Copy, rng: Random, frames: int) -> list[Frame]:
    """Append a random legal history of every kind of frame."""
    made = [] if copy.log.state.epochs else [copy.begin_epoch()]
    while len(made) < frames:
        made.append(a_frame(copy, rng))
    return made


def a_frame(copy: Copy, rng: Random) -> Frame:
    state = copy.log.state
    subject, consumer = rng.choice(["a", "b"]), rng.choice(["c1", "c2"])
    group = state.groups.get((subject, "g"))
    known = group.consumers.get(consumer) if group else None
    kinds = ["messages", "messages", "messages", "pull", "pull", "ack", "nack", "leave", "forget", "epoch", "time"]
    kind = rng.choice(kinds)
    if kind == "epoch" and rng.random() < 0.3:
        return copy.begin_epoch(Epoch(copy.epoch.term + rng.randrange(2), copy.epoch.boot + 1))
    if kind == "time":
        decision = RetentionDecision(state.kept.start, "", {"slave": rng.randrange(9)}, {})
        return copy.append(FrameKind.RETENTION, "", encode_retention(decision))
    if group is None and kind != "messages":
        return copy.progress(FrameKind.POSITION, "", (0, 0, 0), subject=subject)
    if kind == "pull" and group is not None:
        ranges = [*group.requeued, [group.position, state.next_sequence.get(subject, 0) - group.position]]
        sequence, there = rng.choice(ranges)[:2]
        if there:
            taken = rng.randint(1, there)
            skipped = rng.randrange(there - taken + 1) if sequence < group.position else 0
            number = rng.choice([state.next_pull(group, consumer)] * 4 + [PASSED, DEFERRED, EXPIRED])
            return copy.progress(FrameKind.PULL, consumer, (number, sequence + skipped, taken), subject=subject)
    if kind in ("ack", "nack") and known is not None and known.unacked:
        first, _, messages, *_ = rng.choice(known.unacked)
        begin = first + rng.randrange(messages)
        end, due_ms = rng.randint(begin + 1, first + messages), rng.randrange(1000)
        if kind == "ack":
            return copy.progress(FrameKind.ACK, consumer, (begin, end, 0), subject=subject)
        return copy.progress(FrameKind.NACK, consumer, (begin, end, due_ms), subject=subject)
    if kind == "leave" and known is not None:
        return copy.progress(FrameKind.POSITION, consumer, (rng.randrange(2), 0, 0), subject=subject)
    if kind == "forget" and group is not None and not group.consumers:
        return copy.progress(FrameKind.POSITION, "", subject=subject)
    ids = [f"{copy.log.end}-{i}" for i in range(rng.randint(1, 3))]
    return copy.messages(*ids, subject=subject, size=rng.randrange(60), producer=rng.randrange(3), batch=copy.log.end)
