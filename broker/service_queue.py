"""Core. Which consumer is served next, and how much one pass of the loop may do.

The pull served longest ago comes first. A pass ends when its budget is spent, even if pulls still wait; the loop then
reads its sockets before the next pass. So a backlog, a group of many consumers or a consumer with many pulls delays
the others by at most one pass.

Operators limit service in two ways. A rate fills a bucket of messages for a group, up to its gain in BURST_S; a
group with an empty bucket is served again from the next tick on. Messages of the group's retry subject count too.
Consumers that are switched off stay subscribed and keep their unacked messages, but get no new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from qmq.broker.subscriptions import Subscription
from qmq.operator_limits import OperatorLimits
from qmq.subjects import RETRY, parse_derived, real_subject

PASS_BYTES = 1 << 20
"""Bytes delivered in a pass. With four times as much, a group beside a large backlog waited 1.5 times as long."""
TRY_BYTES = 4 << 10
"""Cost of a look-up, with or without a result: 256 of them fill a pass."""
DELIVERY_BYTES = 48 << 10
"""Cost of a delivery besides its bytes: progress frame, answer, bookkeeping."""
LOOKS_PER_PASS = 20_000
"""Messages looked at one by one, over all groups: about 2 ms."""
COPIES_PER_PASS = 500
"""A consumer may give up 200,000 messages at once; others are served between passes."""
OWED_BYTES_MAX = 16 << 20
"""Unsent answers of one connection; at the limit its pulls wait. A connection that reads nothing costs this much memory
and its socket buffer, however much it pulls.
"""

Entry: TypeAlias = Subscription | tuple[str, str]
"""One consumer; or (subject, group): the consumer of it that was served longest ago."""


class ServiceQueue:
    """Queue of consumers to serve, with the budgets of a pass. Made by the delivery; ends with the mastership."""

    def __init__(self) -> None:
        self._queue: dict[Entry, None] = {}
        self.begin()

    def begin(self) -> None:
        """Renew the budgets of a pass."""
        self._left = PASS_BYTES
        self.looks_left = LOOKS_PER_PASS
        self.copies_left = COPIES_PER_PASS
        """Dead letters that this pass may still store."""

    @property
    def has_time(self) -> bool:
        """Whether this pass may continue."""
        return self._left > 0

    @property
    def is_over(self) -> bool:
        """Whether the queue is empty."""
        return not self._queue

    def add(self, entry: Entry) -> None:
        """Append to the queue, unless it is in it."""
        self._queue.setdefault(entry)

    def spend(self, size: int) -> None:
        self._left -= size

    def next(self) -> Entry | None:
        """Take and return the next entry; None if the queue is empty or the pass is over."""
        if not self._queue or self._left <= 0:
            return None
        entry = next(iter(self._queue))
        del self._queue[entry]
        return entry


ANY = "*"


class OfflineRules:
    """Switched-off consumers, as rules (subject, consumer group, consumer); `*` matches all. A rule for a subject
    covers its retry and dead-letter subjects too.
    """

    def __init__(self, rules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._rules = frozenset(rules)

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        rules, (subject, group, consumer) = self._rules, key
        if not rules:
            return False
        subjects = (subject, real_subject(subject), ANY)
        return any(rule in rules for rule in product(subjects, (group, ANY), (consumer, ANY)))


BURST_S = 0.2
"""Two ticks: with one, a late tick would lower the rate."""
DRY_MS = 2_000
"""How long a group counts as slowed after its bucket was empty; at one message a second it is empty each second."""

Key = tuple[str, str]


@dataclass(slots=True)
class _Bucket:
    per_second: int
    filled_ms: int
    tokens: float = 1.0
    dry_ms: int | None = None
    """When it was last found empty."""


class Rates:
    """Buckets of all groups with a rate. Made by `broker.serving`; ends with the mastership. `now_ms` never jumps."""

    def __init__(self) -> None:
        self._buckets: dict[Key, _Bucket] = {}
        self._dry: dict[Key, None] = {}
        """(requested subject, consumer group) with an empty bucket since the last tick."""

    def limit(self, limits: dict[Key, OperatorLimits], now_ms: int) -> None:
        """Replace all limits; the bucket of an unchanged rate stays."""
        known, self._buckets = self._buckets, {}
        for key, rate in limits.items():
            if rate.per_second:
                before = known.get(key)
                if before is None or before.per_second != rate.per_second:
                    before = _Bucket(rate.per_second, now_ms)
                self._buckets[key] = before

    def allows(self, key: Key, now_ms: int) -> int | None:
        """Return how many messages the group may get now; None: no limit."""
        if not self._buckets or (bucket := self._of(key)) is None:
            return None
        room = 1 + bucket.per_second * BURST_S
        bucket.tokens = min(room, bucket.tokens + (now_ms - bucket.filled_ms) * bucket.per_second / 1000)
        bucket.filled_ms = now_ms
        if bucket.tokens < 1:
            bucket.dry_ms = now_ms
            self._dry[key] = None
        return int(max(bucket.tokens, 0))

    def spend(self, key: Key, messages: int) -> None:
        if self._buckets and (bucket := self._of(key)) is not None:
            bucket.tokens -= messages

    @property
    def has_dry(self) -> bool:
        """Whether the next tick has groups to serve again."""
        return bool(self._dry)

    def take_dry(self) -> list[Key]:
        """Take and return the groups that found their bucket empty; the caller serves them again."""
        dry, self._dry = self._dry, {}
        return list(dry)

    def is_slowed(self, key: Key, now_ms: int) -> bool:
        """Return whether its rate holds back messages of the group now."""
        bucket = self._of(key)
        return bucket is not None and bucket.dry_ms is not None and now_ms - bucket.dry_ms < DRY_MS

    def _of(self, key: Key) -> _Bucket | None:
        subject, group = key
        derived = parse_derived(subject)
        return self._buckets.get((derived.real, group) if derived and derived.kind == RETRY else key)
