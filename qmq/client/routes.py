"""Core. Routes of subjects and health of broker groups: the group for a producer's next batch, the groups of a
consumer.

A group's master and writability come from the metaserver. The client usually detects refusals and lost connections a
second earlier; they make the group *rest* for a while. They never remove a route, so a wrong observation loses nothing.

A circuit breaker also stops requests to a group that accepts them and does not answer. A request fails when its
connection is lost or its answer is late. A refusal is an answer: it does not count as a failure, and the group rests.

    closed      FAILURES_MAX failures in a row                  -> open
    open        OPEN_MS later, at the next check                -> half-open
    half-open   one failure                                     -> open
    half-open   SUCCESSES answers                               -> closed

Source: reference of QMQ's client features, section 11.
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
"""Rest of a group after a refusal or failure, doubled with each one in a row. A new master refuses for some 50 ms,
until its slave has matched, so the first rests are short. The metaserver announces changes within a second, so a rest
above two seconds would only delay a group that works again.
"""


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """Broker group in the metaserver's route of one subject."""

    broker_group: str
    master: Endpoint | None
    writable: bool
    term: int


@dataclass(frozen=True, slots=True)
class SubjectRoute:
    """Broker groups of a subject; `version` identifies this content at every metaserver.

    A route without groups is valid, unless `refused` holds a reason. If no group is writable, an operator or the
    brokers made the groups readonly.
    """

    subject: str
    groups: tuple[GroupRoute, ...]
    refused: str = ""
    version: int = 0


def group_of_key(key: int, groups: Sequence[str]) -> str:
    """Return the broker group of an order key; producers with the same groups get the same one.

    Rendezvous hashing: when a group is added or removed, only its own share of the keys moves.

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
    """This client's observation of a group: it rests until `until_ms`, because of `reason`."""

    until_ms: int = 0
    failures: int = 0
    reason: str = ""
    is_readonly: bool = False
    """The group answered that it is readonly."""


class Routing:
    """Routes and group health of one client, used on its event loop."""

    def __init__(self) -> None:
        self._subjects: dict[str, SubjectRoute] = {}
        self._masters: dict[str, GroupRoute] = {}
        self._health: dict[str, _Health] = {}
        self._rotation = 0

    def update(self, routes: Iterable[SubjectRoute]) -> Collection[str]:
        """Store routes of the metaserver; return the broker groups with a new master or term, in order.

        A master of an older term does not replace a newer one: another metaserver may first send an old route after a
        reconnect. A refusal keeps the known groups of the subject.
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
                    self._health.pop(name, None)  # the route is newer than the refusal: the group is writable again
        return changed.keys()

    def forget(self, subjects: Iterable[str]) -> None:
        """Drop unused routes; the groups' masters stay."""
        for subject in subjects:
            self._subjects.pop(subject, None)

    def groups_of(self, subject: str) -> tuple[GroupRoute, ...]:
        """Return every broker group that may hold messages of `subject`, writable or not."""
        route = self._subjects.get(subject)
        return route.groups if route else ()

    def route(self, subject: str) -> SubjectRoute | None:
        """Return the metaserver's last route of `subject`, or None."""
        return self._subjects.get(subject)

    def all_groups(self) -> list[str]:
        return list(self._masters)

    def master(self, broker_group: str) -> Endpoint | None:
        """Return the endpoint of a group's master, or None."""
        group = self._masters.get(broker_group)
        return group.master if group else None

    def choose(self, subject: str, *, now_ms: int, load: Callable[[str], int | None]) -> str | None:
        """Return the broker group for the next batch of `subject`, or None.

        The least loaded group is chosen, and groups of equal load take turns.

        Args:
            load: returns the number of batches in flight to a group, None if it has no room.
        """
        route = self._subjects.get(subject)
        if route is None:
            return None
        best, best_load = None, 0
        self._rotation += 1
        count = len(route.groups)
        for step in range(count):
            group = route.groups[(self._rotation + step) % count]
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
        """Let a group rest after a refusal or a failed connection; return the end of the rest."""
        health = self._health.setdefault(broker_group, _Health())
        if now_ms >= health.until_ms:  # batches of one connection fail together: one failure
            health.until_ms = now_ms + min(REST_MS_MIN << min(health.failures, 10), REST_MS_MAX)
            health.failures += 1
        health.reason, health.is_readonly = reason, is_readonly
        return health.until_ms

    def all_refuse(self, subject: str, only: str = "") -> bool:
        """Return whether all broker groups of a subject, or the one in `only`, are readonly by their routes or answers.
        Groups without a connection do not count as readonly.
        """
        groups = [group for group in self.groups_of(subject) if only in ("", group.broker_group)]
        return bool(groups) and all(map(self._refuses, groups))

    def _refuses(self, group: GroupRoute) -> bool:
        health = self._health.get(group.broker_group)
        return group.master is not None and (not group.writable or (health is not None and health.is_readonly))

    def succeeded(self, broker_group: str) -> None:
        """End the rest of a group that stored a batch."""
        if broker_group in self._health:
            del self._health[broker_group]

    def rest_reason(self, broker_group: str) -> str:
        """Return the reason of a group's last rest; "" if it stored a batch since."""
        health = self._health.get(broker_group)
        return health.reason if health else ""

    def has_route(self, subject: str) -> bool:
        """Return whether a route of the subject is known."""
        return subject in self._subjects

    def why_not(self, subject: str) -> str:
        """Return the reason why no group accepts a batch of `subject`, for the receipt."""
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
    """Circuit breaker of one broker group's master. Made by a producer, anew for each master."""

    __slots__ = ("state", "_failures", "_successes", "_opened_ms")

    def __init__(self) -> None:
        self.state: BreakerState = BreakerState.CLOSED
        self._failures = self._successes = self._opened_ms = 0

    def allows(self, now_ms: int) -> bool:
        """Return whether a request may be sent now."""
        if self.state is not BreakerState.OPEN:
            return True
        if now_ms - self._opened_ms < OPEN_MS:
            return False
        self.state = BreakerState.HALF_OPEN
        self._successes = 0
        return True

    def answered(self) -> None:
        """Count an answer of any kind."""
        self._failures = 0
        if self.state is BreakerState.HALF_OPEN:
            self._successes += 1
            if self._successes >= SUCCESSES:
                self.state = BreakerState.CLOSED

    def failed(self, now_ms: int) -> bool:
        """Count a request without an answer; return whether this opened the breaker."""
        self._failures += 1
        if self.state is BreakerState.OPEN:  # sent before the breaker opened
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
    """Time since all broker groups of a subject are readonly, for `readonly_wait_s`.

    Called for each waiting queue some times a second. A group that cannot be reached does not count as readonly: it may
    have another master in a moment.
    """

    def __init__(self, routing: Routing, wait_ms: int) -> None:
        self._routing = routing
        self._wait_ms = wait_ms
        self._spans: dict[tuple[str, str], _Span] = {}

    def is_over(self, subject: str, group: str, now_ms: int) -> bool:
        """Return whether messages of `subject` have waited long enough. `group` is the only group that may take them;
        "" for any.
        """
        key = subject, group
        if not self._routing.all_refuse(subject, group):
            self._spans.pop(key, None)
            return False
        span = self._spans.get(key)
        if span is None or now_ms - span.seen_ms > max(
            self._wait_ms, SEEN_MS
        ):  # nothing waited meanwhile, so the group was not observed
            span = self._spans[key] = _Span(now_ms, now_ms)
        span.seen_ms = now_ms
        return now_ms - span.since_ms >= self._wait_ms

    def succeeded(self, subject: str, group: str) -> None:
        """Reset the time, after `group` stored messages of this subject."""
        self._spans.pop((subject, ""), None)
        self._spans.pop((subject, group), None)

    def forget(self, subjects: set[str]) -> None:
        for key in [key for key in self._spans if key[0] in subjects]:
            del self._spans[key]


SEEN_MS = 1_000
"""All of 20,000 queues are checked within a quarter of this."""
