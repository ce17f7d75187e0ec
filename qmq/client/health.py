"""Core. Health of a client: one of three states, with the reason.

    connected       it works, as far as the client can detect; an unused producer has nothing to connect to
    degraded        a part of it works: a broker group is missing, rows stay in the outbox, the application paused it
    not connected   it neither sends nor receives: closed, token rejected, no broker group

A process must not be restarted for either of the last two: a new process would find the same brokers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

REASONS_MAX = 10
"""Reasons in a text; a client may have thousands of listeners."""


class HealthState(Enum):
    """State of a client, the best first."""

    CONNECTED = "connected"
    DEGRADED = "degraded"
    NOT_CONNECTED = "not connected"


_ORDER = list(HealthState)


class Health(NamedTuple):
    """State of a client and its reason, which is "" while it is connected."""

    state: HealthState
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value


CONNECTED = Health(HealthState.CONNECTED)


def degraded(reason: str) -> Health:
    """Return the state for a reason: CONNECTED without one."""
    return Health(HealthState.DEGRADED, reason) if reason else CONNECTED


def not_connected(reason: str) -> Health:
    return Health(HealthState.NOT_CONNECTED, reason)


def worst(healths: Iterable[Health]) -> Health:
    """Return the worst state, with the reasons of all parts that are not fully connected."""
    found = list(healths)
    state = max((health.state for health in found), key=_ORDER.index, default=HealthState.CONNECTED)
    reasons = list(dict.fromkeys(health.reason for health in found if health.reason))
    if len(reasons) > REASONS_MAX:
        reasons[REASONS_MAX:] = [f"and {len(reasons) - REASONS_MAX} more"]
    return Health(state, "; ".join(reasons))


def of_groups(missing: Mapping[str, str], *, connected: int, routes: str) -> Health:
    """Return the health of a client's connections.

    Args:
        missing: broker groups without a connection, and why.
        connected: number of broker groups with one.
        routes: reason why no routes arrive; "" while they arrive.
    """
    reasons = [routes] if routes else []
    reasons += [f"{name}: {reason}" for name, reason in missing.items()]
    if not reasons:
        return CONNECTED
    return worst((degraded if connected else not_connected)(reason) for reason in reasons)
