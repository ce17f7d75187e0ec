"""Core. What is due and not sent: how much, and since when, in all, by subject and by broker group.

A message counts from its due time until a broker group has stored it: while it is on the wheel, in its subject's queue
or left on disk, and on its way. So a backlog shows here, whatever it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import NamedTuple, Protocol

from qmq.delayserver.pending_queue import PendingQueue

SUBJECTS_MAX = 20
"""Subjects that are named: those that wait longest. A subject is a metric series, and there may be 100,000."""


class InFlight(Protocol):
    """A batch on its way; `oldest_ms` is when its first message was due."""

    subject: str
    group: str
    oldest_ms: int

    @property
    def count(self) -> int: ...


class Part(NamedTuple):
    """Messages that are due and not sent. `oldest_ms`: when the first of them was due."""

    messages: int
    oldest_ms: int

    def with_more(self, messages: int, oldest_ms: int) -> Part:
        return Part(self.messages + messages, min(self.oldest_ms, oldest_ms))


class Overdue(NamedTuple):
    """`oldest_ms`: when the oldest of all was due, None without any; `subjects`: at most SUBJECTS_MAX."""

    messages: int
    oldest_ms: int | None
    subjects: dict[str, Part]
    groups: dict[str, Part]

    @classmethod
    def of(
        cls,
        queues: Iterable[PendingQueue],
        in_flight: Iterable[InFlight],
        on_wheel: int,
        first_on_wheel_ms: int | None,
        on_disk: Iterable[tuple[str, Part]] = (),
    ) -> Overdue:
        """Count.

        Args:
            on_disk: what is due and on disk alone, by subject.
            on_wheel: messages that are due and still on the wheel; `first_on_wheel_ms`: when the first of them was due.
        """
        subjects, groups = dict[str, Part](), dict[str, Part]()
        for queue in queues:
            if queue.waiting:
                subjects[queue.subject] = Part(queue.waiting, queue.oldest_ms)
        for name, part in on_disk:
            _add(subjects, name, part)
        for batch in in_flight:
            _add(subjects, batch.subject, Part(batch.count, batch.oldest_ms))
            _add(groups, batch.group, Part(batch.count, batch.oldest_ms))
        named = nsmallest(SUBJECTS_MAX, subjects.items(), key=lambda item: (item[1].oldest_ms, -item[1].messages))
        oldest = [part.oldest_ms for _, part in named[:1]]
        if on_wheel and first_on_wheel_ms is not None:
            oldest.append(first_on_wheel_ms)
        messages = sum(part.messages for part in subjects.values()) + on_wheel
        return cls(messages, min(oldest, default=None), dict(named), groups)


def _add(parts: dict[str, Part], name: str, part: Part) -> None:
    if part.messages:
        known = parts.get(name)
        parts[name] = known.with_more(*part) if known else part
