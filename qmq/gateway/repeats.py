"""Core. Outcomes by idempotency key, of one token, for a bounded time and number."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")
Key = tuple[str, str, int]
"""Subject, idempotency key, position in the request."""


class RepeatDiffers(Exception):
    """The key was used for another message."""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    fingerprint: bytes
    until_s: float
    value: V


class Repeats(Generic[V]):
    """Kept values, oldest first."""

    def __init__(self, *, keep_s: float, keys_max: int) -> None:
        self._keep_s = keep_s
        self._keys_max = keys_max
        self._entries: OrderedDict[Key, _Entry[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key, fingerprint: bytes, now_s: float) -> V | None:
        """Return the value of an earlier request with this key; None: there is none.

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
        """Drop the oldest entries that are over, or too many."""
        while self._entries:
            oldest = next(iter(self._entries))
            if len(self._entries) <= self._keys_max and self._entries[oldest].until_s > now_s:
                return
            del self._entries[oldest]
