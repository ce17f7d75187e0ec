"""Core. What follows from a message log: one function of its frames for master, slave, restart, test and Spark.

`State` is derived and never stored by itself, except as a snapshot at a segment's base: truncating the log truncates
it. `apply` is the only thing that changes it.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from qmq.codec import Buffer
from qmq.errors import CorruptFrame, InvalidAck
from qmq.log.frame import FLAG_ORDERED, NO_CHAIN, Frame, FrameKind
from qmq.log.progress import DEFERRED, PASSED, Progress, decode_progress
from qmq.subjects import is_dead_letter_subject
from qmq.types import NO_EPOCH, Epoch

PRODUCERS_MAX = 4096
"""Producers whose last batches are remembered, the least recent forgotten first: about 30 MB when full."""
BATCHES_PER_PRODUCER = 64
"""A producer keeps fewer than this many numbers between its oldest unresolved batch and its newest."""
REIGN_BITS = 32
"""A pull sequence's upper bits name the reign, term and boot, so that a late ack never hits other messages (W2, W13).

A count of reigns would not do: two histories that part may have as many, and a master alone hands out messages.
"""

NEVER_MS = 1 << 63

_FIRST = itemgetter(0)


class EpochStart(NamedTuple):
    """Where an epoch begins, and the chain before it."""

    epoch: Epoch
    offset: int
    chain: int


Taken = tuple[int, int, int]
"""(first sequence, messages, times): messages that a consumer holds no more."""


@dataclass(slots=True)
class Consumer:
    """Progress of one consumer. `unacked` holds [first pull sequence, first sequence, messages, times], ascending;
    `times` says how often they were handed out by now, to whomever."""

    next_pull: int = 0
    unacked: list[list[int]] = field(default_factory=list)
    reign_ends: list[int] = field(default_factory=list)
    """Where the numbers end that each reign gave out, as far as any of them may be un-acked."""

    @property
    def acked_end(self) -> int:
        """Below this pull sequence everything is settled. It never goes back."""
        return self.unacked[0][0] if self.unacked else self.next_pull

    @property
    def unacked_messages(self) -> int:
        return sum(entry[2] for entry in self.unacked)

    def holds_as_many_as(self, limit: int) -> bool:
        """Return whether that many messages are un-acked; nearly always without counting them."""
        return self.next_pull - self.acked_end >= limit and self.unacked_messages >= limit

    def hold(self, pull_sequence: int, sequence: int, messages: int, times: int) -> None:
        """Note that messages were handed out."""
        ends = self.reign_ends
        if not ends or ends[-1] - 1 >> REIGN_BITS != pull_sequence >> REIGN_BITS:
            self.reign_ends = ends = [end for end in ends if end > self.acked_end]
            ends.append(0)
        self.next_pull = ends[-1] = pull_sequence + messages
        if self.unacked:
            last = self.unacked[-1]
            if (last[0] + last[2], last[1] + last[2], last[3]) == (pull_sequence, sequence, times):
                last[2] += messages
                return
        self.unacked.append([pull_sequence, sequence, messages, times])

    def handed_out_more_than(self, limit: int) -> list[tuple[int, int]]:
        """Return the ranges of pull sequences that were handed out more often; 0 is no limit."""
        return [(first, first + messages) for first, _, messages, times in self.unacked if limit and times > limit]

    def unacked_below(self, end: int, limit: int) -> list[tuple[int, int]]:
        """Return the un-acked pull sequences below `end` but those that were handed out more often than `limit`."""
        found: list[tuple[int, int]] = []
        for first, _, messages, times in self.unacked:
            if first >= end:
                break
            if not limit or times <= limit:
                piece = first, min(end, first + messages)
                if found and found[-1][1] == first:
                    found[-1] = found[-1][0], piece[1]
                else:
                    found.append(piece)
        return found

    def was_given(self, end: int) -> bool:
        """Return whether this history gave out all numbers below `end`, which its reign ends with, or settled them."""
        reign = end - 1 >> REIGN_BITS
        return end <= self.acked_end or any(
            end <= given and given - 1 >> REIGN_BITS == reign for given in self.reign_ends
        )

    def held(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return which parts of pull sequences `[begin, end)` are not settled yet, as ranges.

        Raises:
            InvalidAck: the range is empty, or was not handed out.
        """
        self.check_given(begin, end)
        found: list[tuple[int, int]] = []
        for at in range(self._find(begin), len(self.unacked)):
            first, _, messages, _ = self.unacked[at]
            if first >= end:
                break
            piece = max(begin, first), min(end, first + messages)
            if found and found[-1][1] == piece[0]:
                found[-1] = found[-1][0], piece[1]
            else:
                found.append(piece)
        return found

    def check_given(self, begin: int, end: int) -> None:
        """Raise InvalidAck if the range is empty, or was not handed out."""
        if not begin < end:
            raise InvalidAck(f"[{begin}, {end}) is empty")
        if end > self.next_pull:
            raise InvalidAck(f"[{begin}, {end}) ends past {self.next_pull}, the next pull sequence to hand out")

    def take(self, begin: int, end: int) -> list[Taken]:
        """Hold pull sequences `[begin, end)` no more; return what that was."""
        taken: list[Taken] = []
        kept: list[list[int]] = []
        start = at = self._find(begin)
        while at < len(self.unacked) and self.unacked[at][0] < end:
            first, sequence, messages, times = self.unacked[at]
            low, high = max(begin, first), min(end, first + messages)
            taken.append((sequence + low - first, high - low, times))
            if low > first:
                kept.append([first, sequence, low - first, times])
            if high < first + messages:
                kept.append([high, sequence + high - first, first + messages - high, times])
            at += 1
        self.unacked[start:at] = kept
        return taken

    def entry_of(self, pull_sequence: int) -> list[int]:
        """Return the entry that an un-acked pull sequence is in."""
        return self.unacked[self._find(pull_sequence)]

    def _find(self, begin: int) -> int:
        """Return the place of the first entry that ends behind `begin`."""
        at = bisect_right(self.unacked, begin, key=_FIRST) - 1
        return at + (at < 0 or self.unacked[at][0] + self.unacked[at][2] <= begin)


@dataclass(slots=True)
class Group:
    """A group's progress on one subject.

    `returned` holds [first sequence, messages, times, due_ms], ascending and disjoint: messages before `position` that
    no consumer has now. They were handed out `times` times before, and not to be handed out again before `due_ms`.
    """

    position: int
    floor: int = 0
    """First pull sequence that was given to none of the consumers that left."""
    returned: list[list[int]] = field(default_factory=list)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    is_broadcast: bool = False
    """It is one consumer's own, which gets all messages."""
    left_ms: int = 0
    """When the group began, or the last consumer left."""
    began: int = 0
    """Offset of the frame that put the group where it began, the first time or by moving it."""
    soonest_ms: int = field(default=0, compare=False, repr=False)
    """Nothing returned is due before that; it may be too early, until somebody looks."""

    def due(self, now_ms: int) -> Iterator[list[int]]:
        """Yield the entries of `returned` that may be handed out again, in order. A group that fails has many, and
        they are not looked through for each pull while all of them have to wait."""
        if now_ms < self.soonest_ms:
            return
        soonest_ms = NEVER_MS
        for entry in self.returned:
            soonest_ms = min(soonest_ms, entry[3])
            if entry[3] <= now_ms:
                yield entry
        self.soonest_ms = soonest_ms

    def give_back(self, sequence: int, messages: int, times: int, due_ms: int) -> None:
        """Let messages wait for whoever may have them next."""
        returned = self.returned
        self.soonest_ms = min(self.soonest_ms, due_ms)
        at = bisect_right(returned, sequence, key=_FIRST)
        if at and (before := returned[at - 1])[0] + before[1] == sequence and before[2:] == [times, due_ms]:
            before[1] += messages
            at -= 1
        else:
            returned.insert(at, [sequence, messages, times, due_ms])
        if at + 1 < len(returned):
            entry, after = returned[at], returned[at + 1]
            if entry[0] + entry[1] == after[0] and entry[2:] == after[2:]:
                entry[1] += after[1]
                del returned[at + 1]

    def take_returned(self, sequence: int, messages: int) -> int | None:
        """Take messages out of one entry; return how often they were handed out. None: they are not there."""
        at = bisect_right(self.returned, sequence, key=_FIRST) - 1
        if at < 0:
            return None
        first, count, times, due_ms = self.returned[at]
        rest = first + count - sequence - messages
        if rest < 0:
            return None
        kept = [[first, sequence - first, times, due_ms], [sequence + messages, rest, times, due_ms]]
        self.returned[at : at + 1] = [part for part in kept if part[1]]
        return times


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
    ordered: dict[str, int] = field(default_factory=dict)
    """Subjects with order keys, and the first sequence of a batch that had one."""
    retry_ms: int = 0
    """The latest moment at which messages were nacked, by the clocks of the masters (qmq.replication.reign)."""

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
    if frame.flags & FLAG_ORDERED:
        state.ordered.setdefault(subject, expected)
    if frame.producer:
        window = state.producers.pop(frame.producer, None) or {}
        window.pop(frame.batch, None)
        window[frame.batch] = StoredBatch(expected, frame.count, frame.end)
        if len(window) > BATCHES_PER_PRODUCER:
            # Dead letters are numbered by their originals, which die in any order: the copy made first is forgotten.
            del window[next(iter(window)) if is_dead_letter_subject(subject) else min(window)]
        state.producers[frame.producer] = window
        if len(state.producers) > PRODUCERS_MAX:
            del state.producers[next(iter(state.producers))]


def _pull(state: State, frame: Frame, body: Buffer) -> None:
    progress = decode_progress(body)
    group = state.groups.get((frame.subject, progress.group))
    if group is None:
        raise CorruptFrame(frame.offset, f"pull of {progress.group}, which has no position on {frame.subject}")
    if not progress.entries:
        group.consumers.setdefault(progress.consumer, Consumer(group.floor))
    for pull_sequence, sequence, messages in progress.entries:
        times = _leave_group(group, frame, sequence, messages)
        if pull_sequence == DEFERRED:
            group.give_back(sequence, messages, times, 0)
        elif pull_sequence != PASSED:
            consumer = group.consumers.setdefault(progress.consumer, Consumer())
            if pull_sequence < consumer.next_pull:
                raise CorruptFrame(frame.offset, f"pull sequence {pull_sequence} was handed out before")
            consumer.hold(pull_sequence, sequence, messages, times + 1)


def _leave_group(group: Group, frame: Frame, sequence: int, messages: int) -> int:
    """Take messages from those that a group has to give; return how often they were handed out before."""
    if sequence == group.position:
        group.position += messages
        return 0
    times = group.take_returned(sequence, messages)
    if times is None:
        raise CorruptFrame(frame.offset, f"sequences {sequence} to {sequence + messages} are not the group's to give")
    return times


def _holder(state: State, frame: Frame, progress: Progress) -> tuple[Group, Consumer]:
    group = state.groups.get((frame.subject, progress.group))
    consumer = group.consumers.get(progress.consumer) if group else None
    if group is None or consumer is None:
        raise CorruptFrame(frame.offset, f"{progress.consumer} of {progress.group} holds nothing of {frame.subject}")
    return group, consumer


def _take(consumer: Consumer, frame: Frame, begin: int, end: int) -> list[Taken]:
    try:
        consumer.check_given(begin, end)
    except InvalidAck as error:
        raise CorruptFrame(frame.offset, str(error)) from None
    taken = consumer.take(begin, end)
    if not taken:
        raise CorruptFrame(frame.offset, f"nothing of [{begin}, {end}) is held any more")
    return taken


def _ack(state: State, frame: Frame, body: Buffer) -> None:
    progress = decode_progress(body)
    _, consumer = _holder(state, frame, progress)
    for begin, end, _ in progress.entries:
        _take(consumer, frame, begin, end)


def _nack(state: State, frame: Frame, body: Buffer) -> None:
    progress = decode_progress(body)
    group, consumer = _holder(state, frame, progress)
    state.retry_ms = max(state.retry_ms, frame.timestamp_ms)
    for begin, end, due_ms in progress.entries:
        for sequence, messages, times in _take(consumer, frame, begin, end):
            group.give_back(sequence, messages, times, due_ms)


def _position(state: State, frame: Frame, body: Buffer) -> None:
    progress = decode_progress(body)
    key = (frame.subject, progress.group)
    group = state.groups.get(key)
    if progress.consumer:
        if group is None:
            raise CorruptFrame(frame.offset, f"{progress.consumer} leaves {progress.group}, which has no position")
        _leave(group, progress)
        group.left_ms = frame.timestamp_ms
    elif progress.entries:  # a group that is moved counts as a departure of everybody: late acks hit nothing
        given = [consumer.next_pull for consumer in group.consumers.values()] + [group.floor] if group else [0]
        position, is_broadcast, _ = progress.entries[0]
        state.groups[key] = Group(
            position, max(given), is_broadcast=bool(is_broadcast), left_ms=frame.timestamp_ms, began=frame.offset
        )
    elif state.groups.pop(key, None) is None:
        raise CorruptFrame(frame.offset, f"{progress.group} is forgotten, which has no position")


def _leave(group: Group, progress: Progress) -> None:
    """What a consumer did not ack waits for the others. What it never began with does not count as handed out."""
    ((told, _, _),) = progress.entries
    consumer = group.consumers.pop(progress.consumer, Consumer())
    for _, sequence, messages, times in consumer.unacked:
        group.give_back(sequence, messages, times - told, 0)
    group.floor = max(group.floor, consumer.next_pull)


def _nothing(state: State, frame: Frame, body: Buffer) -> None:
    """That the epoch changed was seen by `apply`; what a delay server plans and settles is folded by its schedule."""


_KINDS: dict[int, Callable[[State, Frame, Buffer], None]] = {
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
}


# A snapshot: u32 CRC-32 of the rest, u32 version 3, then zlib-compressed JSON.
_VERSION = 3


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
            [subject, name, g.position, g.floor, g.returned, g.is_broadcast, g.left_ms, g.began,
             [[c, p.next_pull, p.unacked, p.reign_ends] for c, p in g.consumers.items()]]
            for (subject, name), g in state.groups.items()
        ],
        "producers": [[p, [[b, *stored] for b, stored in window.items()]] for p, window in state.producers.items()],
        "ordered": state.ordered,
        "retry_ms": state.retry_ms,
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
    for subject, name, position, floor, returned, is_broadcast, left_ms, began, consumers in plain["groups"]:
        state.groups[subject, name] = Group(
            position, floor, returned, {c: Consumer(n, u, e) for c, n, u, e in consumers}, is_broadcast, left_ms, began
        )
    state.producers = {p: {b: StoredBatch(*stored) for b, *stored in window} for p, window in plain["producers"]}
    state.ordered, state.retry_ms = plain["ordered"], plain["retry_ms"]
    return state
