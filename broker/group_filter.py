"""Core. What is kept of one consumer group for which single messages are chosen.

All of it follows from the fold and the labels. What came back is looked up in the fold when its turn comes: the ranges
noted here only say where to look.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush

from qmq.broker.keys import Keys
from qmq.broker.tags import TagRule
from qmq.log.group import Consumer, Group
from qmq.ranges import Range

PASSED_MS = 1_000
"""After so long it is written down that nothing matched: a restart does not look again."""
FAILED_MS = 1_000
"""How long nothing is read for a group after that failed."""


class GroupFilter:
    """What is kept of one group."""

    def __init__(self, subject: str, group: str) -> None:
        self.subject, self.group = subject, group
        self.keys: Keys | None = None
        """None: not known yet (`broker.key_making`)."""
        self.labels_before: dict[int, array[int]] = {}
        """Labels read for `keys` to be made, until they are."""
        self.is_reading = self.has_failed = False
        self._again_ms = 0
        """When to read again after that failed; 0: it did not."""
        self.changing: list[tuple[int, int]] = []
        """Messages of the last frame of progress, which was not applied yet when they were noted."""
        self.seen_rule: TagRule | None = None
        self.seen_end = 0
        """From the group's position to here nothing matches `seen_rule`; not written down."""
        self.seen_ms = 0
        """Since when something of that is not written down; 0: nothing is."""
        self.idle_at: tuple[TagRule | None, int, int] | None = None
        """Under which rule, at which end of the log and with which limit nothing was found."""
        self._ready: list[tuple[int, int]] = []
        """Heap of [begin, end): where messages may be returned, due, and the next of their keys. The fold decides."""
        self._later: list[tuple[int, int, int]] = []
        """Heap of (due, begin, end)."""

    def note(self, begin: int, end: int, due_ms: int) -> None:
        """Messages `[begin, end)` wait with what was returned, none behind another of its key."""
        if due_ms:
            heappush(self._later, (due_ms, begin, end))
        else:
            heappush(self._ready, (begin, end))

    def rests(self, now_ms: int) -> bool:
        """Return whether a reading failed a moment ago: a copy that is damaged is not read again for each packet."""
        if self.has_failed:
            self.has_failed, self._again_ms = False, now_ms + FAILED_MS
        if now_ms < self._again_ms:
            return True
        self._again_ms = 0
        return False

    @property
    def will_be_overdue(self) -> bool:
        return bool(self.seen_ms or self._again_ms or self.has_failed)

    def is_overdue(self, now_ms: int) -> bool:
        """Return whether its pulls are to be served, though nothing came for them."""
        is_unwritten = self.seen_ms and not 0 <= now_ms - self.seen_ms < PASSED_MS
        return bool(is_unwritten) or self.has_failed or 0 < self._again_ms <= now_ms

    def is_idle(self, rule: TagRule | None, log_end: int, data_limit: int, now_ms: int) -> bool:
        """Return whether nothing happened since nothing was found: a group's consumers ask one after the other."""
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
        """The last frame of progress was applied: what came back waits, what is settled frees its key."""
        changed, self.changing = self.changing, []
        if self.keys is None:
            return
        for begin, end in changed:
            for one in group.requeued.overlapping(begin, end):
                self.settle(group, begin, one.first)
                self.note(one.first, one.end, one.due_ms)
                begin = one.end
            self.settle(group, begin, end)

    def settle(self, group: Group, begin: int, end: int) -> None:
        keys = self.keys
        if keys:
            for sequence in range(begin, end):
                following = keys.settled(sequence)
                while following is not None and not group.requeued.overlapping(following, following + 1):
                    following = keys.settled(following)  # it was given up while it stood behind the other
                if following is not None:
                    self.note(following, following + 1, 0)


def sequences_unacked(consumer: Consumer, begin: int, end: int) -> Iterator[Range]:
    """Yield the sequences of what a consumer has of pull sequences `[begin, end)`."""
    for one in consumer.overlapping(begin, end):
        part = one.part(begin, end)
        yield part.first, part.end
