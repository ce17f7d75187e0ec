"""Core. Bounds of one token's clients: new subjects, new consumer groups, and bytes a second."""

from __future__ import annotations

from collections.abc import Callable

from qmq.errors import Overloaded
from qmq.rights import Caller, TokenRole

NAMES_MAX = 100_000
"""Limit of remembered tokens; at the limit all are forgotten at once."""
PRODUCERS_MAX = 64
"""Limit of remembered producers per connection, which usually has one producer."""
BURST_MS = 1_000
"""Time whose bytes may come at once. With less, a batch of the usual megabyte would stop a token for longer than
sending it takes.
"""


class NewSubjects:
    """Bound on the new subjects of each token's clients: per minute, with a bucket per token name, and since the
    process began.
    """

    noun = "subjects"

    def __init__(self, per_minute: int, in_all: int) -> None:
        self._per_minute = per_minute
        self._in_all = in_all
        self._left: dict[str, tuple[float, int]] = {}
        self._made: dict[str, int] = {}

    def allow(self, caller: Caller, wanted: int, *, now_ms: int) -> int:
        """Return how many of `wanted` new names may be created now; the others may be created later. `now_ms` is
        monotonic.
        """
        if caller.role == TokenRole.CLUSTER:
            return wanted
        if len(self._left) > NAMES_MAX:
            self._left.clear()
        left, since_ms = self._left.get(caller.name, (float(self._per_minute), now_ms))
        left = min(self._per_minute, left + (now_ms - since_ms) * self._per_minute / 60_000)
        made = self._made.get(caller.name, 0)
        allowed = min(wanted, int(left), self._in_all - made)
        self._left[caller.name] = (left - allowed, now_ms)
        if allowed:  # remembers only tokens that created names; they are few, because AddToken made them
            self._made[caller.name] = made + allowed
        return allowed

    def allowed(self, caller: Caller, wanted: int, *, now_ms: int) -> tuple[int, str]:
        """Return the result of `allow`, and the reason why the rest must wait; empty if all may be created."""
        count = self.allow(caller, wanted, now_ms=now_ms)
        return count, "" if count == wanted else str(self.why_not(caller))

    def why_not(self, caller: Caller) -> Overloaded:
        """Return the error that names the bound reached by a token."""
        maker = f"token {caller.name!r} made"
        if self._made.get(caller.name, 0) >= self._in_all:
            limit = "new_subjects_max"
            return Overloaded(f"{maker} {self._in_all:,} new {self.noun} since this process began ({limit})", limit)
        limit = "new_subjects_per_minute"
        return Overloaded(f"{maker} too many new {self.noun} within a minute; wait a little ({limit})", limit)


class TokenGroups(NewSubjects):
    """Bound on the consumer groups of each token's clients: new ones per minute, and those begun here that exist."""

    noun = "consumer groups"

    def ended(self, caller: Caller) -> None:
        """Count a group no more, after it was deleted."""
        if (made := self._made.pop(caller.name, 0)) > 1:
            self._made[caller.name] = made - 1

    def why_not(self, caller: Caller) -> Overloaded:
        if self._made.get(caller.name, 0) < self._in_all:
            return super().why_not(caller)
        limit = "token_groups_max"
        return Overloaded(
            f"clients of token {caller.name!r} began {self._in_all:,} consumer groups that exist ({limit}); "
            "RemoveConsumerGroup removes unused ones",
            limit,
        )


class NewProducers(NewSubjects):
    """Bound on the new producers of each token's clients at this process, because each of them replaces another's
    window.
    """

    def __init__(self, per_minute: int) -> None:
        super().__init__(per_minute, 1 << 62)

    def why_not(self, caller: Caller) -> Overloaded:
        limit = "new_producers_per_minute"
        return Overloaded(
            f"token {caller.name!r} made too many new producers within a minute ({limit}); a process needs one", limit
        )


class SentBytes:
    """Bound on the bytes a second of each token's clients. The bytes of one second may come at once, or one larger
    batch; further bytes wait until these have taken their time. Made only if a bound is set.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._paid_ms: dict[str, float] = {}
        """Token name -> time by which its bytes have taken their time."""

    def take(self, caller: Caller, size: int, *, now_ms: int) -> None:
        """Count bytes; raises Overloaded if they are rejected, and then counts none. `now_ms` is monotonic."""
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
    """Bound on frames that a request of one client writes besides its messages; this one has no bound. The core counts
    when it writes, so a request rejected for another reason counts nothing.
    """

    holder = ""
    """Name of the token; empty without a token."""
    subscriptions_max = 1 << 62
    """Bound on the subscriptions of this token's clients at one master."""

    def begin_producer(self, producer: int) -> None:
        """Count a producer that has no window yet; raises Overloaded if it is rejected."""

    def begin_group(self) -> None:
        """Count a new consumer group; raises Overloaded if it is rejected."""

    def end_group(self) -> None:
        """Count a group of `begin_group` no more, because it was deleted, or belongs to another master now."""

    def write(self, size: int) -> None:
        """Count bytes; raises Overloaded if they must not be written."""


class TokenRation(Ration):
    """Share of one client in its token's bounds. Made by the acceptor; `now_ms` is monotonic."""

    def __init__(
        self,
        caller: Caller,
        groups: TokenGroups,
        sent: SentBytes | None,
        now_ms: Callable[[], int],
        *,
        producers: NewProducers | None = None,
        subscriptions_max: int = Ration.subscriptions_max,
    ) -> None:
        self.holder: str = caller.name
        self.subscriptions_max = subscriptions_max
        self._caller = caller
        self._groups = groups
        self._sent = sent
        self._now_ms = now_ms
        self._producers = producers
        self._begun: dict[int, None] = {}
        """Producers that were counted. A producer whose window is forgotten repeatedly counts once per connection."""

    def begin_producer(self, producer: int) -> None:
        if self._producers is None or producer in self._begun:
            return
        if not self._producers.allow(self._caller, 1, now_ms=self._now_ms()):
            raise self._producers.why_not(self._caller)
        self._begun[producer] = None
        if len(self._begun) > PRODUCERS_MAX:
            del self._begun[next(iter(self._begun))]

    def begin_group(self) -> None:
        if not self._groups.allow(self._caller, 1, now_ms=self._now_ms()):
            raise self._groups.why_not(self._caller)

    def end_group(self) -> None:
        self._groups.ended(self._caller)

    def write(self, size: int) -> None:
        if self._sent is not None:
            self._sent.take(self._caller, size, now_ms=self._now_ms())
