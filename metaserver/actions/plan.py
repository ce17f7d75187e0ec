"""Core. What a change would do: decided on one reading of the directory, shown by `dryRun=true`, stored as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qmq.metaserver.storage.changes import Change

LISTED_MAX = 100
"""A preview names so many subjects at most; it always counts all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One operator's change, not made yet.

    A plan is pure: it follows from the directory and the routes it was decided on. What it compares (terms, versions)
    is compared again when it is stored; if another change came first, a new plan is made.
    """

    changes: tuple[Change, ...] = ()
    """Stored in one transaction. Empty: all is so already, or it is refused."""
    orders: bool = False
    """Brokers are told to change something that the database does not hold."""
    refusals: tuple[str, ...] = ()
    """Why it is not done. `force` does not help against these."""
    objections: tuple[str, ...] = ()
    """Why it should not be done; `force=true` does it all the same."""
    subjects: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    watched: frozenset[str] = frozenset()
    """Groups whose clients it reaches, if these are not the ones of `groups`."""
    whole_groups: bool = False
    """It reaches whatever `groups` serve: the runner adds their subjects."""
    needs: tuple[tuple[str, str], ...] = ()
    """Rights with their subjects that a token needs which is limited to some; empty: to produce to or to consume from
    each of `subjects`."""
    everything: bool = False
    """It concerns the installation as a whole: a token that is limited to subjects or groups is not enough."""
    before: Any = None
    after: Any = None
    data: Any = None
    """What is answered once it is done."""
    details: dict[str, Any] = field(default_factory=dict)
    """What a MAP answer shows beside `error`."""
    forced: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is refused; empty: it may be carried out."""
        return self.refusals if self.forced else self.refusals + self.objections

    @property
    def word(self) -> str:
        """Another one if other values would be stored, or in place of others. Empty: nothing is stored.

        What brokers are asked to do with messages that come and go is another plan each moment, and is not compared.
        """
        if not self.changes:
            return ""
        shown = json.dumps(_timeless([self.before, self.after]), sort_keys=True, default=str)
        return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Blast:
    """Whom a change reaches."""

    subjects: tuple[str, ...]
    groups: tuple[str, ...]
    clients: int
    unasked: tuple[str, ...] = ()
    """Metaservers that did not say how many of their clients it reaches."""

    def __str__(self) -> str:
        text = f"{_count(self.subjects, 'subject')}, {_count(self.groups, 'group')}, {_count(self.clients, 'client')}"
        return text + (f" and those of {', '.join(self.unasked)}, which did not answer" if self.unasked else "")


def preview(plan: Plan, blast: Blast) -> dict[str, Any]:
    """The answer to `dryRun=true`."""
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
        "plan": plan.word,
    }


def _timeless(value: Any) -> Any:
    """Values without the moments at which they were planned."""
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
    """What a broker group still holds for consumers of a subject."""

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
    """What is known about what a broker group still holds."""

    leftovers: tuple[Leftover, ...] = ()
    unknown: str = ""
    """Why it could not be asked."""

    @property
    def most_first(self) -> list[Leftover]:
        return sorted(self.leftovers, key=lambda left: (-left.messages, -left.dead_letters))
