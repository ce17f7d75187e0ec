"""Shell. The seven Grafana pages for operators on call, as plain data: panels in rows of two with PromQL queries, and
variables.

`qmq dashboards` writes them as JSON for Grafana's import, of schema version 39: Grafana 10.4 and newer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from qmq.deploy.plan import write_atomically

SCHEMA_VERSION = 39
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 12, 8
"""Size of a panel, in Grafana's grid of 24 columns."""


class PanelKind(StrEnum):
    """Display of a panel's series."""

    GRAPH = "timeseries"
    NOW = "stat"
    LIST = "table"


class Unit(StrEnum):
    """Units, by Grafana's names."""

    NONE = "short"
    BYTES = "bytes"
    SECONDS = "s"
    PER_SECOND = "ops"
    BYTES_PER_SECOND = "Bps"
    UP = "bool_on_off"
    TIME = "dateTimeFromNow"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel of a dashboard."""

    title: str
    queries: tuple[Query, ...]
    unit: Unit = Unit.NONE
    kind: PanelKind = PanelKind.GRAPH
    advice: str = ""
    """Advice for reading the panel."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice above the page, from the values of a label."""

    name: str
    metric: str
    title: str
    is_single: bool = False

    @property
    def query(self) -> str:
        return f"label_values({self.metric}, {self.name})"


@dataclass(frozen=True, slots=True)
class Page:
    """One dashboard. `uid` is part of its address, so it never changes."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...] = field(default=())


def panel(
    title: str,
    *queries: str | tuple[str, str],
    unit: Unit = Unit.NONE,
    kind: PanelKind = PanelKind.GRAPH,
    advice: str = "",
) -> Panel:
    """Return a panel; a query is an expression, or an expression and a legend."""
    made = tuple(Query(query) if isinstance(query, str) else Query(*query) for query in queries)
    return Panel(title, made, unit, kind, advice)


def to_json(page: Page) -> dict[str, Any]:
    """Return a page as Grafana's JSON."""
    return {
        "uid": page.uid,
        "title": page.title,
        "tags": ["qmq"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "",
        "links": [{"type": "dashboards", "tags": ["qmq"], "title": "qmq", "asDropdown": True, "keepTime": True}],
        "templating": {"list": [_source(), *map(_variable, (CLUSTERS, *page.variables))]},
        "panels": list(_panels(page.panels)),
    }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for number, panel in enumerate(panels):
        row, column = divmod(number, 2)
        yield {
            "id": number + 1,
            "type": panel.kind.value,
            "title": panel.title,
            "description": panel.advice,
            "datasource": SOURCE,
            "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit.value, "min": 0}, "overrides": []},
            "targets": list(_targets(panel)),
        }


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        now = panel.kind is not PanelKind.GRAPH
        yield {
            "refId": letter,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "datasource": SOURCE,
            "instant": now,
            "range": not now,
            "format": "table" if panel.kind is PanelKind.LIST else "time_series",
        }


def _source() -> dict[str, Any]:
    return {"type": "datasource", "name": "source", "label": "Prometheus", "query": "prometheus", "current": {}}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.title,
        "datasource": SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,
        "sort": 1,
        "multi": not variable.is_single,
        "includeAll": not variable.is_single,
        "allValue": ".+",
        "current": {} if variable.is_single else {"text": "All", "value": "$__all"},
    }


CLUSTERS = Variable("cluster", 'up{kind="metaserver"}', "cluster", is_single=True)
GROUP = Variable("broker_group", 'qmq_metaserver_group_writable{cluster=~"$cluster"}', "group")
HERE = 'cluster=~"$cluster"'
"""Selects the series of one installation; every query has it, and every aggregation keeps the label."""
IN_GROUP = f'{HERE}, broker_group=~"$broker_group"'
BROKER_OR_DELAY = "qmq_(broker|delayserver)"


def both(name: str, more: str = "") -> str:
    """Return a selector of a metric of brokers and delay servers."""
    return f'{{__name__=~"{BROKER_OR_DELAY}_{name}", {IN_GROUP}{more}}}'


def latency(metric: str, by: str, window: str = "5m") -> list[tuple[str, str]]:
    """Return queries for the median and the 99th percentile of a histogram."""
    return [
        (f"histogram_quantile({part}, sum by (cluster, {by}, le) (rate({metric}[{window}])))", f"{{{{{by}}}}} {name}")
        for part, name in ((0.5, "median"), (0.99, "99 %"))
    ]


def per_second(metric: str, name: str = "") -> tuple[str, str]:
    """Return a query for the rate of each group; `name` distinguishes it within the panel."""
    return f"sum by (cluster, broker_group) (rate({metric}[1m]))", f"{{{{broker_group}}}} {name}".rstrip()


def recent(metric: str, name: str = "") -> tuple[str, str]:
    """Return a query for the last five minutes' count of each group."""
    return f"sum by (cluster, broker_group) (increase({metric}[5m]))", f"{{{{broker_group}}}} {name}".rstrip()


def per_consumer_group(metric: str, join: str = "sum") -> str:
    """Return a query for the twenty largest values. Master and slave have equal values; `join` combines those of broker
    groups.
    """
    best = f"max by (cluster, broker_group, subject, consumer_group) ({metric})"
    return f"topk by (cluster) (20, {join} by (cluster, subject, consumer_group) ({best}))"


CLUSTER = Page(
    "qmq-cluster",
    "qmq: cluster",
    (
        panel(
            "Alerts",
            f'ALERTS{{alertname=~"Qmq.*", alertstate="firing", {HERE}}} '
            f'or 0 * count by (cluster) (up{{kind="metaserver", {HERE}}})',
            kind=PanelKind.LIST,
            advice="Each has a section in docs/runbook.md.",
        ),
        panel(
            "Findings of Doctor",
            (f"max by (cluster, check) (qmq_metaserver_doctor_findings{{{HERE}}})", "{{check}}"),
            kind=PanelKind.NOW,
            advice="0: all is well. `qmq Doctor` names each, and the command that ends it.",
        ),
        panel(
            "Groups that accept produces",
            (f"min by (cluster, broker_group) (qmq_metaserver_group_writable{{{HERE}}})", "{{broker_group}}"),
            unit=Unit.UP,
            kind=PanelKind.NOW,
        ),
        panel(
            "Brokers that send heartbeats",
            (f"min by (cluster, broker_group, role) (qmq_metaserver_broker_up{{{HERE}}})", "{{broker_group}} {{role}}"),
            unit=Unit.UP,
            kind=PanelKind.NOW,
        ),
        panel(
            "Processes that Prometheus reaches",
            (f'sum by (cluster, kind) (up{{kind=~".+", {HERE}}})', "{{kind}}"),
            kind=PanelKind.NOW,
        ),
        panel("Messages stored", per_second(f"qmq_broker_produced_messages_total{{{HERE}}}"), unit=Unit.PER_SECOND),
        panel(
            "Messages acked by consumers",
            per_second(f"qmq_broker_acked_messages_total{{{HERE}}}"),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Memory", (f'process_resident_memory_bytes{{kind=~".+", {HERE}}}', "{{kind}} {{instance}}"), unit=Unit.BYTES
        ),
        panel(
            "Processor",
            (f'rate(process_cpu_seconds_total{{kind=~".+", {HERE}}}[1m])', "{{kind}} {{instance}}"),
            advice="1: one core is busy.",
        ),
        panel(
            "Versions",
            (f'count by (cluster, version) ({{__name__=~"qmq_(broker|delayserver)_info", {HERE}}})', "{{version}}"),
            kind=PanelKind.NOW,
        ),
        panel(
            "Database of the metaservers",
            f"max by (cluster) (qmq_metaserver_database_up{{{HERE}}})",
            unit=Unit.UP,
            kind=PanelKind.NOW,
        ),
        panel(
            "Database of the metaservers: an answer",
            (f"qmq_metaserver_database_answer_seconds{{{HERE}}}", "{{instance}}"),
            unit=Unit.SECONDS,
        ),
        panel("Clients", (f"sum by (cluster, kind) (qmq_metaserver_clients{{{HERE}}})", "{{kind}}")),
        panel(
            "Operators' actions",
            (
                f"sum by (cluster, action, result) (increase(qmq_metaserver_management_actions_total{{{HERE}}}[5m]))",
                "{{action}} {{result}}",
            ),
        ),
    ),
)

BROKER_GROUP = Page(
    "qmq-broker-group",
    "qmq: broker group",
    (
        panel(
            "Readonly reasons",
            (f"max by (cluster, broker_group, reason) ({both('readonly')})", "{{broker_group}} {{reason}}"),
            unit=Unit.UP,
        ),
        panel("Masters", (both("is_master"), "{{broker_group}} {{hostname}}"), unit=Unit.UP),
        panel("Bytes that the slave has not confirmed", (both("sync_lag_bytes"), "{{broker_group}}"), unit=Unit.BYTES),
        panel(
            "Produce: time to acknowledgement",
            *latency(both("produce_seconds_bucket"), "broker_group"),
            unit=Unit.SECONDS,
        ),
        panel("Bytes taken from producers", per_second(f"{both('produced_bytes_total')}"), unit=Unit.BYTES_PER_SECOND),
        panel(
            "A write with fsync, mean",
            (
                f"sum by (cluster, broker_group, hostname) (rate({both('sync_seconds_total')}[5m]))"
                f" / sum by (cluster, broker_group, hostname) (rate({both('commits_total')}[5m]))",
                "{{broker_group}} {{hostname}}",
            ),
            unit=Unit.SECONDS,
        ),
        panel(
            "End of the log",
            (both("log_end_bytes"), "{{broker_group}} {{hostname}}"),
            unit=Unit.BYTES,
            advice="Master and slave of a group lie on one line.",
        ),
        panel(
            "Free disk above its limit",
            (
                f"qmq_broker_disk_free_bytes{{{IN_GROUP}}} - qmq_broker_disk_free_limit_bytes{{{IN_GROUP}}} or "
                f"qmq_delayserver_disk_free_bytes{{{IN_GROUP}}} - qmq_delayserver_disk_free_limit_bytes{{{IN_GROUP}}}",
                "{{broker_group}} {{hostname}}",
            ),
            unit=Unit.BYTES,
        ),
        panel(
            "Clients' connections",
            (f"sum by (cluster, broker_group, state) ({both('client_connections')})", "{{broker_group}} {{state}}"),
        ),
        panel(
            "Messages refused",
            (f"sum by (cluster, broker_group) (rate({both('refused_messages_total')}[5m]))", "{{broker_group}}"),
            unit=Unit.PER_SECOND,
        ),
    ),
    (GROUP,),
)

_LAG = f'subject!~"%.*", subject=~"$subject", {IN_GROUP}'
CONSUMERS = Page(
    "qmq-consumers",
    "qmq: consumers and lag",
    (
        panel(
            "Messages that wait",
            (per_consumer_group(f"qmq_broker_lag_messages{{{_LAG}}}"), "{{subject}} {{consumer_group}}"),
            advice="Not delivered yet; the twenty largest.",
        ),
        panel(
            "Messages delivered and not acked",
            (per_consumer_group(f"qmq_broker_unacked_messages{{{_LAG}}}"), "{{subject}} {{consumer_group}}"),
        ),
        panel(
            "Age of the oldest message not acked",
            (
                per_consumer_group(f"qmq_broker_oldest_unacked_seconds{{{_LAG}}}", "max"),
                "{{subject}} {{consumer_group}}",
            ),
            unit=Unit.SECONDS,
            advice="Waiting or delivered; the twenty oldest.",
        ),
        panel(
            "Messages stored, by subject",
            (
                "topk by (cluster) (20, sum by (cluster, subject) (max by (cluster, broker_group, subject) "
                f"(rate(qmq_broker_subject_messages_total{{{_LAG}}}[1m]))))",
                "{{subject}}",
            ),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Delivered and acked",
            per_second(f"qmq_broker_pulled_messages_total{{{IN_GROUP}}}", "delivered"),
            per_second(f"qmq_broker_acked_messages_total{{{IN_GROUP}}}", "acked"),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Retries that wait",
            (
                "sum by (cluster, subject, consumer_group) (max by (cluster, broker_group, subject, consumer_group) "
                f'(qmq_broker_lag_messages{{subject=~"%RETRY%.*", {IN_GROUP}}}))',
                "{{subject}}",
            ),
        ),
        panel(
            "Dead letters",
            (
                f"sum by (cluster, subject, consumer_group) (qmq_broker_dead_letters_total{{{IN_GROUP}}})",
                "{{consumer_group}} of {{subject}}",
            ),
            advice="Since the masters' processes began, for any destination; `qmq Redrive` does not lower the count.",
        ),
        panel("Consumers that left or lost their lease", recent(f"qmq_broker_departed_consumers_total{{{IN_GROUP}}}")),
        panel(
            "Connected consumers",
            (f"sum by (cluster, broker_group) (qmq_broker_subscriptions{{{IN_GROUP}}})", "{{broker_group}}"),
        ),
    ),
    (GROUP, Variable("subject", 'qmq_broker_subject_messages_total{cluster=~"$cluster"}', "subject")),
)

_DELAY = "qmq_delayserver"
DELAY = Page(
    "qmq-delay",
    "qmq: delayed messages",
    (
        panel(
            "Messages that pend",
            (f"max by (cluster, broker_group) ({_DELAY}_pending_messages{{{HERE}}})", "{{broker_group}}"),
        ),
        panel(
            "Due and not sent",
            (f"max by (cluster, broker_group) ({_DELAY}_due_messages{{{HERE}}})", "{{broker_group}}"),
            advice="Above 0 for longer than a moment: no broker group accepts these messages.",
        ),
        panel(
            "How long the oldest message has been due",
            (f"max by (cluster, broker_group) ({_DELAY}_due_age_seconds{{{HERE}}})", "{{broker_group}}"),
            unit=Unit.SECONDS,
        ),
        panel("Lateness", *latency(f"{_DELAY}_lateness_seconds_bucket{{{HERE}}}", "broker_group"), unit=Unit.SECONDS),
        panel(
            "Taken and sent",
            per_second(f"{_DELAY}_produced_messages_total{{{HERE}}}", "taken"),
            per_second(f"{_DELAY}_sent_messages_total{{{HERE}}}", "sent"),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Cancelled and moved",
            recent(f"{_DELAY}_cancelled_messages_total{{{HERE}}}", "cancelled"),
            recent(f"{_DELAY}_rescheduled_messages_total{{{HERE}}}", "moved"),
        ),
        panel(
            "Missing answers, batches not stored, messages rejected",
            recent(f"{_DELAY}_unknown_answers_total{{{HERE}}}", "unknown"),
            recent(f"{_DELAY}_not_stored_batches_total{{{HERE}}}", "not stored"),
            recent(f"{_DELAY}_rejected_messages_total{{{HERE}}}", "rejected"),
        ),
        panel(
            "Difference of the machine's clock to the due clock",
            (f"{_DELAY}_clock_difference_seconds{{{HERE}}}", "{{hostname}}"),
            unit=Unit.SECONDS,
        ),
        panel(
            "Memory of messages that are due soon",
            (f"{_DELAY}_loaded_bytes{{{HERE}}}", "{{hostname}}"),
            unit=Unit.BYTES,
        ),
    ),
)

OUTBOX = Page(
    "qmq-outbox",
    "qmq: outboxes and watchdog",
    (
        panel(
            "Active watchdogs",
            f"sum by (cluster) (qmq_watchdog_leader{{{HERE}}})",
            kind=PanelKind.NOW,
            advice="One for each room.",
        ),
        panel(
            "Databases that answer",
            (f"min by (cluster, database) (qmq_watchdog_database_up{{{HERE}}})", "{{database}}"),
            unit=Unit.UP,
            kind=PanelKind.NOW,
        ),
        panel(
            "Rows, by state",
            (f"max by (cluster, database, state) (qmq_watchdog_rows{{{HERE}}})", "{{database}} {{state}}"),
            advice="Counted up to 100,000. Parked: not tried any more.",
        ),
        panel(
            "Age of the oldest row",
            (f"max by (cluster, database) (qmq_watchdog_oldest_seconds{{{HERE}}})", "{{database}}"),
            unit=Unit.SECONDS,
        ),
        panel(
            "Rows sent",
            (f"sum by (cluster, database) (rate(qmq_watchdog_sent_total{{{HERE}}}[5m]))", "{{database}}"),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Rows that failed, were released, were parked",
            (f"sum by (cluster, database) (increase(qmq_watchdog_failed_total{{{HERE}}}[5m]))", "{{database}} failed"),
            (
                f"sum by (cluster, database) (increase(qmq_watchdog_released_total{{{HERE}}}[5m]))",
                "{{database}} released",
            ),
            (f"sum by (cluster, database) (increase(qmq_watchdog_parked_total{{{HERE}}}[5m]))", "{{database}} parked"),
        ),
        panel(
            "Time since each table was last read",
            (f"max by (cluster, database) (qmq_watchdog_last_pass_seconds{{{HERE}}})", "{{database}}"),
            unit=Unit.SECONDS,
        ),
        panel("Elections", f"sum by (cluster) (increase(qmq_watchdog_elections_total{{{HERE}}}[1h]))"),
    ),
)

GATEWAY = Page(
    "qmq-gateway",
    "qmq: HTTP gateways",
    (
        panel(
            "Requests, by status",
            (f"sum by (cluster, status) (rate(qmq_gateway_requests_total{{{HERE}}}[5m]))", "{{status}}"),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Time of requests",
            *latency(f"qmq_gateway_request_seconds_bucket{{{HERE}}}", "route"),
            unit=Unit.SECONDS,
            advice="Pulls wait for their first message.",
        ),
        panel(
            "Messages sent, by outcome",
            (f"sum by (cluster, outcome) (rate(qmq_gateway_sent_total{{{HERE}}}[5m]))", "{{outcome}}"),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Messages decided, and requeued after a lease",
            (
                f"sum by (cluster, decision, outcome) (rate(qmq_gateway_decisions_total{{{HERE}}}[5m]))",
                "{{decision}} {{outcome}}",
            ),
            (f"sum by (cluster) (rate(qmq_gateway_expired_total{{{HERE}}}[5m]))", "lease ended"),
            unit=Unit.PER_SECOND,
        ),
        panel(
            "Open sessions and undecided messages",
            (f"sum by (cluster) (qmq_gateway_sessions{{{HERE}}})", "sessions"),
            (f"sum by (cluster) (qmq_gateway_unacked_messages{{{HERE}}})", "undecided messages"),
        ),
    ),
)

AUDIT = Page(
    "qmq-audit",
    "qmq: audit and nightly jobs",
    (
        panel(
            "Last success",
            (f"max by (cluster, name) (qmq_nightly_last_success_timestamp_seconds{{{HERE}}}) * 1000", "{{name}}"),
            unit=Unit.TIME,
            kind=PanelKind.NOW,
        ),
        panel(
            "Exit status of the last run",
            (f"max by (cluster, name) (qmq_nightly_exit_status{{{HERE}}})", "{{name}}"),
            kind=PanelKind.NOW,
            advice="Of the audit: 0 proven equal, 1 findings, 2 could not read.",
        ),
        panel(
            "Removed before an audit read it",
            (f"max by (cluster, broker_group) (qmq_audit_unverified_bytes{{{HERE}}})", "{{broker_group}}"),
            unit=Unit.BYTES,
            advice="By retention, since the run before.",
        ),
        panel(
            "Duration of the last run",
            (f"max by (cluster, name) (qmq_nightly_seconds{{{HERE}}})", "{{name}}"),
            unit=Unit.SECONDS,
        ),
        panel(
            "Hours since the last success",
            (
                f"(time() - max by (cluster, name) (qmq_nightly_last_success_timestamp_seconds{{{HERE}}})) / 3600",
                "{{name}}",
            ),
        ),
        panel(
            "Bytes on both disks",
            (f"max by (cluster, broker_group) (qmq_broker_high_watermark_bytes{{{HERE}}})", "{{broker_group}}"),
            unit=Unit.BYTES,
            advice="The audit reads up to here.",
        ),
        panel(
            "Log on disk",
            (
                f"qmq_broker_log_end_bytes{{{HERE}}} - qmq_broker_log_start_bytes{{{HERE}}}",
                "{{broker_group}} {{hostname}}",
            ),
            unit=Unit.BYTES,
        ),
    ),
)

PAGES = (CLUSTER, BROKER_GROUP, CONSUMERS, DELAY, OUTBOX, GATEWAY, AUDIT)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="qmq dashboards", description="Write Grafana's pages.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for page in PAGES:
            path = options.out / f"{page.uid}.json"
            write_atomically(path, json.dumps(to_json(page), indent=2) + "\n", mode=0o644)
            print(path)
    except OSError as error:
        print(f"qmq dashboards: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
