"""Shell. Calls to the database: each has a time limit, and none starts while the database is away.

A database that hangs must not block its callers, so calls run on threads of their own. After one unanswered call all
fail at once, until `probe` gets an answer.

Operators' changes are stored all or none. A change and its row of the audit trail are one transaction. So the change
was stored if and only if that row exists, once all pending transactions have ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from qmq.errors import NotServed, OutcomeUnknown, cause_of
from qmq.logs import retrieve_error, shielded
from qmq.memory import without_frames
from qmq.metaserver.model import AuditRow
from qmq.metaserver.storage.changes import Change, CommitUnknown, DatabaseUnusable, Order, RestoreAll
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository

log = logging.getLogger("qmq.metaserver")

THREADS = 8
"""Threads, as many as pooled connections; calls take milliseconds."""

T = TypeVar("T")


class DatabaseAway(NotServed):
    """The database does not answer. Nothing was changed; memory still answers everything else."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(
            "the database does not answer: new subjects, consumer groups and role changes wait; known routes continue"
            + (f" ({reason})" if reason else "")
        )


class DatabaseSetAside(DatabaseAway):
    """The database answers, but has lost groups with registered brokers.

    It is not used until an operator decides; the text names the commands.
    """

    def __init__(self, reason: str) -> None:
        NotServed.__init__(self, reason)


_decides: ContextVar[bool] = ContextVar("decides about a database that was set aside", default=False)


@contextmanager
def deciding() -> Iterator[None]:
    """Allow this task to use the database although it was set aside."""
    before = _decides.set(True)
    try:
        yield
    finally:
        _decides.reset(before)


class AnswerLate(CommitUnknown):
    """A change was not answered in time. `result` receives a late answer."""

    def __init__(self, result: asyncio.Future[Any]) -> None:
        super().__init__("the database did not answer in time: the change is stored as a whole or not at all")
        self.result = result


class Database:
    """The database behind time limits. Created by main; used from the loop. Its threads end with the process.

    Args:
        timeout_ms: time limit of a call.
    """

    def __init__(self, url: str, *, timeout_ms: int) -> None:
        self._url = url
        self._timeout_ms = timeout_ms
        self._first_thread = ThreadPoolExecutor(1, "database")
        """Thread for a call while there is no other: in a pool, every call wakes a second idle thread."""
        self._threads = ThreadPoolExecutor(THREADS - 1, "database")
        self._engine: Engine | None = None
        self._repository: Repository | None = None
        self._probe: asyncio.Future[dict[str, int]] | None = None
        self._away_since: float | None = None
        self._under_way: set[object] = set()
        self.reason = ""
        """Reason why it is away."""
        self.set_aside_because = ""
        """Reason why it is not used although it answers; empty: it is used."""
        self.answer_s = 0.0
        """Duration of the newest answer."""
        self.committed_ms = 0
        """Time of the last write, since 1970."""

    @property
    def is_up(self) -> bool:
        return self._repository is not None and self._away_since is None and not self.set_aside_because

    @property
    def trouble(self) -> str:
        """Return why the database is not used, for users; empty: it is used."""
        return "" if self.is_up else self.set_aside_because or "the database does not answer"

    def set_aside(self, reason: str) -> None:
        """Stop using the database, or use it again if the reason is empty."""
        if reason != self.set_aside_because:
            log.error("%s", reason) if reason else log.warning("the database is used again")
        self.set_aside_because = reason

    async def open(self) -> None:
        """Connect and migrate, without a time limit.

        Raises:
            DatabaseUnusable: it must not be used. DatabaseAway: it does not answer.
        """
        await self._on_thread(self._open)
        self._mark_back()

    async def probe(self) -> dict[str, int]:
        """Read the versions, even while the database is away; an answer ends that state.

        Only one such call is pending at a time, so that a hanging database takes one thread.

        Raises:
            DatabaseAway: no answer yet.
        """
        if self._probe is not None and not self._probe.done():
            await self._answer(
                self._probe
            )  # it proves that the database answers, but its versions are older than our call
        # No variable may hold the earlier error: this frame is in the traceback that the next error keeps.
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._on_thread(self._ask_versions))
            self._probe.add_done_callback(retrieve_error)
        return await self._answer(self._probe)

    async def _answer(self, probe: asyncio.Future[dict[str, int]]) -> dict[str, int]:
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                versions = await shielded(probe)
        except TimeoutError:
            self._mark_away("no answer in time")
            raise DatabaseAway(self.reason) from None
        except DatabaseUnusable as error:
            self._mark_away(str(error))
            raise DatabaseAway(self.reason) from error
        self._mark_back()
        return versions

    async def read(self, work: Callable[[Repository], T], *, timeout_ms: int = 0) -> T:
        """Run `work` on a thread. Raises DatabaseAway."""
        try:
            return await self._bounded(work, timeout_ms or self._timeout_ms)
        except TimeoutError:
            self._mark_away("no answer in time")
            raise DatabaseAway(self.reason) from None

    async def write(self, work: Callable[[Repository], T], *, timeout_ms: int = 0) -> T:
        """Run `work`, which changes rows, on a thread.

        Raises:
            DatabaseAway: nothing was changed. CommitUnknown, AnswerLate: it may have been.
            QmqError: raised by the repository; nothing was changed.
        """
        result = asyncio.ensure_future(self._bounded(work, 0))
        done, _ = await asyncio.wait({result}, timeout=(timeout_ms or self._timeout_ms) / 1000)
        if not done:
            self._mark_away("no answer in time")
            result.add_done_callback(retrieve_error)
            raise AnswerLate(result)
        stored = result.result()
        self.committed_ms = time.time_ns() // 1_000_000
        return stored

    @property
    def is_hanging(self) -> bool:
        """Return whether a call hangs. Python would wait for its thread at exit."""
        return bool(self._under_way)

    @property
    def repository(self) -> Repository:
        """Return the repository, for calls on other threads. Raises DatabaseAway."""
        if self._repository is None:
            raise DatabaseAway(self.reason)
        return self._repository

    @property
    def bad_rows(self) -> int:
        return len(self._repository.bad_rows) if self._repository is not None else 0

    def close(self) -> None:
        """Close connections. A hanging thread is abandoned: waiting for it would block the stop."""
        for threads in (self._first_thread, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None and self._away_since is None:
            self._engine.dispose()

    async def _bounded(self, work: Callable[[Repository], T], timeout_ms: int) -> T:
        repository = self._repository
        if repository is None or self._away_since is not None:
            raise DatabaseAway(self.reason)
        if self.set_aside_because and not _decides.get():
            raise DatabaseSetAside(self.set_aside_because)
        async with asyncio.timeout(timeout_ms / 1000 if timeout_ms else None):
            return await self._on_thread(lambda: work(repository))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        threads = self._threads if self._under_way else self._first_thread
        self._under_way.add(started := object())
        began = time.monotonic()

        def run() -> T:
            try:
                return without_frames(work)
            finally:
                self._under_way.discard(started)

        try:
            answer = await asyncio.get_running_loop().run_in_executor(threads, run)
            self.answer_s = time.monotonic() - began
            return answer
        except (IntegrityError, DataError):
            raise  # it answers; the query is wrong
        except (SQLAlchemyError, OSError) as error:
            reason = cause_of(getattr(error, "orig", None) or error).partition("\n")[0][:200]
            self._mark_away(reason)
            raise DatabaseAway(reason) from error

    def _open(self) -> None:
        engine = open_database(self._url)
        self._engine = engine
        self._repository = Repository(engine)

    def _ask_versions(self) -> dict[str, int]:
        if self._repository is None:
            self._open()
        assert self._repository is not None  # just opened
        return self._repository.versions()

    def _mark_away(self, reason: str) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.error("database away: %s; serving from memory", reason)
        self.reason = reason

    def _mark_back(self) -> None:
        if self._away_since is not None:
            log.warning("database back after %.1f s", time.monotonic() - self._away_since)
        self._away_since = None
        self.reason = ""


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
                order.is_withdrawn = True  # it may not have begun, and must not commit after the search for its row
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
