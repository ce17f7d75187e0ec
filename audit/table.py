"""Shell. Readers of a log's tables for Spark: once, with the filters that Spark pushes down, or as a stream by offset.

The driver looks at the copies and plans parts; each task opens the copy of its part and reads that alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition

from qmq.audit.brokers import find_places
from qmq.audit.copies import CannotRead, Description, open_copy
from qmq.audit.extents import PIECE_BYTES, Extent, Plan, extents, parts
from qmq.audit.tables import table_batches
from qmq.audit.walk import Walk
from qmq.audit.wanted import WrongOption, from_options, narrow


class Place(NamedTuple):
    """One copy of a broker group's log, as options of `open_copy`; an unnamed group has the name ''."""

    group: str
    options: Mapping[str, str]
    log: Description


@dataclass(frozen=True)
class Part(InputPartition):
    """What one task reads: parts of one copy."""

    group: str
    place: Mapping[str, str]
    extents: tuple[Extent, ...]


class _Table:
    """What both readers share. Spark sends it to each task, so it holds options alone."""

    def __init__(self, options: Mapping[str, str], columns: list[str]) -> None:
        self.options, self.columns = options, columns
        self.name = options.get("rows", "messages")
        self.wanted = from_options(options)
        damage = options.get("damage", "rows")
        if damage not in ("rows", "fail"):
            raise WrongOption(f"option 'damage' is {damage!r}, not 'rows' or 'fail'")
        self.is_strict = damage == "fail"

    def places(self) -> list[Place]:
        """Return one copy of each broker group that the options name, and what it holds; raises CannotRead."""
        if not (metaserver := self.options.get("metaserver")):
            return [_look_at(self.options)]
        groups = find_places(metaserver, self.options.get("token", ""))
        return [_first_of(name, copies) for name, copies in groups.items()]

    def parts(self, place: Place, ranges: Iterable[tuple[int, int]], *, on_frames: bool = False) -> Iterator[Part]:
        log, grid = place.log, int(self.options.get("piece_bytes", PIECE_BYTES))
        plan = Plan(log.start, log.end, log.chain, log.segments)
        with closing(open_copy(place.options)) as copy:
            found = extents(
                copy, plan, self.wanted, ranges, grid=grid, by_index=self.name == "messages", on_frames=on_frames
            )
            for one in parts(found, grid):
                yield Part(place.group, place.options, one)

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, Part)
        if not part.extents:
            return
        with closing(open_copy(part.place)) as copy:
            for extent in part.extents:
                copy.read_until(extent.end)
                walk = Walk(copy, extent.begin, extent.end, chain=extent.chain, is_start=extent.is_start)
                group = {"broker_group": part.group}
                yield from table_batches(walk, self.name, self.columns, self.wanted, group, is_strict=self.is_strict)


def _look_at(options: Mapping[str, str]) -> Place:
    place = {name: options[name] for name in ("path", "broker", "token") if options.get(name)}
    with closing(open_copy(place)) as copy:
        return Place(copy.owner().group, place, copy.describe())


def _first_of(group: str, copies: Mapping[str, Mapping[str, str]]) -> Place:
    """Return the slave's copy, whose broker has fewer clients to serve, if it answers; else the master's.

    The higher of the two watermarks counts: it is true of both disks, and a slave learns it with the next frame only.
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
    """Reads what there is when the query is planned, to the end of each log."""

    def __init__(self, options: Mapping[str, str], columns: list[str]) -> None:
        self._table = _Table(options, columns)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keep what narrows what has to be read. Spark applies all of them again: bounds go by whole frames."""
        self._table.wanted = narrow(self._table.wanted, filters, of_messages=self._table.name == "messages")
        return filters

    def partitions(self) -> list[InputPartition]:
        table = self._table
        found: list[InputPartition] = []
        for place in table.places():
            found += table.parts(place, ranges_of(table.options, place.log))
        return found or [Part("", {}, ())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._table.read(partition)


class TableStream(DataSourceStreamReader):
    """Reads each log from its start, and goes on behind what was read, as far as the high watermark has come.

    An offset is {broker group: offset in its log}. Below the high watermark both copies have the same bytes for
    good, so a range that is read again, after a restart or from the other copy, has the same rows.
    """

    def __init__(self, options: Mapping[str, str], columns: list[str]) -> None:
        self._table = _Table(options, columns)

    def initialOffset(self) -> dict[str, int]:
        return {place.group: place.log.start for place in self._table.places()}

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        """Return how far the logs are promised; never back, if a copy that is asked now knows less."""
        known = dict(start or {})
        for place in self._table.places():
            begin = known.get(place.group, place.log.start)
            known[place.group] = max(begin, min(place.log.high_watermark, place.log.end))
        return known

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        found: list[InputPartition] = []
        if start == end:
            return found
        for place in self._table.places():
            begin, until = start.get(place.group, place.log.start), end.get(place.group, 0)
            if begin >= until:
                continue
            if begin < place.log.start or until > place.log.end:
                text = f"[{begin}, {until}) of broker group {place.group!r} is to be read"
                raise CannotRead(f"{text}, its log has [{place.log.start}, {place.log.end})")
            found += self._table.parts(place, [(begin, until)], on_frames=True)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._table.read(partition)


def ranges_of(options: Mapping[str, str], log: Description) -> list[tuple[int, int]]:
    """Return what the options `begin`, `end` and `ranges` name of a log; all of it by default."""
    if text := options.get("ranges"):
        pairs = (pair.split("-") for pair in text.split(","))
        return [(int(begin), int(until)) for begin, until in pairs]
    return [(int(options.get("begin", log.start)), int(options.get("end", log.end)))]
