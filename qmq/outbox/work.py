"""Core. What a drain asks of its database, one transaction at a time, and what comes back.

Each kind of work may be repeated when nobody knows whether it was done: all that it writes looks for the claim that it
expects. `qmq.outbox.statements` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from qmq.outbox.claims import Candidate


class Due(NamedTuple):
    """A moment by the database's clock: `plus_ms` after `told`, which it told with a page; None: after this write."""

    told: object
    plus_ms: int


class Postponed(NamedTuple):
    """Rows that nobody takes now, for a reason; nobody looks at them before they are due."""

    ids: list[int]
    due: Due
    reason: str


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read rows that nobody claimed and that are old enough, the oldest first. Answer: Page."""

    after: tuple[object, int] | None
    limit: int


class Page(NamedTuple):
    """`after`: where the next page begins; None: nothing is behind this one. `told`: the database's clock, or None."""

    rows: list[Candidate]
    after: tuple[object, int] | None
    told: object = None


@dataclass(frozen=True, slots=True)
class Claiming:
    """Claim rows, each for its batch; park those that cannot be sent, postpone those that nobody takes now.

    `ordered`: claims that get all of their rows or none, and none while another drain has a claim for their group.
    `known`: claims of this drain.

    Answer: for each claim the ids that got it. Rows that others lock, or that are gone, are left out.
    """

    claims: dict[str, list[int]]
    parked: list[tuple[int, str]]
    postponed: list[Postponed]
    ordered: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()


class Released(NamedTuple):
    """A claim's rows that were certainly not stored: to be claimed anew when they are due, with so many more errors."""

    claim: str
    ids: list[int]
    due: Due
    reason: str
    failures: int


class Settled(NamedTuple):
    """A claim that came to its end: rows whose messages are stored go, others are parked, each for its reason."""

    claim: str
    stored: list[int]
    parked: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Settling:
    """Write down what became of claims. Rows whose claim is another by now are left alone. Answer: None."""

    settled: list[Settled]
    released: list[Released]


@dataclass(frozen=True, slots=True)
class ReadClaims:
    """Which claims are there, up to a bound, those after `after` in order of their texts; "": all, also one without
    text. Answer: list of Known."""

    after: str = ""


class Known(NamedTuple):
    """A claim in the database. `age_ms`: since it was first written, by the database's clock."""

    claim: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Put the claim `new` in the place of `old`. Answer: its rows, in order of ids; none: it is there no more."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Disown:
    """Park rows with a claim that none of ours wrote, up to a bound; a person decides. Answer: how many."""

    claim: str
    reason: str


Work = ReadPage | Claiming | Settling | ReadClaims | TakeOver | Disown
