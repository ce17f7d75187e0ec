"""Core. What follows from a message log: one function of its frames for master, slave, restart, test and Spark.

`State` is derived and never stored by itself, except as a snapshot at a segment's base: truncating the log truncates
it. `apply` is the only thing that changes it.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qmq.codec import Buffer
from qmq.errors import CorruptFrame, InvalidAck
from qmq.log.frame import NO_CHAIN, Frame, FrameKind
from qmq.log.progress import decode_progress
from qmq.types import NO_EPOCH, Epoch

PRODUCERS_MAX = 4096
"""Producers whose last batches are remembered, the least recent forgotten first: about 30 MB when full."""
BATCHES_PER_PRODUCER = 64
"""A producer keeps fewer than this many numbers between its oldest unresolved batch and its newest."""
REIGN_BITS = 32
"""A pull sequence's upper bits name the reign, term and boot, so that a late ack never hits other messages (W2, W13).

A count of reigns would not do: two histories that part may have as many, and a master alone hands out messages.
"""


class EpochStart(NamedTuple):
    """Where an epoch begins, and the chain before it."""

    epoch: Epoch
    offset: int
    chain: int


@dataclass(slots=True)
class Consumer:
    """Progress of one consumer. `unacked` holds [first pull sequence, first sequence, messages], ascending."""

    next_pull: int = 0
    acked_end: int = 0
    unacked: deque[list[int]] = field(default_factory=deque)

    def check_ack(self, begin: int, end: int) -> bool:
        """Return whether an ack of pull sequences `[begin, end)` brings something new.

        Raises:
            InvalidAck: the range is empty, was not handed out, or would jump over messages that are not acked.
        """
        if not begin < end:
            raise InvalidAck(f"ack of [{begin}, {end}) is empty")
        if end > self.next_pull:
            raise InvalidAck(f"ack of [{begin}, {end}) ends past {self.next_pull}, the next pull sequence to hand out")
        if not self.unacked or end <= self.unacked[0][0]:
            return False
        if begin > self.unacked[0][0]:
            raise InvalidAck(f"ack of [{begin}, {end}) jumps over {self.unacked[0][0]}, which is not acked")
        return True

    def ack(self, end: int) -> None:
        self.acked_end = max(self.acked_end, end)
        while self.unacked and self.unacked[0][0] < end:
            first = self.unacked[0]
            done = min(end - first[0], first[2])
            if done == first[2]:
                self.unacked.popleft()
            else:
                first[0], first[1], first[2] = first[0] + done, first[1] + done, first[2] - done

    @property
    def unacked_messages(self) -> int:
        return sum(entry[2] for entry in self.unacked)


@dataclass(slots=True)
class Group:
    """A group's progress on one subject. `returned`: [first sequence, messages] that a consumer left behind."""

    position: int
    floor: int = 0
    """First pull sequence that was given to none of the consumers that left."""
    returned: deque[list[int]] = field(default_factory=deque)
    consumers: dict[str, Consumer] = field(default_factory=dict)


class StoredBatch(NamedTuple):
    """What a repeated batch is answered with."""

    first_sequence: int
    stored: int
    end: int


@dataclass(slots=True)
class State:
    """Everything that follows from the log's prefix before `end`."""

    end: int = 0
    chain: int = NO_CHAIN
    high_watermark: int = 0
    timestamp_ms: int = 0
    epochs: list[EpochStart] = field(default_factory=list)
    next_sequence: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    producers: dict[int, dict[int, StoredBatch]] = field(default_factory=dict)

    @property
    def epoch(self) -> Epoch:
        """Epoch of the last frame."""
        return self.epochs[-1].epoch if self.epochs else NO_EPOCH

    def next_pull(self, group: Group, consumer: str) -> int:
        """Return the pull sequence that `consumer`'s next message gets: dense within a reign, never used before."""
        known, epoch = group.consumers.get(consumer), self.epoch
        reign = (epoch.term & 0xFFFF) << 16 | epoch.boot & 0xFFFF
        return max(known.next_pull if known else group.floor, reign << REIGN_BITS)

    def repeated(self, producer: int, batch: int) -> StoredBatch | None:
        """Return what was stored for this batch before, if it was."""
        return self.producers.get(producer, {}).get(batch)

    def is_forgotten(self, producer: int, batch: int) -> bool:
        """Return whether the batch is older than the window, so that nobody can tell whether it was stored."""
        window = self.producers.get(producer)
        return window is not None and batch not in window and batch + BATCHES_PER_PRODUCER <= max(window)


def apply(state: State, frame: Frame, body: Buffer) -> None:
    """Advance `state` by the frame that begins at its end.

    Raises:
        CorruptFrame: the frame does not follow from the log before it. The state is as it was, or of no more use:
            the caller gives it up either way.
    """
    if frame.offset != state.end:
        raise CorruptFrame(frame.offset, f"the log ends at {state.end}")
    if not state.epochs or frame.epoch != state.epochs[-1].epoch:
        if frame.epoch < state.epoch:
            raise CorruptFrame(frame.offset, f"epoch {frame.epoch} after epoch {state.epoch}")
        state.epochs.append(EpochStart(frame.epoch, frame.offset, state.chain))
    _KINDS[frame.kind](state, frame, body)
    state.end, state.chain, state.timestamp_ms = frame.end, frame.chain, frame.timestamp_ms
    if frame.high_watermark > state.high_watermark:
        state.high_watermark = frame.high_watermark


def _messages(state: State, frame: Frame, body: Buffer) -> None:
    subject = frame.subject
    expected = state.next_sequence.get(subject, 0)
    if frame.first_sequence != expected:
        raise CorruptFrame(frame.offset, f"{subject} continues at {frame.first_sequence}, not at {expected}")
    state.next_sequence[subject] = expected + frame.count
    if frame.producer:
        window = state.producers.pop(frame.producer, None) or {}
        window[frame.batch] = StoredBatch(expected, frame.count, frame.end)
        if len(window) > BATCHES_PER_PRODUCER:
            del window[min(window)]
        state.producers[frame.producer] = window
        if len(state.producers) > PRODUCERS_MAX:
            del state.producers[next(iter(state.producers))]


def _pull(state: State, frame: Frame, body: Buffer) -> None:
    progress = decode_progress(body)
    group = state.groups.get((frame.subject, progress.group))
    if group is None:
        raise CorruptFrame(frame.offset, f"pull of {progress.group}, which has no position on {frame.subject}")
    consumer = group.consumers.setdefault(progress.consumer, Consumer())
    for pull_sequence, sequence, messages in progress.entries:
        if pull_sequence < consumer.next_pull:
            raise CorruptFrame(frame.offset, f"pull sequence {pull_sequence} was handed out before")
        if sequence >= group.position:
            group.position = sequence + messages
        else:
            _take_returned(group, frame, sequence, messages)
        consumer.unacked.append([pull_sequence, sequence, messages])
        consumer.next_pull = pull_sequence + messages


def _take_returned(group: Group, frame: Frame, sequence: int, messages: int) -> None:
    for entry in group.returned:
        if entry[0] <= sequence and sequence + messages <= entry[0] + entry[1]:
            rest = [[entry[0], sequence - entry[0]], [sequence + messages, entry[0] + entry[1] - sequence - messages]]
            at = group.returned.index(entry)
            group.returned.remove(entry)
            for part in reversed([part for part in rest if part[1]]):
                group.returned.insert(at, part)
            return
    raise CorruptFrame(frame.offset, f"sequences {sequence} to {sequence + messages} are handed out, not returned")


def _ack(state: State, frame: Frame, body: Buffer) -> None:
    progress = decode_progress(body)
    group = state.groups.get((frame.subject, progress.group))
    consumer = group.consumers.get(progress.consumer) if group else None
    ((begin, end, _),) = progress.entries
    try:
        fresh = consumer is not None and consumer.check_ack(begin, end)
    except InvalidAck as error:
        raise CorruptFrame(frame.offset, str(error)) from None
    if consumer is None or not fresh:
        raise CorruptFrame(frame.offset, f"ack of [{begin}, {end}) by {progress.consumer}, who holds nothing of it")
    consumer.ack(end)


def _position(state: State, frame: Frame, body: Buffer) -> None:
    progress = decode_progress(body)
    key = (frame.subject, progress.group)
    if not progress.consumer:
        known = state.groups.get(key)  # a reset counts as a departure of everybody: late acks hit nothing
        given = [consumer.next_pull for consumer in known.consumers.values()] + [known.floor] if known else [0]
        state.groups[key] = Group(position=progress.entries[0][0], floor=max(given))
        return
    group = state.groups.get(key)
    if group is None:
        raise CorruptFrame(frame.offset, f"{progress.consumer} leaves {progress.group}, which has no position")
    consumer = group.consumers.pop(progress.consumer, Consumer())
    group.returned.extend([sequence, messages] for _, sequence, messages in consumer.unacked)
    group.floor = max(group.floor, consumer.next_pull)


def _epoch(state: State, frame: Frame, body: Buffer) -> None:
    """Nothing more: that the epoch changed was seen by `apply`."""


_KINDS: dict[int, Callable[[State, Frame, Buffer], None]] = {
    FrameKind.MESSAGES: _messages,
    FrameKind.PULL: _pull,
    FrameKind.ACK: _ack,
    FrameKind.POSITION: _position,
    FrameKind.EPOCH: _epoch,
}


# A snapshot: u32 CRC-32 of the rest, u32 version 1, then zlib-compressed JSON.
_VERSION = 1


def encode_snapshot(state: State) -> bytes:
    """Store the state at a segment's base, so that a restart replays only what follows."""
    plain: dict[str, Any] = {
        "end": state.end,
        "chain": state.chain,
        "high_watermark": state.high_watermark,
        "timestamp_ms": state.timestamp_ms,
        "epochs": [[*e.epoch, e.offset, e.chain] for e in state.epochs],
        "next_sequence": state.next_sequence,
        "groups": [
            [subject, name, g.position, g.floor, list(g.returned),
             [[c, p.next_pull, p.acked_end, list(p.unacked)] for c, p in g.consumers.items()]]
            for (subject, name), g in state.groups.items()
        ],
        "producers": [[p, [[b, *stored] for b, stored in window.items()]] for p, window in state.producers.items()],
    }  # fmt: skip
    packed = _VERSION.to_bytes(4, "little") + zlib.compress(json.dumps(plain).encode(), 1)
    return zlib.crc32(packed).to_bytes(4, "little") + packed


def decode_snapshot(data: Buffer) -> State:
    """Read a snapshot back; raises ValueError if it is damaged: replay from an earlier one."""
    data = bytes(data)
    if len(data) < 8 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("snapshot does not match its CRC")
    if int.from_bytes(data[4:8], "little") != _VERSION:
        raise ValueError("snapshot of another version")
    plain = json.loads(zlib.decompress(data[8:]))
    state = State(plain["end"], plain["chain"], plain["high_watermark"], plain["timestamp_ms"])
    state.epochs = [EpochStart(Epoch(term, boot), offset, chain) for term, boot, offset, chain in plain["epochs"]]
    state.next_sequence = plain["next_sequence"]
    for subject, name, position, floor, returned, consumers in plain["groups"]:
        state.groups[subject, name] = Group(
            position, floor, deque(returned), {c: Consumer(n, a, deque(u)) for c, n, a, u in consumers}
        )
    state.producers = {p: {b: StoredBatch(*stored) for b, *stored in window} for p, window in plain["producers"]}
    return state
