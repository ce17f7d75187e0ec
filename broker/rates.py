"""Core. How fast consumer groups get messages, where an operator said so: a bucket of messages for each such group.

A bucket fills with the rate that was set, up to what it is filled with in BURST_S; who finds it empty is served again
from the next tick on. What a group gets from its mailbox counts, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq.operator_limits import OperatorLimits
from qmq.subjects import RETRY, parse_derived

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
