"""Shell. Outbox within transactions of SQLAlchemy: sessions and connections, blocking and for coroutines.

`send` writes the rows at once, on the session's connection. So rollbacks, also of savepoints, include them, and a
failed write is an error of `send`. The session that began the transaction reports its commit. A session that joined a
connection's transaction cannot: wrap that transaction in `sends_after_commit`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Column, Connection, Engine, ExceptionContext, Insert, MetaData, Table, Text, event, insert
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from qmq.errors import InvalidRequest
from qmq.outbox.dbapi import commits_each_statement
from qmq.outbox.table import Flavor, Rows
from qmq.outbox.unit import AsyncTransaction, Database, Item, Transaction, Unit

T = TypeVar("T")

_units: WeakKeyDictionary[Connection, Unit] = WeakKeyDictionary()
"""Open transactions with messages."""
_doomed: WeakKeyDictionary[Connection, str] = WeakKeyDictionary()
"""Transactions that lack a message, with the reason: they must not be committed."""
_announced: WeakSet[Connection] = WeakSet()
"""Connections with a transaction that reports its end."""
_changed: WeakSet[Connection] = WeakSet()
"""Connections of sessions with changes in their transaction."""
_watched: WeakSet[Engine] = WeakSet()
"""Engines with event listeners."""


class _Work:
    """Connections and messages of a session in one transaction."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.outbox: Connection | None = None
        """Connection with the rows of the session's messages."""
        self.is_owner = False
        """Whether the session reports the end of that connection's transaction."""

    @property
    def changed(self) -> list[Connection]:
        return [connection for connection in self.connections if connection in _changed]


_works: WeakKeyDictionary[Session, _Work] = WeakKeyDictionary()
_sessions_on: WeakKeyDictionary[Connection, WeakSet[Session]] = WeakKeyDictionary()

_CHANGES = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*\n)*(?:(?:WITH|EXPLAIN)\b.*\b)?"
    r"(?:INSERT|UPDATE|DELETE|REPLACE|MERGE|CALL|COPY|LOAD|TRUNCATE|DO|EXECUTE|CREATE|ALTER|DROP)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Textual statements that may change data."""


_INSERT: Insert = insert(Table("qmq_msg_queue", MetaData(), Column("content", Text)))
"""Statement for which a routing session chooses its connection."""


def find(session: object) -> Transaction | AsyncTransaction | Database | None:
    """Return the transaction or database for a producer's `session`, or None if it does not belong to SQLAlchemy."""
    if isinstance(session, scoped_session | async_scoped_session):
        session = session()
    match session:
        case Session():
            return _OfSession(session)
        case AsyncSession():
            return _OfAsyncSession(session)
        case Connection():
            return _OfConnection(session)
        case AsyncConnection() if session.sync_connection is not None:
            return _OfAsyncConnection(session)
        case Engine():
            return SqlDatabase(session)
        case AsyncEngine():
            return SqlDatabase(session.sync_engine)
    return None


@contextmanager
def sends_after_commit(connection: Connection | AsyncConnection) -> Iterator[None]:
    """Wrap a block that itself begins and ends a connection's transaction.

        with engine.connect() as connection, sends_after_commit(connection), connection.begin():
            producer.send(message, session=connection)

    Without it, messages of such a transaction wait in the outbox, to be relayed. A failed commit is rolled back.
    """
    sync = connection if isinstance(connection, Connection) else connection.sync_connection
    if sync is None:
        raise InvalidRequest("the connection is not open")
    _watch(sync.engine)
    _announced.add(sync)
    try:
        yield
    except BaseException:
        if unit := _units.pop(sync, None):
            unit.lost()
        raise
    else:
        if unit := _units.pop(sync, None):
            (unit.lost if sync.in_transaction() else unit.committed)()
    finally:
        _announced.discard(sync)
        _doomed.pop(sync, None)


def check_atomic(connection: Connection) -> None:
    """Raise unless statements on the connection are part of a transaction.

    Raises:
        InvalidRequest: the driver commits each statement by itself.
    """
    pooled = connection.connection
    if commits_each_statement(pooled.driver_connection) or commits_each_statement(pooled.dbapi_connection):
        raise InvalidRequest(
            "the connection commits each statement by itself (AUTOCOMMIT), so nothing would be atomic: use an engine "
            "and a connection without it, or give the producer the engine to send outside of a transaction"
        )


@dataclass(frozen=True)
class SqlDatabase:
    """Database of an engine, for coroutines or blocking."""

    engine: Engine

    @property
    def name(self) -> str:
        return self.engine.url.render_as_string(hide_password=True)

    @property
    def is_async(self) -> bool:
        """Whether the engine needs an event loop."""
        return self.engine.dialect.is_async

    @property
    def is_in_memory(self) -> bool:
        """Whether the database is in memory, so that each thread has another one."""
        return self.engine.dialect.name == "sqlite" and self.engine.url.database in (None, "", ":memory:")

    async def run(self, table: str, work: Callable[[Rows], T]) -> T:
        def on(connection: Connection) -> T:
            return work(_rows(connection, table))

        if self.is_async:
            return await run_async(AsyncEngine(self.engine), on)
        return await asyncio.to_thread(run, self.engine, on)


async def run_async(engine: AsyncEngine, work: Callable[[Connection], T]) -> T:
    """Do `work` in a transaction of its own and commit it."""
    async with engine.connect() as connection:
        with sends_after_commit(connection):  # rolls back if the commit fails
            async with connection.begin():
                return await connection.run_sync(work)


def run(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Do `work` in a transaction of its own and commit it."""
    with engine.connect() as connection, sends_after_commit(connection), connection.begin():
        return work(connection)


class _OfConnection:
    """Transaction that was begun on a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def stage(self, items: list[Item]) -> None:
        if not self._connection.in_transaction():
            raise InvalidRequest("the connection is in no transaction: begin one, or give the engine instead")
        for session in list(_sessions_on.get(self._connection, ())):
            _take(session, self._connection)
        _write(self._connection, items)


class _OfAsyncConnection:
    """Transaction of a connection for coroutines."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def stage_async(self, items: list[Item]) -> None:
        await self._connection.run_sync(lambda connection: _OfConnection(connection).stage(items))


class _OfSession:
    """A session's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def stage(self, items: list[Item]) -> None:
        connection = _connection_of(self._session)
        _take(self._session, connection)
        _write(connection, items)


class _OfAsyncSession:
    """Transaction of a session for coroutines."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def stage_async(self, items: list[Item]) -> None:
        await self._session.run_sync(lambda session: _OfSession(session).stage(items))


def _connection_of(session: Session) -> Connection:
    """Return the connection that the session writes to, or, without writes, the one for the outbox.

    Raises:
        InvalidRequest: the session has no connection for the outbox.
    """
    if session.autoflush and not session._flushing:  # as before any query of a session
        session.flush()
    arguments: dict[str, Any] = {"clause": _INSERT}
    if (work := _works.get(session)) is not None:
        if work.outbox is not None and work.outbox.in_transaction():
            arguments = {"bind": work.outbox.engine}
        elif changed := work.changed:
            arguments = {"bind": changed[0].engine}
    try:
        return session.connection(bind_arguments=arguments)  # also begins the session's savepoint there
    except UnboundExecutionError as error:
        raise InvalidRequest(
            "the session has no database for the outbox: flush the changes that the message belongs to, or give "
            "session.connection(bind_arguments={'mapper': Order}) as session"
        ) from error


def _take(session: Session, connection: Connection) -> None:
    """Record the connection with the session's messages.

    Raises:
        InvalidRequest: the session has changes on another connection.
    """
    work = _works.setdefault(session, _Work())
    _refuse_others(session, connection, work.changed)
    work.outbox = connection
    if connection not in _announced:
        _announced.add(connection)
        work.is_owner = True


def _refuse_others(session: Session, outbox: Connection, changed: Sequence[Connection]) -> None:
    others = {str(connection.engine.url) for connection in changed if connection is not outbox}
    if others and not session.twophase:  # in a two-phase commit, all connections commit, or none
        raise InvalidRequest(
            f"the session changes {' and '.join(sorted(others))}, which does not commit together with the outbox on "
            f"{outbox.engine.url}: use a session for each database; flush the changes that a message belongs to "
            "before it is sent, or give session.connection(bind_arguments={'mapper': Order}) as session"
        )


def _write(connection: Connection, items: list[Item]) -> None:
    """Write rows within the connection's transaction."""
    check_atomic(connection)
    _watch(connection.engine)
    if (unit := _units.get(connection)) is None:
        unit = Unit(SqlDatabase(connection.engine))
    try:
        unit.write(items, lambda table: _rows(connection, table))
    except BaseException as error:
        if not connection.in_nested_transaction():  # otherwise the savepoint is rolled back, or the application decides
            _doomed[connection] = str(getattr(error, "orig", error))
        raise
    _units[connection] = unit


def _rows(connection: Connection, table: str) -> Rows:
    dialect = connection.dialect

    def execute(statement: str, values: Sequence[object]) -> Sequence[Sequence[Any]]:
        result = connection.exec_driver_sql(statement, tuple(values) if values else None)
        return result.all() if result.returns_rows else []

    return Rows(execute, table, _flavor(connection), dialect.paramstyle)


def _flavor(connection: Connection) -> Flavor:
    match connection.dialect.name:
        case "postgresql":
            return Flavor.POSTGRESQL
        case "sqlite":
            return Flavor.SQLITE
        case "mysql" | "mariadb":  # MariaDB is often reached as MySQL
            return Flavor.MARIADB if connection.dialect.insert_returning else Flavor.MYSQL
        case other:
            raise InvalidRequest(f"there is no outbox on {other!r}")


# Events.


def _watch(engine: Engine) -> None:
    if engine not in _watched:
        _watched.add(engine)
        event.listen(engine, "begin", _begun)
        event.listen(engine, "before_cursor_execute", _before_statement)
        event.listen(engine, "commit", _before_commit)
        event.listen(engine, "commit_twophase", _before_commit)
        event.listen(engine, "handle_error", _failed)
        event.listen(engine, "rollback", _rolled_back)
        event.listen(engine, "rollback_twophase", _rolled_back)


def _begun(connection: Connection) -> None:
    _doomed.pop(connection, None)
    if unit := _units.pop(connection, None):
        unit.lost()  # the unit is of an earlier transaction, whose end was not reported


def _before_statement(connection: Connection, cursor: Any, statement: str, values: Any, context: Any, _: bool) -> None:
    """Record a session's connections with changes; refuse a second one if the first has messages."""
    if connection in _changed or (sessions := _sessions_on.get(connection)) is None:
        return
    is_crud = context is not None and (context.isinsert or context.isupdate or context.isdelete)
    if is_crud or _CHANGES.match(statement):
        for session in list(sessions):
            if (work := _works.get(session)) is not None and work.outbox is not None:
                _refuse_others(session, work.outbox, [connection])
        _changed.add(connection)


def _before_commit(connection: Connection, *_: object) -> None:
    if (reason := _doomed.pop(connection, None)) is not None:
        if unit := _units.pop(connection, None):
            unit.rolled_back()
        _roll_back(connection)
        raise InvalidRequest(f"rolled back, as a message of the transaction could not be written: {reason}")
    if connection not in _announced and (unit := _units.pop(connection, None)):
        unit.lost()


def _failed(context: ExceptionContext) -> None:
    """Handle the error of a failed commit, which is its only event.

    SQLAlchemy does not roll back then. The driver's connection would return to its pool within the transaction, and the
    next user's commit would include it.
    """
    connection = context.connection
    if connection is None or context.statement is not None:
        return
    unit = _units.pop(connection, None)
    if unit:
        unit.lost()
    if (unit or connection in _announced) and not context.is_disconnect:
        _roll_back(connection)


def _roll_back(connection: Connection) -> None:
    """Roll back a transaction that SQLAlchemy considers ended."""
    try:
        connection.dialect.do_rollback(connection.connection)
    except Exception as error:
        with suppress(Exception):
            connection.invalidate(error)


def _rolled_back(connection: Connection, *_: object) -> None:
    _doomed.pop(connection, None)
    if unit := _units.pop(connection, None):
        unit.rolled_back()


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    _watch(connection.engine)
    work = _works.setdefault(session, _Work())
    if connection not in work.connections:
        work.connections.append(connection)
        _sessions_on.setdefault(connection, WeakSet()).add(session)


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    """Report the commit, unless a savepoint or a joined session committed and the transaction continues."""
    work = _works.get(session)
    if work is not None and work.is_owner and work.outbox is not None and not work.outbox.in_transaction():
        if unit := _units.pop(work.outbox, None):
            unit.committed()


@event.listens_for(Session, "after_transaction_end")
def _after_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is not None or (work := _works.pop(session, None)) is None:
        return
    for connection in work.connections:
        if (sessions := _sessions_on.get(connection)) is not None:
            sessions.discard(session)
            if not sessions:
                del _sessions_on[connection]
                _changed.discard(connection)
    if work.is_owner and work.outbox is not None:
        _announced.discard(work.outbox)
        if unit := _units.pop(work.outbox, None):
            unit.lost()
