"""Shell. One outbox, as a watchdog reaches it. Every method blocks and is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from qmq.outbox.statements import Statements
from qmq.outbox.table import Flavor, Rows, table_name
from qmq.outbox.work import ReadClaims, ReadPage, Work
from qmq.watchdog.db.engine import READING
from qmq.watchdog.sources import Source

TRIES_MAX = 3
_REPEAT_SQLSTATES = {"40001", "40P01"}
_REPEAT_NUMBERS = {1020, 1213}
"""Deadlocks, and MariaDB's record that changed since it was read: the same transaction may do next time."""

T = TypeVar("T")


class Outbox:
    """The table of one registered database. Made when a drain begins; any thread may call it, one at a time."""

    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine, self._age_ms = engine, source.age_ms
        self._reading = engine.execution_options(**{READING: True})
        self._table, self._flavor = table_name(source.table), Flavor(source.kind)

    def close(self) -> None:
        self._engine.dispose()

    def do(self, work: Work) -> Any:
        """Carry out what a drain asks for."""
        engine = self._reading if isinstance(work, ReadPage | ReadClaims) else self._engine
        return _repeat(engine, lambda connection: self.statements(connection).do(work))

    def statements(self, connection: Connection) -> Statements:
        """Return the statements within a connection's transaction."""

        def execute(statement: str, values: Sequence[object]) -> Sequence[Sequence[Any]]:
            result = connection.exec_driver_sql(statement, tuple(values) if values else None)
            return result.all() if result.returns_rows else []

        return Statements(Rows(execute, self._table, self._flavor, connection.dialect.paramstyle), self._age_ms)


def _repeat(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run one transaction; again, if the database ended it in favour of another one."""
    for attempt in range(1, TRIES_MAX + 1):
        try:
            with engine.begin() as connection:
                return work(connection)
        except DBAPIError as error:
            if attempt == TRIES_MAX or not _was_in_the_way(error):
                raise
    raise AssertionError("the last try returns or raises")


def _was_in_the_way(error: DBAPIError) -> bool:
    original = error.orig
    numbers = getattr(original, "args", ())[:1]
    return getattr(original, "sqlstate", None) in _REPEAT_SQLSTATES or not _REPEAT_NUMBERS.isdisjoint(numbers)
