"""Core. A page of Grafana as plain data: panels in rows of two, each with its queries, and the variables above them.

What is written is the JSON that Grafana imports (Dashboards, Import), of schema version 39: version 10.4 and newer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 39
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 12, 8
"""Of a panel, in Grafana's grid of 24 columns."""


class Kind(StrEnum):
    """How a panel shows its series."""

    GRAPH = "timeseries"
    NOW = "stat"
    LIST = "table"


class Unit(StrEnum):
    """Grafana's names."""

    NONE = "short"
    BYTES = "bytes"
    SECONDS = "s"
    PER_SECOND = "ops"
    BYTES_PER_SECOND = "Bps"
    UP = "bool_on_off"
    TIME = "dateTimeFromNow"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query, and how its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: Unit = Unit.NONE
    kind: Kind = Kind.GRAPH
    says: str = ""
    """What to read out of it."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice above the page; its values are those of a label."""

    name: str
    metric: str
    title: str

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
    title: str, *queries: str | tuple[str, str], unit: Unit = Unit.NONE, kind: Kind = Kind.GRAPH, says: str = ""
) -> Panel:
    """Make a panel; a query is its expression, or expression and legend."""
    made = tuple(Query(one) if isinstance(one, str) else Query(*one) for one in queries)
    return Panel(title, made, unit, kind, says)


def to_json(page: Page) -> dict[str, Any]:
    """Write a page as Grafana imports it."""
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
        "templating": {"list": [_source(), *map(_variable, page.variables)]},
        "panels": list(_panels(page.panels)),
    }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(panels):
        row, column = divmod(number, 2)
        yield {
            "id": number + 1,
            "type": one.kind.value,
            "title": one.title,
            "description": one.says,
            "datasource": SOURCE,
            "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": one.unit.value, "min": 0}, "overrides": []},
            "targets": list(_targets(one)),
        }


def _targets(one: Panel) -> Iterator[dict[str, Any]]:
    for letter, query in zip("ABCDEFGH", one.queries, strict=False):
        now = one.kind is not Kind.GRAPH
        yield {
            "refId": letter,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "datasource": SOURCE,
            "instant": now,
            "range": not now,
            "format": "table" if one.kind is Kind.LIST else "time_series",
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
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }
