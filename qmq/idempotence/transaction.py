"""Shell. Filter that writes a message's key and the handler's own work in one transaction of the application's
database.
"""

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
    """Filter for coroutine handlers: writes through `session` happen exactly once.

    The key is inserted first, in the same transaction. When the handler returns, the transaction is committed and then
    the message is acked. A failure before the commit leaves nothing written, and the message is redelivered. If the ack
    is lost, the redelivered message's key exists, so it is acked without the handler. An error of the commit is an
    error of the message.

    If two processes have the same message, the database makes the second wait at the key for the end of the first.

    Messages sent with `session=once.session` are written in that transaction and sent after its commit.

    The transaction belongs to the filter. A handler's `session.commit()` and `session.rollback()` affect only a
    savepoint after the key, so that no part is kept before the whole.

    Args:
        engine: the application's database. Each running handler uses one pooled connection.
        key: identifies the work instead of the message's id, for instance `lambda message: message["orderNo"]`.
        table: name of the table of keys; `create_table` creates it.
    """

    needs_auto_ack = True
    """True, because the handler's own ack would be sent before the commit."""

    def __init__(self, engine: AsyncEngine, *, key: KeyOf | None = None, table: str = HANDLED) -> None:
        self._engine = engine
        self._table = HandledTable(table)
        self._name_of = None if key is None else check_plain("key", key)
        self._session: ContextVar[AsyncSession] = ContextVar("qmq_session")

    @property
    def session(self) -> AsyncSession:
        """Session of the calling handler."""
        return _current(self._session)

    async def create_table(self) -> None:
        """Create the table unless it exists."""
        async with self._engine.begin() as connection:
            await connection.run_sync(self._table.create)

    async def forget(self, before: datetime) -> int:
        """Delete keys of messages handled before `before`; return their number."""
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
                except KeyRefused as refused:  # the transaction is rolled back
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
    """Filter for plain functions as handlers, which run in threads; `session` is a blocking one."""

    needs_auto_ack = True

    def __init__(self, engine: Engine, *, key: KeyOf | None = None, table: str = HANDLED) -> None:
        self._engine = engine
        self._table = HandledTable(table)
        self._name_of = None if key is None else check_plain("key", key)
        self._session: ContextVar[Session] = ContextVar("qmq_session")

    @property
    def session(self) -> Session:
        """Session of the calling handler."""
        return _current(self._session)

    def create_table(self) -> None:
        """Create the table unless it exists."""
        with self._engine.begin() as connection:
            self._table.create(connection)

    def forget(self, before: datetime) -> int:
        """Delete keys of messages handled before `before`; return their number."""
        with self._engine.begin() as connection:
            return self._table.forget(connection, before)

    def __call__(self, message: ReceivedMessage, handle: Callable[[ReceivedMessage], object]) -> None:
        key = message_key(message, self._name_of)
        with self._engine.connect() as connection, sends_after_commit(connection):
            try:
                with connection.begin():
                    self._table.claim(connection, key, _now_ms())
                    self._handle(connection, message, handle)
            except KeyRefused as refused:  # the transaction is rolled back
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
