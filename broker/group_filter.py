"""Core. Filter state of one consumer group: its order keys and the requeued ranges that are ready.

Only unsettled messages before the group's position count. The first of a key is its holder: a consumer has it, or it
waits for its retry, or it is delivered next. Later messages of the key wait behind it, in order. So one message of a
key is under way at a time. All of this follows from the fold and the labels; the next master makes it again.

Keeps I24.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from qmq.broker.choice import FRAMES_AT_ONCE
from qmq.broker.labels import LabelCache, TagRule
from qmq.log import MessageLog
from qmq.log.group import Consumer, Group
from qmq.log.index import FrameRef
from qmq.ranges import Range


class Keys:
    """Order keys of one group: their holders, and the messages behind them. A key is the upper half of a label, at
    least 1.
    """

    def __init__(self) -> None:
        self._holder: dict[int, int] = {}
        """Key -> sequence of its holder."""
        self._key: dict[int, int] = {}
        """Sequence of a holder -> its key."""
        self._behind: dict[int, deque[int]] = {}
        """Key -> sequences of the messages behind its holder, in order."""
        self.deferred = 0
        """Messages that wait behind the holder of their key."""

    def __len__(self) -> int:
        """Return how many keys are held."""
        return len(self._holder)

    def is_busy(self, key: int) -> bool:
        return key in self._holder

    def hold(self, key: int, sequence: int) -> None:
        """Give a free key to a message that is delivered."""
        self._holder[key] = sequence
        self._key[sequence] = key

    def defer(self, key: int, sequence: int) -> None:
        """Queue a later message of a busy key."""
        behind = self._behind.get(key)
        if behind is None:
            behind = self._behind[key] = deque()
        behind.append(sequence)
        self.deferred += 1

    def settled(self, sequence: int) -> int | None:
        """Free the key of a settled message; return the next holder, which may be delivered, or None."""
        key = self._key.pop(sequence, None)
        if key is None:
            return None
        behind = self._behind.get(key)
        if behind is None:
            del self._holder[key]
            return None
        following = behind.popleft()
        if not behind:
            del self._behind[key]
        self.deferred -= 1
        self.hold(key, following)
        return following


PASSED_MS = 1_000
"""After this time the position past non-matching messages is written, so a restart does not scan them again."""
FAILED_MS = 1_000
"""Pause after a failed reading."""


class GroupFilter:
    """Filter state of one group."""

    def __init__(self, subject: str, group: str) -> None:
        self.subject = subject
        self.group = group
        self.keys: Keys | None = None
        """None until the keys are restored (`restore_keys`)."""
        self.labels_before: dict[int, array[int]] = {}
        """Labels read to restore `keys`."""
        self.is_reading = self.has_failed = False
        self._again_ms = 0
        """When to read again after a failure; 0: the last reading succeeded."""
        self.changing: list[tuple[int, int]] = []
        """Messages of the last progress frame; it was not applied yet when they were noted."""
        self.seen_rule: TagRule | None = None
        self.seen_end = 0
        """No message from the group's position to here matches `seen_rule`; not written yet."""
        self.seen_ms = 0
        """Since when part of that is unwritten; 0: everything is written."""
        self.idle_at: tuple[TagRule | None, int, int] | None = None
        """Rule, log end and data limit of the last scan without a result."""
        self._ready: list[tuple[int, int]] = []
        """Heap of [begin, end): ranges that may be requeued, due, and first of their keys. The fold decides."""
        self._later: list[tuple[int, int, int]] = []
        """Heap of (due, begin, end)."""

    def note(self, begin: int, end: int, due_ms: int) -> None:
        """Note requeued messages `[begin, end)`, none of them behind another of its key."""
        if due_ms:
            heappush(self._later, (due_ms, begin, end))
        else:
            heappush(self._ready, (begin, end))

    def rests(self, now_ms: int) -> bool:
        """Return whether a reading failed a moment ago: a damaged copy is not read again for each packet."""
        if self.has_failed:
            self.has_failed = False
            self._again_ms = now_ms + FAILED_MS
        if now_ms < self._again_ms:
            return True
        self._again_ms = 0
        return False

    @property
    def will_be_overdue(self) -> bool:
        return bool(self.seen_ms or self._again_ms or self.has_failed)

    def is_overdue(self, now_ms: int) -> bool:
        """Return whether the group's pulls must be served although no message or retry came."""
        is_unwritten = self.seen_ms and not 0 <= now_ms - self.seen_ms < PASSED_MS
        return bool(is_unwritten) or self.has_failed or 0 < self._again_ms <= now_ms

    def is_idle(self, rule: TagRule | None, log_end: int, data_limit: int, now_ms: int) -> bool:
        """Return whether nothing changed since a scan found nothing: the consumers of a group ask one after another."""
        is_due = self._later and self._later[0][0] <= now_ms or self.seen_ms
        return not is_due and self.idle_at == (rule, log_end, data_limit)

    def pop_ready(self, now_ms: int) -> tuple[int, int] | None:
        while self._later and self._later[0][0] <= now_ms:
            heappush(self._ready, heappop(self._later)[1:])
        return heappop(self._ready) if self._ready else None

    def soon_ready(self, most: int) -> list[tuple[int, int]]:
        """Return some of the next ranges, in order."""
        return sorted(self._ready[:most])

    def catch_up(self, group: Group) -> None:
        """Apply the noted messages of the last progress frame: requeued ones wait, settled ones free their keys."""
        changed, self.changing = self.changing, []
        if self.keys is None:
            return
        for begin, end in changed:
            for span in group.requeued.overlapping(begin, end):
                self.settle(group, begin, span.first)
                self.note(span.first, span.end, span.due_ms)
                begin = span.end
            self.settle(group, begin, end)

    def settle(self, group: Group, begin: int, end: int) -> None:
        """Free the keys of settled messages `[begin, end)`, and note the next holder of each."""
        keys = self.keys
        if keys:
            for sequence in range(begin, end):
                following = keys.settled(sequence)
                while following is not None and not group.requeued.overlapping(following, following + 1):
                    following = keys.settled(following)  # it was given up while it waited behind the other
                if following is not None:
                    self.note(following, following + 1, 0)


def sequences_unacked(consumer: Consumer, begin: int, end: int) -> Iterator[Range]:
    """Yield the sequences of a consumer's unacked messages within pull sequences `[begin, end)`."""
    for span in consumer.overlapping(begin, end):
        part = span.part(begin, end)
        yield part.first, part.end


def restore_keys(group_filter: GroupFilter, log: MessageLog, label_cache: LabelCache) -> list[FrameRef]:
    """Restore the group's keys and requeued ranges; return the frames with labels to read first.

    They are requested once: until the keys are known, the set of unsettled messages only shrinks.
    """
    if group_filter.keys is None:
        making = _Making(group_filter, log, label_cache)
        if missing := making.missing():
            return missing
        making.make()
    return []


class _Making:
    """Restoration of one group's keys from the fold and the labels."""

    def __init__(self, group_filter: GroupFilter, log: MessageLog, label_cache: LabelCache) -> None:
        self._group_filter = group_filter
        self._log = log
        self._label_cache = label_cache
        self._group: Group = log.state.groups[group_filter.subject, group_filter.group]
        self._ordered_from = log.state.ordered.get(group_filter.subject)
        consumers = self._group.consumers.values()
        self._unacked = sorted((span.first, span.end) for consumer in consumers for span in consumer.unacked)

    def missing(self) -> list[FrameRef]:
        """Return the frames with unsettled messages and labels to read."""
        first = self._ordered_from
        if first is None:
            return []
        requeued = ((span.first, span.end) for span in self._group.requeued)
        ranges = sorted(span for span in (*self._unacked, *requeued) if span[1] > first)
        refs = {ref.offset: ref for range_ in ranges for ref in self._refs(*range_)}
        return [refs[offset] for offset in sorted(refs) if self._labels(refs[offset]) is None]

    def make(self) -> None:
        """Give each key to the unacked message that has it; then add requeued ranges, in order, and deferred
        messages.
        """
        group_filter = self._group_filter
        keys = group_filter.keys = Keys()
        for begin, end in self._unacked:
            for key, sequence, _ in self._keyed(begin, end):
                if key and not keys.is_busy(key):
                    keys.hold(key, sequence)
        for span in self._group.requeued:
            for key, begin, end in self._keyed(span.first, span.end):
                if keys.is_busy(key):
                    keys.defer(key, begin)
                    continue
                if key:
                    keys.hold(key, begin)
                group_filter.note(begin, end, span.due_ms)
        group_filter.labels_before.clear()

    def _refs(self, begin: int, end: int) -> Iterator[FrameRef]:
        return frames_of(self._log, self._group_filter.subject, begin, end)

    def _labels(self, ref: FrameRef) -> array[int] | None:
        before = self._group_filter.labels_before.get(ref.offset)
        return self._label_cache.labels(ref) if before is None else before

    def _keyed(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (key, begin, end): messages with a key one by one, ranges without keys with key 0."""
        if self._ordered_from is None or end <= self._ordered_from:
            yield 0, begin, end
            return
        for ref in self._refs(begin, end):
            if ref.begin > begin:  # retention deleted the messages before it
                yield 0, begin, ref.begin
                begin = ref.begin
            labels, last = self._labels(ref), min(end, ref.end)
            if labels:
                for sequence in range(begin, last):
                    if key := labels[sequence - ref.begin] >> 32:
                        if sequence > begin:
                            yield 0, begin, sequence
                        yield key, sequence, sequence + 1
                        begin = sequence + 1
            if last > begin:
                yield 0, begin, last
            begin = last
        if end > begin:
            yield 0, begin, end


def frames_of(message_log: MessageLog, subject: str, begin: int, end: int) -> Iterator[FrameRef]:
    """Yield the frames that hold `[begin, end)`, as far as they exist."""
    while begin < end:
        refs = message_log.frames(subject, begin, min(end - begin, FRAMES_AT_ONCE))
        for ref in refs:
            if ref.begin >= end:
                return
            yield ref
        if not refs:
            return
        begin = refs[-1].end
