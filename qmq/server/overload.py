"""Core. When a broker has enough: whose sockets it reads no more, and when it looks at memory and disk.

States of a client's connection:

    running   it is read as fast as it sends
    flow      its un-acknowledged bytes fill its window: not read until half of them were answered
    blocked   the process has more memory than its limit: not read until that is over

A connection that consumes is always running, for its acks come on it and they are what ends an overload. What it
produces beyond its window, or while memory is short, is refused instead (qmq.server.producing, and the reason for
readonly).

Keeps I19.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MEMORY_ENDS_AT = 0.95
"""Share of the limit below which the alarm ends; at the limit itself it would come and go with every tick."""
DISK_EVERY_MS = 10_000
DISK_NEAR_BYTES = 1 << 30
"""This close above twice the limit, free space is looked at in every tick."""


class ConnectionState(StrEnum):
    RUNNING = "running"
    FLOW = "flow"
    BLOCKED = "blocked"


@dataclass(slots=True)
class Flow:
    """What one client's connection does, and whether it is read. Made by its acceptor; ends with it."""

    window_bytes: int
    produces: bool = False
    consumes: bool = False
    state: ConnectionState = ConnectionState.RUNNING

    def follow(self, unacked_bytes: int, *, memory_is_short: bool) -> bool:
        """Take the state that these circumstances ask for; return whether that is another one."""
        before, self.state = self.state, self._state(unacked_bytes, memory_is_short)
        return self.state is not before

    def _state(self, unacked_bytes: int, memory_is_short: bool) -> ConnectionState:
        if not self.produces or self.consumes:
            return ConnectionState.RUNNING
        if memory_is_short:
            return ConnectionState.BLOCKED
        # Half a window between stop and go: a pause per batch would cost two system calls each.
        is_flowing = self.state is ConnectionState.FLOW and unacked_bytes > self.window_bytes // 2
        if is_flowing or unacked_bytes >= self.window_bytes:
            return ConnectionState.FLOW
        return ConnectionState.RUNNING


@dataclass(slots=True)
class MemoryAlarm:
    """Whether the process has more memory than it should. Made by the service, asked about every 100 ms."""

    limit_bytes: int
    is_on: bool = False

    def measured(self, used_bytes: int) -> bool:
        """Take note of what is used; return whether the alarm begins or ends."""
        was_on = self.is_on
        self.is_on = used_bytes > self.limit_bytes * (MEMORY_ENDS_AT if was_on else 1.0)
        return self.is_on is not was_on


@dataclass(slots=True)
class DiskWatch:
    """When free space has to be looked at again: what was written since then may be what was free."""

    limit_bytes: int
    is_full: bool = False
    is_near: bool = False
    """Whether free space has to be looked at in every tick."""
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
