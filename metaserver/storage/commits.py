"""Shell. Stores operators' changes, all or none, and looks up the outcome of a commit without an answer.

A change and its row of the audit trail are one transaction. So the change was stored if and only if that row exists,
once all pending transactions have ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable

from qmq.errors import OutcomeUnknown
from qmq.logs import shielded
from qmq.metaserver.model import AuditRow
from qmq.metaserver.storage.changes import Change, Order, RestoreAll
from qmq.metaserver.storage.database import AnswerLate, Database, DatabaseAway
from qmq.metaserver.storage.errors import CommitUnknown

log = logging.getLogger("qmq.metaserver")

AUDIT_ROWS_READ = 200
"""Newest rows that are searched for a lost commit, which is seconds old by any clock."""
LATE_S = 5.0
"""Time after which a database that answers again will not answer an earlier call."""
LOOK_FIRST = "check AuditTrail once the database answers, before you repeat this"
MANY = 100
"""A transaction with more changes gets the time limit of a full reading."""
LOAD_MS = 60_000
"""Time limit of a full reading: 100,000 routes take a few seconds."""


class Commits:
    """Writes changes one at a time. Made by the registry, used on its loop.

    Args:
        catch_up: reads changes from the database; raises DatabaseAway.
    """

    def __init__(self, database: Database, catch_up: Callable[[], Awaitable[None]]) -> None:
        self.database = database
        self._catch_up = catch_up
        self.writing = asyncio.Lock()
        """Held while a decision is stored and read back."""

    async def change(self, changes: Iterable[Change], audit: AuditRow) -> None:
        """Store changes and read them back. Raises: see `Registry.change`."""
        orders = tuple(changes)
        async with self.writing:
            await self._store(orders, audit)

    async def _store(self, changes: tuple[Change, ...], audit: AuditRow) -> None:
        order = Order()
        try:
            many = any(isinstance(change, RestoreAll) for change in changes) or len(changes) > MANY
            await self.database.write(lambda r: r.change(changes, audit, order), timeout_ms=LOAD_MS if many else 0)
        except CommitUnknown as error:
            try:
                stored = await self._was_stored(audit, error)
            except OutcomeUnknown:
                order.is_withdrawn = True  # it may not have begun: it must not commit after the row was searched
                raise
            if not stored:
                raise DatabaseAway("the connection broke, and the change was not stored") from error
        try:
            await self._catch_up()
        except DatabaseAway:
            log.error("change stored but not read back action=%s: the database went away", audit.action)

    async def settle(self) -> None:
        """Wait until every pending change is stored or gone, then read the database.

        Raises:
            DatabaseAway, CommitUnknown: the outcome is still unknown.
        """
        await self.database.probe()
        await self._join_queue()
        await self._catch_up()

    async def _join_queue(self) -> None:
        """Wait for the locks of all pending changes: the commit of a broken connection may still arrive."""
        try:
            await self.database.write(lambda r: r.settle())
        except AnswerLate:
            raise
        except CommitUnknown:
            pass  # it had the locks, so every earlier transaction has ended

    async def _was_stored(self, audit: AuditRow, error: CommitUnknown) -> bool:
        """Return whether a change without an answer was stored: its audit row is part of it."""
        try:
            await self.database.probe()
            outcome = await _late_answer(error) if isinstance(error, AnswerLate) else None
            if outcome is not None:
                return outcome
            await self._join_queue()
            rows = await self.database.read(lambda r: r.audit_trail(limit=AUDIT_ROWS_READ))
        except (DatabaseAway, CommitUnknown, TimeoutError) as failed:
            raise OutcomeUnknown(f"{error}; {LOOK_FIRST}") from failed
        return any(_is_same(row, audit) for row in rows)


async def _late_answer(error: AnswerLate) -> bool | None:
    """Return the outcome of a pending change; None: its connection broke in the commit.

    Raises:
        TimeoutError: it is still pending. QmqError: the repository refused it.
    """
    try:
        async with asyncio.timeout(LATE_S):
            await shielded(error.result)
    except DatabaseAway:
        return False  # it failed before the commit
    except CommitUnknown:
        return None
    return True


def _is_same(row: AuditRow, audit: AuditRow) -> bool:
    """Return whether a row equals the audit row to be stored: JSON turns tuples into lists."""
    stored, known = (
        json.dumps([each.who, each.peer, each.action, dict(each.parameters), each.before, each.after], sort_keys=True)
        for each in (row, audit)
    )
    return stored == known
