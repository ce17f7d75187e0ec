"""Core. Broker groups that take a producer's batches, and groups a consumer pulls from.

Which broker group takes a producer's next batch, and which groups a consumer pulls from.

Two sources are joined: the metaserver's routes (who is master, is the group writable for this subject) and what the
client saw by itself (a refusal, a connection that does not come up), which is usually a second earlier. What was seen
only ever makes a group *rest* for a while; it never removes a route, so nothing is lost if the view was wrong.

A circuit breaker: a broker group that takes requests and answers none gets no more of them for a while.

A request fails when its connection is lost or answers none in time. Any answer is a success, a refusal too: a broker
that is overloaded or readonly is alive, and `qmq.client.routes` lets it rest for as long as that takes.

    closed      FAILURES_MAX failures in a row                  -> open
    open        OPEN_MS later, when it is next looked at        -> half-open
    half-open   one failure                                     -> open
    half-open   SUCCESSES answers                               -> closed

Source: reference of QMQ's client features, section 11.

For how long all broker groups of a subject have refused new messages: what a message waits for in vain.

A group refuses if its route says that it is readonly, or if it answered so last. One that cannot be reached does not:
it has another master in a moment, or nobody can say what it would do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b

from qmq.types import Endpoint

READ_ONLY = "readonly"
REST_MS_MIN, REST_MS_MAX = 20, 2_000
"""How long a group rests after it refused or failed: doubled with each failure in a row. A new master refuses until its
slave has matched, some 50 ms after clients find it, so the first rests are short. The metaserver tells of a change
within a second, so that resting longer than two would only delay what already works again."""


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """A broker group as the metaserver sees it, for one subject."""

    broker_group: str
    master: Endpoint | None
    writable: bool
    term: int


@dataclass(frozen=True, slots=True)
class SubjectRoute:
    """The broker groups of a subject, as of `version`, which names this content at every metaserver.

    A route without groups is meant so, unless `refused` says what went wrong. Groups of which none is writable: the
    operators, or the brokers themselves, keep producers away.
    """

    subject: str
    groups: tuple[GroupRoute, ...]
    refused: str = ""
    version: int = 0


def group_of_key(key: int, groups: Sequence[str]) -> str:
    """Return the broker group that an order key belongs to: the same for every producer that has the same groups.

    Rendezvous hashing: when a group comes or goes, only its own share of the keys changes groups.

    Args:
        key: the order key's 32 bits in a label (qmq.codec).
        groups: not empty.
    """
    return max(groups, key=lambda group: (_weight(key, group), group))


@lru_cache(maxsize=1 << 16)
def _weight(key: int, group: str) -> bytes:
    return blake2b(group.encode(), digest_size=8, key=key.to_bytes(4, "little")).digest()


@dataclass(slots=True)
class _Health:
    """What this client saw of a group: it rests until `until_ms`, because of `reason`."""

    until_ms: int = 0
    failures: int = 0
    reason: str = ""
    is_readonly: bool = False
    """It answered, and takes no messages now."""


class Routing:
    """The routes that a client has. Made by a producer or consumer, used on its event loop, ends with it."""

    def __init__(self) -> None:
        self._subjects: dict[str, SubjectRoute] = {}
        self._masters: dict[str, GroupRoute] = {}
        self._health: dict[str, _Health] = {}
        self._turn = 0

    def update(self, routes: Iterable[SubjectRoute]) -> Collection[str]:
        """Take over what the metaserver says; return the broker groups whose master or term is new, in its order.

        A route of an older term than one already known keeps the newer master: after a reconnect to another metaserver
        an old picture may come first. A refusal never takes a route away: it says that something went wrong, not that
        the groups are gone.
        """
        changed: dict[str, None] = {}
        for route in routes:
            if route.refused and self.groups_of(route.subject):
                self._subjects[route.subject] = replace(self._subjects[route.subject], refused=route.refused)
                continue
            before = {group.broker_group: group.writable for group in self.groups_of(route.subject)}
            self._subjects[route.subject] = route
            for group in route.groups:
                name = group.broker_group
                known = self._masters.get(name)
                if known is None or known.term <= group.term:
                    self._masters[name] = group
                    if known is None or (known.master, known.term) != (group.master, group.term):
                        changed[name] = None
                if group.writable and (name in changed or not before.get(name, True)):
                    self._health.pop(name, None)  # the metaserver's news is newer: it takes messages again
        return changed.keys()

    def forget(self, subjects: Iterable[str]) -> None:
        """Drop routes that nobody uses; the groups' masters stay."""
        for subject in subjects:
            self._subjects.pop(subject, None)

    def groups_of(self, subject: str) -> tuple[GroupRoute, ...]:
        """Return every broker group that may hold messages of `subject`, writable or not: a consumer reads them all."""
        route = self._subjects.get(subject)
        return route.groups if route else ()

    def route(self, subject: str) -> SubjectRoute | None:
        """Return what the metaserver last said about `subject`; None if it never did."""
        return self._subjects.get(subject)

    def all_groups(self) -> list[str]:
        return list(self._masters)

    def master(self, broker_group: str) -> Endpoint | None:
        """Return where the master of a group listens; None while it has none."""
        group = self._masters.get(broker_group)
        return group.master if group else None

    def choose(self, subject: str, *, now_ms: int, load: Callable[[str], int | None]) -> str | None:
        """Choose the broker group for the next batch of `subject`; None if none can take one now.

        `load` tells how many batches a group has in flight, None if it can take no more. The least loaded group wins,
        the others have their turn when loads are equal.
        """
        route = self._subjects.get(subject)
        if route is None:
            return None
        best, best_load = None, 0
        self._turn += 1
        count = len(route.groups)
        for step in range(count):
            group = route.groups[(self._turn + step) % count]
            if not group.writable or self.resting(group.broker_group, now_ms):
                continue
            group_load = load(group.broker_group)
            if group_load is not None and (best is None or group_load < best_load):
                best, best_load = group.broker_group, group_load
        return best

    def resting(self, broker_group: str, now_ms: int) -> bool:
        health = self._health.get(broker_group)
        return health is not None and now_ms < health.until_ms

    def failed(self, broker_group: str, reason: str, *, now_ms: int, is_readonly: bool = False) -> int:
        """Let a group rest after it refused a batch or could not be reached; return until when."""
        health = self._health.setdefault(broker_group, _Health())
        if now_ms >= health.until_ms:  # many batches of one connection fail at once: that is one failure
            health.until_ms = now_ms + min(REST_MS_MIN << min(health.failures, 10), REST_MS_MAX)
            health.failures += 1
        health.reason, health.is_readonly = reason, is_readonly
        return health.until_ms

    def all_refuse(self, subject: str, only: str = "") -> bool:
        """Return whether all broker groups of a subject, or only this one of them, take no messages now, as the route
        or the groups themselves say; not that they cannot be reached."""
        groups = [group for group in self.groups_of(subject) if only in ("", group.broker_group)]
        return bool(groups) and all(map(self._refuses, groups))

    def _refuses(self, group: GroupRoute) -> bool:
        health = self._health.get(group.broker_group)
        return group.master is not None and (not group.writable or (health is not None and health.is_readonly))

    def worked(self, broker_group: str) -> None:
        """The group stored a batch."""
        if broker_group in self._health:
            del self._health[broker_group]

    def complaint(self, broker_group: str) -> str:
        """Return why a group rests, or rested last; "" if it worked since."""
        health = self._health.get(broker_group)
        return health.reason if health else ""

    def has_route(self, subject: str) -> bool:
        """Return whether the metaserver said anything about a subject."""
        return subject in self._subjects

    def why_not(self, subject: str) -> str:
        """Say why no group took a batch of `subject`, for the receipt."""
        route = self._subjects.get(subject)
        if route is None:
            return f"the metaserver sent no route for {subject!r}"
        if not route.groups:
            return route.refused or f"no broker group serves {subject!r}"
        reasons = []
        for group in route.groups:
            health = self._health.get(group.broker_group)
            reason = health.reason if health else ("no connection" if group.writable else READ_ONLY)
            reasons.append(f"{group.broker_group}: {reason}")
        if route.refused:
            reasons.append(f"the metaserver: {route.refused}")
        return "; ".join(reasons)


FAILURES_MAX = 100
OPEN_MS = 5_000
SUCCESSES = 20


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The breaker of one broker group's master. Made by a producer; a new master gets a new one."""

    __slots__ = ("state", "_failures", "_successes", "_opened_ms")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = self._successes = self._opened_ms = 0

    def allows(self, now_ms: int) -> bool:
        """Say whether a request may be sent now."""
        if self.state is not BreakerState.OPEN:
            return True
        if now_ms - self._opened_ms < OPEN_MS:
            return False
        self.state = BreakerState.HALF_OPEN
        self._successes = 0
        return True

    def answered(self) -> None:
        """A request was answered, with whatever."""
        self._failures = 0
        if self.state is BreakerState.HALF_OPEN:
            self._successes += 1
            if self._successes >= SUCCESSES:
                self.state = BreakerState.CLOSED

    def failed(self, now_ms: int) -> bool:
        """A request will not be answered; return whether that opened the breaker."""
        self._failures += 1
        if self.state is BreakerState.OPEN:  # one of those that were under way
            return False
        if self.state is BreakerState.CLOSED and self._failures < FAILURES_MAX:
            return False
        self.state = BreakerState.OPEN
        self._opened_ms = now_ms
        return True


@dataclass(slots=True)
class _Span:
    since_ms: int
    seen_ms: int


class RefusalClock:
    """Made by the sender if the application bounds that wait; told of what still waits, some times a second."""

    def __init__(self, routing: Routing, wait_ms: int) -> None:
        self._routing = routing
        self._wait_ms = wait_ms
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
