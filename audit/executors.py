"""Shell. The two ways to run the tasks of an audit: in this process, or on Spark.

Both run the same readers, judges and comparisons. This process is faster for logs smaller than those that
Spark could read during its own start. On Spark, each task is a row, so a task receives nothing of the others:

    facts    job int, key string, piece long, copy string, payload binary (`audit.plan`)
    judged   job int, copy string, kind string, payload string, listed boolean

Spark joins and compiles nothing: the plan is one sort with two functions of ours around it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.storagelevel import StorageLevel

from qmq.audit.copies import CannotRead
from qmq.audit.plan import Fact, Judged, Task, judge_facts, read_task

HERE_BYTES_MAX = 1 << 30
"""Bytes of all copies that are read in this process; beyond, Spark pays for its start of 7 CPU seconds on two cores."""
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
    """Runs the tasks of one wave of broker groups."""

    def judge(self, tasks: Sequence[Task], store: Callable[[DataFrame], None] | None = None) -> Iterable[Judged]:
        """Read all tasks, judge their facts, and return the listed rows. `store` takes the table of all rows."""

    def run(self, step: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        """Run `step` on each task; return the results in order, `Failed` for a step that raised an error."""


class InProcess:
    """Runs tasks one after the other in this process. It stores no tables."""

    def judge(self, tasks: Sequence[Task], store: Callable[[DataFrame], None] | None = None) -> Iterator[Judged]:
        facts: list[Fact] = [fact for task in tasks for fact in read_task(task)]
        facts.sort(key=itemgetter(0, 1, 2, 3))
        for rows in judge_facts(facts):
            yield from (row for row in rows if row[4])

    def run(self, step: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        return [outcome_of(step, task) for task in tasks]


class OnSpark:
    """Runs tasks in a Spark session of its own, all of them in one action.

    Each action takes settings of the session. The caller's session keeps its own, and runs other audits meanwhile.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark.newSession()
        for name, value in spark.conf.getAll.items():
            if self._spark.conf.isModifiable(name):
                self._spark.conf.set(name, value)

    def judge(self, tasks: Sequence[Task], store: Callable[[DataFrame], None] | None = None) -> Iterator[Judged]:
        parts = _judges(self._spark, len(tasks))
        facts = self._task_rows(tasks).mapInArrow(_read, from_arrow_schema(_FACTS))
        ordered = facts.repartition(parts, "job", "key").sortWithinPartitions("job", "key", "piece", "copy")
        judged = ordered.mapInArrow(_judge, from_arrow_schema(_JUDGED))
        if store is not None:
            judged = judged.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            listed = judged.where("listed").toArrow()
            if store is not None:
                store(judged)
        finally:
            judged.unpersist()
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


def _read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _, task in _tasks(batches):
        for step in task:
            yield _batch([*read_task([step])], _FACTS)


def _judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows in judge_facts(_facts(batches)):
        yield _batch(rows, _JUDGED)


def _facts(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """Yield rows; payloads one at a time, as a batch of them may be large."""
    for batch in batches:
        columns = [batch.column(column).to_pylist() for column in range(4)]
        for place, about in enumerate(zip(*columns)):
            yield *about, batch.column(4)[place].as_py()


class Executors:
    """Choice of the executor. Owned by one run of the audit.

    Args:
        spark: a session, for Spark alone; a function that starts one, to choose by size; None, for this process alone.
    """

    def __init__(self, spark: SparkSession | Start | None) -> None:
        self._start = spark if callable(spark) else None
        self._session = None if callable(spark) else spark

    def of(self, size: int, *, stores: bool = False) -> Executor:
        """Return the executor for `size` bytes of logs; `stores`: tables are stored."""
        if self._session is None and (self._start is None or (size <= HERE_BYTES_MAX and not stores)):
            return InProcess()
        return OnSpark(self.session())

    def in_use(self) -> SparkSession | None:
        """Return the session if there is one."""
        return self._session

    def session(self) -> SparkSession:
        """Return the session; start it if need be."""
        if self._session is None:
            if self._start is None:
                raise CannotRead("this needs Spark, and the audit runs without it")
            self._session = self._start()
        return self._session
