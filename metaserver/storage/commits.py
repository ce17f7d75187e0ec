"""Shell. Stores operators' changes, all or none, and finds out what became of a commit that nobody answered.

A change and its row of the audit trail are one transaction. So a change is stored exactly if its row is there, once all
that was under way is over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable

from qmq.errors import OutcomeUnknown
from qmq.metaserver.model import AuditRow
from qmq.metaserver.storage.changes import Change, Order, RestoreAll
from qmq.metaserver.storage.database import AnswerLate, Database, DatabaseAway
from qmq.metaserver.storage.errors import CommitUnknown

log = logging.getLogger("qmq.metaserver")

AUDIT_ROWS_READ = 200
"""So many newest rows are looked through for a change whose commit got lost; it is seconds old, by whatever clock."""
LATE_S = 5.0
"""A database that answers again has answered what it was asked before, or will not."""
LOOK_FIRST = "it does not tell now; look at AuditTrail once it does, before you repeat this"
MANY = 100
"""More changes than these in one transaction get the time of a reading of everything."""
LOAD_MS = 60_000
"""How long a reading of everything may take: 100,000 routes take a few seconds."""


class Commits:
    """Made by the registry, used on its loop.

    Args:
        catch_up: reads what changed in the database; raises DatabaseAway.
    """

    def __init__(self, database: Database, catch_up: Callable[[], Awaitable[None]]) -> None:
        self.database, self._catch_up = database, catch_up
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
                order.is_withdrawn = True  # it may not even have begun; who looks for it later must not be overtaken
                raise
            if not stored:
                raise DatabaseAway("the connection broke, and the change was not stored") from error
        try:
            await self._catch_up()
        except DatabaseAway:
            log.error("change stored but not read back action=%s: the database went away", audit.action)

    async def settle(self) -> None:
        """Read what changed, once every change that was under way is stored, or gone.

        Raises:
            DatabaseAway, CommitUnknown: nobody can say yet.
        """
        await self.database.probe()
        await self._stand_in_line()
        await self._catch_up()

    async def _stand_in_line(self) -> None:
        """Wait behind all changes that are under way: a broken connection's commit may still be on its way."""
        try:
            await self.database.write(lambda r: r.settle())
        except AnswerLate:
            raise
        except CommitUnknown:
            pass  # it had its turn, so whatever was before it is over

    async def _was_stored(self, audit: AuditRow, error: CommitUnknown) -> bool:
        """Find out whether a change was stored whose commit was not answered: its audit row is part of it."""
        try:
            await self.database.probe()
            told = await _late_answer(error) if isinstance(error, AnswerLate) else None
            if told is not None:
                return told
            await self._stand_in_line()
            rows = await self.database.read(lambda r: r.audit_trail(limit=AUDIT_ROWS_READ))
        except (DatabaseAway, CommitUnknown, TimeoutError) as failed:
            raise OutcomeUnknown(f"{error}; {LOOK_FIRST}") from failed
        return any(_is_same(row, audit) for row in rows)


async def _late_answer(error: AnswerLate) -> bool | None:
    """Whether a change that is under way gets stored; None: its connection broke in the commit.

    Raises:
        TimeoutError: it is still under way. QmqError: the repository refused it.
    """
    try:
        async with asyncio.timeout(LATE_S):
            await asyncio.shield(error.result)
    except DatabaseAway:
        return False  # it failed before the commit
    except CommitUnknown:
        return None
    return True


def _is_same(row: AuditRow, audit: AuditRow) -> bool:
    """Whether a row that was read is what was to be stored: JSON makes lists of tuples."""
    said, known = (
        json.dumps([each.who, each.peer, each.action, dict(each.parameters), each.before, each.after], sort_keys=True)
        for each in (row, audit)
    )
    return said == known
