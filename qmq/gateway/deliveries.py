"""Core. Memory of the gateway, bounded in time and number: a session's delivered messages, and a token's outcomes.

A message is open until a request decides it or its lease ends. At the end of its lease the session forgets it, and its
handle is gone. Decided handles are remembered, so that a repeated ack, whose first answer was lost, has the same
outcome.

Outcomes are kept by idempotency key, so that a repeated request to send has the same outcome.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

M = TypeVar("M")
REMEMBERED_MAX = 10_000
"""Limit of remembered decided handles of a session."""


class Decision(StrEnum):
    """Decisions on a message."""

    ACK = "ack"
    NACK = "nack"
    DEAD_LETTER = "dead-letter"


@dataclass(slots=True)
class Delivery(Generic[M]):
    """Delivery of a message. `message`: None once its decision is stored. `until_s`: end of its lease. `decision`: None
    while it is open.
    """

    message: M | None
    until_s: float
    decision: Decision | None = None


class Deliveries(Generic[M]):
    """Deliveries of one session. Each handle begins with `session`, which no caller can guess."""

    def __init__(self, session: str, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._session = session
        self._remembered_max = remembered_max
        self._count = 0
        self._open: dict[str, Delivery[M]] = {}
        self._decided: OrderedDict[str, Delivery[M]] = OrderedDict()
        self._next_s = math.inf
        """Time before which no lease ends."""

    def __len__(self) -> int:
        """Number of open messages."""
        return len(self._open)

    def add(self, message: M, until_s: float) -> str:
        """Return the handle of a new delivery."""
        self._count += 1
        handle = f"{self._session}.{self._count}"
        self._open[handle] = Delivery(message, until_s)
        self._next_s = min(self._next_s, until_s)
        return handle

    def find(self, handle: str) -> Delivery[M] | None:
        """Return an open or decided delivery, or None if its handle is gone."""
        return self._open.get(handle) or self._decided.get(handle)

    def decide(self, handle: str, decision: Decision) -> None:
        """Mark an open delivery as decided."""
        delivery = self._open.pop(handle)
        delivery.decision = decision
        self._decided[handle] = delivery
        while len(self._decided) > self._remembered_max:
            self._decided.popitem(last=False)

    def stored(self, handle: str) -> None:
        """Drop the content of a decided message, whose decision a broker has stored."""
        if (delivery := self._decided.get(handle)) is not None:
            delivery.message = None

    def renew(self, handle: str, until_s: float) -> None:
        """Set the end of an open delivery's lease."""
        self._open[handle].until_s = until_s
        self._next_s = min(self._next_s, until_s)

    def expired(self, now_s: float) -> list[M]:
        """Forget the deliveries whose lease has ended; return their messages."""
        if now_s < self._next_s:
            return []
        over = [handle for handle, delivery in self._open.items() if delivery.until_s <= now_s]
        found = [self._open.pop(handle).message for handle in over]
        self._next_s = min((delivery.until_s for delivery in self._open.values()), default=math.inf)
        return [message for message in found if message is not None]


def session_of(handle: str) -> str:
    """Return the part of a handle that names its session."""
    return handle.partition(".")[0]


V = TypeVar("V")
Key = tuple[str, str, int]
"""Subject, idempotency key, position in the request."""


class RepeatDiffers(Exception):
    """Error: the key was used for another message."""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    fingerprint: bytes
    until_s: float
    value: V


class Repeats(Generic[V]):
    """Values kept by idempotency key, oldest first."""

    def __init__(self, *, keep_s: float, keys_max: int) -> None:
        self._keep_s = keep_s
        self._keys_max = keys_max
        self._entries: OrderedDict[Key, _Entry[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key, fingerprint: bytes, now_s: float) -> V | None:
        """Return the value of an earlier request with this key, or None.

        Raises:
            RepeatDiffers: the earlier request had another content.
        """
        self._drop(now_s)
        if (entry := self._entries.get(key)) is None:
            return None
        if entry.fingerprint != fingerprint:
            raise RepeatDiffers
        return entry.value

    def keep(self, key: Key, fingerprint: bytes, value: V, now_s: float) -> None:
        self._entries[key] = _Entry(fingerprint, now_s + self._keep_s, value)
        self._drop(now_s)

    def forget(self, key: Key) -> None:
        self._entries.pop(key, None)

    def _drop(self, now_s: float) -> None:
        """Drop the oldest entries, if their time is over or they are too many."""
        while self._entries:
            oldest = next(iter(self._entries))
            if len(self._entries) <= self._keys_max and self._entries[oldest].until_s > now_s:
                return
            del self._entries[oldest]
