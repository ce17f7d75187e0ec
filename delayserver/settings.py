"""Core. Settings of a delay server."""

from __future__ import annotations

from dataclasses import dataclass

from qmq.replication.settings import CopySettings
from qmq.settings import setting


@dataclass(frozen=True, slots=True)
class DelaySettings(CopySettings):
    serve_port: int = setting(20801, least=1, most=65535, why="TCP port for clients; QMQ's default")
    sync_port: int = setting(20802, least=1, most=65535, why="TCP port for the slave; QMQ's default")
    control_port: int = setting(20803, least=1, most=65535, why="gRPC port for metaserver, tools, repair and Spark")
    metrics_port: int = setting(20804, least=1, most=65535, why="HTTP port of /metrics")

    delay_days_max: float = setting(730.0, unit="days", least=0.001, most=36_500, why="longest delay that is accepted")
    segment_minutes: int = setting(
        60, unit="min", least=1, most=1440, why="time of one segment of the schedule; existing segments keep theirs"
    )
    load_ahead_minutes: float = setting(
        10.0, unit="min", least=0.1, most=1440, why="how long before its begin a segment is loaded"
    )
    loaded_messages_max: int = setting(
        8_000_000, least=1000, why="loaded messages, 40 bytes each, above which those due last are loaded later"
    )
    sent_hours: float = setting(
        72.0,
        unit="h",
        least=0.01,
        why="time for which a cancel of a sent or cancelled message gets its state; later: unknown",
    )
    unknown_ms: int = setting(
        60_000, unit="ms", least=1000, why="time after which messages without an answer may go to another broker group"
    )
    clock_alarm_ms: int = setting(
        1000, unit="ms", least=1, why="difference of the machine's clock to the due clock that raises the alarm"
    )
    recurring_max: int = setting(
        1000, least=1, most=10_000, why="recurring schedules of one subject: each change looks through all of them"
    )
