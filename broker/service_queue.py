"""Core. Which consumer is served next, and how much one pass of the loop may do.

The pull served longest ago comes first. A pass ends when its budget is spent, even if pulls still wait; the loop then
reads its sockets before the next pass. So a backlog, a group of many consumers or a consumer with many pulls delays
the others by at most one pass.

Operators limit service in two ways. A rate fills a bucket of messages for a group, up to what it gains in BURST_S; a
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
"""What a pass may deliver. With four times as much, a group beside a large backlog waited half as long again."""
TRY_BYTES = 4 << 10
"""What looking for something counts for, found or not: 256 looks are a pass."""
DELIVERY_BYTES = 48 << 10
"""What a delivery counts for besides its bytes: frame of progress, answer, bookkeeping."""
LOOKS_PER_PASS = 20_000
"""Messages looked at one by one, over all groups: about 2 ms."""
COPIES_PER_PASS = 500
"""A consumer may give up on 200,000 messages at once; meanwhile the loop goes on with everybody else."""
OWED_BYTES_MAX = 16 << 20
"""Answers under way to one connection; at the limit its pulls wait. One that reads nothing costs this and what its
socket takes, however much it asks for."""

Entry: TypeAlias = Subscription | tuple[str, str]
"""One consumer; or (subject, group): whichever of its consumers was served longest ago."""


class Passes:
    """Who waits to be served. Made by the delivery; ends with the mastership."""

    def __init__(self) -> None:
        self._queue: dict[Entry, None] = {}
        self.begin()

    def begin(self) -> None:
        """What every pass may do anew."""
        self._left = PASS_BYTES
        self.looks_left = LOOKS_PER_PASS
        self.copies_left = COPIES_PER_PASS
        """Dead letters that may still be stored."""

    @property
    def has_time(self) -> bool:
        """Whether this pass may go on."""
        return self._left > 0

    @property
    def is_over(self) -> bool:
        """Whether nobody waits to be served."""
        return not self._queue

    def add(self, entry: Entry) -> None:
        """Put behind all others, unless it waits already."""
        self._queue.setdefault(entry)

    def spend(self, size: int) -> None:
        self._left -= size

    def next(self) -> Entry | None:
        """Take away and return who comes next; None if nobody does in this pass."""
        if not self._queue or self._left <= 0:
            return None
        entry = next(iter(self._queue))
        del self._queue[entry]
        return entry


ANY = "*"


class Offline:
    """Rules (subject, consumer group, consumer); `*` in a place stands for all. A rule for a subject is one for its
    retry and dead-letter subjects, too: they belong to its consumers."""

    def __init__(self, rules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._rules = frozenset(rules)

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        rules, (subject, group, consumer) = self._rules, key
        if not rules:
            return False
        subjects = (subject, real_subject(subject), ANY)
        return any(rule in rules for rule in product(subjects, (group, ANY), (consumer, ANY)))


BURST_S = 0.2
"""Two ticks: with one, a tick that is late would lower the rate."""
DRY_MS = 2_000
"""How long a group counts as slowed after it found its bucket empty: at one message a second it does each second."""

Key = tuple[str, str]


@dataclass(slots=True)
class _Bucket:
    per_second: int
    filled_ms: int
    level: float = 1.0
    dry_ms: int | None = None
    """When it was found empty last."""


class Rates:
    """Made by `broker.delivery`; ends with the mastership. `now_ms` never jumps."""

    def __init__(self) -> None:
        self._buckets: dict[Key, _Bucket] = {}
        self._dry: dict[Key, None] = {}
        """(subject as it was asked for, consumer group) of those who found theirs empty since the last tick."""

    def limit(self, limits: dict[Key, OperatorLimits], now_ms: int) -> None:
        """From now on these are all limits; a rate that stays goes on."""
        known, self._buckets = self._buckets, {}
        for key, one in limits.items():
            if one.per_second:
                before = known.get(key)
                if before is None or before.per_second != one.per_second:
                    before = _Bucket(one.per_second, now_ms)
                self._buckets[key] = before

    def allows(self, key: Key, now_ms: int) -> int | None:
        """Return how many messages the group may get now; None: as many as there are."""
        if not self._buckets or (bucket := self._of(key)) is None:
            return None
        room = 1 + bucket.per_second * BURST_S
        bucket.level = min(room, bucket.level + (now_ms - bucket.filled_ms) * bucket.per_second / 1000)
        bucket.filled_ms = now_ms
        if bucket.level < 1:
            bucket.dry_ms = now_ms
            self._dry[key] = None
        return int(max(bucket.level, 0))

    def spend(self, key: Key, messages: int) -> None:
        if self._buckets and (bucket := self._of(key)) is not None:
            bucket.level -= messages

    @property
    def has_dry(self) -> bool:
        """Whether somebody is to be served again with the next tick."""
        return bool(self._dry)

    def take_dry(self) -> list[Key]:
        """Take away and return those who found nothing in their bucket: they are to be served again."""
        dry, self._dry = self._dry, {}
        return list(dry)

    def is_slowed(self, key: Key, now_ms: int) -> bool:
        """Return whether its rate keeps messages from the group now."""
        bucket = self._of(key)
        return bucket is not None and bucket.dry_ms is not None and now_ms - bucket.dry_ms < DRY_MS

    def _of(self, key: Key) -> _Bucket | None:
        subject, group = key
        derived = parse_derived(subject)
        return self._buckets.get((derived.real, group) if derived and derived.kind == RETRY else key)
