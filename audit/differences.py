"""Shell. Where copies differ, both are read again frame by frame and compared: one Spark action for all groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.storagelevel import StorageLevel

from qmq.audit.comparison import COLUMNS, compare
from qmq.audit.copies import open_copy
from qmq.audit.reading import LogRange
from qmq.audit.schema import COPIES
from qmq.audit.walk import Walk, Window
from qmq.log.frame import Frame

_TEXTS = frozenset({"subject", "producer", "batch", "chain", "body"})
_OF_PAIR = pa.schema([("pair", pa.int32()), ("side", pa.string()), ("due", pa.bool_())])
_ROWS = pa.schema([*_OF_PAIR, *((name, pa.string() if name in _TEXTS else pa.int64()) for name in COLUMNS)])
_NO_RANGE = "SELECT 0 AS d_pair, '' AS d_copy, 0L AS d_offset, 0L AS d_end WHERE false"
_RANGES = "d_pair int, d_copy string, d_offset long, d_end long"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two copies with other bytes in some `pieces`: their places and logs, by the names of COPIES, and broken ranges as
    (name, begin, end): that frames are missing there is not said again."""

    places: Mapping[str, Mapping[str, str]]
    logs: Mapping[str, LogRange]
    pieces: Sequence[tuple[int, int]]
    watermark: int
    damaged: Sequence[tuple[str, int, int]]


def differences(spark: SparkSession, pairs: Sequence[Pair]) -> list[list[Row]]:
    """Return of each pair its findings, as rows of `audit.schema.FINDINGS` and `frames`: how many one stands for."""
    tasks = [(number, begin, end) for number, pair in enumerate(pairs) for begin, end in pair.pieces]
    found: list[list[Row]] = [[] for _ in pairs]
    if not tasks:
        return found
    ranges = [(number, *damaged) for number, pair in enumerate(pairs) for damaged in pair.damaged]
    damaged = spark.createDataFrame(ranges, _RANGES) if ranges else spark.sql(_NO_RANGE)
    rows = spark.range(0, len(tasks), 1, len(tasks))
    frames = rows.mapInArrow(partial(_frames, tuple(pairs), tasks), from_arrow_schema(_ROWS))
    frames = frames.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        for row in compare(frames, damaged).collect():
            said = row.asDict()
            found[said.pop("pair")].append(said)
    finally:
        frames.unpersist()
    return found


def _frames(pairs: Sequence[Pair], tasks: Sequence[tuple[int, int, int]], batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for task in batch.column(0).to_pylist():
            number, begin, end = tasks[task]
            for side in COPIES:
                yield from _of_copy(pairs[number], number, side, begin, end)


def _of_copy(pair: Pair, number: int, side: str, begin: int, end: int) -> Iterator[Any]:
    log = pair.logs[side]
    is_start, until = begin == log.start, max(begin, min(end, log.end))
    with closing(open_copy(pair.places[side], limit=end)) as copy:
        for window in Walk(copy, begin, until, chain=log.chain if is_start else None, is_start=is_start).windows():
            rows = [_row(window, frame) | {"pair": number, "side": side} for frame in window.frames]
            for row in rows:
                row["due"] = row["offset"] < pair.watermark
            yield pa.RecordBatch.from_pylist(rows, _ROWS)


def _row(window: Window, frame: Frame) -> Row:
    """Return COLUMNS of a frame; without a hash of its body, if that is damaged."""
    is_whole = frame.offset not in window.damaged
    return frame._asdict() | {
        "term": frame.epoch.term,
        "boot": frame.epoch.boot,
        "producer": f"{frame.producer:016x}",
        "batch": f"{frame.batch:016x}",
        "chain": f"{frame.chain:016x}",
        "body": blake2b(window.body(frame), digest_size=16).hexdigest() if is_whole else None,
    }
