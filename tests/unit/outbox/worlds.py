"""Shell. Shops, applications with a database, through each interface: the common world of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import django
import django.conf
import psycopg
import pymysql
from django.db import connections, transaction
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.orm import Session

from qmq.outbox.dbapi import Database
from qmq.outbox.row import decode_row
from qmq.outbox.schema import create_statements

INTERFACES = ("session", "dbapi", "django")
TABLE = "qmq_msg_queue"
BACKENDS = {"mariadb": "mysql", "sqlite": "sqlite3"}
"""Django's names, where they differ."""

django.conf.settings.configure(
    DATABASES={"default": {}}, USE_TZ=True, LOGGING_CONFIG=None, INSTALLED_APPS=["qmq.django"]
)
pymysql.version_info = (2, 2, 1, "final", 0)  # called by Django on its driver
pymysql.install_as_MySQLdb()
django.setup()
_aliases = count(1)


@dataclass
class Begun:
    """A transaction: the producer's session, a function for statements, and one for savepoints."""

    session: Any
    execute: Callable[[str], object]
    savepoint: Callable[[], AbstractContextManager[Any]]


class World:
    """A shop. `begin` yields a transaction that commits, or rolls back if its block raises; `outside` is no
    transaction.

    `statements`: the interface's statements on the outbox.
    """

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self.engine = create_engine(url)
        self.statements: list[str] = []
        self.make_tables()
        event.listen(self.engine, "before_cursor_execute", self._note)

    def make_tables(self) -> None:
        """Create the tables, or empty them."""
        with self.engine.begin() as connection:
            if self.engine.dialect.has_table(connection, TABLE):
                connection.execute(text(f"DELETE FROM {TABLE}"))
            else:
                for statement in create_statements(self.engine.dialect.name):
                    connection.execute(text(statement))
            if self.engine.dialect.has_table(connection, "orders"):
                connection.execute(text("DELETE FROM orders"))
            else:
                connection.execute(text("CREATE TABLE orders (number INTEGER)"))

    def close(self) -> None:
        self.engine.dispose()

    def _note(self, _connection, _cursor, statement, *_):
        if TABLE in statement:
            self.statements.append(statement.partition(" ")[0])

    # Return the contents of the database.

    def orders(self) -> list[int]:
        return self._read("SELECT number FROM orders ORDER BY number")

    def rows(self) -> list[str]:
        """Return the ids of the messages in the outbox."""
        return [decode_row(content).id for content in self._read(f"SELECT content FROM {TABLE} ORDER BY id")]

    def _read(self, statement: str) -> list[Any]:
        engine = create_engine(self.url)
        with engine.connect() as connection:
            found = list(connection.execute(text(statement)).scalars())
        engine.dispose()
        return found

    def drop_outbox(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(f"DROP TABLE {TABLE}"))


class SessionWorld(World):
    @contextmanager
    def begin(self) -> Iterator[Begun]:
        with Session(self.engine) as session, session.begin():
            yield Begun(session, lambda statement: session.execute(text(statement)), session.begin_nested)

    @property
    def outside(self) -> Any:
        return self.engine


class DbapiWorld(World):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._database = Database(self._connect)

    def _connect(self) -> Any:
        return connect(self.url)

    @contextmanager
    def begin(self) -> Iterator[Begun]:
        with self._database.transaction() as begun:

            def execute(statement: str) -> None:
                with nullcontext(begun.connection.cursor()) as cursor:
                    cursor.execute(statement)
                    cursor.close()

            yield Begun(begun, execute, begun.savepoint)

    @property
    def outside(self) -> Any:
        return self._database


class DjangoWorld(World):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._alias = f"world{next(_aliases)}"
        settings = {
            "ENGINE": f"django.db.backends.{BACKENDS.get(self.engine.dialect.name, self.engine.dialect.name)}",
            "NAME": self.url.database,
            "USER": self.url.username or "",
            "HOST": self.url.host or "",
            "PORT": self.url.port or "",
        }
        connections.databases[self._alias] = connections.configure_settings({"default": {}, self._alias: settings})[
            self._alias
        ]
        self.connection = connections[self._alias]
        self.connection.execute_wrappers.append(self._count)

    def _count(self, execute, statement, *others):
        self._note(None, None, statement)
        return execute(statement, *others)

    def close(self) -> None:
        self.connection.close()
        super().close()

    @contextmanager
    def begin(self) -> Iterator[Begun]:
        def execute(statement: str) -> None:
            with self.connection.cursor() as cursor:
                cursor.execute(statement)

        with transaction.atomic(using=self._alias):
            yield Begun(self.connection, execute, lambda: transaction.atomic(using=self._alias))

    @property
    def outside(self) -> Any:
        return self.connection


def connect(url: Any) -> Any:
    """Open a connection of the plain driver."""
    import sqlite3

    match url.get_backend_name():
        case "sqlite":
            return sqlite3.connect(url.database)
        case "postgresql":
            return psycopg.connect(host=url.host, port=url.port, user=url.username, dbname=url.database)
        case _:
            return pymysql.connect(host=url.host, port=url.port, user=url.username, database=url.database)


WORLDS = {"session": SessionWorld, "dbapi": DbapiWorld, "django": DjangoWorld}
