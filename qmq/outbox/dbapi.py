"""Shell. Outbox within transactions of plain DB-API connections: sqlite3, psycopg, PyMySQL and the like."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any, TypeVar

from qmq.client.handler import check_plain
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
"""Kinds of databases by the driver's module; the server's version distinguishes MySQL from MariaDB."""


_numbers = count(1)
"""Numbers for the names of databases: the function that connects does not show which database it is."""


class Database:
    """Database with an outbox. As a producer's `session`, it writes messages outside of the application's transactions.

        database = Database(lambda: sqlite3.connect("shop.db"))
        with database.transaction() as transaction:
            transaction.connection.execute("UPDATE orders SET paid = 1 WHERE id = 42")
            producer.send(message, session=transaction)

    Args:
        connect: opens a connection, for each transaction without one; also in other threads, to delete the rows of sent
            messages.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = check_plain("connect", connect)
        self._number = next(_numbers)

    @property
    def name(self) -> str:
        return f"database {self._number} of the DB-API"

    @contextmanager
    def transaction(self, connection: Any = None) -> Iterator[Transaction]:
        """Begin a transaction, on the given connection or a new one; commit it, or roll it back if the block raises.

        Messages are sent after the commit. Nothing else may commit or roll back within the block.
        """
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
    """Transaction of a DB-API connection, made by `Database.transaction`; a producer takes it as `session`."""

    def __init__(self, database: Database, connection: Any) -> None:
        self.connection = connection
        self._unit = Unit(database)
        self._names = count(1)
        self._ends_by_statement = False
        """Whether the driver is unaware of the transaction, so that COMMIT must be a statement."""
        self._depth = 0
        self._lacks = ""
        """Reason why a message could not be written; the transaction must then not be committed."""

    def stage(self, items: list[Item]) -> None:
        if commits_each_statement(self.connection):
            raise InvalidRequest("the connection left its transaction, or commits each statement by itself since then")
        try:
            self._unit.write(items, lambda table: rows(self.connection, table))
        except BaseException as error:
            if not self._depth:  # otherwise the savepoint is rolled back, or the application decides
                self._lacks = str(error) or repr(error)
            raise

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Run a part of the transaction that is rolled back, with its messages, if the block raises; may be nested."""
        name = f"qmq_{next(self._names)}"
        self._execute(f"SAVEPOINT {name}")
        self._depth += 1
        try:
            yield
        except BaseException:
            self._execute(f"ROLLBACK TO SAVEPOINT {name}")
            raise
        finally:
            self._depth -= 1
        self._execute(f"RELEASE SAVEPOINT {name}")

    def begin(self) -> None:
        """Begin the transaction, unless the driver does so before the first statement."""
        if _begins_explicitly(self.connection):
            self._execute("BEGIN")
        self._ends_by_statement = _ends_by_statement(self.connection)

    def commit(self) -> None:
        if self._lacks:
            self.roll_back()
            raise InvalidRequest(f"rolled back, as a message of the transaction could not be written: {self._lacks}")
        try:
            if self._ends_by_statement:
                self._execute("COMMIT")
            else:
                self.connection.commit()
        except BaseException:
            self._unit.lost()
            self.roll_back()
            raise
        self._unit.committed()

    def roll_back(self) -> None:
        self._unit.rolled_back()
        with suppress(Exception):  # the connection may be lost; the first error counts
            self._end()

    def _end(self) -> None:
        if not self._ends_by_statement:
            self.connection.rollback()
        elif getattr(self.connection, "in_transaction", True):  # SQLite ends the transaction when its disk is full
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


def commits_each_statement(connection: Any) -> bool:
    """Return whether a driver's connection, or SQLAlchemy's adapter of one, is in autocommit without a transaction."""
    if hasattr(connection, "isolation_level") and hasattr(connection, "in_transaction"):  # sqlite3, aiosqlite
        return not connection.in_transaction and _begins_explicitly_in_sqlite(connection)
    if hasattr(connection, "get_autocommit"):  # PyMySQL, mysqlclient, aiomysql
        return bool(connection.get_autocommit()) and not getattr(connection, "server_status", 0) & _IN_TRANSACTION
    is_idle = getattr(getattr(connection, "info", None), "transaction_status", 0) == 0  # psycopg, psycopg2
    return getattr(connection, "autocommit", False) is True and is_idle


_IN_TRANSACTION = 1
"""Bit of MySQL's status."""


def _begins_explicitly_in_sqlite(connection: Any) -> bool:
    autocommit = getattr(connection, "autocommit", -1)  # since Python 3.12; -1 is the older behaviour
    return autocommit is True or (autocommit == -1 and connection.isolation_level is None)


def _begins_explicitly(connection: Any) -> bool:
    if (
        _module(connection) == "sqlite3"
    ):  # the driver begins only before the first change, and releasing a savepoint would commit
        return not connection.in_transaction
    return commits_each_statement(connection)


def _ends_by_statement(connection: Any) -> bool:
    match _module(connection):
        case "sqlite3":
            return _begins_explicitly_in_sqlite(connection)
        case "psycopg2":
            return bool(connection.autocommit)
        case _:
            return False


@contextmanager
def _left_open(connection: Any) -> Iterator[Any]:
    """Yield a connection that the caller keeps open."""
    yield connection
