"""Shell. Use of every table: values as columns, checks of values, invalid rows, transactions.

Values are checked before SQL, because the three databases treat oversized or odd values differently. Invalid rows,
perhaps edited by hand, are left out, logged once and counted.

A reading sees one moment; a change is stored as a whole or not at all. Every change first raises the version rows of
its tables. Their locks order all changes, on each of the three databases, and a metaserver that polls the versions
misses none.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import intern
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Connection, Engine, Integer, String, Table, Text, select, update
from sqlalchemy.exc import DBAPIError

from qmq.metaserver.storage.changes import CommitUnknown, DatabaseUnusable, ValueRefused
from qmq.metaserver.storage.engine import ANSWER_S, begin
from qmq.metaserver.storage.tables import meta_version

log = logging.getLogger("qmq.metaserver")

ROWS_PER_STATEMENT = 1000
"""Names in one `IN (…)`, within every database's limit; the rows share a round trip."""

T = TypeVar("T")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(values), ROWS_PER_STATEMENT):
        yield values[first : first + ROWS_PER_STATEMENT]


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


DIRECTORY, ROUTES, SIGHTINGS = "directory", "routes", "sightings"

BESIDE_GROUPS = "beside_groups"
"""Counts down with each change of the directory that leaves groups and brokers as they are. Its sum with the
directory's version, which counts up, identifies them, so they are not read again after a mark. A transaction that
raises only one of the two, as an older version does, makes others read them.
"""

TRIES_MAX = 5
"""Retries after a deadlock, for which the database aborts one of two transactions."""

LIMIT_S = 2 * ANSWER_S
"""Longest transaction: a restore, with few statements of seconds."""

_REPEAT_SQLSTATES = {"40001", "40P01"}  # serialization failure, deadlock
_REPEAT_NUMBERS = {1020, 1213}  # MariaDB: record changed since it was read, deadlock


class Transactions:
    """Runs transactions. Created by the repository; any thread may call it."""

    def __init__(self, engine: Engine, *, limit_s: float = LIMIT_S) -> None:
        self._engine = engine
        self._limit_s = limit_s

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one consistent reading of the database."""
        return _repeat(lambda: self._read_once(work))

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` as one transaction; repeat it after a deadlock or on a dead pooled connection.

        Raises:
            CommitUnknown: the connection broke in the commit. Any other error: nothing was changed.
        """
        return _repeat(lambda: self._write_once(work))

    def _read_once(self, work: Callable[[Connection], T]) -> T:
        with (
            self._engine.connect() as connection,
            _deadline(connection, self._limit_s),
            begin(connection, reading=True),
        ):
            return work(connection)

    def _write_once(self, work: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection, _deadline(connection, self._limit_s):
            transaction = begin(connection)
            try:
                result = work(connection)
            except BaseException:
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except DBAPIError as error:
                connection.invalidate()  # in any state, with any locks
                if _is_conflict(error):
                    raise  # a cluster of databases detected the conflict at the commit, and rolled back
                log.error("commit unknown reason=%s", error.orig)
                raise CommitUnknown(
                    "the connection to the database broke in the commit: the change is stored as a whole or not at all"
                ) from error
            return result


_VERSIONS = select(meta_version.c.name, meta_version.c.version)
"""Compiled once: it runs four times a second."""


def read_versions(connection: Connection) -> dict[str, int]:
    rows = connection.execute(_VERSIONS)
    return {row.name: row.version for row in rows}


def raise_versions(connection: Connection, *names: str) -> list[int]:
    """Raise versions and return them; their locks exclude other transactions on the same until this one ends."""
    for name in sorted(names):  # in a fixed order, against deadlocks
        row = meta_version.c.name == name
        if connection.execute(update(meta_version).where(row).values(version=meta_version.c.version + 1)).rowcount != 1:
            raise DatabaseUnusable(f"the table meta_version lacks its row {name}; restore the database")
    versions = read_versions(connection)
    return [versions[name] for name in names]


def leave_groups(connection: Connection) -> None:
    """Record that a transaction which raises the directory's version leaves groups and brokers unchanged."""
    row = meta_version.c.name == BESIDE_GROUPS
    connection.execute(update(meta_version).where(row).values(version=meta_version.c.version - 1))


def groups_version(versions: Mapping[str, int]) -> int:
    """Return a number that differs after each change of groups or brokers."""
    return versions[DIRECTORY] + versions[BESIDE_GROUPS]


def _repeat(transaction: Callable[[], T]) -> T:
    """Run a transaction, and repeat it where that may help; after an error nothing was changed."""
    was_cut = False
    for attempt in range(1, TRIES_MAX + 1):
        try:
            return transaction()
        except DBAPIError as error:
            # A pooled connection may have died in a restart of the database. The pool closes all others now.
            cut_first = error.connection_invalidated and not was_cut
            if attempt == TRIES_MAX or not (cut_first or _is_conflict(error)):
                raise
            was_cut = was_cut or error.connection_invalidated
    raise AssertionError("the last try returns or raises")


def _is_conflict(error: DBAPIError) -> bool:
    original = error.orig
    numbers = getattr(original, "args", ())[:1]
    return getattr(original, "sqlstate", None) in _REPEAT_SQLSTATES or not _REPEAT_NUMBERS.isdisjoint(numbers)


@contextmanager
def _deadline(connection: Connection, limit_s: float) -> Iterator[None]:
    """Break a connection to a hanging PostgreSQL server: its driver would wait for ever.

    The other two drivers have a limit of their own.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    driver = connection.connection.driver_connection
    assert driver is not None, "it is connected"
    twin = socket.socket(fileno=os.dup(driver.fileno()))  # a duplicate, so that a closed and reused number is safe
    timer = threading.Timer(limit_s, twin.shutdown, (socket.SHUT_RDWR,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        twin.close()
