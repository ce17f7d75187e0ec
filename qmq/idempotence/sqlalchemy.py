"""Shell. Keys in a database through SQLAlchemy: SQLite, MariaDB, MySQL, PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from qmq.idempotence.checker import in_thread
from qmq.idempotence.keys import Claim, State
from qmq.idempotence.tables import CLAIMS, ClaimsTable
from qmq.outbox.sqlalchemy import run, run_async

T = TypeVar("T")

CLAIMS_MAX = 10
"""Limit of attempts to claim. Between the insert and the select, the key may be released by a failure in another
process.
"""


class SqlKeys:
    """Keys in a table, for `Idempotence`; each step is a transaction of its own.

    Args:
        engine: an AsyncEngine, or an Engine; its calls then run in threads.
        table: name of the table; `create_table` creates it.
        now_ms: the clock.
    """

    def __init__(
        self,
        engine: AsyncEngine | Engine,
        *,
        table: str = CLAIMS,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._engine = engine
        self._table = ClaimsTable(table)
        self._now_ms = now_ms

    async def create_table(self) -> None:
        """Create the table unless it exists."""
        await self._run(self._table.create)

    async def forget(self, before: datetime) -> int:
        """Delete keys of messages handled before `before`; return their number.

        Later redeliveries of these messages are handled again.
        """
        return await self._run(lambda connection: self._table.forget(connection, before, self._now_ms()))

    async def claim(self, key: str, owner: str, lease_s: float) -> Claim:
        def insert(connection: Connection) -> None:
            self._table.insert(connection, key, owner, self._now_ms(), _ms(lease_s))

        def take_expired(connection: Connection) -> Claim | None:
            return self._table.take_expired(connection, key, owner, self._now_ms(), _ms(lease_s))

        for _ in range(CLAIMS_MAX):
            try:
                await self._run(insert)
                return Claim(State.CLAIMED)
            except IntegrityError:
                if claim := await self._run(take_expired):
                    return claim
        return Claim(State.BUSY, lease_s)

    async def renew(self, key: str, owner: str, lease_s: float) -> bool:
        return await self._run(
            lambda connection: self._table.renew(connection, key, owner, self._now_ms(), _ms(lease_s))
        )

    async def finish(self, key: str, owner: str) -> bool:
        return await self._run(lambda connection: self._table.finish(connection, key, owner, self._now_ms()))

    async def release(self, key: str, owner: str) -> None:
        await self._run(lambda connection: self._table.release(connection, key, owner))

    async def _run(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction and commit it; repeat it once if a pooled connection was broken.

        A restarted database ends all pooled connections, and the first error discards the pool. Each step may be
        repeated: a claim whose commit was lost counts as a claim of another process until its lease ends.
        """
        try:
            return await self._run_once(work)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            return await self._run_once(work)

    async def _run_once(self, work: Callable[[Connection], T]) -> T:
        engine = self._engine
        if isinstance(engine, AsyncEngine):
            return await run_async(engine, work)
        return await in_thread(lambda: run(engine, work))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
