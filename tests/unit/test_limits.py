"""Core. Every configurable number: its effect has a name, or it stops no consumer group."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import qmq
from qmq.broker.group_status import CAUSES, Cause
from qmq.broker.settings import BrokerSettings
from qmq.delayserver.settings import DelaySettings
from qmq.metaserver.settings import MetaserverSettings
from qmq.operator_limits import OperatorLimits
from qmq.replication.readonly import Reason
from qmq.watchdog.settings import WatchdogSettings


class Nobody(str):
    """A limit that neither stops nor slows a client or consumer group, with the reason."""


PRODUCERS = "producers alone wait, or get an error that names it; what is stored is delivered"
REACHED = "qmq_broker_limits_reached_total, Doctor's finding `limits`, and a line of the log name it"
DISK = Nobody("how a copy keeps its log")
WATCHES = "a new subject alone is refused; Doctor's finding `routes` names it"
OPERATORS = Nobody("how soon an operator's action, or a restart, goes on")
ROWS = "rows of an outbox wait in the application's database; OutboxStuck and the watchdog's metrics have them"
DELAYED = "due messages wait at the delay group; qmq_delayserver_due_messages, and DelayStats says why"

COPY = {
    "segment_bytes": DISK,
    "tail_bytes": DISK,
    "cached_bytes": DISK,
    "scrub_hours": DISK,
    "scrub_bytes_per_s": DISK,
    "read_log_bytes_per_s": Nobody("how long an audit takes; clients do not notice it"),
    "inline_sync_us_max": DISK,
    "retention_hours": DISK,
    "retention_bytes": DISK,
    "quarantine_bytes": Nobody("what left the log is kept for less long; Doctor, if an operator has to clear it"),
    "metrics_subjects_max": Nobody("what /metrics shows; Lag and Doctor have all"),
    "clock_difference_ms_max": Nobody("nothing is deleted; Doctor's finding `clocks`"),
    "packet_bytes_max": REACHED,  # deliveries are cut to 8 MiB
    "message_bytes_max": "the message alone is refused; qmq_broker_refused_messages_total, and a line of the log",
    "token_bytes_per_s": REACHED,
    "new_subjects_per_minute": REACHED,
    "new_subjects_max": REACHED,
    "token_groups_max": REACHED,
    "token_subscriptions_max": REACHED,
    "new_producers_per_minute": REACHED,
    "window_bytes": REACHED,
    "memory_limit": Reason.MEMORY,
    "connections_max": REACHED,
    "token_connections_max": REACHED,
    "slave_lag_bytes_max": Reason.SLAVE_LAG,
    "slave_lag_ms_max": Reason.SLAVE_LAG,
    "slave_wait_ms": Cause.MASTER,
    "rejoin_wait_s": Reason.REJOIN,
    "catch_up_bytes_per_s": Cause.NO_SLAVE,
    "disk_free_limit": Reason.DISK,
}
OPERATOR = {
    "expires_after_s": "messages are over for each group; qmq_broker_expired_messages_total, and a line of the log",
    "messages_max": "messagesMax: qmq_broker_limits_reached_total, Doctor's finding `limits`, and a line of the log",
    "bytes_max": "bytesMax: qmq_broker_limits_reached_total, Doctor's finding `limits`, and a line of the log",
    "per_second": Cause.RATE,
}
"""Of a subject or a consumer group, as set by SetLimits and LimitGroup."""
BROKER = COPY | {
    "unconsumed_hours": "old messages are dropped if so set; qmq_broker_dropped_messages_total",
    "lease_ms": Cause.NO_CONSUMER,
    "broadcast_forget_hours": Nobody("a broadcast consumer that is away is forgotten; it begins anew"),
}
DELAY = COPY | {
    "delay_days_max": PRODUCERS,
    "segment_minutes": DISK,
    "load_ahead_minutes": DISK,
    "loaded_messages_max": DELAYED,
    "sent_hours": Nobody("how long a cancel is answered exactly"),
    "unknown_ms": DELAYED,
    "clock_alarm_ms": Nobody("an alarm alone"),
    "recurring_max": PRODUCERS,
}
METASERVER = dict.fromkeys(
    (
        "database_timeout_ms",
        "poll_ms",
        "heartbeat_timeout_ms",
        "broker_timeout_ms",
        "swap_catch_up_ms",
        "swap_hold_ms",
        "swap_finish_ms",
        "failover_silence_ms",
        "request_bytes_max",
        "groups_per_subject_min",
        "groups_per_subject_new",
    ),
    OPERATORS,
) | dict.fromkeys(
    ("new_subjects_per_minute", "new_subjects_max", "watch_subjects_max", "token_subjects_max", "token_watches_max"),
    WATCHES,
)
METASERVER["group_expiry_days"] = Nobody("groups without a consumer alone; QmqConsumerGroupExpires comes before")
WATCHDOG = dict.fromkeys(
    (
        "lease_ms",
        "beat_ms",
        "refresh_ms",
        "scan_ms",
        "stats_ms",
        "stop_ms",
        "page_rows",
        "release_ms",
        "release_ms_max",
    ),
    Nobody("how soon a row goes again"),
) | dict.fromkeys(("claims_max", "errors_max", "unknown_s_max"), ROWS)
CONSUMER = {
    "drain_s": OPERATORS,
    "concurrency": Cause.PREFETCH,
    "batch": Cause.PREFETCH,
    "prefetch_messages": Cause.PREFETCH,
    "prefetch_bytes": Cause.PREFETCH,
    "unacked_max": Cause.PREFETCH,
    "priority": Cause.PREFETCH,
    "retry_delay": Cause.LATER,
    "retries_max": "the message becomes a dead letter",
}
PRODUCER = {
    "timeout_s": "the receipt is unknown, or refused with each group's reason",
    "readonly_wait_s": "the receipt is refused with each group's reason",
    "answer_timeout_s": "a line of the application's log; the batch goes on another connection",
    "in_flight_max": Nobody("what comes meanwhile gathers to the next batch"),
    "queue_messages_max": "QueueFull names it",
    "queue_bytes_max": "QueueFull names it",
}


def numbers_of(kind: type) -> set[str]:
    fields = dataclasses.fields(kind)
    return {field.name for field in fields if _is_number(field.default) and not field.name.endswith("_port")}


def _is_number(default: object) -> bool:
    return isinstance(default, int | float) and not isinstance(default, bool)


def test_operators_limits_have_names():
    defaults = OperatorLimits._field_defaults
    assert {name for name, default in defaults.items() if _is_number(default)} == set(OPERATOR)


@pytest.mark.parametrize(
    ("kind", "named"),
    [(BrokerSettings, BROKER), (DelaySettings, DELAY), (MetaserverSettings, METASERVER), (WatchdogSettings, WATCHDOG)],
)
def test_process_limits_have_names(kind, named):
    assert numbers_of(kind) == set(named)


def test_consumer_limits_have_names():
    parameters = [
        *inspect.signature(qmq.Consumer.__init__).parameters.values(),
        *inspect.signature(qmq.Consumer.listen).parameters.values(),
    ]
    numbers = {
        parameter.name
        for parameter in parameters
        if _is_number(parameter.default) or parameter.name in ("prefetch_messages", "batch")
    }
    assert numbers == set(CONSUMER)


def test_producer_limits_have_names():
    parameters = inspect.signature(qmq.Producer.__init__).parameters.values()
    numbers = {
        parameter.name
        for parameter in parameters
        if _is_number(parameter.default) or parameter.name == "readonly_wait_s"
    }
    assert numbers == set(PRODUCER)


def test_each_limit_name_is_explained():
    tables = (OPERATOR, BROKER, DELAY, METASERVER, WATCHDOG, CONSUMER)
    causes = {cause for named in tables for cause in named.values() if isinstance(cause, Cause)}
    assert all(CAUSES[cause].text for cause in causes)
