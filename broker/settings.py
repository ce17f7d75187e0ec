"""Core. Settings of a broker process."""

from __future__ import annotations

from dataclasses import dataclass

from qmq.replication.settings import PairSettings
from qmq.settings import setting


@dataclass(frozen=True, slots=True)
class BrokerSettings(PairSettings):
    unconsumed_hours: float = setting(
        168.0, unit="h", least=0.01, why="age up to which a segment stays because a group has not acked something in it"
    )
    lease_ms: int = setting(30_000, unit="ms", least=500, why="silence after which a consumer's messages go back")
    broadcast_forget_hours: float = setting(
        24.0, unit="h", least=0.01, why="absence after which a broadcast consumer's progress is forgotten"
    )
