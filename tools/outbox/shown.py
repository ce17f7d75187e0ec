"""Core. Answers of a watchdog as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qmq.tools.command import bad, warning
from qmq.tools.table import Block, Cell, Column, Table

_ROW = (
    Column("ID", "id"),
    Column("STATE", "state"),
    Column("AGE S", lambda row: round(row["age"])),
    Column("ERRORS", "errors", drop=1),
    Column("SUBJECT", "subject"),
    Column("MESSAGE", "messageId", fold=12),
)
_REASON = Column("REASON", "reason", fold=20)


def stuck_blocks(answer: Mapping[str, Any]) -> Iterator[Block]:
    yield from _each(answer, _stuck)


def _stuck(one: Mapping[str, Any]) -> Iterator[Block]:
    line = f"{one['pending']} to be sent ({one['claimed']} of them under way), oldest {round(one['oldest'])} s"
    yield f"{one['database']}: {line}"
    if one["parked"]:
        yield bad(f"{one['parked']} parked: not sent until OutboxRetry")
    if one["rows"]:
        yield Table((*_ROW, _REASON), one["rows"])


def reconciled_blocks(answer: Mapping[str, Any]) -> Iterator[Block]:
    yield from _each(answer, _reconciled)


def _reconciled(one: Mapping[str, Any]) -> Iterator[Block]:
    counts = one["counts"]
    yield (
        f"{one['database']}: of {sum(counts.values())} rows {counts['inLog']} are in a log, {counts['notInLog']} are "
        f"in none, {counts['unchecked']} could not be checked"
    )
    more = (Column("LOG", "log"), Column("WHERE", lambda row: row["where"] or row["why"], fold=20))
    if one["rows"]:
        yield Table((*_ROW, *more), one["rows"])


def problems_of(answer: Mapping[str, Any]) -> list[str]:
    return [f"{one['database']}: {one['problem']}" for one in answer["databases"] if "problem" in one]


def _each(answer: Mapping[str, Any], blocks: Any) -> Iterator[Block]:
    if not answer["databases"]:
        yield Cell("no database is registered in this room")
    for one in answer["databases"]:
        if "problem" in one:
            yield warning(f"{one['database']}: not looked at, {one['problem']}")
        else:
            yield from blocks(one)
