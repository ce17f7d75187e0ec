"""Core. Delay for brokers that go up and down repeatedly, so that routes do not flap.

A group that becomes readonly is published at once: a late producer loses an attempt. A broker that lost its mastership
repeatedly must stay writable for a while before others see it. New terms and operators' marks are not faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from qmq.metaserver.model import BrokerKey, ReplicaState

WINDOW_MS = 60_000
LOSSES_FREE = 4
"""Losses within the window that cause no delay: restarts, swaps, operators' experiments."""
HOLD_MS = 2000
HOLD_MS_MAX = 10_000
ORDERS = frozenset({"operator", "draining"})
"""Readonly reasons that come from an operator."""
FLAPPING = "flapping"
"""Readonly reason: the broker is writable, but not for long enough yet."""


@dataclass(slots=True)
class _History:
    term: int = 0
    writable: bool = False
    since_ms: int = 0
    losses_ms: deque[int] = field(default_factory=deque)


class Damping:
    """Recent changes of each broker's readiness. Owned by `Liveness`."""

    def __init__(self) -> None:
        self._histories: dict[BrokerKey, _History] = {}

    def forget(self, keys: Iterable[BrokerKey]) -> None:
        """Drop brokers that no longer exist."""
        for key in keys:
            self._histories.pop(key, None)

    def damped(self, key: BrokerKey, state: ReplicaState, *, now_ms: int) -> ReplicaState:
        """Return the state to publish: `state`, or `state` marked not writable while the broker flaps."""
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
