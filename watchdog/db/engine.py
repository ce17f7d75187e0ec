"""Shell. Opens an application's database: a guest there, with few connections, short waits and small locks."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Engine, create_engine, event

from qmq.sql_waits import Waits
from qmq.watchdog.sources import MARIADB, POSTGRESQL, SQLITE, Source, UnusableSource

CONNECT_S = 5
LOCK_S = 3
"""Rows that others lock are passed over; what waits at all waits for a moment."""
ANSWER_S = 20
"""How long one statement may take; each touches a thousand rows by an index."""
CONNECTIONS = 2
"""One that drains, one for questions of operators."""
IDLE_S = 60

_DRIVERS = {MARIADB: "mariadb+pymysql", POSTGRESQL: "postgresql+psycopg", SQLITE: "sqlite"}
_EXTRAS = {MARIADB: "mariadb", POSTGRESQL: "postgresql"}


def open_source(source: Source) -> Engine:
    """Make the engine of a registered database; nothing is asked of it yet.

    Raises:
        UnusableSource: nobody could connect to this; the text says why.
    """
    kind = source.kind
    host, port, database = source.place
    if kind == SQLITE:
        # A wrong path is an error, not a new file.
        path = URL.create("sqlite", database=f"file:{quote(database)}", query={"mode": "rw", "uri": "true"})
        engine = create_engine(path, connect_args={"timeout": LOCK_S})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(_begin_of(connection)))
        return engine
    url = URL.create(_DRIVERS[kind], source.user or None, source.password or None, host, port, database)
    waits = Waits(CONNECT_S, LOCK_S, ANSWER_S, IDLE_S, IDLE_S)
    # UTC, as an hour that comes twice a year would let the scan read on from a moment that it did not mean.
    arguments = waits.mariadb("time_zone = '+00:00'") if kind == MARIADB else waits.postgresql()
    if kind == MARIADB and source.password:
        arguments["password"] = source.password.encode()  # of a text, PyMySQL takes Latin-1 alone
    try:
        return create_engine(
            url,
            connect_args=arguments,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=CONNECT_S,
            pool_recycle=IDLE_S * 3 // 4,
            isolation_level="READ COMMITTED",
            hide_parameters=True,
        )
    except ModuleNotFoundError as error:
        raise UnusableSource(
            f"{error}; the watchdog's machine needs the driver: install qmq[server,{_EXTRAS[kind]}]"
        ) from None


READING = "qmq_reading"
"""Execution option of transactions that only read: SQLite's others take the lock of the file at once."""


def _begin_of(connection: Any) -> str:
    return "BEGIN" if connection.get_execution_options().get(READING) else "BEGIN IMMEDIATE"


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own; `begin` does
    # One content that is no text must not make a whole page unreadable; what cannot be encoded again is parked.
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
