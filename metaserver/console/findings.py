"""Core. Findings for operators, the urgent first: stalled groups, hung handlers, late messages, parked rows, …

A consumer group's movement is followed from survey to survey, because one look shows a backlog but not its standstill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STALLED_MS = 60_000
"""A group with a backlog stalls when nothing was acked for this time."""
HUNG_MS = 120_000
"""A handler hangs when a consumer has had the same first unacked message for this time."""
PASSING = frozenset({"later", "away"})
"""Causes with which a standstill is no finding: all messages are postponed, or a broadcast's only consumer left."""
LATE_MS = 5_000
"""A delayed message is late when it is due for this time; a busy server takes a second."""
LISTED_MAX = 5
"""Findings of one kind that are listed; the others are counted."""
FOLLOWED_MAX = 10_000

BAD, WARN = "bad", "warn"


class Finding(NamedTuple):
    """One line of the list. `path` and `query` lead to the page with the details; it stands for `number` things."""

    kind: str
    level: str
    text: str
    detail: str
    path: str = ""
    query: Mapping[str, str] = {}
    number: int = 1


@dataclass(slots=True)
class Progress:
    """A consumer group in one survey, on one broker group or summed over all."""

    subject: str
    group: str
    messages: int = 0
    unacked: int = 0
    dead_letters: int = 0
    oldest_ms: int = 0
    """When the oldest message that is not acked was stored; 0: none."""
    done: int = 0
    """Messages acked so far; only its growth means something."""
    first_unacked_ms: int = 0
    """For how long a consumer has had the same first unacked message."""
    causes: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group


class _Movement(NamedTuple):
    done: int
    moved_ms: int


class Movements:
    """When each consumer group moved last, on each broker group: on one it may stand still while others continue.
    Made by the survey.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], _Movement] = {}

    def look(self, rows: Iterable[tuple[str, Progress]], now_ms: int) -> list[Finding]:
        """Compare with the survey before; return stalled groups and hung handlers.

        Args:
            rows: broker groups, each with the progress of a consumer group there.
        """
        known, still, hung = dict[tuple[str, str, str], _Movement](), _Places(), _Places()
        for place, row in rows:
            if not row.messages or len(known) >= FOLLOWED_MAX:
                continue
            key = place, *row.key
            before = self._known.get(key)
            is_same = before is not None and row.done == before.done
            moved = known[key] = before if before is not None and is_same else _Movement(row.done, now_ms)
            still_ms = now_ms - moved.moved_ms
            if row.first_unacked_ms >= HUNG_MS:
                hung.setdefault(row.key, []).append((place, row, row.first_unacked_ms))
            elif still_ms >= STALLED_MS and not PASSING.intersection(row.causes):
                still.setdefault(row.key, []).append((place, row, still_ms))
        self._known = known
        standing = [_standing(*item) for item in still.items() if item[0] not in hung]
        return [_hung(*item) for item in hung.items()] + standing


_Place = tuple[str, Progress, int]
"""A broker group, the progress there, and the milliseconds since its last movement."""
_Places = dict[tuple[str, str], list[_Place]]


def _hung(key: tuple[str, str], places: list[_Place]) -> Finding:
    subject, group = key
    for_s = max(ms for _, _, ms in places) // 1000
    detail = f"{subject} on {_names(places)}: a consumer has had the same first message for {_minutes(for_s)}"
    query = {"subject": subject, "group": group}
    return Finding("handlers", BAD, f"A handler of {group} hangs", detail, "/consumers", query)


def _standing(key: tuple[str, str], places: list[_Place]) -> Finding:
    subject, group = key
    messages, for_s = sum(row.messages for _, row, _ in places), min(ms for _, _, ms in places) // 1000
    causes = dict.fromkeys(cause for _, row, _ in places for cause in row.causes)
    why = f" ({', '.join(causes).replace('_', ' ')})" if causes else ""
    count = _counted(messages, "message")
    detail = f"{subject} on {_names(places)}: {count} not acked, and none was for {_minutes(for_s)}{why}"
    query = {"subject": subject, "group": group}
    return Finding("stalled", BAD, f"{group} stands still", detail, "/consumers", query)


def _names(places: list[_Place]) -> str:
    return ", ".join(sorted(place for place, _, _ in places))


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


def of_parked(rows: Mapping[str, int]) -> list[Finding]:
    """Return findings of outboxes: databases and their parked rows."""
    return [
        Finding(
            "parked rows",
            BAD,
            f"{_counted(count, 'parked row')} of an outbox",
            f"{database}: not sent before OutboxRetry",
            "/outbox",
        )
        for database, count in sorted(rows.items(), key=lambda item: -item[1])
        if count
    ]


def of_subjects(subjects: Sequence[str], count: int) -> list[Finding]:
    """Return findings of subjects that no broker group accepts: the first ones, and the number of all."""
    found = [
        Finding(
            "subjects",
            BAD,
            f"No broker group accepts {subject}",
            "all groups of its route are readonly; producers keep their messages and repeat them",
            "/subjects",
            {"prefix": subject},
        )
        for subject in subjects[:LISTED_MAX]
    ]
    others = Finding("subjects", BAD, "Others", "", "/subjects", number=count - len(found))
    return [*found, others] if others.number > 0 else found


def shortened(findings: Sequence[Finding]) -> list[Finding]:
    """Return at most LISTED_MAX findings of each kind, and a line for the others."""
    shown: list[Finding] = []
    for kind in dict.fromkeys(finding.kind for finding in findings):
        of_kind = [finding for finding in findings if finding.kind == kind]
        shown += of_kind[:LISTED_MAX]
        if more := sum(finding.number for finding in of_kind[LISTED_MAX:]):
            first = of_kind[LISTED_MAX]
            shown.append(Finding(kind, first.level, f"and {more:,} more: {kind}", "", first.path))
    return shown


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _minutes(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
