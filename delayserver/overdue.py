"""Core. Overdue messages: due and not sent, counted in all, by subject and by broker group, with the oldest due time.

A message counts from its due time until a broker group has stored it: on the wheel, in its subject's queue, on disk, or
in flight. So every backlog shows here, of any cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import NamedTuple

from qmq.delayserver.flights import Flight
from qmq.delayserver.pending_queue import PendingQueue

SUBJECTS_MAX = 20
"""Subjects that are listed, the longest-waiting ones. Each is a metric series, and there may be 100,000 subjects."""


class Part(NamedTuple):
    """Number of overdue messages, and the earliest due time of them."""

    messages: int
    oldest_ms: int

    def with_more(self, messages: int, oldest_ms: int) -> Part:
        return Part(self.messages + messages, min(self.oldest_ms, oldest_ms))


class Overdue(NamedTuple):
    """`oldest_ms`: the earliest due time of all, None if there are none; `subjects`: at most SUBJECTS_MAX."""

    messages: int
    oldest_ms: int | None
    subjects: dict[str, Part]
    groups: dict[str, Part]

    @classmethod
    def of(
        cls,
        queues: Iterable[PendingQueue],
        in_flight: Iterable[Flight],
        on_wheel: int,
        first_on_wheel_ms: int | None,
        on_disk: Iterable[tuple[str, Part]] = (),
    ) -> Overdue:
        """Count overdue messages.

        Args:
            on_disk: overdue messages that are on disk only, by subject.
            on_wheel: overdue messages on the wheel; `first_on_wheel_ms`: their earliest due time.
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
