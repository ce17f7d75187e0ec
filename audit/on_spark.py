"""Shell. Tasks of the audit on a Spark cluster: each task is a row, so a task receives nothing of the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from qmq.audit.copies import CannotRead

_TASK = pa.schema([("number", pa.int32()), ("task", pa.binary())])
_OUTCOME = "number int, outcome binary"


@contextmanager
def task_rows(spark: SparkSession, tasks: Sequence[Any]) -> Iterator[DataFrame]:
    """Return a row per task, each in a partition of its own while the context lasts. out: number int, task binary."""
    names = ("spark.sql.leafNodeDefaultParallelism", "spark.sql.execution.arrow.localRelationThreshold")
    before = {name: spark.conf.get(name, None) for name in names}
    packed = [pickle.dumps(task, 5) for task in tasks]
    table = pa.table([range(len(packed)), packed], schema=_TASK)
    try:
        for name, number in zip(names, (max(1, len(packed)), 2 * sum(map(len, packed)) + (64 << 20))):
            spark.conf.set(name, str(number))
        yield spark.createDataFrame(table)
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def run_tasks(spark: SparkSession, step: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    """Return what `step` returns for each task, or `Failed`."""
    found: list[Any] = [None] * len(tasks)
    if tasks:
        with task_rows(spark, tasks) as rows:
            for row in rows.mapInArrow(partial(_run, step), _OUTCOME).collect():
                found[row["number"]] = pickle.loads(row["outcome"])
    return found


def _run(step: Callable[[Any], Any], batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for number, task in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()):
            outcome = pickle.dumps(outcome_of(step, pickle.loads(task)), 5)
            yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int32()), "outcome": [outcome]})


class Failed(NamedTuple):
    """Outcome of a task that raised an error: an exception of a worker may not be one that the driver can unpickle."""

    reason: str


def outcome_of(step: Callable[[Any], Any], task: Any) -> Any:
    """Return what `step` returns, or `Failed`."""
    try:
        return step(task)
    except Exception as error:
        return Failed(str(error) if isinstance(error, CannotRead) else f"{type(error).__name__}: {error}")
