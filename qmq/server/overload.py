"""Core. Overload: which clients' sockets a broker stops reading, and when it checks memory and disk.

States of a client's connection:

    running   read as fast as the client sends
    sharing   other connections produce, too, and its unacknowledged bytes fill its share: not read until half of them
              were answered. A message is acknowledged with the log before it, so no other message waits much longer
    flow      its unacknowledged bytes fill its window: not read until half of them were answered
    blocked   the process is over its memory limit: not read until that ends

A connection that consumes is always running: its acks end an overload. Its batches beyond the window, or while memory
is short, are rejected instead (qmq.server.producing, and the readonly reason).

Keeps I19.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

K = TypeVar("K")
MEMORY_ENDS_AT = 0.95
"""Share of the limit below which the alarm ends. If it ended at the limit itself, it would begin and end with every
tick.
"""
DISK_EVERY_MS = 10_000
LATELY_MS = 60_000
"""Time for which Doctor names a reached limit: longer than Prometheus's interval between scrapes."""
LIMITED_SUBJECTS_MAX = 100
"""Number of subjects that are named while an operator's limit refuses their producers. All refusals are counted."""
DISK_NEAR_BYTES = 1 << 30
"""Free space this close above twice the limit is measured in every tick."""


SHARED_BYTES, QUIETLY_SHARED_BYTES = 2 << 20, 1 << 20
"""Limit of the unacknowledged bytes of all connections together, if several produce: enough for large commits, and some
5 ms of two disks. The second value applies while one of them is quiet, because its messages wait behind all these
bytes.
"""
SHARE_BYTES_LEAST = 256 << 10
BATCH_BYTES = 256 << 10
"""Advised maximum of a batch while a quiet connection produces, which waits for each whole batch of the others. It does
not apply among loud connections, because smaller batches cost brokers and producers more.
"""
QUIET_BYTES = 64 << 10
"""A connection is quiet if all its batches of the last ten to twenty seconds were smaller than this."""
SHARES_MS = 10_000
"""A connection keeps its share until it has produced nothing for one or two of these periods. So an occasional producer
finds no long queue either.
"""


class ConnectionState(StrEnum):
    RUNNING = "running"
    SHARING = "sharing"
    FLOW = "flow"
    BLOCKED = "blocked"


@dataclass(slots=True)
class Flow:
    """State of one client's connection. Made by its acceptor; ends with it."""

    window_bytes: int
    produces: bool = False
    consumes: bool = False
    state: ConnectionState = ConnectionState.RUNNING

    def follow(self, unacked_bytes: int, *, share_bytes: int | None = None, memory_is_short: bool) -> bool:
        """Enter the state that follows from the arguments; return whether it changed."""
        before, self.state = self.state, self._state(unacked_bytes, share_bytes, memory_is_short)
        return self.state is not before

    def _state(self, unacked_bytes: int, share_bytes: int | None, memory_is_short: bool) -> ConnectionState:
        if not self.produces or self.consumes:
            return ConnectionState.RUNNING
        if memory_is_short:
            return ConnectionState.BLOCKED
        if self._fills(ConnectionState.FLOW, self.window_bytes, unacked_bytes):
            return ConnectionState.FLOW
        if share_bytes is not None and self._fills(ConnectionState.SHARING, share_bytes, unacked_bytes):
            return ConnectionState.SHARING
        return ConnectionState.RUNNING

    def _fills(self, state: ConnectionState, most: int, unacked_bytes: int) -> bool:
        # Half of `most` lies between stop and resume, because a pause per batch would cost two system calls each.
        return unacked_bytes > most or (self.state is state and unacked_bytes > most // 2)


class _Recent(Generic[K]):
    """Members of the present period of SHARES_MS and of the one before."""

    def __init__(self) -> None:
        self._now: set[K] = set()
        self._before: set[K] = set()

    def __len__(self) -> int:
        return len(self._now) + len(self._before)

    def add(self, key: K) -> None:
        self._before.discard(key)
        self._now.add(key)

    def discard(self, key: K) -> None:
        self._before.discard(key)
        self._now.discard(key)

    def begin_period(self, late_ms: int) -> None:
        """Begin the next period, `late_ms` after the last one ended; forget all members if that is a whole period."""
        self._before = self._now if late_ms < SHARES_MS else set()
        self._now = set()


class Shares(Generic[K]):
    """Connections that produced recently, with the unacknowledged bytes that each may have. Made by the service."""

    def __init__(self) -> None:
        self._producing: _Recent[K] = _Recent()
        self._loud: _Recent[K] = _Recent()
        """Producing connections that are not quiet."""
        self._until_ms = 0

    def produced(self, connection: K, size: int, now_ms: int) -> None:
        """Record a batch: its connection has a share for the next ten to twenty seconds."""
        if now_ms >= self._until_ms:
            for recent in (self._producing, self._loud):
                recent.begin_period(now_ms - self._until_ms)
            self._until_ms = now_ms + SHARES_MS
        self._producing.add(connection)
        if size >= QUIET_BYTES:
            self._loud.add(connection)

    def lost(self, connection: K) -> None:
        self._producing.discard(connection)
        self._loud.discard(connection)

    @property
    def bytes(self) -> int | None:
        """Share of each connection, or None if only one produces."""
        count = len(self._producing)
        shared = QUIETLY_SHARED_BYTES if self._is_one_quiet else SHARED_BYTES
        return max(SHARE_BYTES_LEAST, shared // count) if count > 1 else None

    @property
    def batch_bytes(self) -> int | None:
        """Advised maximum of a batch, or None."""
        return BATCH_BYTES if len(self._producing) > 1 and self._is_one_quiet else None

    @property
    def _is_one_quiet(self) -> bool:
        return len(self._producing) > len(self._loud)


@dataclass(slots=True)
class LimitsReached:
    """Settings that stopped or rejected a client, and operators' limits of subjects. Made by the service; times are
    monotonic.
    """

    counts: Counter[str] = field(default_factory=Counter)
    """How often each setting stopped or rejected a client; only settings that ever did."""
    _last_ms: dict[str, int] = field(default_factory=dict)
    _subjects: dict[tuple[str, str], int] = field(default_factory=dict)
    """(setting, subject) -> time when the limit was last reached. May include limits that are not reached any more."""

    def reached(self, setting: str, now_ms: int, subject: str = "") -> bool:
        """Count a reached limit; return whether it was not reached lately (for a subject's limit: by this subject)."""
        begins = setting not in self.counts or not self.is_lately(setting, now_ms)
        self.counts[setting] += 1
        self._last_ms[setting] = now_ms
        return self._reached_of((setting, subject), now_ms) if subject else begins

    def _reached_of(self, key: tuple[str, str], now_ms: int) -> bool:
        if key not in self._subjects and len(self._subjects) >= LIMITED_SUBJECTS_MAX:
            self._subjects = {subject: self._subjects[subject] for subject in self.subjects_lately(now_ms)}
            if len(self._subjects) >= LIMITED_SUBJECTS_MAX:
                return False
        begins = now_ms - self._subjects.get(key, now_ms - LATELY_MS) >= LATELY_MS
        self._subjects[key] = now_ms
        return begins

    def is_lately(self, setting: str, now_ms: int) -> bool:
        """Return whether this setting stopped or rejected a client within the last LATELY_MS."""
        return now_ms - self._last_ms[setting] < LATELY_MS

    def subjects_lately(self, now_ms: int) -> list[tuple[str, str]]:
        """Return (setting, subject) of operators' limits that refused producers within the last LATELY_MS."""
        return [key for key, last_ms in self._subjects.items() if now_ms - last_ms < LATELY_MS]


@dataclass(slots=True)
class MemoryAlarm:
    """Alarm of a process over its memory limit. Made by the service, checked about every 100 ms."""

    limit_bytes: int
    is_on: bool = False

    def measured(self, used_bytes: int) -> bool:
        """Record the used memory; return whether the alarm begins or ends."""
        was_on = self.is_on
        self.is_on = used_bytes > self.limit_bytes * (MEMORY_ENDS_AT if was_on else 1.0)
        return self.is_on is not was_on


@dataclass(slots=True)
class DiskWatch:
    """Schedule of the checks of free space: the bytes written since the last check may have filled the disk."""

    limit_bytes: int
    is_full: bool = False
    is_near: bool = False
    """Whether free space must be measured in every tick."""
    _next_ms: int = 0
    _next_end: int = 0

    def is_due(self, now_ms: int, log_end: int) -> bool:
        return now_ms >= self._next_ms or log_end >= self._next_end

    def measured(self, free_bytes: int, now_ms: int, log_end: int) -> None:
        self.is_full = free_bytes < self.limit_bytes
        headroom = free_bytes - self.limit_bytes
        self.is_near = headroom < self.limit_bytes + DISK_NEAR_BYTES
        self._next_ms = now_ms + (0 if self.is_near else DISK_EVERY_MS)
        self._next_end = log_end + max(headroom // 4, 0)
