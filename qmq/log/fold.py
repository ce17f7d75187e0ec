"""Core. Fold: the state of a message log as one function of its frames, for master, slave, restart, test and Spark.

`State` is derived, and stored only as a snapshot at a segment's base, so truncating the log truncates it. Only `apply`
changes it.

Keeps I7, I8, I17 and I18.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from qmq.codec import Buffer
from qmq.crc import crc32
from qmq.errors import CorruptFrame, IllegalTransition, InvalidAck, NewerFormat
from qmq.log.frame import FLAG_DEAD, FLAG_ORDERED, NO_CHAIN, Frame, FrameKind
from qmq.log.group import LIFE, MASTERSHIP_BITS, Consumer, Group, MessageEvent, UnackedRange
from qmq.log.progress_frame import (
    DEFERRED,
    EXPIRED,
    NOT_BEGUN,
    OVERFLOWED,
    PASSED,
    Departure,
    Progress,
    decode_progress,
)
from qmq.log.requeued import Requeued, RequeuedRange
from qmq.log.retention import Kept, decode_retention
from qmq.subjects import is_dead_letter_subject
from qmq.types import NO_EPOCH, Epoch

PRODUCERS_MAX = 4096
"""Limit of producers whose last batches are remembered. The producer silent for longest is forgotten first. They take
about 30 MB.
"""
BATCHES_PER_PRODUCER = 64
"""Batches remembered per producer, whose oldest unresolved batch and newest one are closer together than this."""


class EpochStart(NamedTuple):
    """Begin of an epoch, and the chain before it."""

    epoch: Epoch
    offset: int
    chain: int


class StoredBatch(NamedTuple):
    """Stored answer to a repeated batch."""

    first_sequence: int
    stored: int
    end: int


@dataclass(slots=True)
class State:
    """State that follows from the log before `end`."""

    end: int = 0
    chain: int = NO_CHAIN
    high_watermark: int = 0
    timestamp_ms: int = 0
    epochs: list[EpochStart] = field(default_factory=list)
    next_sequence: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    producers: dict[int, dict[int, StoredBatch]] = field(default_factory=dict)
    unsorted: set[int] = field(default_factory=set, compare=False)
    """Producers with batches that arrived out of the order of their numbers."""
    ordered: dict[str, int] = field(default_factory=dict)
    """Subjects with order keys -> first sequence of a batch with one."""
    kept: Kept = field(default_factory=Kept)
    retry_ms: int = 0
    """Latest time of a nack, by the clocks of the masters (qmq.replication.mastership)."""
    pull_floor: int = field(default=0, compare=False)
    """End of the pull sequences of deleted groups. New groups of those names begin above it, so that late acks hit none
    of their messages. Not in snapshots, because a restart begins a mastership, which has higher pull sequences.
    """

    @property
    def epoch(self) -> Epoch:
        """Epoch of the last frame."""
        return self.epochs[-1].epoch if self.epochs else NO_EPOCH

    def epoch_at(self, offset: int) -> Epoch:
        """Return the epoch of the frame at `offset`, which need not be readable."""
        before = bisect_right(self.epochs, offset, key=attrgetter("offset"))
        return self.epochs[before - 1].epoch if before else NO_EPOCH

    def next_pull(self, group: Group, consumer: str) -> int:
        """Return the pull sequence of `consumer`'s next message: dense within a mastership, never used before."""
        known, epoch = group.consumers.get(consumer), self.epoch
        mastership = (epoch.term & 0xFFFF) << 16 | epoch.boot & 0xFFFF
        given = known.next_pull if known else 0
        return max(given or max(group.floor, self.pull_floor), mastership << MASTERSHIP_BITS)

    def repeated(self, producer: int, batch: int) -> StoredBatch | None:
        """Return the stored answer of this batch, or None."""
        return self.producers.get(producer, {}).get(batch)

    def is_forgotten(self, producer: int, batch: int) -> bool:
        """Return whether the batch is older than the window, so that it is unknown whether it was stored."""
        window = self.producers.get(producer)
        return window is not None and batch not in window and batch + BATCHES_PER_PRODUCER <= max(window)


Content = Buffer | Progress


def apply(state: State, frame: Frame, body: Content) -> None:
    """Advance `state` by the frame that begins at its end.

    Args:
        body: body of the frame. For a progress frame, the decoded `Progress` serves as well.

    Raises:
        CorruptFrame: the frame contradicts the log before it. Discard the state, which may be half changed.
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
    if frame.flags & FLAG_ORDERED:
        state.ordered.setdefault(subject, expected)
    if frame.producer:
        _remember(state, frame, expected)


def _remember(state: State, frame: Frame, first_sequence: int) -> None:
    """Record a producer's batch; forget its oldest batch, or the producer silent for longest."""
    producer, batch = frame.producer, frame.batch
    window = state.producers.pop(producer, None) or {}
    window.pop(batch, None)
    if window and batch < next(reversed(window)):
        state.unsorted.add(producer)
    window[batch] = StoredBatch(first_sequence, frame.count, frame.end)
    if len(window) > BATCHES_PER_PRODUCER:
        is_dead = frame.flags & FLAG_DEAD or is_dead_letter_subject(frame.subject)
        if is_dead or producer not in state.unsorted:
            # Dead letters have the numbers of their originals, which become dead in any order. So the copy made first
            # is forgotten.
            del window[next(iter(window))]
        else:
            del window[min(window)]
            if _is_sorted(window):
                state.unsorted.remove(producer)
    state.producers[producer] = window
    if len(state.producers) > PRODUCERS_MAX:
        silent = next(iter(state.producers))
        del state.producers[silent]
        state.unsorted.discard(silent)


def _is_sorted(window: dict[int, StoredBatch]) -> bool:
    return list(window) == sorted(window)


def _pull(state: State, frame: Frame, body: Content) -> None:
    progress = body if isinstance(body, Progress) else decode_progress(body)
    group = state.groups.get((frame.subject, progress.group))
    if group is None:
        raise CorruptFrame(frame.offset, f"pull of {progress.group}, which has no position on {frame.subject}")
    if not progress.entries:
        group.consumers.setdefault(progress.consumer, Consumer(group.floor))
    for pull_sequence, sequence, messages in progress.entries:
        event = _PULL_EVENTS.get(pull_sequence, MessageEvent.DELIVER)
        waited = _take_waiting(group, frame, event, sequence, messages)
        if event is MessageEvent.DEFER:
            group.requeued.add(waited._replace(due_ms=0))
        elif event is MessageEvent.DELIVER:
            consumer = group.consumers.setdefault(progress.consumer, Consumer())
            if pull_sequence < consumer.next_pull:
                raise CorruptFrame(frame.offset, f"pull sequence {pull_sequence} was delivered before")
            attempts = waited.attempts + 1
            consumer.deliver(UnackedRange(pull_sequence, sequence, messages, attempts, waited.suspected))


_PULL_EVENTS = {
    DEFERRED: MessageEvent.DEFER,
    PASSED: MessageEvent.PASS_OVER,
    EXPIRED: MessageEvent.PASS_OVER,
    OVERFLOWED: MessageEvent.PASS_OVER,
}


def _take_waiting(group: Group, frame: Frame, event: MessageEvent, sequence: int, messages: int) -> RequeuedRange:
    """Take messages from those a group may deliver: new ones, or a part of one requeued range."""
    if sequence == group.position:
        group.position += messages
        return RequeuedRange(sequence, messages, 0, 0)
    taken = group.requeued.take(sequence, messages)
    if taken is None:
        why = f"sequences {sequence} to {sequence + messages} do not wait for delivery to the group"
        try:
            LIFE.after(group.state_of(sequence), event)
        except IllegalTransition as error:
            why = f"{why}: {error}"
        raise CorruptFrame(frame.offset, why)
    return taken


def _holder(state: State, frame: Frame, progress: Progress) -> tuple[Group, Consumer]:
    group = state.groups.get((frame.subject, progress.group))
    if group is not None and (consumer := group.consumers.get(progress.consumer)) is not None:
        return group, consumer
    raise CorruptFrame(frame.offset, f"{progress.consumer} of {progress.group} has no messages of {frame.subject}")


def _take(consumer: Consumer, frame: Frame, begin: int, end: int) -> list[UnackedRange]:
    try:
        consumer.check_given(begin, end)
    except InvalidAck as error:
        raise CorruptFrame(frame.offset, str(error)) from None
    taken = consumer.take(begin, end)
    if not taken:
        raise CorruptFrame(frame.offset, f"pull sequences [{begin}, {end}) are not unacked")
    return taken


def _ack(state: State, frame: Frame, body: Content) -> None:
    progress = body if isinstance(body, Progress) else decode_progress(body)
    _, consumer = _holder(state, frame, progress)
    for begin, end, _ in progress.entries:
        _take(consumer, frame, begin, end)


def _nack(state: State, frame: Frame, body: Content) -> None:
    progress = body if isinstance(body, Progress) else decode_progress(body)
    group, consumer = _holder(state, frame, progress)
    state.retry_ms = max(state.retry_ms, frame.timestamp_ms)
    for begin, end, due_ms in progress.entries:
        for taken in _take(consumer, frame, begin, end):
            not_begun = due_ms == NOT_BEGUN
            attempts = taken.attempts - not_begun
            group.requeue(taken, due_ms=0 if not_begun else due_ms, attempts=attempts, suspected=taken.suspected)


def _position(state: State, frame: Frame, body: Content) -> None:
    progress = body if isinstance(body, Progress) else decode_progress(body)
    key = (frame.subject, progress.group)
    group = state.groups.get(key)
    if progress.consumer:
        if group is None:
            raise CorruptFrame(frame.offset, f"{progress.consumer} leaves {progress.group}, which has no position")
        _leave(group, progress)
        group.left_ms = frame.timestamp_ms
    elif progress.entries:  # an operator's move ends the membership of all consumers, so late acks hit nothing
        position, is_broadcast, _ = progress.entries[0]
        state.groups[key] = Group(
            position, _pulls_end(group), is_broadcast=bool(is_broadcast), left_ms=frame.timestamp_ms, began=frame.offset
        )
    elif state.groups.pop(key, None) is None:
        raise CorruptFrame(frame.offset, f"{progress.group} is forgotten, which has no position")
    else:
        state.pull_floor = max(state.pull_floor, _pulls_end(group))


def _pulls_end(group: Group | None) -> int:
    """Return the end of the pull sequences that were delivered to the group's consumers."""
    return max(group.floor, *(consumer.next_pull for consumer in group.consumers.values()), 0) if group else 0


def _leave(group: Group, progress: Progress) -> None:
    """Requeue a departed consumer's unacked messages. Deliveries of messages that it had not begun do not count."""
    (departure, _, _), *begun = progress.entries
    consumer = group.consumers.pop(progress.consumer, Consumer())
    for begin, end, _ in begun:
        for span in consumer.take(begin, end):
            group.requeue(span, attempts=span.attempts, suspected=span.suspected)
    is_suspect = departure == Departure.SUSPECTED
    for span in consumer.unacked:
        attempts = span.attempts - (departure != Departure.VANISHED)
        group.requeue(span, attempts=attempts, suspected=span.suspected + is_suspect)
    group.floor = max(group.floor, consumer.next_pull)


def _nothing(state: State, frame: Frame, body: Buffer) -> None:
    """Do nothing: `apply` handles epochs, and a delay server's schedule folds its own frames."""


def _retention(state: State, frame: Frame, body: Buffer) -> None:
    try:
        decision = decode_retention(body)
        state.kept.take(decision, offset=frame.offset, end=frame.end, time_ms=frame.timestamp_ms)
    except ValueError as error:
        raise CorruptFrame(frame.offset, str(error)) from None


_KINDS: dict[int, Callable[[State, Frame, Any], None]] = {
    FrameKind.MESSAGES: _messages,
    FrameKind.PULL: _pull,
    FrameKind.ACK: _ack,
    FrameKind.POSITION: _position,
    FrameKind.EPOCH: _nothing,
    FrameKind.NACK: _nack,
    FrameKind.CARRY: _nothing,
    FrameKind.DISPATCH: _nothing,
    FrameKind.SETTLED: _nothing,
    FrameKind.CANCEL: _nothing,
    FrameKind.RETENTION: _retention,
}


# A snapshot: u32 CRC-32 of the rest, u32 version 4, then zlib-compressed JSON. In version 3 ranges had no `suspected`,
# and requeued messages were a list of ranges instead of columns.
_VERSION, _VERSIONS_READ = 4, (3, 4)


def encode_snapshot(state: State) -> bytes:
    """Return the snapshot of a state, for a segment's base: a restart replays only the frames behind it."""
    plain: dict[str, Any] = {
        "end": state.end,
        "chain": state.chain,
        "high_watermark": state.high_watermark,
        "timestamp_ms": state.timestamp_ms,
        "epochs": [[*e.epoch, e.offset, e.chain] for e in state.epochs],
        "next_sequence": state.next_sequence,
        "groups": [
            [
                subject,
                name,
                g.position,
                g.floor,
                g.requeued.plain(),
                g.is_broadcast,
                g.left_ms,
                g.began,
                [[c, p.next_pull, p.unacked, p.mastership_ends] for c, p in g.consumers.items()],
            ]
            for (subject, name), g in state.groups.items()
        ],
        "producers": [[p, [[b, *stored] for b, stored in window.items()]] for p, window in state.producers.items()],
        "ordered": state.ordered,
        "retry_ms": state.retry_ms,
        "kept": state.kept.to_json(),
    }
    packed = _VERSION.to_bytes(4, "little") + zlib.compress(json.dumps(plain).encode(), 1)
    return crc32(packed).to_bytes(4, "little") + packed


def is_current_snapshot(data: Buffer) -> bool:
    """Return whether a snapshot has this version's format: an older one has fewer fields, a newer one more."""
    return bytes(data[4:8]) == _VERSION.to_bytes(4, "little")


def decode_snapshot(data: Buffer) -> State:
    """Read a snapshot back.

    Raises:
        ValueError: the snapshot is damaged; replay from an earlier one.
        NewerFormat: a newer version wrote the snapshot; replay from an earlier one.
    """
    data = bytes(data)
    if crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("snapshot does not match its CRC")
    if (version := int.from_bytes(data[4:8], "little")) > _VERSION:
        raise NewerFormat(0, f"a snapshot of version {version}")
    if version not in _VERSIONS_READ:
        raise ValueError("snapshot of another version")  # too short, or empty: an empty body matches its CRC, too
    plain = json.loads(zlib.decompress(data[8:]))
    epochs = [EpochStart(Epoch(term, boot), offset, chain) for term, boot, offset, chain in plain["epochs"]]
    numbers = plain["end"], plain["chain"], plain["high_watermark"], plain["timestamp_ms"]
    state = State(*numbers, epochs, plain["next_sequence"])
    for subject, name, position, floor, returned, is_broadcast, left_ms, began, consumers in plain["groups"]:
        state.groups[subject, name] = Group(
            position,
            floor,
            Requeued.from_plain(returned),
            {c: Consumer(n, [UnackedRange(*span) for span in u], e) for c, n, u, e in consumers},
            is_broadcast,
            left_ms,
            began,
        )
    state.producers = {p: {b: StoredBatch(*stored) for b, *stored in window} for p, window in plain["producers"]}
    state.unsorted = {producer for producer, window in state.producers.items() if not _is_sorted(window)}
    state.ordered, state.retry_ms = plain["ordered"], plain["retry_ms"]
    if "kept" in plain:  # snapshots older than retention frames have none
        state.kept = Kept.from_json(plain["kept"])
    return state
