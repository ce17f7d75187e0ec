"""Shell. The outbox within transactions of plain DB-API connections: sqlite3, psycopg, PyMySQL and the like."""

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
        self._ends_by_statement = False
        """The driver believes that there is nothing to commit."""
        self._depth = 0
        self._lacks = ""
        """Why a message could not be written; then the transaction must not be committed."""

    def stage(self, items: list[Item]) -> None:
        if commits_each_statement(self.connection):
            raise InvalidRequest("the connection left its transaction, or commits each statement by itself since then")
        try:
            self._unit.write(items, lambda table: rows(self.connection, table))
        except BaseException as error:
            if not self._depth:  # else the savepoint is rolled back, or the application decides otherwise
                self._lacks = str(error) or repr(error)
            raise

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of the transaction that is rolled back, with its messages, if the block raises. It may be nested."""
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
        """Begin, where the driver does not do so by itself before the first statement."""
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
        with suppress(Exception):  # the connection may be gone; the error that led here is what counts
            self._end()

    def _end(self) -> None:
        if not self._ends_by_statement:
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


def commits_each_statement(connection: Any) -> bool:
    """Whether statements of a driver's connection, or of SQLAlchemy's adapter of one, are in no transaction."""
    if hasattr(connection, "isolation_level") and hasattr(connection, "in_transaction"):  # sqlite3, aiosqlite
        return not connection.in_transaction and _begins_explicitly_in_sqlite(connection)
    if hasattr(connection, "get_autocommit"):  # PyMySQL, mysqlclient, aiomysql
        return bool(connection.get_autocommit()) and not getattr(connection, "server_status", 0) & _IN_TRANSACTION
    is_idle = getattr(getattr(connection, "info", None), "transaction_status", 0) == 0  # psycopg, psycopg2
    return getattr(connection, "autocommit", False) is True and is_idle


_IN_TRANSACTION = 1
"""A bit of MySQL's status."""


def _begins_explicitly_in_sqlite(connection: Any) -> bool:
    autocommit = getattr(connection, "autocommit", -1)  # since Python 3.12; -1 is the way of before
    return autocommit is True or (autocommit == -1 and connection.isolation_level is None)


def _begins_explicitly(connection: Any) -> bool:
    if (
        _module(connection) == "sqlite3"
    ):  # it would begin before the first change only, and a savepoint's release would commit
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
    """A connection that is somebody else's."""
    yield connection
