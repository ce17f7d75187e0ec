"""Shell. The Spark data source `qmq`: message logs as tables, from data directories or running brokers.

    qmq.audit.register(spark)
    spark.read.format("qmq").option("path", "/data/b1").load()

    option             meaning
    path               data directory; every executor must see it
    broker, token      "ip:control_port" of a running broker and an API token; no shared disk is needed
    metaserver, token  all broker groups that it knows; of each, the slave's copy if it answers, else the master's
    rows               "messages" (default), "frames", "progress" (audit.tables), or "records" (every byte, for the
                       audit; see audit.rows)
    columns            names with commas, all by default; of messages, properties are decoded only if they are named
    subject            only frames of these subjects, names with commas
    since, until       only frames that were stored in `[since, until)`: 2026-01-31T12:00:00Z, or ms since 1970
    contains           only frames of messages in which these texts, in lines, stand as id, tag, or part of a property
    damage             "rows" (default): a range that does not parse is a row whose `problem` says why, and the read
                       goes on behind it; "fail": then the query fails
    begin, end         offsets, half-open; by default the whole log
    ranges             "begin-end,begin-end" instead: only these
    until_ms           of records: when the audit began; a frame of a later time is a problem
    stored             of records: "true" for facts of what may be stored once (audit.messages)
    piece_bytes        bytes of log per task (default 64 MiB), on a grid that is the same for both copies

`spark.readStream.format("qmq")` takes the same options but `begin`, `end` and `ranges`, of all but `records`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from qmq.audit import rows, tables
from qmq.audit.copies import open_copy
from qmq.audit.extents import PIECE_BYTES, split_range
from qmq.audit.line import FOREVER_MS
from qmq.audit.table import TableReader, TableStream, ranges_of
from qmq.audit.walk import Walk

SCHEMAS = tables.SCHEMAS | {"records": rows.RECORDS}


class LogSource(DataSource):
    """What `spark.read.format("qmq")` makes. See the module's text for the options."""

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
        reader = LogReader if self.options.get("rows") == "records" else TableReader
        return reader(dict(self.options), schema.fieldNames())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self.options.get("rows") == "records":
            raise ValueError("records are what the audit reads of a range; stream messages, frames or progress")
        return TableStream(dict(self.options), schema.fieldNames())


@dataclass(frozen=True)
class Piece(InputPartition):
    """Frames that begin in `[begin, end)`. `chain` is the chain before `begin`, known at the log's start."""

    begin: int
    end: int
    is_start: bool
    chain: int | None


class LogReader(DataSourceReader):
    """Reads records: plans the pieces on the driver, reads one per task."""

    def __init__(self, options: dict[str, str], columns: list[str]) -> None:
        # Spark hands over a case-insensitive mapping whose keys are lower-case already.
        self._options, self._columns = options, columns

    def partitions(self) -> list[InputPartition]:
        with closing(open_copy(self._options)) as copy:
            log = copy.describe()
        ranges = ranges_of(self._options, log)
        grid = int(self._options.get("piece_bytes", PIECE_BYTES))
        pieces: list[InputPartition] = []
        for begin, end in ranges:
            for at, until in split_range(max(begin, log.start), min(end, log.end), grid):
                pieces.append(Piece(at, until, at == log.start, log.chain if at == log.start else None))
        return pieces or [Piece(log.end, log.end, True, None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Piece)
        with closing(open_copy(self._options, limit=partition.end)) as copy:
            walk = Walk(copy, partition.begin, partition.end, chain=partition.chain, is_start=partition.is_start)
            until_ms = int(self._options.get("until_ms", FOREVER_MS))
            wants_stored = self._options.get("stored") == "true"
            yield from rows.record_batches(walk, partition.begin, until_ms=until_ms, wants_stored=wants_stored)
