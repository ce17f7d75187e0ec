"""Core. How many bytes of a limited subject wait for each of its consumer groups.

No number of the fold says that. It is counted by the consume log: each frame once when it is there, once when the group
has gone past it, and never more of them in a tick than cost a few milliseconds. So after a start, or after a group was
moved, the count begins at the group's position and grows tick by tick until it has met the subject's end. Requeued
messages are summed anew when they have changed, the oldest ranges of them. What is not counted counts nothing; of a
frame that a group has in part, the part is estimated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from qmq.log import MessageLog
from qmq.log.group import Group
from qmq.log.index import FrameRef
from qmq.log.requeued import Requeued

FRAMES_PER_TICK = 4_000
"""About 10 ms, of which there are ten in a second; so of limited subjects, 20,000 batches a second are kept up with."""
FRAMES_AT_ONCE = 2_000
RANGES_AT_ONCE = 1_000
"""Requeued ranges of a group that count, the oldest of them."""
REQUEUED_FRAMES = 2_000
"""So many frames of them, at most; with the look-ups, half of what is walked in a tick."""
WALKED_PER_TICK = 12_000
"""Frames that are walked for requeued messages, and to give up the oldest: at most some 30 ms of a tick."""
WALKED_AT_ONCE = 100
LOOK_UP = 3
"""Frames that could be walked while one is looked up."""

Key = tuple[str, str]


@dataclass(slots=True)
class _Counted:
    """Whole frames with the sequences [begin, end), and their bytes."""

    begin: int
    end: int
    bytes: int = 0


@dataclass(slots=True)
class _Summed:
    """Bytes of `requeued` when it had changed so often, and frames were kept from `start` on."""

    requeued: Requeued
    changes: int
    start: int
    bytes: int


class Lengths:
    """Made by `broker.pruning`; ends with the mastership."""

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._counted: dict[Key, _Counted] = {}
        self._summed: dict[Key, _Summed] = {}
        self._unfinished: dict[Key, None] = {}
        """Counts that have not met the subject's end; the one that went on last is the last."""
        self._left, self._walk_left = FRAMES_PER_TICK, WALKED_PER_TICK

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def is_spent(self) -> bool:
        """Whether less is left of this tick than a look may need."""
        return self._walk_left < WALKED_PER_TICK // 2

    def new_tick(self) -> None:
        """Go on with what is not finished.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        self._left, self._walk_left = FRAMES_PER_TICK, WALKED_PER_TICK
        for key in list(self._unfinished):
            if self._left <= 0:
                return
            if (group := self._log.state.groups.get(key)) is None:
                self.forget(key)
            else:
                self._new(key, group.position)

    def forget(self, key: Key) -> None:
        for known in (self._counted, self._summed, self._unfinished):
            known.pop(key, None)

    def waiting(self, key: Key, group: Group) -> int:
        """Return how many bytes wait for a group: what it was not delivered, and what is requeued.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        return self._new(key, group.position) + self._requeued(key, group.requeued)

    def covering(self, subject: str, ranges: Iterable[tuple[int, int]], size: int) -> int:
        """Return how many of the first messages of these ranges, (first, count), have `size` bytes; fewer if more
        frames would have to be walked than is done in a tick.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        messages = 0
        for gone, kept, ref in self._parts(subject, ranges):
            messages += gone
            if ref is not None and (part := _part(ref, kept)) >= size:
                return messages - (-size * (ref.end - ref.begin) // ref.length)
            messages, size = messages + kept, size - (part if ref is not None else 0)
        return messages

    def _requeued(self, key: Key, requeued: Requeued) -> int:
        start, summed = self._log.state.kept.start, self._summed.get(key)
        if summed is not None and summed.requeued is requeued:
            if (summed.changes, summed.start) == (requeued.changes, start):
                return summed.bytes
        if self.is_spent or requeued.first is None:
            return 0
        first_kept = self._look_up(key[0], requeued.first, 1)
        ranges = requeued.overlapping(first_kept[0].begin, 1 << 63, RANGES_AT_ONCE) if first_kept else []
        parts = self._parts(key[0], ((one.first, one.count) for one in ranges))
        size = sum(_part(ref, kept) for _, kept, ref in islice(parts, REQUEUED_FRAMES) if ref is not None)
        self._summed[key] = _Summed(requeued, requeued.changes, start, size)
        return size

    def _parts(self, subject: str, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, FrameRef | None]]:
        """Yield what each frame has of these ranges, in order: messages before it that retention took, messages in it,
        and the frame; None: there is none any more."""
        refs: deque[FrameRef] = deque()
        for at, count in ranges:
            end = at + count
            while at < end:
                while refs and refs[0].end <= at:
                    refs.popleft()
                if not refs:
                    if self._walk_left <= 0:
                        return
                    refs.extend(self._look_up(subject, at, min(WALKED_AT_ONCE, count)))
                begin = min(max(refs[0].begin, at), end) if refs else end
                stop = min(refs[0].end, end) if begin < end else end
                yield begin - at, stop - begin, refs[0] if begin < end else None
                at = stop

    def _look_up(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        refs = self._log.frames(subject, sequence, most)
        self._walk_left -= LOOK_UP + len(refs)
        return refs

    def _new(self, key: Key, position: int) -> int:
        self._unfinished.pop(key, None)
        end = self._log.state.next_sequence.get(key[0], 0)
        refs = self._log.frames(key[0], position, 1) if position < end else []
        if not refs:
            return 0
        first, counted = refs[0], self._counted.get(key)
        if counted is None or not counted.begin <= first.begin <= counted.end:
            counted = self._counted[key] = _Counted(first.begin, first.begin)
        if not self._leave(key[0], counted, first.begin):
            self._unfinished[key] = None
            return 0
        while counted.end < end and self._left > 0:
            refs = self._take(key[0], counted.end)
            counted.bytes += sum(ref.length for ref in refs)
            counted.end = refs[-1].end
        if counted.end < end:
            self._unfinished[key] = None
        return counted.bytes - _part(first, max(position - first.begin, 0))

    def _leave(self, subject: str, counted: _Counted, begin: int) -> bool:
        """Count what lies before `begin` no more; return whether that is done."""
        while counted.begin < begin and self._left > 0:
            refs = self._take(subject, counted.begin)
            if refs[0].begin != counted.begin:  # retention took some that were counted
                counted.begin, counted.end, counted.bytes = begin, begin, 0
                return True
            gone = [ref for ref in refs if ref.begin < begin]
            counted.bytes -= sum(ref.length for ref in gone)
            counted.begin = gone[-1].end
        return counted.begin == begin

    def _take(self, subject: str, sequence: int) -> list[FrameRef]:
        refs = self._log.frames(subject, sequence, min(FRAMES_AT_ONCE, self._left))
        self._left -= len(refs)
        return refs


def _part(ref: FrameRef, messages: int) -> int:
    return ref.length * messages // (ref.end - ref.begin)
