"""Shell. The outbox within transactions of SQLAlchemy: sessions and connections, blocking and of coroutines.

Rows are written when the connection is about to commit, behind everything that a flush may still do; that is also where
savepoints are seen. The session that began the transaction reports its commit. A session that joined a
connection's transaction cannot: wrap that transaction in `sends_after_commit`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, ExceptionContext, TwoPhaseTransaction, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from qmq.errors import InvalidRequest
from qmq.outbox.table import Flavor, Rows
from qmq.outbox.unit import AsyncTransaction, Database, Item, Transaction, Unit

T = TypeVar("T")

TWO_PHASES = "there is no outbox in transactions of two phases"

_units: WeakKeyDictionary[Connection, Unit] = WeakKeyDictionary()
"""Transactions with messages that have not ended yet."""
_of_sessions: WeakKeyDictionary[Session, Connection] = WeakKeyDictionary()
"""Sessions that began such a transaction."""
_announced: WeakSet[Connection] = WeakSet()
"""Connections whose transaction reports its end."""
_heard: WeakSet[Engine] = WeakSet()
"""Engines whose events are listened to."""


def find(session: object) -> Transaction | AsyncTransaction | Database | None:
    """Return what `session` is to a producer; None if it is nothing of SQLAlchemy's."""
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
            return _OfConnection(session.sync_connection)
        case Engine():
            return SqlDatabase(session)
        case AsyncEngine():
            return SqlDatabase(session.sync_engine)
    return None


@contextmanager
def sends_after_commit(connection: Connection | AsyncConnection) -> Iterator[None]:
    """Wrap a block that begins and ends a connection's transaction by itself.

        with engine.connect() as connection, sends_after_commit(connection), connection.begin():
            producer.send(message, session=connection)

    Without it, messages of such a transaction wait in the outbox, to be relayed.
    """
    sync = connection if isinstance(connection, Connection) else connection.sync_connection
    if sync is None:
        raise InvalidRequest("the connection is not open")
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


@dataclass(frozen=True)
class SqlDatabase:
    """A database that an engine reaches, of coroutines or blocking."""

    engine: Engine

    @property
    def name(self) -> str:
        return self.engine.url.render_as_string(hide_password=True)

    @property
    def is_async(self) -> bool:
        """Whether only an event loop can use it."""
        return self.engine.dialect.is_async

    @property
    def is_in_memory(self) -> bool:
        """Whether each thread sees another one."""
        return self.engine.dialect.name == "sqlite" and self.engine.url.database in (None, "", ":memory:")

    async def run(self, table: str, work: Callable[[Rows], T]) -> T:
        if self.is_async:
            async with AsyncEngine(self.engine).begin() as connection:
                return await connection.run_sync(lambda sync: work(_rows(sync, table)))

        def run() -> T:
            with self.engine.begin() as connection:
                return work(_rows(connection, table))

        return await asyncio.to_thread(run)


class _OfConnection:
    """A transaction that somebody began on a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def stage(self, items: list[Item]) -> None:
        if not self._connection.in_transaction():
            raise InvalidRequest("the connection is in no transaction: begin one, or give the engine instead")
        _unit(self._connection).add(items)


class _OfSession:
    """A session's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def stage(self, items: list[Item]) -> None:
        session = self._session
        if session.twophase:
            raise InvalidRequest(TWO_PHASES)
        connection = session.connection()
        if isinstance(session.get_bind(), Engine):  # else it joined a transaction, and does not see its end
            _of_sessions[session] = connection
            _announced.add(connection)
        _unit(connection).add(items)


class _OfAsyncSession:
    """The same of a session for coroutines."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def stage_async(self, items: list[Item]) -> None:
        await self._session.run_sync(lambda session: _OfSession(session).stage(items))


def _unit(connection: Connection) -> Unit:
    """Return the messages of the connection's transaction."""
    if (unit := _units.get(connection)) is None:
        if isinstance(connection.get_transaction(), TwoPhaseTransaction):
            raise InvalidRequest(TWO_PHASES)
        _listen(connection.engine)
        unit = _units[connection] = Unit(SqlDatabase(connection.engine))
    return unit


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


def _listen(engine: Engine) -> None:
    if engine not in _heard:
        _heard.add(engine)
        event.listen(engine, "begin", _begun)
        event.listen(engine, "commit", _before_commit)
        event.listen(engine, "handle_error", _failed)
        event.listen(engine, "rollback", _rolled_back)
        event.listen(engine, "savepoint", _savepoint)
        event.listen(engine, "rollback_savepoint", _rolled_back_to_savepoint)
        event.listen(engine, "release_savepoint", _released_savepoint)


def _begun(connection: Connection) -> None:
    if unit := _units.pop(connection, None):
        unit.lost()  # of a transaction before, whose end was not reported


def _before_commit(connection: Connection) -> None:
    if unit := _units.get(connection):
        unit.write(lambda table: _rows(connection, table))
        if connection not in _announced:
            del _units[connection]
            unit.lost()


def _failed(context: ExceptionContext) -> None:
    """Also called for statements. Of a commit that fails it is all that is told: no roll-back follows."""
    connection = context.connection
    if connection is not None and (unit := _units.get(connection)) and unit.is_written:
        del _units[connection]
        unit.lost()


def _rolled_back(connection: Connection) -> None:
    if unit := _units.pop(connection, None):
        unit.rolled_back()


def _savepoint(connection: Connection, name: str | None) -> None:
    if unit := _units.get(connection):
        unit.savepoint()


def _rolled_back_to_savepoint(connection: Connection, name: str, context: None) -> None:
    if unit := _units.get(connection):
        unit.roll_back_savepoint()


def _released_savepoint(connection: Connection, name: str, context: None) -> None:
    if unit := _units.get(connection):
        unit.release()


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    """Also called for savepoints, and by sessions that joined a transaction: then it goes on."""
    connection = _of_sessions.get(session)
    if connection is not None and not connection.in_transaction():
        del _of_sessions[session]
        if unit := _units.pop(connection, None):
            unit.committed()


@event.listens_for(Session, "after_transaction_end")
def _after_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None and (connection := _of_sessions.pop(session, None)) is not None:
        if unit := _units.pop(connection, None):
            unit.lost()
