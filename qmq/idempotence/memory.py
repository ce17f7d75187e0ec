"""Core. Keys in this process's memory: a message that comes again to the same process is handled once."""

from __future__ import annotations

from collections import OrderedDict

from qmq.errors import InvalidRequest
from qmq.idempotence.keys import Claim, State


class MemoryKeys:
    """Keys of the messages that this process handled last; they end with it, and no other process sees them.

    A claim needs no lease here: it ends with the handler, as both live in this process. While one handles a message,
    whoever is given it a second time asks for it again after a lease.

    Args:
        keys_max: handled messages that are remembered; the oldest are forgotten first.
    """

    def __init__(self, *, keys_max: int = 100_000) -> None:
        if keys_max < 1:
            raise InvalidRequest(f"keys_max is 1 or more, not {keys_max}")
        self._keys_max = keys_max
        self._claimed: dict[str, str] = {}
        self._handled: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._handled)

    async def claim(self, key: str, owner: str, lease_s: float) -> Claim:
        if key in self._handled:
            return Claim(State.HANDLED)
        if key in self._claimed:
            return Claim(State.BUSY, lease_s)
        self._claimed[key] = owner
        return Claim(State.OURS)

    async def renew(self, key: str, owner: str, lease_s: float) -> bool:
        return self._claimed.get(key) == owner

    async def finish(self, key: str, owner: str) -> bool:
        if self._claimed.get(key) != owner:
            return False
        del self._claimed[key]
        self._handled[key] = None
        if len(self._handled) > self._keys_max:
            self._handled.popitem(last=False)
        return True

    async def release(self, key: str, owner: str) -> None:
        if self._claimed.get(key) == owner:
            del self._claimed[key]
