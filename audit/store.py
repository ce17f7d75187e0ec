"""Shell. Tables of an audit as Parquet: counts per subject and hour, equations, findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from qmq.audit.conservation import STATES
from qmq.audit.consumption import CONSERVED
from qmq.audit.delays import DELAY_STATES, DELAYED_HOUR
from qmq.audit.executors import Rows, write_table
from qmq.audit.facts import ALL
from qmq.audit.findings import FINDINGS, HOUR, HOUR_MS, Row
from qmq.audit.plan import Judged
from qmq.audit.results import Result

_MOMENT = pa.timestamp("us", "UTC")
_DAY = ("day", pa.string())
_NUMBERS = ("stored", *STATES, "nacked")
_DELAYED = ("taken", *DELAY_STATES, "late")

_HOURS = pa.schema(
    [
        ("copy", pa.string()),
        ("subject", pa.string()),
        ("hour", _MOMENT),
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        _DAY,
    ]
)
_CONSERVED = pa.schema(
    [
        ("copy", pa.string()),
        ("subject", pa.string()),
        ("consumer_group", pa.string()),
        ("hour", _MOMENT),
        *((name, pa.int64()) for name in _NUMBERS),
        _DAY,
    ]
)
_OF_DELAYS = pa.schema(
    [
        ("subject", pa.string()),
        ("hour", _MOMENT),
        *((name, pa.int64()) for name in (*_DELAYED, "late_ms_max")),
        _DAY,
    ]
)
_FINDINGS = pa.schema(
    [(name, pa.int64() if name in ("offset", "end", "sequence") else pa.string()) for name in FINDINGS] + [_DAY]
)


class Tables(NamedTuple):
    """Folder of the tables of all runs, and the name of this run.

    <group>/<table>/run=<name>/day=<date>: a run replaces nothing but its own rows. The day of a count is that of its
    hour, the day of a finding that of the run.
    """

    folder: Path
    run: str

    def place(self, group: str, table: str) -> Path:
        """Return the folder of this run's rows."""
        folder = self.folder / group / table
        _keep_earlier(folder)
        return folder / f"run={self.run}"


def _keep_earlier(folder: Path) -> None:
    """Move the rows of an audit before 0.3, which had no runs, to a run of their own: Spark reads one layout."""
    for days, at in (("day=*", ""), ("*.parquet", "day=__HIVE_DEFAULT_PARTITION__")):
        for path in [*folder.glob(days)]:
            place = folder / "run=earlier" / at
            place.mkdir(parents=True, exist_ok=True)
            path.rename(place / path.name)


def store_counts(judged: Rows, job: int, group: str, names: tuple[str, ...], tables: Tables) -> None:
    """Store counts per subject and hour, and the equations, of one broker group. Raises OSError."""
    for table, make, schema in (("hours", _hours, _HOURS), ("conserved", _conserved, _CONSERVED)):
        judged.write(partial(_made, make, schema, (job, names)), schema, tables.place(group, table))


def store_delays(judged: Rows, group: str, tables: Tables) -> None:
    """Store the equations of a delay group. Raises OSError."""
    totals = dict.fromkeys(_DELAYED, "sum") | {"late_ms_max": "max"}
    make = partial(_made, _delays, _OF_DELAYS, (0, ()))
    judged.write(make, _OF_DELAYS, tables.place(group, "delayed"), totals)


def store_findings(result: Result, tables: Tables) -> None:
    """Store the findings of one group. Raises OSError."""
    rows = [{name: row.get(name) for name in FINDINGS} | {"day": tables.run[:10]} for row in result.findings]
    write_table(pa.Table.from_pylist(rows, _FINDINGS), tables.place(result.group, "findings"))


Of = tuple[int, tuple[str, ...]]
"""Job whose rows are stored, and the names of its copies."""


def _made(
    make: Callable[[Of, Judged], Iterable[Row]], schema: pa.Schema, of: Of, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        judged = zip(*(column.to_pylist() for column in batch.columns))
        yield pa.RecordBatch.from_pylist([row for of_row in judged for row in make(of, of_row)], schema)


def _hours(of: Of, judged: Judged) -> Iterator[Row]:
    for copy, row in _of_kind(HOUR, of, judged):
        yield row | {"copy": copy} | _at(row["hour"])


def _conserved(of: Of, judged: Judged) -> Iterator[Row]:
    for copy, row in _of_kind(CONSERVED, of, judged):
        equation: Mapping[str, Any] = json.loads(row["equation"])
        about = {"copy": copy, "subject": row["subject"], "consumer_group": equation["group"]}
        yield about | {name: equation[name] for name in _NUMBERS} | _at(equation["hour"])


def _delays(of: Of, judged: Judged) -> Iterator[Row]:
    for _, row in _of_kind(DELAYED_HOUR, of, judged):
        yield row | _at(row["hour"])


def _of_kind(kind: str, of: Of, judged: Judged) -> Iterator[tuple[str, Row]]:
    """Yield (copy, row) for each copy that a judged row is about."""
    (wanted, names), (job, copy, found, payload, _) = of, judged
    if (job, found) == (wanted, kind):
        row = json.loads(payload)
        for name in names if copy == ALL and names else (copy,):
            yield name, row


def _at(hours: int) -> Row:
    """Return the columns of an hour since 1970."""
    moment = datetime.fromtimestamp(hours * HOUR_MS // 1000, UTC)
    return {"hour": moment, "day": f"{moment:%Y-%m-%d}"}
