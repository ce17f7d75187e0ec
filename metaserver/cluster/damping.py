"""Core. Keeps a broker that goes off and on from making routes flap.

Bad news is passed on at once: a producer that is told too late loses an attempt. Good news of a broker that lost its
mastership again and again waits until it lasted a while. A new term and an operator's mark are orders, not faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from qmq.metaserver.model import BrokerKey, ReplicaState

WINDOW_MS = 60_000
LOSSES_FREE = 4
"""So many losses within the window cost nothing: restarts, swaps, an operator who tries things."""
HOLD_MS = 2000
HOLD_MS_MAX = 10_000
ORDERS = frozenset({"operator", "draining"})
"""Reasons for readonly that an operator gave."""
FLAPPING = "flapping"
"""Among a broker's reasons for readonly: it takes messages, but not for long enough yet."""


@dataclass(slots=True)
class _History:
    term: int = 0
    writable: bool = False
    since_ms: int = 0
    losses_ms: deque[int] = field(default_factory=deque)


class Damping:
    """What each broker's readiness did lately. Owned by `Liveness`."""

    def __init__(self) -> None:
        self._histories: dict[BrokerKey, _History] = {}

    def forget(self, keys: Iterable[BrokerKey]) -> None:
        """Drop what is known about brokers that no longer exist."""
        for key in keys:
            self._histories.pop(key, None)

    def damped(self, key: BrokerKey, state: ReplicaState, *, now_ms: int) -> ReplicaState:
        """Return what to tell others of `state`: the same, or not writable yet."""
        history = self._histories.setdefault(key, _History())
        if state.term != history.term:
            history.term, history.writable = state.term, False
            history.losses_ms.clear()
        if state.writable != history.writable:
            history.writable, history.since_ms = state.writable, now_ms
            if not state.writable and ORDERS.isdisjoint(state.readonly_reasons):
                history.losses_ms.append(now_ms)
        while history.losses_ms and history.losses_ms[0] < now_ms - WINDOW_MS:
            history.losses_ms.popleft()
        hold_ms = min((len(history.losses_ms) - LOSSES_FREE) * HOLD_MS, HOLD_MS_MAX)
        if not state.writable or now_ms - history.since_ms >= hold_ms:
            return state
        return replace(state, writable=False, readonly_reasons=(*state.readonly_reasons, FLAPPING))
