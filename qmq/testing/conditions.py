"""Core. Progress of a consumer group, and the conditions that tests wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.log.fold import State
from qmq.plain import plain
from qmq.subjects import parse_derived, retry_subject


class GroupProgress(NamedTuple):
    """Unsettled messages of a consumer group, on a subject and the group's own `%RETRY%` subject."""

    subject: str
    group: str
    is_known: bool
    """Whether a consumer of the group ever subscribed."""
    consumers: int = 0
    """Number of connected consumers."""
    waiting: int = 0
    """Messages that may be delivered now."""
    delayed: int = 0
    """Messages that wait for their retry."""
    held: int = 0
    """Number of messages that are unacked: delivered, and neither acked nor nacked."""
    next_due_ms: int = 0
    """Due time of the first delayed message, on the broker's clock; 0 without any."""
    stored: int = 0
    """Messages of the subject, settled ones included."""

    @property
    def is_consumed(self) -> bool:
        return self.is_known and not self.waiting and not self.delayed and not self.held

    def text(self, now_ms: int) -> str:
        """Return this progress as text, for a timeout."""
        if not self.group:
            return f"subject {self.subject!r} has {self.stored} messages"
        name = f"group {self.group!r} of subject {self.subject!r}"
        if not self.is_known:
            return f"{name}: no consumer has subscribed"
        if self.is_consumed:
            return f"{name}: everything is settled"
        delay = f", the first for {(self.next_due_ms - now_ms) / 1000:.1f} s" if self.delayed else ""
        return (
            f"{name}: {self.waiting} messages to be delivered, {self.delayed} wait for their retry{delay}, "
            f"{self.held} are held by its {self.consumers} consumers"
        )


def progress_of(state: State, subject: str, group: str, *, consumers: int, now_ms: int) -> GroupProgress:
    """Return the progress of `group` on `subject`.

    Args:
        consumers: number of connected consumers.
    """
    stored = state.next_sequence.get(subject, 0)
    found = GroupProgress(subject, group, (subject, group) in state.groups, consumers, stored=stored)
    names = [subject] if parse_derived(subject) else [subject, retry_subject(subject, group)]
    for name in names:
        if (known := state.groups.get((name, group))) is None:
            continue
        due = [entry for entry in known.requeued if entry.due_ms <= now_ms]
        later = [entry for entry in known.requeued if entry.due_ms > now_ms]
        firsts = [entry.due_ms for entry in later] + ([found.next_due_ms] if found.next_due_ms else [])
        new = state.next_sequence.get(name, 0) - known.position
        found = found._replace(
            waiting=found.waiting + new + sum(entry.count for entry in due),
            delayed=found.delayed + sum(entry.count for entry in later),
            held=found.held + sum(consumer.unacked_messages for consumer in known.consumers.values()),
            next_due_ms=min(firsts, default=0),
        )
    return found


@dataclass(eq=False)
class Condition:
    """Condition that a test waits for; resolves the future `met`. Without a group it is about the subject alone."""

    subject: str
    group: str
    text: str
    is_met: Callable[[GroupProgress], bool]
    skip_delays: bool = False
    """Whether the clock may advance to the next retry when only delayed messages are left."""
    met: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.subject, self.group = plain(self.subject), plain(self.group)


def consumed(subject: str, group: str, skip_delays: bool) -> Condition:
    return Condition(subject, group, "consumed", lambda found: found.is_consumed, skip_delays)


def delayed(subject: str, group: str, messages: int) -> Condition:
    return Condition(subject, group, f"{messages} delayed", lambda found: found.delayed >= messages)


def subscribed(subject: str, group: str, consumers: int) -> Condition:
    text = f"{consumers} consumers subscribed"
    return Condition(subject, group, text, lambda found: found.is_known and found.consumers >= consumers)


def stored(subject: str, messages: int) -> Condition:
    return Condition(subject, "", f"{messages} stored", lambda found: found.stored >= messages)
