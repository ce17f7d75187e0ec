"""Core. Who is served next, and how much a pass of the loop may do: the pull served longest ago comes first.

A pass ends when it has done enough, also if somebody still waits; the loop then looks at its sockets before the next
one. So a backlog, a group of many consumers or a consumer with many pulls costs everybody else at most a pass.
"""

from __future__ import annotations

from typing import TypeAlias

from qmq.broker.consume import Subscription

PASS_BYTES = 1 << 20
"""What a pass may deliver. With four times as much, a group beside a large backlog waited half as long again."""
TRY_BYTES = 4 << 10
"""What looking for something counts for, found or not: 256 looks are a pass."""
DELIVERY_BYTES = 48 << 10
"""What a delivery counts for besides its bytes: frame of progress, answer, bookkeeping."""
LOOKS_PER_PASS = 20_000
"""Messages looked at one by one, over all groups: about 2 ms."""
COPIES_PER_PASS = 500
"""A consumer may give up on 200,000 messages at once; meanwhile the loop goes on with everybody else."""
OWED_BYTES_MAX = 16 << 20
"""Answers under way to one connection; at the limit its pulls wait. One that reads nothing costs this and what its
socket takes, however much it asks for."""

Entry: TypeAlias = Subscription | tuple[str, str]
"""One consumer; or (subject, group): whichever of its consumers was served longest ago."""


class Passes:
    """Who waits to be served. Made by the delivery; ends with the mastership."""

    def __init__(self) -> None:
        self._queue: dict[Entry, None] = {}
        self.begin()

    def begin(self) -> None:
        """What every pass may do anew."""
        self._left = PASS_BYTES
        self.looks_left = LOOKS_PER_PASS
        self.copies_left = COPIES_PER_PASS
        """Dead letters that may still be stored."""

    @property
    def has_time(self) -> bool:
        """Whether this pass may go on."""
        return self._left > 0

    @property
    def is_over(self) -> bool:
        """Whether nobody waits to be served."""
        return not self._queue

    def add(self, entry: Entry) -> None:
        """Put behind all others, unless it waits already."""
        self._queue.setdefault(entry)

    def spend(self, size: int) -> None:
        self._left -= size

    def next(self) -> Entry | None:
        """Take away and return who comes next; None if nobody does in this pass."""
        if not self._queue or self._left <= 0:
            return None
        entry = next(iter(self._queue))
        del self._queue[entry]
        return entry
