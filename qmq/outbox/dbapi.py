"""Shell. The outbox within transactions of plain DB-API connections: sqlite3, psycopg, PyMySQL and the like."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any, TypeVar

from qmq.client.calling import check_plain
from qmq.errors import InvalidRequest
from qmq.outbox.table import Flavor, Rows
from qmq.outbox.unit import Item, Unit

T = TypeVar("T")

_FLAVORS = {
    "sqlite3": Flavor.SQLITE,
    "psycopg": Flavor.POSTGRESQL,
    "psycopg2": Flavor.POSTGRESQL,
    "pymysql": Flavor.MYSQL,
    "MySQLdb": Flavor.MYSQL,
}
"""Of the modules that connections come from; whether it is MariaDB, the server says."""


_numbers = count(1)
"""Of the databases that were made: a function that connects has no name that says where."""


class Database:
    """A database with an outbox; given to a producer as `session`, its messages are kept outside of a transaction.

        database = Database(lambda: sqlite3.connect("shop.db"))
        with database.transaction() as transaction:
            transaction.connection.execute("UPDATE orders SET paid = 1 WHERE id = 42")
            producer.send(message, session=transaction)

    Args:
        connect: opens a connection. Called for each transaction that is not given one, and, in other threads, to delete
            the rows of messages that were sent.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = check_plain("connect", connect)
        self._number = next(_numbers)

    @property
    def name(self) -> str:
        return f"database {self._number} of the DB-API"

    @contextmanager
    def transaction(self, connection: Any = None) -> Iterator[Transaction]:
        """Begin a transaction, on a connection of its own unless one is given; commit it, or roll it back if the block
        raises. Then the messages are sent. Nothing else may commit or roll back meanwhile."""
        with closing(self._connect()) if connection is None else _left_open(connection) as used:
            transaction = Transaction(self, used)
            transaction.begin()
            try:
                yield transaction
            except BaseException:
                transaction.roll_back()
                raise
            transaction.commit()

    async def run(self, table: str, work: Callable[[Rows], T]) -> T:
        """Do `work` in a transaction of its own, in a thread."""

        def run() -> T:
            with closing(self._connect()) as connection:
                done = work(rows(connection, table))
                connection.commit()
                return done

        return await asyncio.to_thread(run)


class Transaction:
    """A transaction of a DB-API connection; made by `Database.transaction`, and given to a producer as `session`."""

    def __init__(self, database: Database, connection: Any) -> None:
        self.connection = connection
        self._unit = Unit(database)
        self._names = count(1)
        self._is_ours = False
        """Begun by a statement of ours, and so ended by one: a driver that autocommits may have nothing to commit."""

    def stage(self, items: list[Item]) -> None:
        self._unit.add(items)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of the transaction that is rolled back, with its messages, if the block raises. It may be nested."""
        name = f"qmq_{next(self._names)}"
        self._execute(f"SAVEPOINT {name}")
        self._unit.savepoint()
        try:
            yield
        except BaseException:
            self._unit.roll_back_savepoint()
            self._execute(f"ROLLBACK TO SAVEPOINT {name}")
            raise
        self._execute(f"RELEASE SAVEPOINT {name}")
        self._unit.release()

    def begin(self) -> None:
        """Begin, where the driver does not do so by itself before the first statement."""
        self._is_ours = _begins_explicitly(self.connection)
        if self._is_ours:
            self._execute("BEGIN")

    def commit(self) -> None:
        try:
            self._unit.write(lambda table: rows(self.connection, table))
        except BaseException:
            self.roll_back()
            raise
        try:
            if self._is_ours:
                self._execute("COMMIT")
            else:
                self.connection.commit()
        except BaseException:
            self._unit.lost()
            with suppress(Exception):  # the connection may be gone; the error of the commit is what counts
                self._end()
            raise
        self._unit.committed()

    def roll_back(self) -> None:
        self._unit.rolled_back()
        self._end()

    def _end(self) -> None:
        if not self._is_ours:
            self.connection.rollback()
        elif getattr(self.connection, "in_transaction", True):  # SQLite ends it by itself when its disk is full
            self._execute("ROLLBACK")

    def _execute(self, statement: str) -> None:
        with closing(self.connection.cursor()) as cursor:
            cursor.execute(statement)


def rows(connection: Any, table: str) -> Rows:
    """Return the outbox within a connection's transaction."""
    module = _module(connection)

    def execute(statement: str, values: Sequence[object]) -> Sequence[Sequence[Any]]:
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement, tuple(values))
            return cursor.fetchall() if cursor.description else []

    flavor = _FLAVORS[module]
    if flavor is Flavor.MYSQL and "MariaDB" in str(execute("SELECT VERSION()", ())[0][0]):
        flavor = Flavor.MARIADB
    return Rows(execute, table, flavor, sys.modules[module].paramstyle)


def _module(connection: Any) -> str:
    """Return the name of the driver's module."""
    for parent in type(connection).__mro__:
        if (name := parent.__module__.partition(".")[0]) in _FLAVORS:
            return name
    raise InvalidRequest(f"{type(connection).__module__} is not known here, but {', '.join(sorted(_FLAVORS))} are")


def _begins_explicitly(connection: Any) -> bool:
    match _module(connection):
        case "sqlite3":  # it would begin before the first change only, and a savepoint's release would commit
            return not connection.in_transaction
        case "psycopg" | "psycopg2":
            return bool(connection.autocommit)
        case _:
            return bool(connection.get_autocommit())


@contextmanager
def _left_open(connection: Any) -> Iterator[Any]:
    """A connection that is somebody else's."""
    yield connection
