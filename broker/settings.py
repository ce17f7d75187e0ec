"""Core. Settings of a broker process."""

from __future__ import annotations

from dataclasses import dataclass

from qmq.replication.settings import CopySettings
from qmq.settings import setting


@dataclass(frozen=True, slots=True)
class BrokerSettings(CopySettings):
    unconsumed: str = setting(
        "keep",
        one_of=("keep", "drop"),
        why="keep or drop old messages that a group has not consumed; with keep, a full disk ends producing",
    )
    unconsumed_hours: float = setting(
        168.0, unit="h", least=0.01, why="age at which unconsumed = drop drops them; retention_bytes drops them earlier"
    )
    lease_ms: int = setting(30_000, unit="ms", least=500, why="silence after which a consumer's messages are requeued")
    broadcast_forget_hours: float = setting(
        24.0, unit="h", least=0.01, why="absence after which a broadcast consumer's progress is forgotten"
    )
