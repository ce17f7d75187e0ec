"""Core. The keys of a group that nobody looked at in this mastership, made again from the fold and the labels."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from qmq.broker.choosing import FRAMES_AT_ONCE
from qmq.broker.group_filter import GroupFilter
from qmq.broker.keys import Keys
from qmq.broker.labels import LabelCache
from qmq.log import MessageLog
from qmq.log.group import Group
from qmq.log.index import FrameRef


def made_again(group_filter: GroupFilter, log: MessageLog, label_cache: LabelCache) -> list[FrameRef]:
    """See to it that the group's filter knows its keys, and what waits; return the frames whose labels that needs.

    They are asked for once: what the group has not settled only becomes less until its keys are known.
    """
    if group_filter.keys is None:
        making = _Making(group_filter, log, label_cache)
        if missing := making.missing():
            return missing
        making.make()
    return []


class _Making:
    def __init__(self, group_filter: GroupFilter, log: MessageLog, label_cache: LabelCache) -> None:
        self._group_filter, self._log, self._label_cache = group_filter, log, label_cache
        self._group: Group = log.state.groups[group_filter.subject, group_filter.group]
        self._ordered_from = log.state.ordered.get(group_filter.subject)
        consumers = self._group.consumers.values()
        self._held = sorted((one.first, one.end) for consumer in consumers for one in consumer.unacked)

    def missing(self) -> list[FrameRef]:
        """Return the frames, of those with messages that are not settled, whose labels have to be read."""
        first = self._ordered_from
        if first is None:
            return []
        requeued = ((one.first, one.end) for one in self._group.requeued)
        ranges = sorted(one for one in (*self._held, *requeued) if one[1] > first)
        refs = {ref.offset: ref for one in ranges for ref in self._refs(*one)}
        return [refs[offset] for offset in sorted(refs) if self._labels(refs[offset]) is None]

    def make(self) -> None:
        """Whoever has a message of a key holds it; then what came back, in order, and behind it what was deferred."""
        group_filter = self._group_filter
        keys = group_filter.keys = Keys()
        for begin, end in self._held:
            for key, sequence, _ in self._keyed(begin, end):
                if key and not keys.is_busy(key):
                    keys.hold(key, sequence)
        for one in self._group.requeued:
            for key, begin, end in self._keyed(one.first, one.end):
                if keys.is_busy(key):
                    keys.defer(key, begin)
                    continue
                if key:
                    keys.hold(key, begin)
                group_filter.note(begin, end, one.due_ms)
        group_filter.labels_before.clear()

    def _refs(self, begin: int, end: int) -> Iterator[FrameRef]:
        return frames_of(self._log, self._group_filter.subject, begin, end)

    def _labels(self, ref: FrameRef) -> array[int] | None:
        before = self._group_filter.labels_before.get(ref.offset)
        return self._label_cache.labels(ref) if before is None else before

    def _keyed(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (key, begin, end): messages with a key one by one, others as ranges with key 0."""
        if self._ordered_from is None or end <= self._ordered_from:
            yield 0, begin, end
            return
        for ref in self._refs(begin, end):
            if ref.begin > begin:  # retention took what is before it
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
    """Yield the frames that hold `[begin, end)`, as far as they are there."""
    while begin < end:
        refs = message_log.frames(subject, begin, min(end - begin, FRAMES_AT_ONCE))
        for ref in refs:
            if ref.begin >= end:
                return
            yield ref
        if not refs:
            return
        begin = refs[-1].end
