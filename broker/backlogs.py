"""Core. How far behind consumer groups are, and how old the oldest message is that each has not acked.

Groups are looked at in turn, some in each tick, so that neither a tick nor a page of metrics walks through all of them,
and what is found is at most a round old. When a message was stored stands in its frame, which may be on disk alone: it
is read on a thread, of few groups at a time, and only of those whose oldest message is another one than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from heapq import nlargest, nsmallest
from typing import NamedTuple

from qmq.errors import CorruptFrame, LogError
from qmq.log import MessageLog
from qmq.log.group import Group
from qmq.replication.mastership import Mastership
from qmq.subjects import matching

READ_AT_ONCE = 50
"""Frames, a fraction of a millisecond of a thread, most often in memory; of 10,000 busy groups, all within 20 s."""
AGES_MAX = 100
"""Groups whose age is shown: those with the oldest messages."""

Key = tuple[str, str]
"""(subject, consumer group)"""


class Backlog(NamedTuple):
    """Messages that a group has not acked: `waiting` are with no consumer, `delivered` with one."""

    waiting: int
    delivered: int

    @classmethod
    def of(cls, group: Group, end: int) -> Backlog:
        """Of a group of a subject that ends at sequence `end`."""
        waiting = end - group.position + group.requeued.messages
        return cls(waiting, sum(consumer.unacked_messages for consumer in group.consumers.values()))


class _Oldest(NamedTuple):
    sequence: int
    stored_ms: int


class Backlogs:
    """Made by `broker.delivery`; ends with the mastership.

    Args:
        always: subjects whose groups are always shown; one that ends in `*` stands for all that begin so.
    """

    def __init__(self, mastership: Mastership, always: Sequence[str]) -> None:
        self._mastership, self._is_always = mastership, matching(always)
        self._known: dict[Key, Backlog] = {}
        """Of groups that have not acked everything."""
        self._oldest: dict[Key, _Oldest] = {}
        self._is_reading = False

    def look(self, keys: Iterable[Key]) -> None:
        """Look at these groups.

        Raises:
            CorruptFrame: this copy is damaged.
        """
        message_log = self._mastership.log
        wanted: list[tuple[Key, int, int]] = []
        for key in keys:
            group, end = message_log.state.groups.get(key), message_log.state.next_sequence.get(key[0], 0)
            first = group.first_unconsumed(end) if group is not None else None
            if group is None or first is None:
                self.forget(key)
                continue
            self._known[key] = Backlog.of(group, end)
            is_known = key in self._oldest and self._oldest[key].sequence == first
            if not is_known and not self._is_reading and len(wanted) < READ_AT_ONCE:
                if refs := message_log.frames(key[0], first, 1):
                    wanted.append((key, first, refs[0].offset))
        if wanted:
            self._read(wanted)

    def forget(self, key: Key) -> None:
        """The group is no more."""
        self._known.pop(key, None)
        self._oldest.pop(key, None)

    def _read(self, wanted: Sequence[tuple[Key, int, int]]) -> None:
        message_log, self._is_reading = self._mastership.log, True

        def done(found: list[tuple[Key, _Oldest] | CorruptFrame] | LogError) -> None:
            self._is_reading = False
            for one in [found] if isinstance(found, LogError) else found:
                if isinstance(one, CorruptFrame):
                    self._mastership.found_damage(one)
                elif isinstance(one, LogError):
                    raise one
                elif one[0] in self._known:
                    self._oldest[one[0]] = one[1]

        self._mastership.host.read(lambda: [_stored(message_log, *one) for one in wanted], done)

    def copy(self) -> Backlogs:
        """As they are now, for another thread to ask."""
        twin = copy(self)
        twin._known, twin._oldest = dict(self._known), dict(self._oldest)
        return twin

    def largest(self, most: int) -> dict[Key, Backlog]:
        """Return the largest backlogs, and those that are always shown."""
        found = nlargest(most, self._known.items(), key=lambda one: sum(one[1]))
        return dict(found) | {key: one for key, one in self._known.items() if self._is_always(key[0])}

    def ages_ms(self, now_ms: int) -> dict[Key, int]:
        """Return how old the oldest messages are that groups have not acked: the oldest, and those always shown."""
        found = nsmallest(AGES_MAX, self._oldest.items(), key=lambda one: one[1].stored_ms)
        found += [one for one in self._oldest.items() if self._is_always(one[0][0])]
        return {key: max(0, now_ms - oldest.stored_ms) for key, oldest in found}


def _stored(message_log: MessageLog, key: Key, sequence: int, offset: int) -> tuple[Key, _Oldest] | CorruptFrame:
    """Say when a message was stored. Blocks; may run on a thread."""
    try:
        return key, _Oldest(sequence, message_log.timestamp_at(offset))
    except CorruptFrame as problem:  # or retention took it meanwhile
        return problem
