"""Core. Findings for operators, the urgent first: stalled groups, hung handlers, dead letters, late messages.

A consumer group's movement is followed from survey to survey, because one look shows a backlog but not its standstill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STALLED_MS = 60_000
"""A group with a backlog stalls when nothing was acked for this time."""
HUNG_MS = 120_000
"""A handler hangs when the oldest message stays with connected consumers for this time."""
LATE_MS = 5_000
"""A delayed message is late when it is due for this time; a busy server takes a second."""
LISTED_MAX = 5
"""Findings of one kind that are listed; the others are counted."""
FOLLOWED_MAX = 10_000

BAD, WARN = "bad", "warn"


class Finding(NamedTuple):
    """One line of the list. `path` and `words` lead to the page with the details."""

    kind: str
    level: str
    text: str
    detail: str
    path: str = ""
    words: Mapping[str, str] = {}


@dataclass(slots=True)
class Progress:
    """A consumer group in one survey, summed over broker groups."""

    subject: str
    group: str
    messages: int = 0
    unacked: int = 0
    dead_letters: int = 0
    oldest_ms: int = 0
    """When the oldest message that is not acked was stored; 0: none."""
    done: int = 0
    """Messages acked so far; only its growth means something."""
    returned: int = 0
    has_consumer: bool = False
    held_by_connected: int = 0
    causes: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group


class _Movement(NamedTuple):
    done: int
    moved_ms: int
    oldest_ms: int
    oldest_since_ms: int


class Movements:
    """When each consumer group moved last. Made by the survey."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Movement] = {}

    def look(self, groups: Iterable[Progress], now_ms: int) -> list[Finding]:
        """Compare with the survey before; return stalled groups and hung handlers."""
        known, findings = dict[tuple[str, str], _Movement](), list[Finding]()
        for row in groups:
            if not row.messages or len(known) >= FOLLOWED_MAX:
                continue
            before = self._known.get(row.key) or _Movement(row.done, now_ms, row.oldest_ms, now_ms)
            moved = _Movement(
                row.done,
                before.moved_ms if row.done == before.done else now_ms,
                row.oldest_ms,
                before.oldest_since_ms if row.oldest_ms == before.oldest_ms else now_ms,
            )
            known[row.key] = moved
            findings += _of_movement(row, moved, now_ms)
        self._known = known
        return findings


def _of_movement(row: Progress, moved: _Movement, now_ms: int) -> list[Finding]:
    words = {"subject": row.subject, "group": row.group}
    held_s, still_s = (now_ms - moved.oldest_since_ms) // 1000, (now_ms - moved.moved_ms) // 1000
    if row.held_by_connected and not row.returned and now_ms - moved.oldest_since_ms >= HUNG_MS:
        text = f"A handler of {row.group} hangs"
        detail = f"{row.subject}: the oldest message is with a consumer for {_minutes(held_s)}"
        return [Finding("handlers", BAD, text, detail, "/consumers", words)]
    if now_ms - moved.moved_ms >= STALLED_MS:
        why = f" ({', '.join(row.causes).replace('_', ' ')})" if row.causes else ""
        detail = f"{row.subject}: {row.messages:,} messages wait, none was acked for {_minutes(still_s)}{why}"
        return [Finding("stalled", BAD, f"{row.group} stands still", detail, "/consumers", words)]
    return []


def of_dead_letters(groups: Iterable[Progress]) -> list[Finding]:
    rows = sorted((row for row in groups if row.dead_letters), key=lambda row: -row.dead_letters)
    return [
        Finding(
            "dead letters",
            BAD,
            f"{_counted(row.dead_letters, 'dead letter')} of {row.group}",
            f"{row.subject}: Redrive returns them, once their cause is gone",
            "/messages",
            {"subject": row.subject, "dead": row.group},
        )
        for row in rows
    ]


def of_late(late: Mapping[str, tuple[int, int]]) -> list[Finding]:
    """Return findings of delay groups: messages due and not sent, and the age of the oldest in ms."""
    return [
        Finding(
            "late",
            BAD,
            f"{_counted(messages, 'delayed message')} late",
            f"{name}: the oldest was due {_minutes(age_ms // 1000)} ago",
            "/delayed",
        )
        for name, (messages, age_ms) in sorted(late.items(), key=lambda item: -item[1][1])
        if messages and age_ms >= LATE_MS
    ]


def of_subjects(subjects: Sequence[str]) -> list[Finding]:
    """Return findings of subjects that no broker group accepts."""
    return [
        Finding(
            "subjects",
            BAD,
            f"No broker group accepts {subject}",
            "all groups of its route are readonly; producers keep their messages and repeat them",
            "/subjects",
            {"prefix": subject},
        )
        for subject in subjects
    ]


def shortened(findings: Sequence[Finding]) -> list[Finding]:
    """Return at most LISTED_MAX findings of each kind, and a line for the others."""
    shown: list[Finding] = []
    for kind in dict.fromkeys(finding.kind for finding in findings):
        of_kind = [finding for finding in findings if finding.kind == kind]
        shown += of_kind[:LISTED_MAX]
        if (more := len(of_kind) - LISTED_MAX) > 0:
            first = of_kind[LISTED_MAX]
            shown.append(Finding(kind, first.level, f"and {more:,} more: {kind}", "", first.path))
    return shown


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _minutes(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
