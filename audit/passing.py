"""Core. Whether messages that a consumer group passed over may have been: the log does not say what its consumers asked
for, but what they got.

A consumer gets what has its tags, any of them or all. So whoever got a message without tags asked for none, and is
given every message; and of two messages with the same tags, both are for it or none. A pull that passes messages over
and delivers such ones beside them contradicts itself. So does one between two others of the same consumer and epoch
that both delivered such: what it asks for may change once in between, not twice, unless a pull without entries says
that it changed, or the consumer left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from qmq.audit.kinds import Kind
from qmq.audit.messages import TAGGED, Ints
from qmq.log.frame import Frame
from qmq.log.progress import DEFERRED, EXPIRED, OVERFLOWED, PASSED, Progress
from qmq.ranges import Range
from qmq.types import Epoch

UNTAGGED = 0
Key = tuple[str, str, Epoch]
"""(consumer group, consumer, epoch)"""


class Complaint(NamedTuple):
    """What is wrong with a progress frame: the one at hand, unless `offset` says which."""

    what: Kind
    text: str
    sequence: int | None = None
    offset: int | None = None
    end: int | None = None


class _Passed(NamedTuple):
    """Messages that one pull passed over, between what was delivered before and what is to come."""

    frame: Frame
    begin: int
    messages: int
    tags: frozenset[int]


class Passing:
    """What groups of one subject passed over and delivered. Made by the judge of progress, per copy and subject."""

    def __init__(self) -> None:
        self._sequences: list[Ints] = []
        self._tags: list[Ints] = []
        self._got: dict[Key, list[Range]] = {}
        """Sequences that its last pull delivered. Their tags are looked up only if messages are passed over."""
        self._open: dict[Key, list[_Passed]] = {}
        self.is_known = True
        """Whether all messages are there that pulls may name."""

    def tags(self, packed: bytes) -> None:
        """Take note of messages with tags (audit.messages: TAGGED)."""
        found = np.frombuffer(packed, TAGGED)
        self._sequences.append(found["sequence"].astype(np.int64))
        self._tags.append(found["tags"].astype(np.int64))

    def forget(self, group: str, consumer: str, epoch: Epoch) -> None:
        """The consumer left, or asks for other messages from here on; without a name: all of the group."""
        gone = [(group, consumer, epoch)] if consumer else [key for key in self._got if key[0] == group]
        for key in gone:
            self._got.pop(key, None)
            self._open.pop(key, None)

    def pull(self, frame: Frame, said: Progress, first: int, position: int) -> Iterator[Complaint]:
        """Take a pull; yield what it, or one before, passed over for no reason.

        `first`: of the subject, in the log. `position`: the group's, before this pull. What came back from before it
        does not tell what the consumer asks for: who asks next is given what is to be a dead letter, whatever it is.
        """
        if not self.is_known:
            return
        got: list[Range] = []
        passed: list[Range] = []
        for number, sequence, messages in said.entries:
            begin, end = max(sequence, first), sequence + messages
            if begin >= end or number in (DEFERRED, EXPIRED, OVERFLOWED):
                continue
            if number == PASSED:
                passed.append((begin, end))
            elif sequence >= position:
                got.append((begin, end))
        key = said.group, said.consumer, frame.epoch
        if passed or (got and key in self._open):
            yield from self._hold(key, frame, got, passed)
        if got:
            self._got[key] = got

    def _hold(self, key: Key, frame: Frame, got: list[Range], passed: list[Range]) -> Iterator[Complaint]:
        """Hold what was passed over against what was delivered with it, before it and behind it."""
        handed_out = self._tags_of(got)
        before = self._tags_of(self._got.get(key, ()))
        waiting = self._open.pop(key, []) if handed_out else []
        for begin, end in passed:
            one = _Passed(frame, begin, end - begin, self._tags_of([(begin, end)]))
            if _wants(handed_out, one.tags):
                yield _complain(one)
            elif _wants(before, one.tags) and not handed_out:
                self._open.setdefault(key, []).append(one)
        for one in waiting:
            if _wants(handed_out, one.tags):
                yield _complain(one)

    def _tags_of(self, ranges: Iterable[Range]) -> frozenset[int]:
        """Return which tags, as hashes, the messages of these ranges have."""
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


def _wants(got: frozenset[int], tags: frozenset[int]) -> bool:
    """Return whether who got messages with these tags would get one of those others."""
    return bool(tags) and (UNTAGGED in got or not got.isdisjoint(tags))


def _complain(one: _Passed) -> Complaint:
    text = f"{one.messages} messages from sequence {one.begin} on were passed over; it gets such messages"
    return Complaint(Kind.PASSED, text, one.begin, one.frame.offset, one.frame.end)
