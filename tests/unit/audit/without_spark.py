"""Shell. The audit of two directories in this process: readers and judges take turns as Spark lets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from qmq.audit import plan
from qmq.audit.copies import place_options
from qmq.audit.group import audit_group
from qmq.audit.on_spark import outcome_of
from qmq.audit.results import Group, Result

NO_SPARK: Any = None
PIECE_BYTES = 16_384
COPIES = ("master", "slave")


class _Rows:
    """The driver's use of Spark's table of judged rows."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows = list(rows)

    def where(self, column: str) -> _Rows:
        return _Rows(row for row in self._rows if row[column])

    def select(self, *columns: str) -> _Rows:
        return self

    def collect(self) -> list[dict[str, Any]]:
        return self._rows

    def unpersist(self) -> None: ...


def judged(spark: Any, jobs: Sequence[plan.Job], piece_bytes: int) -> _Rows:
    tasks = plan.tasks_of(jobs, piece_bytes)
    numbers = pa.RecordBatch.from_arrays([pa.array(range(len(tasks)), pa.int64())], ["id"])
    read = list(plan._read(jobs, tasks, [numbers]))
    facts = sorted((row for batch in read for row in batch.to_pylist()), key=itemgetter("job", "key", "piece", "copy"))
    ordered = pa.RecordBatch.from_pylist(facts, read[0].schema)
    return _Rows(row for batch in plan._judge(jobs, [ordered]) for row in batch.to_pylist())


def audit(folder: Path, copies: Sequence[str] = COPIES, **options: Any) -> Result:
    """Audit the directories of `folder` with these names."""
    return audit_places({copy: place_options(str(folder / copy), "") for copy in copies}, **options)


def audit_places(places: Mapping[str, Mapping[str, str]], **options: Any) -> Result:
    """Audit one group by the places of its copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qmq.audit.group.judged", judged)
        patch.setattr(
            "qmq.audit.group.run_tasks", lambda spark, step, tasks: [outcome_of(step, task) for task in tasks]
        )
        return audit_group(NO_SPARK, Group("g1", places), **({"piece_bytes": PIECE_BYTES} | options))


def named(result: Result) -> set[tuple[str, str, int | None]]:
    return {(row["what"], row["copy"], row["offset"]) for row in result.findings}
