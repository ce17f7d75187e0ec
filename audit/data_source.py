"""Shell. The Spark data source `qmq`, message logs as tables, and the Spark session it is registered in.

    qmq.audit.register(spark)
    spark.read.format("qmq").option("path", "/data/b1").load()

    option             meaning
    path               data directory; every executor must see it
    broker, token      "host:control_port" of a running broker and an API token; no shared disk is needed
    metaserver, token  all its broker groups; of each, the slave's copy if it answers, else the master's
    rows               "messages" (default), "frames" or "progress" (audit.tables)
    columns            names with commas, all by default; properties of messages are decoded only if named
    properties         names with commas, or each with a line end: only these are decoded into the column `properties`
    subject            only frames of these subjects: names with commas, or each with a line end if one has a comma
    since, until       only frames stored in `[since, until)`: 2026-01-31T12:00:00Z, or ms since 1970
    sequences          "begin-end", half-open: only frames of messages with these sequences
    contains           only frames of messages with these texts, one a line, as id, tag, or part of a property
    damage             "rows" (default): a damaged range is a row with its reason in `problem`, and the read continues
                       after it; "fail": the query fails
    begin, end         offsets, half-open; by default the whole log
    ranges             "begin-end,begin-end" instead: only these
    piece_bytes        bytes of log per task (default 64 MiB), on one grid for all copies

`spark.readStream.format("qmq")` takes the same options except `begin`, `end` and `ranges`, and these:

    startingOffsets    "earliest" (default), "latest", or a time as of `since`: from the first frame stored then. It
                       counts for a new checkpoint only
    maxBytesPerTrigger  log bytes of one batch, of all broker groups together; by default all that is there

The driver inspects the copies and plans parts; each task opens the copy of its part and reads only that.

Conditions of a query do not reach the reader. Spark 4 keeps a pushed filter in the relation, and applies it to every
other query of the same DataFrame.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark import SparkConf, SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import qmq
from qmq.audit.copies import CannotRead, Description, open_copy
from qmq.audit.places import find_places
from qmq.audit.selection import (
    PIECE_BYTES,
    Extent,
    Plan,
    WrongOption,
    extents,
    parts,
    range_option,
    segments_since,
    selection_of,
    time_option_ms,
)
from qmq.audit.tables import SCHEMAS, table_batches
from qmq.audit.walk import Walk

_SOURCES = frozenset({"path", "broker", "token", "metaserver"})
_COMMON = _SOURCES | {
    "rows",
    "columns",
    "subject",
    "since",
    "until",
    "sequences",
    "contains",
    "damage",
    "piece_bytes",
    "properties",
}
_BATCH = _COMMON | {"begin", "end", "ranges"}
_STREAM = _COMMON | {"startingOffsets", "maxBytesPerTrigger"}


class Place(NamedTuple):
    """One copy of a broker group's log, as options of `open_copy`; an unnamed group has the name ''."""

    group: str
    options: Mapping[str, str]
    log: Description


@dataclass(frozen=True)
class Part(InputPartition):
    """Extents of one copy that one task reads."""

    group: str
    place: Mapping[str, str]
    extents: tuple[Extent, ...]


def walks(part: Part) -> Iterator[Walk]:
    """Yield a walk over each extent of a part; raise CannotRead."""
    if part.extents:
        with closing(open_copy(part.place)) as copy:
            for extent in part.extents:
                copy.read_until(extent.end)
                yield Walk(copy, extent.begin, extent.end, chain=extent.chain, is_start=extent.is_start)


class _TableReading:
    """Common part of both readers. Spark sends it to each task, so it holds only options."""

    def __init__(self, given: Mapping[str, str], columns: list[str], names: frozenset[str]) -> None:
        self.options = options = checked_options(given, names)
        self.columns = columns
        self.name = options.get("rows", "messages")
        self.selection = selection_of(options)
        self.piece_bytes = number_option(options, "piece_bytes", PIECE_BYTES)
        damage = options.get("damage", "rows")
        if damage not in ("rows", "fail"):
            raise WrongOption(f"option 'damage' is {damage!r}, not 'rows' or 'fail'")
        self.is_strict = damage == "fail"

    def places(self) -> list[Place]:
        """Return one described copy of each broker group in the options; raise CannotRead."""
        if not (metaserver := self.options.get("metaserver")):
            return [_look_at(self.options)]
        groups = find_places(metaserver, self.options.get("token", ""))
        return [_first_of(name, copies) for name, copies in groups.items()]

    def parts(self, place: Place, ranges: Iterable[tuple[int, int]], *, on_frames: bool = False) -> Iterator[Part]:
        log, grid = place.log, self.piece_bytes
        plan = Plan(log.start, log.end, log.chain, log.segments)
        with closing(open_copy(place.options)) as copy:
            found = extents(
                copy, plan, self.selection, ranges, grid=grid, by_index=self.name == "messages", on_frames=on_frames
            )
            for extents_of_part in parts(found, grid):
                yield Part(place.group, place.options, extents_of_part)

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, Part)
        group = {"broker_group": part.group}
        for walk in walks(part):
            yield from table_batches(walk, self.name, self.columns, self.selection, group, is_strict=self.is_strict)


def _look_at(options: Mapping[str, str]) -> Place:
    place = {name: options[name] for name in ("path", "broker", "token") if options.get(name)}
    with closing(open_copy(place)) as copy:
        return Place(copy.owner().group, place, copy.describe())


def _first_of(group: str, copies: Mapping[str, Mapping[str, str]]) -> Place:
    """Return the slave's copy if it answers, else the master's: the slave's broker serves fewer clients.

    The higher of the watermarks counts. It holds for both disks, and a slave learns it only with the next frame.
    """
    found: list[Place] = []
    why = CannotRead(f"broker group {group} has no copy")
    for _, options in sorted(copies.items(), reverse=True):
        try:
            found.append(_look_at(options))
        except CannotRead as error:
            why = error
    if not found:
        raise why
    watermark = max(place.log.high_watermark for place in found)
    return found[0]._replace(group=group, log=found[0].log._replace(high_watermark=watermark))


class TableReader(DataSourceReader):
    """Batch reader of each log, up to its end at planning time."""

    def __init__(self, options: Mapping[str, str], columns: list[str]) -> None:
        self._table = _TableReading(options, columns, _BATCH)

    def partitions(self) -> list[InputPartition]:
        table = self._table
        found: list[InputPartition] = []
        for place in table.places():
            found += table.parts(place, ranges_of(table.options, place.log))
        return found or [Part("", {}, ())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._table.read(partition)


class TableStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader of each log, from its starting offset on and up to the high watermark.

    An offset is {broker group: offset in its log}, at a frame. Bytes below the high watermark are the same on both
    copies for good. So a range read again, after a restart or from the other copy, has the same rows.
    """

    def __init__(self, options: Mapping[str, str], columns: list[str]) -> None:
        self._table = _TableReading(options, columns, _STREAM)
        self._starting = self._table.options.get("startingOffsets", "earliest")
        self._since_ms = 0
        if self._starting not in ("earliest", "latest"):
            self._since_ms = time_option_ms({"startingOffsets": self._starting}, "startingOffsets", 0)
        self._bytes_max = number_option(self._table.options, "maxBytesPerTrigger", 0)
        self._target: dict[str, int] | None = None
        """Last offsets of a query with the trigger availableNow."""

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._bytes_max) if self._bytes_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {place.group: _readable_end(place) for place in self._table.places()}

    def initialOffset(self) -> dict[str, int]:
        places = self._table.places()
        if self._starting == "latest":
            return {place.group: _readable_end(place) for place in places}
        if self._since_ms:
            return {place.group: _first_since(place, self._since_ms) for place in places}
        return {place.group: place.log.start for place in places}

    def latestOffset(self, start: dict[str, int] | None = None, limit: ReadLimit | None = None) -> dict[str, int]:
        """Return the offsets up to which the next batch reads: the high watermarks, or frames within the limit.

        They are never lower than before, even if another copy with a lower watermark answers now.
        """
        known = dict(start or {})
        waiting: list[tuple[int, int, Place]] = []
        for place in self._table.places():
            begin, end = known.get(place.group, place.log.start), _readable_end(place)
            if self._target is not None:
                end = min(end, self._target.get(place.group, begin))
            known[place.group] = begin
            if end > begin:
                waiting.append((end - begin, begin, place))
        left = limit.max_bytes if isinstance(limit, ReadMaxBytes) else sum(size for size, _, _ in waiting)
        for number, (size, begin, place) in enumerate(sorted(waiting, key=lambda group: group[0])):
            share = left // (len(waiting) - number)  # a group with less leaves the rest to others
            end = begin + size
            if share < size:
                end = _frame_from(place, begin + max(1, share), end)
            known[place.group] = end
            left = max(0, left - (end - begin))
        return known

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        found: list[InputPartition] = []
        if start == end:
            return found
        for place in self._table.places():
            begin, until = start.get(place.group, place.log.start), end.get(place.group, 0)
            if begin >= until:
                continue
            self._check_kept(place, begin, until)
            found += self._table.parts(place, [(begin, until)], on_frames=True)
        return found

    def _check_kept(self, place: Place, begin: int, until: int) -> None:
        log = place.log
        if begin < log.start:
            raise CannotRead(
                f"retention has removed [{begin}, {log.start}) of broker group {place.group!r} before the stream read "
                "it: begin with a new checkpoint, and keep segments longer (retention_hours)"
            )
        if until > log.end:
            raise CannotRead(
                f"the log of broker group {place.group!r} ends at {log.end}, the stream has read up to {until}: it is "
                "another log, or a copy behind; name the right one, or begin with a new checkpoint"
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._table.read(partition)


def _readable_end(place: Place) -> int:
    return min(place.log.high_watermark, place.log.end)


def _frame_from(place: Place, offset: int, end: int) -> int:
    """Return the offset of the first frame at or after `offset`, or `end`."""
    with closing(open_copy(place.options)) as copy:
        walk = Walk(copy, offset, end)
        walk.enter()
        return walk.at


def _first_since(place: Place, since_ms: int) -> int:
    """Return the offset of the first frame stored at or after a time, or the end."""
    log, end = place.log, _readable_end(place)
    plan = Plan(log.start, log.end, log.chain, log.segments)
    with closing(open_copy(place.options)) as copy:
        for begin, until in segments_since(copy, plan, since_ms):
            for window in Walk(copy, begin, min(until, end), is_start=True).windows():
                for frame in window.frames:
                    if frame.timestamp_ms >= since_ms:
                        return frame.offset
    return end


def ranges_of(options: Mapping[str, str], log: Description) -> list[tuple[int, int]]:
    """Return the ranges given by the options `begin`, `end` and `ranges`; the whole log by default."""
    if text := options.get("ranges"):
        return [range_option(pair, "ranges") for pair in text.split(",")]
    return [(number_option(options, "begin", log.start), number_option(options, "end", log.end))]


def checked_options(given: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    """Return the options under their own names: Spark may pass them in lower case. Raise WrongOption for others."""
    known = {name.lower(): name for name in names}
    if unknown := sorted(name for name in given if name.lower() not in known):
        raise WrongOption(f"unknown option {unknown[0]!r}; options are {', '.join(sorted(names))}")
    options = {known[name.lower()]: value for name, value in given.items()}
    if len(places := sorted({"path", "broker", "metaserver"} & options.keys())) != 1:
        raise WrongOption(f"name one of path, broker and metaserver, not {' and '.join(places) or 'none'}")
    return options


def number_option(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name, "")
    if text and not text.isdigit():
        raise WrongOption(f"option '{name}' is {text!r}, not a number of bytes")
    return int(text) if text else default


class LogSource(DataSource):
    """Data source behind `spark.read.format("qmq")`. The module's docstring lists its options."""

    @classmethod
    def name(cls) -> str:
        return "qmq"

    def schema(self) -> StructType:
        kind = self.options.get("rows", "messages")
        if kind not in SCHEMAS:
            raise ValueError(f"option 'rows' is {kind!r}, not one of {', '.join(SCHEMAS)}")
        schema: pa.Schema = SCHEMAS[kind]
        names = [name.strip() for name in self.options.get("columns", "").split(",") if name.strip()]
        if unknown := [name for name in names if name not in schema.names]:
            raise ValueError(f"option 'columns' names {', '.join(unknown)}; {kind} have {', '.join(schema.names)}")
        return from_arrow_schema(pa.schema([schema.field(name) for name in names or schema.names]))

    def reader(self, schema: StructType) -> DataSourceReader:
        return TableReader(dict(self.options), schema.fieldNames())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return TableStream(dict(self.options), schema.fieldNames())


_ROOT = Path(qmq.__file__).resolve().parents[1]
_QUICK_JVM = "-XX:TieredStopAtLevel=1"
"""The work is done in Python. The JVM's second compiler took as much CPU as reading: for 2 GiB of log in frames of 100
messages, the JVM took 4.2 of 8.4 CPU seconds, and 1.4 of 5.3 without that compiler. Starting takes 7 s instead of 11 s.
"""


def start_spark(master: str | None, name: str, **config: str) -> SparkSession:
    """Return a session with the data source `qmq` registered; `config` has double underscores for dots.

    Without a `master`, spark-submit or spark-defaults.conf set it; the default is `local[*]`. Their other settings
    apply, too. On `local[...]` all traffic stays on loopback. Elsewhere our code is sent to the executors.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", _QUICK_JVM)  # for a JVM started here; spark-defaults.conf overrides it
    if _is_here(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    asked = {key.replace("__", "."): value for key, value in config.items()}
    if master is not None:
        asked["spark.master"] = master
    with _environment(asked):
        conf = _submitted()
        for key, value in _defaults(conf.get("spark.master")).items():
            conf.setIfMissing(key, value)
        conf.setAll([*asked.items(), ("spark.app.name", name)])
        spark: SparkSession = SparkSession.builder.config(conf=conf).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if is_submitted() or not str(spark.sparkContext.master).startswith("local"):
        _ship(spark)
    _register(spark)
    return spark


@contextmanager
def _environment(asked: Mapping[str, str]) -> Iterator[None]:
    """Set the environment of a JVM started here.

    PYTHONPATH has our modules, because the JVM starts the process that plans a Python data source. The arguments have
    the settings that count only at the JVM's start, such as its memory.
    """
    # A JVM started for Python behaves as a shell and draws progress bars.
    launched = {"spark.ui.showConsoleProgress": "false"} | dict(asked)
    confs = [shlex.join(["--conf", f"{name}={value}"]) for name, value in launched.items()]
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    given = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYSPARK_SUBMIT_ARGS": " ".join([*confs, os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")]),
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _submitted() -> SparkConf:
    """Return the settings of spark-submit, spark-defaults.conf and the environment."""
    SparkContext.getSystemProperty("spark.master")  # starts the JVM, which alone reads them
    return SparkConf()


def is_submitted() -> bool:
    """Return whether spark-submit started this process. Its JVM was there before and lacks our PYTHONPATH."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _is_here(master: str | None) -> bool:
    return master is not None and (master.startswith("local") or "127.0.0.1" in master or "localhost" in master)


def _defaults(master: str | None) -> dict[str, str]:
    is_local = master is None or master.startswith("local")
    settings = {
        "spark.master": "local[*]",
        "spark.ui.enabled": "false",
        # The shuffle is a few rows per piece, not the log; more partitions only cost their start.
        "spark.sql.shuffle.partitions": "4" if is_local else "16",
        "spark.sql.session.timeZone": "UTC",
        # A row may hold the ids of a whole piece, so a batch must not have thousands of rows.
        "spark.sql.execution.arrow.maxBytesPerBatch": "32m",
        "spark.executor.extraJavaOptions": _QUICK_JVM,
        # Between the JVM and its Python workers; measured: 290 MB/s per core instead of 240 over loopback TCP.
        "spark.python.unix.domain.socket.enabled": "true",
    }
    if is_local or _is_here(master):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return settings


def register(spark: SparkSession) -> None:
    """Register `spark.read.format("qmq")` and `spark.readStream.format("qmq")` in your own session; repeatable.

    Spark Connect sessions work, too. Our code is sent to the executors.
    """
    _ship(spark)
    _register(spark)


def _register(spark: SparkSession) -> None:
    spark.dataSource.register(LogSource)


def _ship(spark: SparkSession) -> None:
    """Send our packages to every executor, as one archive that Python imports from."""
    folder = Path(tempfile.mkdtemp(prefix="qmq-audit-"))
    # Executors fetch the archive when they start, so it stays until this process ends.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = folder / "qmq-audit.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        # In a checkout `qmq/audit` is a link; `os.walk` can follow it, `Path.rglob` does not.
        for folder_name, _, names in os.walk(_ROOT / "qmq", followlinks=True):
            for path in (Path(folder_name, name) for name in names if name.endswith(".py")):
                file.write(path, path.relative_to(_ROOT))
    if isinstance(spark, SparkSession):
        spark.sparkContext.addPyFile(str(archive))
    else:  # Spark Connect, which has no SparkContext
        spark.addArtifacts(str(archive), pyfile=True)


def read_copy(spark: SparkSession, place: dict[str, str], **options: object) -> DataFrame:
    """Read one copy with the data source's options; `place` is `audit.copies.place_options`."""
    given = place | {key: str(value) for key, value in options.items()}
    return spark.read.format("qmq").options(**given).load()


def in_ms(rows: DataFrame) -> DataFrame:
    """Replace the timestamps `stored_at` and `due_at` by numbers to compute with: `timestamp_ms` and `due_ms`."""
    for name, number in (("stored_at", "timestamp_ms"), ("due_at", "due_ms")):
        if name in rows.columns:
            rows = rows.withColumn(name, F.unix_millis(name)).withColumnRenamed(name, number)
    return rows
