"""Core. Table of the outbox: statements as text for any driver, and the passing of values.

    id           bigint, by the database, never reused
    content      long text         the message: qmq.outbox.row
    status       smallint, 0       0: to be sent; below: parked until an operator decides
    error        int, 0            failed attempts of the watchdog
    create_time  moment            time of writing, by the database's clock
    update_time  moment            last change, by the database's clock
    reason       varchar(500)      reason of parking or of the last failure; NULL
    claim        varchar(128)      the watchdog's batch with this row; NULL

All but the last two are QMQ's columns. Producers use only those, so QMQ's own table works unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import groupby, islice
from typing import Any, NamedTuple

from qmq.errors import InvalidRequest
from qmq.plain import plain_text

DEFAULT_TABLE = "qmq_msg_queue"
ROWS_MAX = 1_000
"""Limit of rows per statement. SQLite takes 32,766 values, and MySQL's optimizer does not use the index for long lists
of ids.
"""
BYTES_MAX = 4 << 20
"""Limit of the contents per statement. MySQL takes packets of 16 MiB, small servers of 4 MiB."""

Execute = Callable[[str, Sequence[object]], Sequence[Sequence[Any]]]
"""Function that runs a statement with its values, within a transaction, and returns the resulting rows."""

_NAMED = re.compile(r"(?<![:\w]):([a-z_]+)")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")
_MARKS: dict[str, Callable[[int], str]] = {
    "qmark": lambda _: "?",
    "format": lambda _: "%s",
    "pyformat": lambda _: "%s",
    "numeric_dollar": lambda number: f"${number + 1}",
}


class Flavor(Enum):
    """Kind of database."""

    POSTGRESQL = "postgresql"
    SQLITE = "sqlite"
    MARIADB = "mariadb"
    MYSQL = "mysql"

    @property
    def now(self) -> str:
        """SQL of the present time, because PostgreSQL's CURRENT_TIMESTAMP is the time when the transaction began."""
        return "clock_timestamp()" if self is Flavor.POSTGRESQL else "CURRENT_TIMESTAMP"

    @property
    def returns_ids(self) -> bool:
        """Whether INSERT returns the new ids."""
        return self is not Flavor.MYSQL


def table_name(name: str) -> str:
    """Return a table's name if it is safe in a statement: "table" or "schema.table".

    Raises:
        InvalidRequest: the name has characters other than letters, digits and _.
    """
    name = plain_text("the name of a table", name)
    parts = name.split(".")
    if len(parts) > 2 or not all(_IDENTIFIER.fullmatch(part) for part in parts):
        raise InvalidRequest(f"{name!r} is not the name of a table, or schema.table")
    return name


class Inserted(NamedTuple):
    """Rows of one INSERT: their ids, and the heads of their contents, in unrelated order."""

    ids: list[int]
    heads: list[str]


_AFTER_HEAD = ',"subject":'


def head_of(content: str) -> str:
    """Return the head of a content, which has the id of its message (`qmq.outbox.row`)."""
    return content.partition(_AFTER_HEAD)[0]


class Rows:
    """Rows of one outbox, within one transaction of one connection.

    Args:
        execute: runs a statement there.
        paramstyle: that of the driver, by PEP 249.
    """

    def __init__(self, execute: Execute, table: str, flavor: Flavor, paramstyle: str) -> None:
        if paramstyle not in _MARKS:
            raise InvalidRequest(f"a driver with the paramstyle {paramstyle!r} is not known here")
        self._execute = execute
        self._table = table_name(table)
        self._flavor = flavor
        self._mark = _MARKS[paramstyle]
        self._escapes_percent = paramstyle in ("format", "pyformat")

    @property
    def table(self) -> str:
        return self._table

    @property
    def flavor(self) -> Flavor:
        return self._flavor

    def run(self, statement: str, **values: object) -> Sequence[Sequence[Any]]:
        """Run a statement with `:name` for each value; return the resulting rows."""
        given: list[object] = []

        def mark(found: re.Match[str]) -> str:
            given.append(values[found[1]])
            return self._mark(len(given) - 1)

        if values and self._escapes_percent:
            statement = statement.replace("%", "%%")
        text = _NAMED.sub(mark, statement)
        return self._execute(text, given)

    def insert(self, contents: Sequence[str]) -> list[Inserted]:
        """Write rows."""
        return [Inserted(self._insert(part), [head_of(content) for content in part]) for part in parts_of(contents)]

    def _insert(self, contents: Sequence[str]) -> list[int]:
        now = self._flavor.now
        rows = ", ".join(f"({self._mark(number)}, 0, 0, {now}, {now})" for number in range(len(contents)))
        statement = f"INSERT INTO {self._table} (content, status, error, create_time, update_time) VALUES {rows}"
        if self._flavor.returns_ids:
            return [row[0] for row in self._execute(f"{statement} RETURNING id", contents)]
        self._execute(statement, contents)
        # MySQL gives consecutive ids to a statement with a known number of rows, and returns the first one.
        ((first, step),) = self._execute("SELECT LAST_INSERT_ID(), @@auto_increment_increment", ())
        return [first + number * step for number in range(len(contents))]

    def delete(self, inserted: Iterable[Inserted]) -> None:
        """Delete rows that are still the inserted ones.

        A database that lost its last commits, after a restore or a failover, reuses their ids for rows with unsent
        messages.
        """
        for ids, heads in _joined(inserted):
            marks = map(self._mark, range(len(heads)))
            heads.sort(key=len)
            same = " OR ".join(
                f"SUBSTR(content, 1, {size}) IN ({', '.join(islice(marks, len(list(some))))})"
                for size, some in groupby(heads, len)
            )
            self._execute(f"DELETE FROM {self._table} WHERE id IN ({ids_text(sorted(ids))}) AND ({same})", heads)

    def heads(self, inserted: Iterable[Inserted]) -> set[str]:
        """Return the heads of the rows that exist.

        Ids alone would not identify them: SQLite reuses the ids of a rolled-back savepoint.
        """
        return {
            head_of(row[0])
            for ids, heads in _joined(inserted)
            for row in self._execute(
                f"SELECT SUBSTR(content, 1, {max(map(len, heads)) + len(_AFTER_HEAD)}) FROM {self._table}"
                f" WHERE id IN ({ids_text(sorted(set(ids)))})",
                (),
            )
        }

    def read(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        """Return (id, content) of the rows that exist."""
        return [
            (row[0], row[1])
            for part in _cut(ids)
            for row in self._execute(f"SELECT id, content FROM {self._table} WHERE id IN ({ids_text(part)})", ())
        ]


def parts_of(contents: Sequence[str]) -> Iterator[list[str]]:
    """Yield contents in parts, each for one statement; a larger row has a statement of its own."""
    part: list[str] = []
    size = 0
    for content in contents:
        if part and (len(part) == ROWS_MAX or size + len(content) > BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(content)
        size += len(content)
    if part:
        yield part


def _joined(inserted: Iterable[Inserted]) -> Iterator[Inserted]:
    """Join rows into parts for one statement, in ascending order, so that concurrent deletions wait instead of
    deadlocking.
    """
    joined = Inserted([], [])
    for part in sorted(inserted, key=lambda part: min(part.ids)):
        if len(joined.ids) + len(part.ids) > ROWS_MAX:
            yield joined
            joined = Inserted([], [])
        joined.ids.extend(part.ids)
        joined.heads.extend(part.heads)
    if joined.ids:
        yield joined


def _cut(ids: Sequence[int]) -> Iterator[list[int]]:
    ascending = iter(sorted(ids))
    while part := list(islice(ascending, ROWS_MAX)):
        yield part


def ids_text(ids: Sequence[int]) -> str:
    """Return ids as text for `IN (…)`."""
    return ", ".join(str(int(id)) for id in ids)
