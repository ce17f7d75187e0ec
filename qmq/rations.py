"""Core. Bounds what one token's clients may bring into being, so that none of them fills tables and memory."""

from __future__ import annotations

from qmq.rights import Caller, TokenRole

NAMES_MAX = 100_000
"""Tokens that are remembered; they are forgotten all at once when there are more."""


class NewSubjects:
    """Bounds how many subjects each token's clients bring into being: within a minute (a bucket per token's name), and
    in all since the process began."""

    def __init__(self, per_minute: int, in_all: int) -> None:
        self._per_minute, self._in_all = per_minute, in_all
        self._left: dict[str, tuple[float, int]] = {}
        self._made: dict[str, int] = {}

    def allow(self, caller: Caller, wanted: int, *, now_ms: int) -> int:
        """Return how many of `wanted` new subjects may be made now; the others later. `now_ms` never goes back."""
        if caller.role == TokenRole.CLUSTER:
            return wanted
        if len(self._left) > NAMES_MAX:
            self._left.clear()
        left, since_ms = self._left.get(caller.name, (float(self._per_minute), now_ms))
        left = min(self._per_minute, left + (now_ms - since_ms) * self._per_minute / 60_000)
        made = self._made.get(caller.name, 0)
        allowed = min(wanted, int(left), self._in_all - made)
        self._left[caller.name] = (left - allowed, now_ms)
        if allowed:  # tokens that made none are not remembered, and those that did are few: AddToken made them
            self._made[caller.name] = made + allowed
        return allowed

    def why_not(self, caller: Caller) -> str:
        """Say which bound a token has reached."""
        if self._made.get(caller.name, 0) >= self._in_all:
            return f"token {caller.name!r} made {self._in_all:,} new subjects since this process began, and may no more"
        return f"token {caller.name!r} made too many new subjects within a minute; wait a little"
