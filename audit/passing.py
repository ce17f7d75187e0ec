"""Core. Judge of messages passed over by the pulls of one subject.

The log does not store filters, only deliveries. A consumer gets the messages with its tags, any
of them or all. So a consumer that got a message without tags has no filter and gets every message; and of two messages
with equal tags it gets both or none. A pull that passes over messages and delivers others with the same tags
contradicts itself. So does a pull between two others of the same consumer and epoch that both delivered such messages:
the filter may change once in between, not twice, unless a pull without entries announces the change, or the consumer
left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from qmq.audit.findings import FindingKind
from qmq.audit.messages import TAGGED, Ints
from qmq.log.frame import Frame
from qmq.log.progress_frame import DEFERRED, EXPIRED, OVERFLOWED, PASSED, Progress
from qmq.ranges import Range
from qmq.types import Epoch

UNTAGGED = 0
Key = tuple[str, str, Epoch]
"""(consumer group, consumer, epoch)"""


class Complaint(NamedTuple):
    """Problem of a progress frame: of the current one, or of the one at `offset`."""

    what: FindingKind
    text: str
    sequence: int | None = None
    offset: int | None = None
    end: int | None = None
    about: tuple[int, int] | None = None
    """Messages of the subject: a gap in them is the cause."""


class _Passed(NamedTuple):
    """Messages passed over by one pull."""

    frame: Frame
    begin: int
    messages: int
    tags: frozenset[int]


class Passing:
    """Passed-over and delivered messages of one subject's groups. One per copy and subject."""

    def __init__(self) -> None:
        self._sequences: list[Ints] = []
        self._tags: list[Ints] = []
        self._got: dict[Key, list[Range]] = {}
        """Sequences delivered by the last pull. Their tags are looked up only when messages are passed over."""
        self._open: dict[Key, list[_Passed]] = {}
        self.is_known = True
        """Whether all messages that pulls may name are present."""

    def tags(self, packed: bytes) -> None:
        """Record messages with tags (`audit.messages.TAGGED`)."""
        found = np.frombuffer(packed, TAGGED)
        self._sequences.append(found["sequence"].astype(np.int64))
        self._tags.append(found["tags"].astype(np.int64))

    def forget(self, group: str, consumer: str, epoch: Epoch) -> None:
        """Forget a consumer that left or changed its filter; without a name, all consumers of the group."""
        gone = [(group, consumer, epoch)] if consumer else [key for key in self._got if key[0] == group]
        for key in gone:
            self._got.pop(key, None)
            self._open.pop(key, None)

    def pull(self, frame: Frame, progress: Progress, first: int, position: int) -> Iterator[Complaint]:
        """Take a pull; yield complaints about messages that it or an earlier pull passed over without reason.

        `first`: first sequence of the subject in the log. `position`: position of the group before this pull.
        Redelivered messages before the position do not reveal the filter: the next consumer gets candidates for dead
        letters regardless of its filter.
        """
        if not self.is_known:
            return
        got: list[Range] = []
        passed: list[Range] = []
        for number, sequence, messages in progress.entries:
            begin, end = max(sequence, first), sequence + messages
            if begin >= end or number in (DEFERRED, EXPIRED, OVERFLOWED):
                continue
            if number == PASSED:
                passed.append((begin, end))
            elif sequence >= position:
                got.append((begin, end))
        key = progress.group, progress.consumer, frame.epoch
        if passed or (got and key in self._open):
            yield from self._compare(key, frame, got, passed)
        if got:
            self._got[key] = got

    def _compare(self, key: Key, frame: Frame, got: list[Range], passed: list[Range]) -> Iterator[Complaint]:
        """Compare passed-over messages with those delivered by this pull, the one before and the one after."""
        delivered = self._tags_of(got)
        before = self._tags_of(self._got.get(key, ()))
        waiting = self._open.pop(key, []) if delivered else []
        for begin, end in passed:
            passed_over = _Passed(frame, begin, end - begin, self._tags_of([(begin, end)]))
            if _selects(delivered, passed_over.tags):
                yield _complain(passed_over)
            elif _selects(before, passed_over.tags) and not delivered:
                self._open.setdefault(key, []).append(passed_over)
        for passed_over in waiting:
            if _selects(delivered, passed_over.tags):
                yield _complain(passed_over)

    def _tags_of(self, ranges: Iterable[Range]) -> frozenset[int]:
        """Return the tags of the messages in these ranges, as hashes."""
        return frozenset().union(*(self._tags_in(begin, end) for begin, end in ranges))

    def _tags_in(self, begin: int, end: int) -> set[int]:
        tagged, found = 0, set()
        for sequences, tags in zip(reversed(self._sequences), reversed(self._tags)):
            if sequences[0] >= end:
                continue
            if sequences[-1] < begin:
                break
            some = tags[np.searchsorted(sequences, begin) : np.searchsorted(sequences, end)]
            tagged += len(some)
            found.update(np.unique(some).tolist())
        return found | ({UNTAGGED} if tagged < end - begin else set())


def _selects(got: frozenset[int], tags: frozenset[int]) -> bool:
    """Return whether a consumer that got messages with the tags `got` also gets some with `tags`."""
    return bool(tags) and (UNTAGGED in got or not got.isdisjoint(tags))


def _complain(passed_over: _Passed) -> Complaint:
    text = (
        f"{passed_over.messages} messages from sequence {passed_over.begin} on were passed over; it gets such messages"
    )
    return Complaint(FindingKind.PASSED, text, passed_over.begin, passed_over.frame.offset, passed_over.frame.end)
