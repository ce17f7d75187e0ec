"""One SQLite database of all metaservers, each with an engine that fails as ordered.

A transaction fails before it begins, at one of its statements, at its commit, or right after it: then the change is
stored and the answer is lost. The oracle reads the tables after every commit.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool

from qmq.metaserver.storage import engine as real
from qmq.metaserver.storage.tables import metadata

Row = tuple[Any, ...]
Tables = Mapping[str, frozenset[Row]]

DECIDED = (
    "broker_group",
    "broker",
    "subject_info",
    "subject_route",
    "readonly_broker_group_setting",
    "client_offline_state",
    "audit_trail",
)
"""Tables of operators' decisions, and their audit trail."""
COLUMNS = {name: tuple(column.name for column in metadata.tables[name].columns) for name in DECIDED}


@dataclass(frozen=True)
class Fate:
    """Fate of a job.

    - fine
    - away: it fails before it begins; also for a call to a broker
    - broken: its statement number `at` and all later ones fail
    - hiccup: only that statement fails
    - uncommitted: its commit number `at` fails
    - lost: that commit works, and its answer is lost; also for a call to a broker
    """

    kind: str = "fine"
    at: int = 1

    def __str__(self) -> str:
        return self.kind if self.kind in ("fine", "away") else f"{self.kind} at {self.at}"


FINE, AWAY, LOST = Fate(), Fate("away"), Fate("lost")


class Access:
    """Engine of one metaserver."""

    def __init__(self, uri: str, on_commit: Callable[[], None]) -> None:
        self._fate = FINE
        self._statements = self._commits = self._changes = 0
        self._raw: sqlite3.Connection | None = None
        self._on_commit = on_commit
        self.engine = create_engine("sqlite://", creator=lambda: connect(uri), poolclass=StaticPool)
        event.listen(self.engine, "begin", self._begin)
        event.listen(self.engine, "before_cursor_execute", self._statement)
        event.listen(self.engine, "commit", self._commit)

    @contextmanager
    def job(self, fate: Fate) -> Iterator[None]:
        self._fate = fate
        self._statements = 0
        self._commits = 0
        try:
            yield
        finally:
            self._fate = FINE

    def _begin(self, _: Any) -> None:
        if self._fate == AWAY:
            self._fail("the database is away")

    def _statement(self, *_: Any) -> None:
        self._statements += 1
        over = self._statements - self._fate.at
        if (self._fate.kind == "broken" and over >= 0) or (self._fate.kind == "hiccup" and over == 0):
            self._fail("the connection broke")

    def _commit(self, connection: Any) -> None:
        self._commits += 1
        if self._fate.kind == "uncommitted" and self._commits == self._fate.at:
            self._fail("the connection broke at the commit")
        raw = connection.connection.dbapi_connection
        raw.execute("COMMIT")
        if raw is not self._raw or raw.total_changes != self._changes:
            self._raw = raw
            self._changes = raw.total_changes
            self._on_commit()
        if self._fate.kind == "lost" and self._commits == self._fate.at:
            self._fail("the connection broke while the answer to the commit was awaited")

    def _fail(self, text: str) -> None:
        raise OperationalError(text, {}, sqlite3.OperationalError(text))


def connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys=ON")
    return connection


def read_tables(database: sqlite3.Connection) -> Tables:
    return {
        name: frozenset(database.execute(f"SELECT {', '.join(columns)} FROM {name}").fetchall())
        for name, columns in COLUMNS.items()
    }


class Template:
    """Empty database of the newest schema, made once and copied for each run."""

    def __init__(self, folder: Path) -> None:
        self._copies = 0
        path = folder / "empty.db"
        real.open_database(f"sqlite:///{path}").dispose()
        self._empty = sqlite3.connect(path, check_same_thread=False)
        self._empty.execute(  # or each metaserver would make an admin's token
            "INSERT INTO api_token VALUES ('first', 'first-admin', 'admin', 'salt', 'hash', '[]', '[]', 1, 0, 0)"
        )
        self._empty.commit()
        self.bare = sqlite3.connect(":memory:", check_same_thread=False)
        """Empty database that stays empty."""
        self._empty.backup(self.bare)

    def keep(self, database: sqlite3.Connection) -> None:
        """Copy this database from now on."""
        database.backup(self._empty)

    def copy(self) -> tuple[str, sqlite3.Connection]:
        """Return the name of a new database in memory for `connect`, and a connection that keeps it open."""
        self._copies += 1
        uri = f"file:state-machine-{id(self)}-{self._copies}?mode=memory&cache=shared"
        database = connect(uri)
        self._empty.backup(database)
        return uri, database

    def close(self) -> None:
        self._empty.close()
        self.bare.close()
