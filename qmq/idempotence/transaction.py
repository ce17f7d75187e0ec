"""Shell. The message's key and the handler's own work in one transaction of the application's database."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from qmq.client.handler import check_plain
from qmq.client.received import ReceivedMessage
from qmq.errors import InvalidRequest
from qmq.idempotence.keys import KeyOf, message_key
from qmq.idempotence.tables import HANDLED, HandledTable, KeyRefused
from qmq.outbox.sqlalchemy import sends_after_commit

S = TypeVar("S", AsyncSession, Session)


class SqlTransaction:
    """A filter for coroutine handlers: what a handler writes through `session` happens exactly once.

    The key is inserted first, in the same transaction; when the handler returns, all is committed, and then the message
    is acked. If anything fails or dies before the commit, nothing is written and the message comes again; if its ack is
    lost, it comes again, its key is found, and it is acked. An error of the commit is an error of the message.

    Two processes that have the same message: the database lets the second one wait at the key for the first one's end.

    Messages that a handler sends with `session=once.session` are written in that transaction and sent after its commit.

    The transaction is the filter's: `session.commit()` and `session.rollback()` of a handler reach back to a savepoint
    that lies behind the key, so that nothing is kept before all of it is.

    Args:
        engine: the application's database. Each running handler uses one connection of its pool.
        key: what identifies the work instead of the message's id, for instance `lambda message: message["orderNo"]`.
        table: name of the table of keys; `create_table` makes it.
    """

    needs_auto_ack = True
    """An ack of the handler's own would leave before the commit."""

    def __init__(self, engine: AsyncEngine, *, key: KeyOf | None = None, table: str = HANDLED) -> None:
        self._engine = engine
        self._table = HandledTable(table)
        self._name_of = None if key is None else check_plain("key", key)
        self._session: ContextVar[AsyncSession] = ContextVar("qmq_session")

    @property
    def session(self) -> AsyncSession:
        """The session of the handler that asks."""
        return _current(self._session)

    async def create_table(self) -> None:
        """Make the table, unless it is there."""
        async with self._engine.begin() as connection:
            await connection.run_sync(self._table.create)

    async def forget(self, before: datetime) -> int:
        """Delete the keys of messages that were handled before that moment; returns how many."""
        async with self._engine.begin() as connection:
            return await connection.run_sync(self._table.forget, before)

    async def __call__(self, message: ReceivedMessage, handle: Callable[[ReceivedMessage], Awaitable[object]]) -> None:
        key = message_key(message, self._name_of)
        async with self._engine.connect() as connection:
            with sends_after_commit(connection):
                try:
                    async with connection.begin():
                        await connection.run_sync(self._table.claim, key, _now_ms())
                        await self._handle(connection, message, handle)
                except KeyRefused as refused:  # rolled back by now
                    await connection.run_sync(self._table.check_handled, key, refused)

    async def _handle(
        self,
        connection: AsyncConnection,
        message: ReceivedMessage,
        handle: Callable[[ReceivedMessage], Awaitable[object]],
    ) -> None:
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            before = self._session.set(session)
            try:
                await handle(message)
            finally:
                self._session.reset(before)
            await session.commit()


class BlockingSqlTransaction:
    """The same for plain functions as handlers, which run in threads: `session` is a blocking one."""

    needs_auto_ack = True

    def __init__(self, engine: Engine, *, key: KeyOf | None = None, table: str = HANDLED) -> None:
        self._engine = engine
        self._table = HandledTable(table)
        self._name_of = None if key is None else check_plain("key", key)
        self._session: ContextVar[Session] = ContextVar("qmq_session")

    @property
    def session(self) -> Session:
        """The session of the handler that asks."""
        return _current(self._session)

    def create_table(self) -> None:
        """Make the table, unless it is there."""
        with self._engine.begin() as connection:
            self._table.create(connection)

    def forget(self, before: datetime) -> int:
        """Delete the keys of messages that were handled before that moment; returns how many."""
        with self._engine.begin() as connection:
            return self._table.forget(connection, before)

    def __call__(self, message: ReceivedMessage, handle: Callable[[ReceivedMessage], object]) -> None:
        key = message_key(message, self._name_of)
        with self._engine.connect() as connection, sends_after_commit(connection):
            try:
                with connection.begin():
                    self._table.claim(connection, key, _now_ms())
                    self._handle(connection, message, handle)
            except KeyRefused as refused:  # rolled back by now
                self._table.check_handled(connection, key, refused)

    def _handle(
        self, connection: Connection, message: ReceivedMessage, handle: Callable[[ReceivedMessage], object]
    ) -> None:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            before = self._session.set(session)
            try:
                handle(message)
            finally:
                self._session.reset(before)
            session.commit()


def _current(variable: ContextVar[S]) -> S:
    try:
        return variable.get()
    except LookupError:
        raise InvalidRequest("there is a session only while a handler runs behind this filter") from None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
