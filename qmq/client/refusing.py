"""Core. For how long all broker groups of a subject have refused new messages: what a message waits for in vain.

A group refuses if its route says that it is readonly, or if it answered so last. One that cannot be reached does not:
it has another master in a moment, or nobody can say what it would do.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq.client.routing import Routing


@dataclass(slots=True)
class _Span:
    since_ms: int
    seen_ms: int


class Refusing:
    """Made by the sender if the application bounds that wait; told of what still waits, some times a second."""

    def __init__(self, routing: Routing, wait_ms: int) -> None:
        self._routing, self._wait_ms = routing, wait_ms
        self._spans: dict[tuple[str, str], _Span] = {}

    def is_over(self, subject: str, group: str, now_ms: int) -> bool:
        """Whether what waits for `subject` has waited in vain for long enough; `group`: only that one may take it."""
        key = subject, group
        if not self._routing.all_refuse(subject, group):
            self._spans.pop(key, None)
            return False
        span = self._spans.get(key)
        if span is None or now_ms - span.seen_ms > max(self._wait_ms, SEEN_MS):  # nothing waited meanwhile: who knows
            span = self._spans[key] = _Span(now_ms, now_ms)
        span.seen_ms = now_ms
        return now_ms - span.since_ms >= self._wait_ms

    def worked(self, subject: str, group: str) -> None:
        """The group stored messages of this subject: a refusal from now on is a new one."""
        self._spans.pop((subject, ""), None)
        self._spans.pop((subject, group), None)

    def forget(self, subjects: set[str]) -> None:
        for key in [key for key in self._spans if key[0] in subjects]:
            del self._spans[key]


SEEN_MS = 1_000
"""20,000 queues are all looked at within a quarter of this."""
