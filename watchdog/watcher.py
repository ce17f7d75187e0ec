"""Shell. Counts the rows of all databases for the metrics, and answers what operators ask; beside the drains."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from qmq.errors import CallError, NotServed, OperatorError, QmqError
from qmq.watchdog.db.engine import open_source
from qmq.watchdog.db.questions import Questions, Stats, StuckRow
from qmq.watchdog.leading import Leading
from qmq.watchdog.meta_link import MetaLink
from qmq.watchdog.metrics import Metrics
from qmq.watchdog.reconcile import IN_LOG, NOT_IN_LOG, UNCHECKED, Finding, Reconciling
from qmq.watchdog.settings import WatchdogSettings
from qmq.watchdog.sources import Source

log = logging.getLogger("qmq.watchdog")

QUESTION_S = 20.0
THREADS_MAX = 200
"""A database has one question at a time, so one that hangs takes one thread."""
SAMPLE_ROWS, SAMPLE_OLDER_S, SAMPLE_S = 20, 300, 10.0
"""What the metric of reconciliation looks at, each time."""
EACH = 40
"""Every so many counts there is a look at the logs: every ten minutes by default."""
LIMIT_MAX = 1_000

T = TypeVar("T")


class Watcher:
    """Made by main; `run` returns when it is cancelled. Used on the loop."""

    def __init__(self, settings: WatchdogSettings, leading: Leading, link: MetaLink, metrics: Metrics) -> None:
        self._settings, self._leading, self._link, self._metrics = settings, leading, link, metrics
        # Threads of our own: a database that hangs must not take those by which the metaserver is found.
        self._threads = ThreadPoolExecutor(THREADS_MAX, "questions")
        self._asked: dict[str, Future[Any]] = {}

    @property
    def is_hanging(self) -> bool:
        """Whether a question has not been answered; its thread cannot be ended."""
        return any(not call.done() for call in self._asked.values())

    async def run(self) -> None:
        turn = 0
        while True:
            if self._leading.is_leader:
                await asyncio.gather(*(self._count(source) for source in list(self._leading.sources)))
                if turn % EACH == 0:
                    await self._sample()
                turn += 1
            known = {source.url for source in self._leading.sources} if self._leading.is_leader else set()
            for url in {*self._metrics.stats, *self._metrics.reconciled} - known:
                self._metrics.stats.pop(url, None)
                self._metrics.reconciled.pop(url, None)
            await asyncio.sleep(self._settings.stats_ms / 1000)

    async def _count(self, source: Source) -> None:
        try:
            stats: Stats = await self._ask(source, Questions.stats)
        except NotServed:
            self._metrics.stats.pop(source.url, None)  # the drain says what is wrong
        else:
            self._metrics.stats[source.url] = stats

    async def _sample(self) -> None:
        for source in list(self._leading.sources):
            try:
                report = await self.reconcile(
                    database=source.url, older_s=SAMPLE_OLDER_S, limit=SAMPLE_ROWS, seconds=SAMPLE_S
                )
            except QmqError:
                continue
            for one in report["databases"]:
                if "counts" in one:
                    self._metrics.reconciled[source.url] = one["counts"]

    # Operators.

    async def stuck(self, *, database: str, older_s: int, limit: int) -> dict[str, Any]:
        """List rows that are parked, or wait for longer than `older_s`."""

        async def of(source: Source) -> dict[str, Any]:
            stats = await self._ask(source, Questions.stats)
            rows = await self._stuck(source, older_s, limit)
            counts = {name: getattr(stats, name) for name in ("pending", "claimed", "parked")}
            return {**counts, "oldest": stats.oldest_s, "rows": list(map(_row_json, rows))}

        return await self._each(database, of)

    async def _stuck(self, source: Source, older_s: int, limit: int) -> list[StuckRow]:
        limit = min(limit, LIMIT_MAX)
        return await self._ask(source, lambda questions: questions.stuck(older_s=older_s, limit=limit))

    async def retry(self, *, database: str, ids: list[int] | None) -> dict[str, Any]:
        """Let parked rows be sent again: those with these ids, or all."""
        if ids is not None and not database:
            raise OperatorError("ids are those of one database: say which")

        async def of(source: Source) -> dict[str, Any]:
            return {"retried": await self._ask(source, lambda questions: questions.retry(ids))}

        return await self._each(database, of)

    async def reconcile(self, *, database: str, older_s: int, limit: int, seconds: float) -> dict[str, Any]:
        """Hold rows that are parked, or older than `older_s`, against the logs of the brokers."""
        async with Reconciling(self._link, self._settings.token, seconds=seconds) as reconciling:

            async def of(source: Source) -> dict[str, Any]:
                stats = await self._ask(source, Questions.stats)
                findings = await reconciling.look(await self._stuck(source, older_s, limit))
                states = Counter(finding.state for finding in findings)
                counts = {state: states[state] for state in (IN_LOG, NOT_IN_LOG, UNCHECKED)}
                more = {"pending": stats.pending, "parked": stats.parked, "claimed": stats.claimed}
                return {**more, "counts": counts, "rows": list(map(_finding_json, findings))}

            return await self._each(database, of)

    async def _each(self, database: str, work: Callable[[Source], Any]) -> dict[str, Any]:
        """Do something with each database, or the one that is named. One that fails says why, in its place."""
        if not self._leading.is_leader:
            raise NotServed("this watchdog is not the active one; ListWatchdogs says which one is")
        sources = [one for one in self._leading.sources if database in ("", one.url)]
        if database and not sources:
            known = ", ".join(one.url for one in self._leading.sources) or "none"
            raise OperatorError(f"no database {database[:200]} is registered in this room; there is: {known}")

        async def of(source: Source) -> dict[str, Any]:
            try:
                return {"database": source.url, **await work(source)}
            except (NotServed, CallError) as error:
                return {"database": source.url, "problem": str(error)}

        answers = await asyncio.gather(*map(of, sources))
        problems = [{"database": url, "problem": problem} for url, problem in self._leading.problems.items()]
        return {"databases": [*answers, *(one for one in problems if database in ("", one["database"]))]}

    async def _ask(self, source: Source, question: Callable[[Questions], T]) -> T:
        """Ask on a thread; raises NotServed if the database is of no use, or does not answer in time."""

        def ask() -> T:
            questions = Questions(open_source(source), source)
            try:
                return question(questions)
            finally:
                questions.close()

        try:
            async with asyncio.timeout(QUESTION_S):
                while (earlier := self._asked.get(source.url)) is not None and not earlier.done():
                    await asyncio.sleep(0.02)
                self._asked[source.url] = call = self._threads.submit(ask)
                return await asyncio.wrap_future(call)
        except CallError as error:
            raise NotServed(str(error)) from None
        except Exception as error:  # whatever a driver raises, it is the trouble of this database alone
            reason = (str(getattr(error, "orig", None) or error) or "no answer in time").partition("\n")[0][:200]
            raise NotServed(f"{source.url}: {reason}") from None


def _row_json(row: StuckRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "state": row.state,
        "errors": row.errors,
        "reason": row.reason,
        "age": row.age_s,
        "subject": row.subject,
        "messageId": row.message_id,
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {**_row_json(finding.row), "log": finding.state, "where": finding.where, "why": finding.why}
