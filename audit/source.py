"""Shell. The Spark data source `qmq`: one copy of a message log as rows, from a data directory or a running broker.

    spark.dataSource.register(LogSource)
    spark.read.format("qmq").option("path", "/data/b1").load()

    option           meaning
    path             data directory; every executor must see it
    broker, token    "ip:control_port" of a running broker and an API token; no shared disk is needed
    rows             "messages" (default), "frames", or "records" (every byte, for the audit; see audit.rows)
    columns          of messages: names with commas, all by default; properties are decoded only if they are named
    begin, end       offsets, half-open; by default the whole log
    ranges           "begin-end,begin-end" instead: only these
    until_ms         of records: when the audit began; a frame of a later time is a problem
    stored           of records: "true" for facts of what may be stored once (audit.messages)
    piece_bytes      bytes of log per task (default 64 MiB), on a grid that is the same for both copies

A range that does not parse is a row whose `problem` says why; the read goes on behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from qmq.audit import rows
from qmq.audit.copies import open_copy
from qmq.audit.line import FOREVER_MS
from qmq.audit.walk import Walk

PIECE_BYTES = 64 << 20
SCHEMAS = {"records": rows.RECORDS, "frames": rows.FRAMES, "messages": rows.MESSAGES}


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
        return LogReader(dict(self.options), schema.fieldNames())


@dataclass(frozen=True)
class Piece(InputPartition):
    """Frames that begin in `[begin, end)`. `chain` is the chain before `begin`, known at the log's start."""

    begin: int
    end: int
    is_start: bool
    chain: int | None


class LogReader(DataSourceReader):
    """Plans the pieces on the driver, reads one per task."""

    def __init__(self, options: dict[str, str], columns: list[str]) -> None:
        # Spark hands over a case-insensitive mapping whose keys are lower-case already.
        self._options, self._columns = options, columns

    def partitions(self) -> list[InputPartition]:
        with closing(open_copy(self._options)) as copy:
            log = copy.describe()
        ranges = _ranges(self._options, log.start, log.end)
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
            yield from self._batches(walk, partition)

    def _batches(self, walk: Walk, piece: Piece) -> Iterator[Any]:
        match self._options.get("rows", "messages"):
            case "records":
                options = self._options
                until_ms = int(options.get("until_ms", FOREVER_MS))
                return rows.record_batches(
                    walk, piece.begin, until_ms=until_ms, wants_stored=options.get("stored") == "true"
                )
            case "frames":
                return rows.frame_batches(walk)
            case _:
                return rows.message_batches(walk, self._columns)


def split_range(begin: int, end: int, grid: int) -> Iterator[tuple[int, int]]:
    """Split `[begin, end)` at the multiples of `grid`, so that both copies are split at the same offsets."""
    while begin < end:
        until = min(end, (begin // grid + 1) * grid)
        yield begin, until
        begin = until


def _ranges(options: dict[str, str], start: int, end: int) -> list[tuple[int, int]]:
    if text := options.get("ranges"):
        pairs = (pair.split("-") for pair in text.split(","))
        return [(int(begin), int(until)) for begin, until in pairs]
    return [(int(options.get("begin", start)), int(options.get("end", end)))]
