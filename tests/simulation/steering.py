"""Steering of a seed: to a fault, to a state that the fault shall meet, or past some of its strikes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

CALM = 4
"""Weight of the faults that lead to the state, relative to all others, which lead away from it."""


@dataclass(frozen=True)
class Steering:
    """`fault`: half of the strikes are this one. `state`: the fault strikes whenever a copy is in this state, and most
    other strikes lead there (`WAYS`). `skipped`: numbers of strikes left out.
    """

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
        """Draw the enabled faults of a seed, as name -> weight between `least` and `least` plus the fault's own.
        `ways`: faults that lead to the state.
        """
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
    """Way to a state that is rare or short."""

    faults: tuple[str, ...] = ()
    """Faults that lead there; they are most strikes of a steered seed."""
    victim: int | None = None
    """Copy with a disk that loses fsynced bytes: the first master or the first slave."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Sizes and times of the seed that the way needs."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the swarm that the way needs."""


_RESETS = ("reset", "half_open")
_LONG = {"war_ms": 7000, "strike_ms": (130.0, 800.0), "delay_ms": 0.5}
"""Time to get there, and between strikes for copies to meet again."""
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
