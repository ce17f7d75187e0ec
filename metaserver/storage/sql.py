"""Shell. Helpers for all tables: JSON columns, checks of values, the begin of transactions, invalid rows.

Values are checked before SQL, because the three databases treat oversized or odd values differently. Invalid rows,
perhaps edited by hand, are left out, logged once and counted.
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
from qmq.sql_drivers import set_waits

ROWS_PER_STATEMENT = 1000
"""Names in one `IN (…)`, within every database's limit; the rows share a round trip."""

T = TypeVar("T")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(values), ROWS_PER_STATEMENT):
        yield values[begin : begin + ROWS_PER_STATEMENT]


def from_json(text: str) -> Any:
    """Parse JSON; raises ValueError for invalid JSON or Unicode.

    A row edited by hand may hold half a surrogate, which cannot be written again.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_names(text: str) -> tuple[str, ...]:
    """Parse a JSON array of names; raises ValueError for anything else. Equal names are one object."""
    names = from_json(text)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{text[:50]!r} is no JSON array of names")
    return tuple(map(intern, names))


def to_json(value: Any) -> str:
    """Encode a value as JSON; raises ValueRefused if JSON cannot hold it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueRefused(f"{type(value).__name__} cannot be written as JSON: {error}") from None


def checked(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` if each fits its column of `table`.

    Raises:
        ValueRefused: names the column. PostgreSQL takes no NUL, MariaDB ignores trailing spaces, SQLite has
            no limits.
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
    """Begin a transaction that may write, or one that reads several tables as of one moment.

    A call, not a listener of the engine: SQLAlchemy's statements are a tenth slower with one, measured.
    """
    transaction = connection.begin()
    if connection.dialect.name == "sqlite":
        # A read before the first write would fail after another transaction's write: take the lock now.
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
    elif reading:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    set_waits(connection)
    return transaction


log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000


class BadRows:
    """Invalid rows. Created with the repository; any thread may call it."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of different invalid rows since the start."""
        return len(self._seen)

    def note(self, table: str, key: object, reason: object) -> None:
        row = (table, str(key)[:200], str(reason)[:200])
        with self._lock:
            if row in self._seen or len(self._seen) >= REMEMBERED_MAX:
                return
            self._seen.add(row)
        log.error("invalid row left out, repair it: table=%s key=%r reason=%s", *row)
