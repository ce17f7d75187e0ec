"""Shell. Row counts of all databases for the metrics, and the answers to operators: stuck rows, retry, reconciliation.

Reconciliation looks for the messages of rows in the logs of the brokers; it only reads. Each broker group of the row's
subject searches the messages stored since the row was written, less an hour for differing clocks. The number of rows
and the time are bounded.

    in the log       some group has the message: nothing is lost, the row will be deleted
    not in the log   every group searched all of its log
    unchecked        anything else, with the reason
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio

from qmq.access import token_text
from qmq.control_plane import CHANNEL_OPTIONS
from qmq.errors import CallError, NotServed, OperatorError, QmqError
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from qmq.watchdog.database import Questions, Stats, StuckRow, open_source
from qmq.watchdog.leader import Leader
from qmq.watchdog.meta_link import MetaLink
from qmq.watchdog.metrics import Metrics
from qmq.watchdog.settings import Source, WatchdogSettings

CLOCKS_MS = 3_600_000
ANSWER_S = 5.0
IN_LOG, NOT_IN_LOG, UNCHECKED = "inLog", "notInLog", "unchecked"


class Finding(NamedTuple):
    """Result for one row's message. `where`: broker group and sequence; `why`: reason if unchecked."""

    row: StuckRow
    state: str
    where: str = ""
    why: str = ""


class Reconciliation:
    """One reconciliation of rows of any databases. Used on the loop: `async with`."""

    def __init__(self, link: MetaLink, token: str, *, seconds: float) -> None:
        self._link = link
        self._token = token
        self._ends_at = time.monotonic() + seconds
        self._masters: dict[str, list[tuple[str, str]]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Reconciliation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def look(self, rows: Iterable[StuckRow]) -> list[Finding]:
        return [await self._look_for(row) for row in rows]

    async def _look_for(self, row: StuckRow) -> Finding:
        if not row.message_id or not row.subject:
            return Finding(row, UNCHECKED, why="the row cannot be read")
        try:
            masters = await self._masters_of(row.subject)
            if not masters:
                return Finding(row, UNCHECKED, why="the metaserver names no broker group of its subject")
            for group, address in masters:
                if (sequence := await self._find(address, row)) is not None:
                    return Finding(row, IN_LOG, where=f"{group} {sequence}")
        except (NotServed, TimeoutError) as error:
            return Finding(row, UNCHECKED, why=str(error) or "no time was left")
        except grpc.aio.AioRpcError as error:
            return Finding(row, UNCHECKED, why=f"a broker does not answer: {error.details()}")
        return Finding(row, NOT_IN_LOG)

    async def _masters_of(self, subject: str) -> list[tuple[str, str]]:
        if subject not in self._masters:
            self._masters[subject] = await self._link.masters(subject)
        return self._masters[subject]

    async def _find(self, address: str, row: StuckRow) -> int | None:
        """Search one group's messages within the time; return the message's sequence, or None."""
        since_ms = max(1, row.created_ms - CLOCKS_MS) if row.created_ms else 0
        request = pb.BrowseRequest(subject=row.subject, id=row.message_id, since_ms=since_ms, messages_max=1)
        while True:
            answer = await self._ask(address, request)
            if answer.messages:
                return int(answer.messages[0].sequence)
            if answer.begin >= answer.end:
                return None
            request.begin, request.end, request.since_ms = answer.begin, answer.end, 0

    async def _ask(self, address: str, request: pb.BrowseRequest) -> Any:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        metadata = (("x-api-token", self._token),)
        return await BrokerStub(channel).Browse(request, metadata=metadata, timeout=min(left_s, ANSWER_S))


log = logging.getLogger("qmq.watchdog")

QUESTION_S = 20.0
THREADS_MAX = 200
"""One question at a time per database, so a hanging one blocks one thread."""
SAMPLE_ROWS, SAMPLE_OLDER_S, SAMPLE_S = 20, 300, 10.0
"""Bounds of the sample for the metric of reconciliation."""
COUNTS_PER_SAMPLE = 40
"""Counts from one sample to the next: ten minutes by default."""
LIMIT_MAX = 1_000

T = TypeVar("T")


class Watcher:
    """Row counts and operators' requests of one watchdog. Made by main; `run` ends when cancelled. Used on the loop."""

    def __init__(self, settings: WatchdogSettings, leader: Leader, link: MetaLink, metrics: Metrics) -> None:
        self._settings = settings
        self._leader = leader
        self._link = link
        self._metrics = metrics
        # Own threads: a hanging database must not block those that find the metaserver.
        self._threads = ThreadPoolExecutor(THREADS_MAX, "questions")
        self._asked: dict[str, Future[Any]] = {}

    @property
    def is_hanging(self) -> bool:
        """Whether a question is still running; its thread cannot be ended."""
        return any(not call.done() for call in self._asked.values())

    async def run(self) -> None:
        counts = 0
        while True:
            if self._leader.is_leader:
                await asyncio.gather(*(self._count(source) for source in list(self._leader.sources)))
                if counts % COUNTS_PER_SAMPLE == 0:
                    await self._sample()
                counts += 1
            known = {source.url for source in self._leader.sources} if self._leader.is_leader else set()
            for url in {*self._metrics.stats, *self._metrics.reconciled} - known:
                self._metrics.stats.pop(url, None)
                self._metrics.reconciled.pop(url, None)
            await asyncio.sleep(self._settings.stats_ms / 1000)

    async def _count(self, source: Source) -> None:
        try:
            stats: Stats = await self._ask(source, Questions.stats)
        except NotServed:
            self._metrics.stats.pop(source.url, None)  # the drain reports the trouble
        else:
            self._metrics.stats[source.url] = stats

    async def _sample(self) -> None:
        for source in list(self._leader.sources):
            try:
                report = await self.reconcile(
                    database=source.url, older_s=SAMPLE_OLDER_S, limit=SAMPLE_ROWS, seconds=SAMPLE_S
                )
            except QmqError:
                continue
            for answer in report["databases"]:
                if "counts" in answer:
                    self._metrics.reconciled[source.url] = answer["counts"]

    # Operators.

    async def stuck(self, *, database: str, older_s: int, limit: int) -> dict[str, Any]:
        """List rows that are parked, or wait longer than `older_s`."""

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
        """Release parked rows: those with these ids, or all."""
        if ids is not None and not database:
            raise OperatorError("ids belong to one database: name it with --database")

        async def of(source: Source) -> dict[str, Any]:
            return {"retried": await self._ask(source, lambda questions: questions.retry(ids))}

        return await self._each(database, of)

    async def reconcile(self, *, database: str, older_s: int, limit: int, seconds: float) -> dict[str, Any]:
        """Search the brokers' logs for the messages of rows that are parked, or older than `older_s`."""
        async with Reconciliation(self._link, token_text(self._settings.token), seconds=seconds) as reconciliation:

            async def of(source: Source) -> dict[str, Any]:
                stats = await self._ask(source, Questions.stats)
                findings = await reconciliation.look(await self._stuck(source, older_s, limit))
                states = Counter(finding.state for finding in findings)
                counts = {state: states[state] for state in (IN_LOG, NOT_IN_LOG, UNCHECKED)}
                more = {"pending": stats.pending, "parked": stats.parked, "claimed": stats.claimed}
                return {**more, "counts": counts, "rows": list(map(_finding_json, findings))}

            return await self._each(database, of)

    async def _each(self, database: str, work: Callable[[Source], Any]) -> dict[str, Any]:
        """Run `work` for each database, or the named one; a failure becomes its `problem`."""
        if not self._leader.is_leader:
            raise NotServed("this watchdog is not the active one; ListWatchdogs names the active one")
        sources = [source for source in self._leader.sources if database in ("", source.url)]
        if database and not sources:
            known = ", ".join(source.url for source in self._leader.sources) or "none"
            raise OperatorError(f"no database {database[:200]} is registered in this room. Registered: {known}")

        async def of(source: Source) -> dict[str, Any]:
            try:
                return {"database": source.url, **await work(source)}
            except (NotServed, CallError) as error:
                return {"database": source.url, "problem": str(error)}

        answers = await asyncio.gather(*map(of, sources))
        problems = [{"database": url, "problem": problem} for url, problem in self._leader.problems.items()]
        return {"databases": [*answers, *(problem for problem in problems if database in ("", problem["database"]))]}

    async def _ask(self, source: Source, question: Callable[[Questions], T]) -> T:
        """Run a question on a thread; raise NotServed if the database is unusable, or too slow."""

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
        except Exception as error:  # any driver's error concerns this database alone
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
