"""Core. Bounds what one token's clients may bring into being or send, so that none of them takes what others need."""

from __future__ import annotations

from collections.abc import Callable

from qmq.errors import Overloaded
from qmq.rights import Caller, TokenRole

NAMES_MAX = 100_000
"""Tokens that are remembered; they are forgotten all at once when there are more."""
BURST_MS = 1_000
"""Of bytes: with less, a batch of the usual megabyte would stop a token for longer than it takes to send the next."""


class NewSubjects:
    """Bounds how many subjects, or consumer groups if `what` says so, each token's clients bring into being: within a
    minute (a bucket per token's name), and in all since the process began."""

    def __init__(self, per_minute: int, in_all: int, what: str = "subjects") -> None:
        self._per_minute = per_minute
        self._in_all = in_all
        self._what = what
        self._left: dict[str, tuple[float, int]] = {}
        self._made: dict[str, int] = {}

    def allow(self, caller: Caller, wanted: int, *, now_ms: int) -> int:
        """Return how many of `wanted` new ones may be made now; the others later. `now_ms` never goes back."""
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

    def allowed(self, caller: Caller, wanted: int, *, now_ms: int) -> tuple[int, str]:
        """Return what `allow` does, and why not the others; empty if all may be made."""
        count = self.allow(caller, wanted, now_ms=now_ms)
        return count, "" if count == wanted else str(self.why_not(caller))

    def why_not(self, caller: Caller) -> Overloaded:
        """Say which bound a token has reached."""
        who = f"token {caller.name!r} made"
        if self._made.get(caller.name, 0) >= self._in_all:
            limit = "new_subjects_max"
            return Overloaded(f"{who} {self._in_all:,} new {self._what} since this process began ({limit})", limit)
        limit = "new_subjects_per_minute"
        return Overloaded(f"{who} too many new {self._what} within a minute; wait a little ({limit})", limit)


class SentBytes:
    """Bounds how many bytes a second each token's clients send. A second's worth may come at once, or one batch that is
    larger; who sends more waits until what was taken is paid for. Used where there is such a bound."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._paid_ms: dict[str, float] = {}
        """Token's name -> when what was taken of it is paid for."""

    def take(self, caller: Caller, size: int, *, now_ms: int) -> None:
        """Count what is taken. `now_ms` never goes back. Raises Overloaded: it is not taken, and not counted."""
        paid_ms = max(self._paid_ms.get(caller.name, 0.0), now_ms)
        if paid_ms - now_ms >= BURST_MS:
            limit = "token_bytes_per_s"
            raise Overloaded(
                f"token {caller.name!r} sends more than {self._per_second:,} bytes a second ({limit}); wait a little",
                limit,
            )
        if len(self._paid_ms) > NAMES_MAX:
            self._paid_ms.clear()
        self._paid_ms[caller.name] = paid_ms + size * 1000 / self._per_second


class Ration:
    """What may be written for who is at the other end of a connection, besides what it sends: of this one, without
    bound. The core takes of it when it writes, so that nothing counts that was refused for another reason."""

    def begin_group(self) -> None:
        """Count a consumer group that comes into being. Raises Overloaded: it may not, and is not counted."""

    def write(self, size: int) -> None:
        """Count so many bytes. Raises Overloaded: they may not be written, and are not counted."""


class TokenRation(Ration):
    """A client's part of what its token has. Made by the acceptor; `now_ms` never goes back."""

    def __init__(self, caller: Caller, groups: NewSubjects, sent: SentBytes | None, now_ms: Callable[[], int]) -> None:
        self._caller = caller
        self._groups = groups
        self._sent = sent
        self._now_ms = now_ms

    def begin_group(self) -> None:
        if not self._groups.allow(self._caller, 1, now_ms=self._now_ms()):
            raise self._groups.why_not(self._caller)

    def write(self, size: int) -> None:
        if self._sent is not None:
            self._sent.take(self._caller, size, now_ms=self._now_ms())
