"""Shell. Small things that reading and writing of every table needs.

What a column can hold, checked before SQL: the three databases would each do something else with the rest.

How a transaction begins: what it sees of others, on SQLite, MariaDB and PostgreSQL.

Rows that cannot be understood, perhaps edited by hand: left out, logged once, counted. They stop no other.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from sys import intern
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Connection, Integer, RootTransaction, String, Table, Text

from qmq.metaserver.storage.errors import ValueRefused

ROWS_PER_STATEMENT = 1000
"""Names in one `IN (…)`: each database takes so many arguments, and a round trip is shared by that many rows."""

T = TypeVar("T")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(values), ROWS_PER_STATEMENT):
        yield values[begin : begin + ROWS_PER_STATEMENT]


def from_json(text: str) -> Any:
    """Read JSON; raises ValueError for what is none, or holds text that is not valid Unicode: a row edited by hand may
    have half a surrogate, which nobody could write again."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_names(text: str) -> tuple[str, ...]:
    """Read a JSON array of names; raises ValueError for anything else. A name is one object, in however many arrays."""
    names = from_json(text)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{text[:50]!r} is no JSON array of names")
    return tuple(map(intern, names))


def to_json(value: Any) -> str:
    """Write a value as JSON; raises ValueRefused for what JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueRefused(f"{type(value).__name__} cannot be written as JSON: {error}") from None


def checked(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` if each fits its column of `table`.

    Raises:
        ValueRefused: names the column. PostgreSQL takes no NUL, MariaDB compares without spaces at the end, SQLite
            has no limits at all.
    """
    for column, value in values.items():
        kind = table.c[column].type
        where = f"{table.name}.{column}"
        if isinstance(kind, String):
            _check_text(where, value, None if isinstance(kind, Text) else kind.length)
        elif isinstance(kind, Integer):
            _check_number(where, value, 63 if isinstance(kind, BigInteger) else 31)
    return dict(values)


def _check_text(where: str, value: Any, chars_max: int | None) -> None:
    if not isinstance(value, str):
        raise ValueRefused(f"{where}: {value!r} is no text")
    if chars_max is not None and len(value) > chars_max:
        raise ValueRefused(f"{where}: {value[:20]!r}… has {len(value)} characters, {chars_max} fit")
    if "\x00" in value:
        raise ValueRefused(f"{where}: {value[:20]!r} contains the character NUL")
    if chars_max is not None and value.endswith(" "):
        raise ValueRefused(f"{where}: {value[:20]!r} ends with a space")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueRefused(f"{where}: {value[:20]!r} is not valid Unicode")


def _check_number(where: str, value: Any, bits: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << bits) <= value < 1 << bits:
        raise ValueRefused(f"{where}: {value!r} is no integer of {bits + 1} bits")


def begin(connection: Connection, *, reading: bool = False) -> RootTransaction:
    """Begin a transaction that may change something; or one that reads several tables as of one moment.

    By a call, as SQLAlchemy does more for each statement of an engine that has a listener: a tenth, measured.
    """
    transaction = connection.begin()
    if connection.dialect.name == "sqlite":
        # Who reads first and writes later would fail when another one wrote in between: take the lock now.
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
    elif reading:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    return transaction


log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000


class BadRows:
    """Created with the repository; any thread may call it."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many different ones were met since the start."""
        return len(self._seen)

    def note(self, table: str, key: object, reason: object) -> None:
        row = (table, str(key)[:200], str(reason)[:200])
        with self._lock:
            if row in self._seen or len(self._seen) >= REMEMBERED_MAX:
                return
            self._seen.add(row)
        log.error("row left out, repair it: table=%s key=%r reason=%s", *row)
