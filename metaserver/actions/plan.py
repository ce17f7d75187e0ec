"""Core. Plan of a change: decided on one reading of the directory, shown by `dryRun=true`, stored as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qmq.metaserver.storage.changes import Change

LISTED_MAX = 100
"""Number of subjects named in a preview; it always counts all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One operator's change, not made yet.

    A plan follows from the directory and routes that it was decided on. Terms and versions are compared again when it
    is stored; after a conflicting change, a new plan is made.
    """

    changes: tuple[Change, ...] = ()
    """Stored in one transaction. Empty: nothing to change, or refused."""
    orders: bool = False
    """Brokers are ordered to change something outside the database."""
    refusals: tuple[str, ...] = ()
    """Reasons against the change that `force` does not override."""
    objections: tuple[str, ...] = ()
    """Reasons against the change that `force=true` overrides."""
    subjects: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    watched: frozenset[str] = frozenset()
    """Groups with affected clients, if they differ from `groups`."""
    whole_groups: bool = False
    """The change affects everything that `groups` serve: the runner adds their subjects."""
    needs: tuple[tuple[str, str], ...] = ()
    """Rights with their subjects, for limited tokens; empty: to produce to or to consume from each of `subjects`."""
    everything: bool = False
    """The action concerns the whole installation; tokens limited to subjects or groups are refused."""
    before: Any = None
    after: Any = None
    data: Any = None
    """Data of the answer after the change."""
    details: dict[str, Any] = field(default_factory=dict)
    """Shown beside `error` in a MAP answer."""
    forced: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons to refuse the change; empty: it may be carried out."""
        return self.refusals if self.forced else self.refusals + self.objections

    @property
    def digest(self) -> str:
        """Hash of the stored values before and after. Empty: nothing is stored.

        Orders to brokers about messages that come and go differ each moment, and are not compared.
        """
        if not self.changes:
            return ""
        shown = json.dumps(_timeless([self.before, self.after]), sort_keys=True, default=str)
        return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Blast:
    """Subjects, groups and clients that a change affects."""

    subjects: tuple[str, ...]
    groups: tuple[str, ...]
    clients: int
    unasked: tuple[str, ...] = ()
    """Metaservers that did not report their clients."""

    def __str__(self) -> str:
        text = f"{_count(self.subjects, 'subject')}, {_count(self.groups, 'group')}, {_count(self.clients, 'client')}"
        return text + (f" and those of {', '.join(self.unasked)}, which did not answer" if self.unasked else "")


def preview(plan: Plan, blast: Blast) -> dict[str, Any]:
    """Return the answer to `dryRun=true`."""
    return {
        "dryRun": True,
        "wouldChange": bool(plan.changes or plan.orders) and not plan.reasons,
        "reasons": list(plan.reasons),
        "objections": list(plan.objections),
        "blastRadius": str(blast),
        "subjects": {"count": len(blast.subjects), "names": list(blast.subjects[:LISTED_MAX])},
        "groups": {"count": len(blast.groups), "names": list(blast.groups[:LISTED_MAX])},
        "clients": blast.clients,
        "before": plan.before,
        "after": plan.after,
        "plan": plan.digest,
    }


def _timeless(value: Any) -> Any:
    """Return values without their planning times."""
    if isinstance(value, dict):
        return {name: _timeless(item) for name, item in value.items() if name != "updateTime"}
    return [_timeless(item) for item in value] if isinstance(value, list | tuple) else value


def refused(*reasons: str, details: dict[str, Any] | None = None) -> Plan:
    return Plan(refusals=reasons, details=details or {})


def one_text(reasons: Iterable[str]) -> str:
    return "; ".join(reasons)


def _count(things: tuple[str, ...] | int, noun: str) -> str:
    count = things if isinstance(things, int) else len(things)
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


@dataclass(frozen=True, slots=True)
class Leftover:
    """Messages that a broker group still holds for consumers of a subject."""

    subject: str
    consumer_group: str
    messages: int
    oldest_ms: int = 0
    dead_letters: int = 0

    def __str__(self) -> str:
        messages, dead = _count(self.messages, "message"), _count(self.dead_letters, "dead letter")
        if not self.messages:
            return f"{self.consumer_group} has {dead} of {self.subject} there"
        more = f", and {dead}" if self.dead_letters else ""
        return f"{self.consumer_group} has {messages} of {self.subject} to do there{more}"


@dataclass(frozen=True, slots=True)
class Contents:
    """Messages that a broker group still holds, as far as known."""

    leftovers: tuple[Leftover, ...] = ()
    unknown: str = ""
    """Reason for a missing answer."""

    @property
    def most_first(self) -> list[Leftover]:
        return sorted(self.leftovers, key=lambda left: (-left.messages, -left.dead_letters))
