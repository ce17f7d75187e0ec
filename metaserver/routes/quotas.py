"""Core. Bounds of watched routes per token, and the refusals for them.

A bound rejects new watches only. Clients repeat a rejected request every ten seconds, so a token without a recent
refusal has all its watches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.rights import Caller, TokenRole

REFUSED_S = 60.0
"""Time for which a refusal counts: several repeats of its client."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of watches. Holders of the installation's key have `subjects_max` only.

    `subjects_max`: of one watch. `token_subjects_max`, `token_watches_max`: of all clients of one token together.
    """

    subjects_max: int
    token_subjects_max: int
    token_watches_max: int


class Refusal(NamedTuple):
    """Last refusal of a token's clients, with the reason."""

    at_s: float
    reason: str


@dataclass(slots=True)
class _Usage:
    watches: int = 0
    subjects: int = 0


@dataclass(slots=True)
class Quotas:
    """Watches and subjects per token. Made by main for all hubs, which report every change."""

    bounds: Bounds
    refused: int = 0
    """Refusals; only grows."""
    _used: dict[str, _Usage] = field(default_factory=dict)
    _refusals: dict[str, Refusal] = field(default_factory=dict)

    @property
    def subjects(self) -> int:
        """Number of watched routes, each counted for every watch that has it."""
        return sum(usage.subjects for usage in self._used.values())

    def open(self, caller: Caller, now_s: float) -> str:
        """Count one more watch; return why it is refused, or ""."""
        used = self._used.setdefault(caller.name, _Usage())
        if caller.role != TokenRole.CLUSTER and used.watches >= self.bounds.token_watches_max:
            why = f"has {used.watches} watches, the most that one token may have (token_watches_max)"
            return self._refuse(caller, why, now_s)
        used.watches += 1
        return ""

    def close(self, caller: Caller) -> None:
        used = self._used[caller.name]
        used.watches -= 1
        if not used.watches:
            del self._used[caller.name]

    def add(self, caller: Caller, watched: int, now_s: float) -> str:
        """Count one more subject in a watch that has `watched`; return why it is refused, or ""."""
        used, bounds = self._used[caller.name], self.bounds
        if watched >= bounds.subjects_max:
            why = f"has a client that watches {watched} subjects, the most that one may (watch_subjects_max)"
            return self._refuse(caller, why, now_s)
        if caller.role != TokenRole.CLUSTER and used.subjects >= bounds.token_subjects_max:
            why = f"watches {used.subjects} subjects, the most that one token may (token_subjects_max)"
            return self._refuse(caller, why, now_s)
        used.subjects += 1
        return ""

    def remove(self, caller: Caller, subjects: int) -> None:
        self._used[caller.name].subjects -= subjects

    def refusals(self, now_s: float) -> dict[str, str]:
        """Return the tokens with a recent refusal, and the last reason of each."""
        self._refusals = {name: refusal for name, refusal in self._refusals.items() if now_s - refusal.at_s < REFUSED_S}
        return {name: refusal.reason for name, refusal in self._refusals.items()}

    def note(self, caller: Caller, reason: str, now_s: float) -> None:
        """Record a refusal, also one that was decided elsewhere."""
        self.refused += 1
        self._refusals[caller.name] = Refusal(now_s, reason)

    def _refuse(self, caller: Caller, why: str, now_s: float) -> str:
        reason = f"token {caller.name!r} {why}"
        self.note(caller, reason, now_s)
        return reason
