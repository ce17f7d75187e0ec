"""Shell. How a transaction begins: what it sees of others, on SQLite, MariaDB and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import Connection, RootTransaction


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
