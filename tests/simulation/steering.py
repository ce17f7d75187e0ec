"""How a seed is steered: to a fault, to a state that the fault shall meet, or past some of its strikes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

CALM = 4
"""How many times as often as all others the faults strike that lead to a state: others lead away from it."""


@dataclass(frozen=True)
class Steering:
    """`fault`: half of the strikes are this one. `state`: it strikes whenever a copy is in this state, and most other
    strikes are those which bring copies there (`WAYS`). `skipped`: numbers of strikes left out."""

    fault: str = ""
    state: str = ""
    skipped: frozenset[int] = frozenset()

    @staticmethod
    def parse(text: str) -> Steering:
        """Read `FAULT` or `FAULT@STATE`."""
        fault, _, state = text.partition("@")
        return Steering(fault, state)

    def __str__(self) -> str:
        return f"{self.fault}@{self.state}" if self.state else self.fault

    def enabled(
        self, rng: Random, faults: Iterable[str], weights: Mapping[str, float], least: float, ways: Iterable[str] = ()
    ) -> dict[str, float]:
        """Draw the faults of a seed, with how often they strike: up to their weight more than `least`. `ways`: faults
        that bring copies to the state."""
        names = list(faults)
        favoured = [name for name in names if name in ways] or [self.fault]
        chosen = [name for name in names if rng.random() < 0.6 or name in favoured] or names
        drawn = {name: rng.random() * weights.get(name, 1.0) + least for name in chosen}
        if self.fault:
            times = CALM if self.state else 1
            drawn |= dict.fromkeys(favoured, times * sum(drawn.values()) / len(favoured))
        return drawn


UNSTEERED = Steering()

MASTER, SLAVE = 0, 1


@dataclass(frozen=True)
class Way:
    """Of a state in which copies are seldom, or not for long."""

    faults: tuple[str, ...] = ()
    """Which bring copies there; most of a steered seed's strikes are these."""
    victim: int | None = None
    """Whose disk loses what was fsynced: of who is the master, or the slave, at first."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Sizes and times of the seed without which it takes too long, or never happens."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The same of its swarm."""


_RESETS = ("reset", "half_open")
_LONG = {"war_ms": 7000, "strike_ms": (130.0, 800.0), "delay_ms": 0.5}
"""Time to get there, and between strikes for copies to come together again."""
_LONGER = _LONG | {"war_ms": 12_000, "strike_ms": (400.0, 2400.0)}
_RESTORES = Way(("forgets_last_write", "rotten_tail"), MASTER, {"slave_wait_ms": 3000}, _LONG)
WAYS = {
    "FollowerState.RESTORING": _RESTORES,
    "FollowerState.CATCHING_UP": Way(_RESETS, settings=_LONG),
    "FollowerState.LAGGING": Way(
        ("slow_path",), None, {"slave_lag_ms_max": 30}, _LONG | {"think_ms": (7.5, 30.0), "slow_sync": 0.1}
    ),
    "FollowerState.DIVERGED": Way(("put_back", "back_up", "failover", "forgets_last_write")),
    "SlaveState.AWAITING_FLUSH": Way(_RESETS, None, {"sync_ms": 3.0}, _LONG | {"slow_sync": 0.5}),
    "SlaveState.HELLO_SENT": Way(_RESETS, settings=_LONG),
    "SlaveState.AWAITING_SNAPSHOT": Way(
        ("wipe",), SLAVE, {"retention_ms": 1500, "segment_bytes": 4096, "catch_up_bytes_per_s": 1 << 20}, _LONGER
    ),
    "SlaveState.RESTORING": _RESTORES,
    "LogHealth.TAIL_CUT": Way(("rotten_tail",), None, {}, _LONG),
    "LogHealth.DAMAGED": Way(("flip", "bad_block", "flip_while_down", "reset"), MASTER, {"tail_bytes": 0}, _LONG),
    "LogHealth.UNREPLAYED": Way(("rotten_tail", "flip_while_down"), settings=_LONG),
}
NO_WAY = Way()


def way_to(state: str) -> Way:
    return WAYS.get(state, NO_WAY)
