"""Shell. The two ways to run the tasks of an audit: in this process, or on Spark.

Both run the same readers, judges and comparisons. Small logs are read faster here than Spark starts. On Spark, each
task is a row, so a task receives nothing of the others:

    facts    job int, key string, piece long, copy string, payload binary (`audit.plan`)
    judged   job int, copy string, kind string, payload string, listed boolean

Spark joins and compiles nothing: the plan is a sort between functions of ours.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.dataset
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.storagelevel import StorageLevel

from qmq.audit.copies import CannotRead
from qmq.audit.plan import Fact, Judged

HERE_BYTES_MAX = 1 << 30
"""Bytes of all copies that are read in this process. More of them are worth the start of Spark, 7 CPU seconds."""
JUDGES_PER_CORE = 2
"""Judges' tasks: their work is uneven, as a task takes whole subjects."""
ROWS_AT_ONCE = 10_000

_TASK = pa.schema([("number", pa.int32()), ("task", pa.binary())])
_OUTCOME = pa.schema([("number", pa.int32()), ("outcome", pa.binary())])
_FACTS = pa.schema(
    [("job", pa.int32()), ("key", pa.string()), ("piece", pa.int64()), ("copy", pa.string()), ("payload", pa.binary())]
)
_JUDGED = pa.schema(
    [
        ("job", pa.int32()),
        ("copy", pa.string()),
        ("kind", pa.string()),
        ("payload", pa.string()),
        ("listed", pa.bool_()),
    ]
)

Start = Callable[[], SparkSession]
Read = Callable[[Any], Iterator[Fact]]
"""Yields the facts of a task."""
Stage = Callable[[Iterable[Fact]], Iterator[list[Any]]]
"""Takes facts that are sorted by job, key, piece and copy. The last stage yields judged rows, others yield facts."""
Make = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Makes rows of a table out of judged rows."""


class Rows(Protocol):
    """All judged rows of a fold, listed or not."""

    def write(self, make: Make, schema: pa.Schema, folder: Path, totals: Mapping[str, str] | None = None) -> None:
        """Write a table as Parquet, one folder per `day`, in place of `folder`. Raises OSError.

        Args:
            totals: columns to add up, with "sum" or "max"; the others name the row.
        """


class Failed(NamedTuple):
    """Outcome of a task that raised an error: an exception of a worker may not be one that the driver can unpickle."""

    reason: str


def outcome_of(step: Callable[[Any], Any], task: Any) -> Any:
    """Return the result of `step`, or `Failed` if it raises an error."""
    try:
        return step(task)
    except Exception as error:
        return Failed(str(error) if isinstance(error, CannotRead) else f"{type(error).__name__}: {error}")


class Executor(Protocol):
    """Executor of the tasks of one wave of broker groups."""

    def fold(
        self, tasks: Sequence[Any], read: Read, stages: Sequence[Stage], store: Callable[[Rows], None] | None = None
    ) -> Iterable[Judged]:
        """Read all tasks, pass their facts through the stages, and return the listed rows. `store` takes all rows."""

    def run(self, step: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        """Run `step` on each task; return the results in order, `Failed` for a step that raised an error."""


class InProcess:
    """Executor of tasks in this process, one after the other."""

    def fold(
        self, tasks: Sequence[Any], read: Read, stages: Sequence[Stage], store: Callable[[Rows], None] | None = None
    ) -> Iterator[Judged]:
        facts: Iterable[Fact] = (fact for task in tasks for fact in read(task))
        for stage in stages[:-1]:
            facts = [fact for some in stage(_sorted(facts)) for fact in some]
        judged: Iterable[Judged] = (row for some in stages[-1](_sorted(facts)) for row in some)
        if store is not None:
            judged = [*judged]
            store(_RowsHere(judged))
        yield from (row for row in judged if row[4])

    def run(self, step: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        return [outcome_of(step, task) for task in tasks]


class OnSpark:
    """Executor of tasks in a Spark session of its own, all of them in one action.

    An action runs with the settings of its session. The caller's session keeps its own, and runs other audits
    meanwhile.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark.newSession()
        for name, value in spark.conf.getAll.items():
            if self._spark.conf.isModifiable(name):
                self._spark.conf.set(name, value)

    def fold(
        self, tasks: Sequence[Any], read: Read, stages: Sequence[Stage], store: Callable[[Rows], None] | None = None
    ) -> Iterator[Judged]:
        parts = _judges(self._spark, len(tasks))
        rows = self._task_rows(tasks).mapInArrow(partial(_read, read), from_arrow_schema(_FACTS))
        for stage in stages:
            ordered = rows.repartition(parts, "job", "key").sortWithinPartitions("job", "key", "piece", "copy")
            schema = _JUDGED if stage is stages[-1] else _FACTS
            rows = ordered.mapInArrow(partial(_stage, stage, schema), from_arrow_schema(schema))
        if store is not None:
            rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            listed = rows.where("listed").toArrow()
            if store is not None:
                store(_RowsOnSpark(rows))
        finally:
            rows.unpersist()
        yield from rows_of(listed)

    def run(self, step: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        found: list[Any] = [None] * len(tasks)
        if tasks:
            rows = self._task_rows(tasks).mapInArrow(partial(_run, step), from_arrow_schema(_OUTCOME))
            for row in rows.collect():
                found[row["number"]] = pickle.loads(row["outcome"])
        return found

    def _task_rows(self, tasks: Sequence[Any]) -> DataFrame:
        """Return a row per task, each in a partition of its own. out: number int, task binary."""
        packed = [pickle.dumps(task, 5) for task in tasks]
        settings = self._spark.conf
        settings.set("spark.sql.leafNodeDefaultParallelism", str(len(packed)))
        settings.set("spark.sql.execution.arrow.localRelationThreshold", str(2 * sum(map(len, packed)) + (64 << 20)))
        return self._spark.createDataFrame(pa.table([range(len(packed)), packed], schema=_TASK))


def _judges(spark: SparkSession, tasks: int) -> int:
    """Return the number of judges' tasks: at least the session's shuffle partitions, more on a larger cluster."""
    cores = spark.sparkContext.defaultParallelism
    return max(int(str(spark.conf.get("spark.sql.shuffle.partitions"))), min(JUDGES_PER_CORE * cores, tasks))


def rows_of(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table, a bounded number at a time: as columns they take a fifth of the memory."""
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        yield from zip(*(column.to_pylist() for column in batch.columns))


def _batch(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = list(zip(*rows)) or [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _tasks(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        for number, task in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()):
            yield number, pickle.loads(task)


def _run(step: Callable[[Any], Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for number, task in _tasks(batches):
        yield _batch([(number, pickle.dumps(outcome_of(step, task), 5))], _OUTCOME)


def _read(read: Read, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _, task in _tasks(batches):
        for step in task:
            yield _batch([*read([step])], _FACTS)


def _stage(stage: Stage, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows in stage(_facts(batches)):
        yield _batch(rows, schema)


def _facts(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """Yield rows; payloads one at a time, as a batch of them may be large."""
    for batch in batches:
        columns = [batch.column(column).to_pylist() for column in range(4)]
        for place, about in enumerate(zip(*columns)):
            yield *about, batch.column(4)[place].as_py()


def _sorted(facts: Iterable[Fact]) -> list[Fact]:
    return sorted(facts, key=itemgetter(0, 1, 2, 3))


class _RowsHere:
    """Judged rows in this process."""

    def __init__(self, rows: Sequence[Judged]) -> None:
        self._rows = rows

    def write(self, make: Make, schema: pa.Schema, folder: Path, totals: Mapping[str, str] | None = None) -> None:
        table = pa.Table.from_batches(make([_batch(self._rows, _JUDGED)]), schema)
        if totals:
            keys = [name for name in schema.names if name not in totals]
            table = table.group_by(keys).aggregate([*totals.items()]).rename_columns([*keys, *totals])
        write_table(table, folder)


class _RowsOnSpark:
    """Judged rows in a Spark session."""

    def __init__(self, rows: DataFrame) -> None:
        self._rows = rows

    def write(self, make: Make, schema: pa.Schema, folder: Path, totals: Mapping[str, str] | None = None) -> None:
        table = self._rows.mapInArrow(make, from_arrow_schema(schema))
        if totals:
            keys = [name for name in schema.names if name not in totals]
            table = table.groupBy(*keys).agg(dict(totals))
            table = table.select(*keys, *(table[f"{how}({name})"].alias(name) for name, how in totals.items()))
        table.write.mode("overwrite").partitionBy("day").parquet(str(folder))


def write_table(table: pa.Table, folder: Path) -> None:
    """Write a table as `Rows.write` does."""
    shutil.rmtree(folder, ignore_errors=True)
    pyarrow.dataset.write_dataset(
        table,
        folder,
        format="parquet",
        partitioning=["day"],
        partitioning_flavor="hive",
        existing_data_behavior="overwrite_or_ignore",
    )


class Executors:
    """Choice of the executor. Owned by one run of the audit.

    Args:
        spark: a session, for Spark alone; a function that starts one, to choose by size; None, for this process alone.
    """

    def __init__(self, spark: SparkSession | Start | None) -> None:
        self._start = spark if callable(spark) else None
        self._session = None if callable(spark) else spark

    def of(self, size: int) -> Executor:
        """Return the executor for `size` bytes of logs."""
        if self._session is None and (self._start is None or size <= HERE_BYTES_MAX):
            return InProcess()
        return OnSpark(self.session())

    def session(self) -> SparkSession:
        """Return the session; start it if need be."""
        if self._session is None:
            assert self._start is not None
            self._session = self._start()
        return self._session
