"""Shell. Relay of the rows that stay in a producer's outboxes, and the runner of any drain.

A row stays if its process ended before the send, or if the send failed. Each database of a producer has one relay,
which alternates between two steps:

    look     count the rows that wait longer than the producer tries: at the start, then once a minute; while rows wait,
             after 1 s, 2 s, … 30 s, and whenever a broker group becomes usable
    drain    if rows are old enough: claim, send and delete them by the rules of `qmq.outbox.drain_plan`; claims allow
             any number of producers and watchdogs to drain one outbox at a time

Without such rows an application has one SELECT a minute in its database and no connection beside the producer's own.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from qmq.client.batch import Answer
from qmq.client.numbered_sender import NumberedSender
from qmq.logs import bounded, shielded
from qmq.outbox.claims import (
    PRODUCER_BITS,
    RELAY_TERM,
    RELAY_TERM_BITS,
    AdoptClaims,
    ClaimRows,
    Disown,
    ReadClaims,
    ReadPage,
    SettleClaims,
    Work,
)
from qmq.outbox.drain_plan import Attempt, DrainPlan, Limits
from qmq.outbox.statements import Left, Statements
from qmq.outbox.unit import Database


class Drain:
    """Runner of one drain: work in the database, and sends. Made by a watchdog for a lease, or by a relay while rows
    wait.

    Args:
        do: carries out work in the database and returns its answer; may raise any driver's error.
    """

    def __init__(self, core: DrainPlan, sender: NumberedSender, do: Callable[[Work], Awaitable[Any]]) -> None:
        self.core = core
        self._sender = sender
        self._do = do
        self._moved = asyncio.Event()

    def wake(self) -> None:
        """Continue at once: an answer arrived, or groups became usable."""
        self._moved.set()

    async def step(self) -> None:
        """Send due batches, then do one piece of work, or wait until there may be some.

        Raises:
            Exception: the work failed, or its outcome is unknown; the plan has recorded that.
        """
        now_ms = now()
        self._moved.clear()
        for attempt in self.core.attempts(now_ms):
            self._send(attempt)
        work = self.core.next_work(now_ms)
        if work is not None:
            await self._carry_out(work)
        elif not self.core.has_stopped:
            await self.rest(self.core.wake_ms(now_ms) - now_ms)

    async def rest(self, wait_ms: int) -> None:
        """Wait for `wait_ms`, or until `wake`."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._moved.wait()
        except TimeoutError:
            pass

    def _send(self, attempt: Attempt) -> None:
        self._sender.send(attempt.group, attempt.batch, partial(self._answered, attempt))

    def _answered(self, attempt: Attempt, answer: Answer) -> None:
        self.core.answered(attempt.claim, answer, now())
        self._moved.set()

    async def _carry_out(self, work: Work) -> None:
        core = self.core
        try:
            result = await self._do(work)
        except Exception:  # of any kind, such as RuntimeError for a missing package, or UnicodeError
            core.failed(work, now())
            raise
        match work:
            case ReadPage():
                core.page(result, now())
            case ClaimRows():
                core.claimed(result, now())
            case SettleClaims():
                core.settled(work, now())
            case ReadClaims():
                core.known(result)
            case AdoptClaims():
                core.adopted(work, result, now())
            case Disown():
                core.disowned(work, result)


def now() -> int:
    return time.monotonic_ns() // 1_000_000


log = bounded(__name__)

LOOK_S = 60.0
AGAIN_S_MIN, AGAIN_S_MAX = 1.0, 30.0
"""Time until the next look while rows wait; doubled each time, because each look reads all of them."""
LEARNED_S = 10.0
"""Time until the first look at a database that a message has named. Short programs have ended by then, and starts are
over.
"""
STOP_S = 5.0
"""Wait for answers at the end, and for a running query. Another drain adopts unanswered claims after a minute."""
TROUBLES_MIN = 2
"""Number of failures in a row above which the cause is not just a passing lock."""
DATABASES_MAX = 64
"""Limit of databases, because applications may create them dynamically. The oldest one without waiting rows is
forgotten.
"""
LIMITS = Limits(rate=2_000, page_rows=100, claims_max=4)
"""Limits of a relay, which runs beside the application's own work: a fifth of a watchdog's rate."""


class LeftBehind(NamedTuple):
    """Unsent rows of one outbox.

    `rows`: those waiting longer than the producer tries, up to 10,000. `oldest_s`: age of the oldest. `parked`: rows
    that stay until OutboxRetry and do not wait. `reason`: why they wait, or why they cannot be counted.
    """

    database: str
    rows: int
    oldest_s: float
    parked: int
    reason: str

    @property
    def is_degraded(self) -> bool:
        return bool(self.rows or self.reason)

    def __str__(self) -> str:
        """Return a sentence, without the database's address."""
        if not self.rows:
            return f"outbox: {self.reason or f'{self.parked} rows are parked'}"
        waits = f"{self.rows} messages wait in the outbox, the oldest for {self.oldest_s:.0f} s"
        return f"{waits}: {self.reason}" if self.reason else waits


class Relays:
    """All relays of one producer; used on its event loop.

    Args:
        new_sender: makes the sender of batches, opened while rows wait.
        timeout_ms: the producer's timeout, after which a row counts as left behind.
        age_ms: age from which a relay may send a row.
        under_way: returns the ids of rows that this producer is sending now.
    """

    def __init__(
        self,
        *,
        new_sender: Callable[[], NumberedSender],
        table: str,
        timeout_ms: int,
        age_ms: int,
        under_way: Callable[[Database], set[int]],
    ) -> None:
        self.new_sender = new_sender
        self.table = table
        self.timeout_ms = timeout_ms
        self.age_ms = age_ms
        self.under_way = under_way
        self._relays: dict[str, Relay] = {}
        self._is_closed = False

    def use(self, database: Database, *, wait_s: float | None = None) -> None:
        """Relay the rows of this database; databases of one name are the same.

        Args:
            wait_s: delay of the first look.
        """
        if self._is_closed or getattr(database, "is_in_memory", False):  # there each connection has another database
            return
        known = self._relays.get(database.name)
        if known is not None:
            known.database = database  # an earlier engine may be disposed
            return
        if len(self._relays) >= DATABASES_MAX:
            for name, relay in self._relays.items():
                if not relay.waits:
                    relay.cancel()
                    del self._relays[name]
                    break
            else:
                return
        first_s = min(LEARNED_S, self.age_ms / 1000) if wait_s is None else wait_s
        self._relays[database.name] = Relay(self, database, first_s)

    def left(self, database: Database, reason: str) -> None:
        """Record that rows of this database could not be sent."""
        if (relay := self._relays.get(database.name)) is not None:
            relay.left(reason)

    @property
    def left_behind(self) -> list[LeftBehind]:
        """Waiting or parked rows: an entry for each database that has some, or whose rows cannot be counted."""
        found = (relay.left_behind for relay in list(self._relays.values()))
        return [entry for entry in found if entry.is_degraded or entry.parked]

    async def close(self) -> None:
        """End all relays after a short wait for their claims and queries."""
        relays = list(self._relays.values())
        self._relays = {}
        self._is_closed = True
        await asyncio.gather(*(relay.stop() for relay in relays))


class Relay:
    """Relay of one database. Made by `Relays`; its task ends with `stop` or `cancel`."""

    def __init__(self, owner: Relays, database: Database, first_s: float) -> None:
        self.database = database
        self._owner = owner
        self._left = Left(0, 0, 0)
        self._looked_ms = now()
        self._reason = ""
        """Reason of the last failed send; "" if the rows are of another process and none was tried yet."""
        self._trouble = ""
        self._troubles = 0
        self._is_announced = False
        self._relayed = 0
        self._again_s = AGAIN_S_MIN
        self._moved = asyncio.Event()
        self._is_stopping = False
        self._is_expected = False
        self._sender: NumberedSender | None = None
        self._drain: Drain | None = None
        self._query: asyncio.Future[Any] | None = None
        """Newest query. Its thread cannot be stopped, so it continues when its caller is cancelled."""
        self._task = asyncio.get_running_loop().create_task(self._run(first_s))

    @property
    def waits(self) -> bool:
        return bool(self._left.rows)

    @property
    def left_behind(self) -> LeftBehind:
        """Result of the last look; readable from any thread."""
        left, oldest_s = self._left, 0.0
        if left.rows:
            oldest_s, reason = (left.oldest_ms + now() - self._looked_ms) / 1000, self._trouble or self._reason
        else:
            reason = self._trouble if self._troubles >= TROUBLES_MIN else ""
        return LeftBehind(str(self.database.name), left.rows, oldest_s, left.parked, reason)

    def left(self, reason: str) -> None:
        """Record that a message could not be sent and its row stays."""
        self._reason = reason
        self._is_expected = True
        if not self._left.rows:  # otherwise a look is planned already, and each look reads all waiting rows
            self._moved.set()

    def cancel(self) -> None:
        self._task.cancel()
        if self._query is not None:
            self._query.cancel()

    async def stop(self) -> None:
        """End the relay. A running drain stops claiming and waits a little for its answers.

        Then it waits for a running query, whose thread uses the application's engine. A query that ends after the
        engine was disposed would leave an open connection in no pool.
        """
        self._is_stopping = True
        try:
            if self._drain is not None:
                self._drain.core.stop()
                self._drain.wake()
                if not self._drain.core.has_stopped:
                    await asyncio.wait([self._task], timeout=STOP_S)
            self._task.cancel()
            await asyncio.wait([self._task])
            if self._query is not None:
                await asyncio.wait([self._query], timeout=STOP_S)
        finally:
            self.cancel()
        if self._query is not None:
            await asyncio.wait([self._query])

    async def _run(self, first_s: float) -> None:
        try:
            await self._rest(first_s)
            while not self._is_stopping:
                await self._rest(await self._pass())
        finally:
            await self._disconnect()

    async def _pass(self) -> float:
        """Look, and relay old rows; return the seconds until the next pass."""
        relayed = 0
        try:
            await self._look()
            if self._left.rows and self._left.oldest_ms >= self._owner.age_ms:
                relayed = await self._relay()
                self._relayed += relayed
                await self._look()
                refusals = self._sender.refusals if self._sender is not None else {}
                self._reason = refusals.get("", "") or self._reason or next(iter(refusals.values()), "")
        except Exception as error:  # of any driver
            self._troubled(error)
            return self._next_s()
        self._trouble = ""
        self._troubles = 0
        self._announce()
        if not self._left.rows:
            await self._disconnect()
            self._again_s = AGAIN_S_MIN
            if self._is_expected:  # the message was refused before its timeout
                self._is_expected = False
                return self._owner.timeout_ms / 1000
            self._reason = ""
            return min(LOOK_S, self._owner.age_ms / 1000) * random.uniform(0.9, 1.1)
        if relayed:
            self._again_s = AGAIN_S_MIN
        again_s, young_s = self._next_s(), (self._owner.age_ms - self._left.oldest_ms) / 1000
        return min(again_s, young_s) if young_s > 0 else again_s

    def _next_s(self) -> float:
        again_s = self._again_s
        self._again_s = min(self._again_s * 2, AGAIN_S_MAX)
        return again_s

    async def _rest(self, seconds: float) -> None:
        """Wait until something changes, at least a second."""
        await asyncio.sleep(min(seconds, AGAIN_S_MIN))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds - AGAIN_S_MIN)):
                await self._moved.wait()
        self._moved.clear()

    async def _look(self) -> None:
        timeout_ms = self._owner.timeout_ms
        self._left = await self._on_rows(lambda statements: statements.left(timeout_ms))
        self._looked_ms = now()

    def _announce(self) -> None:
        """Log once that rows wait, and once that none is left."""
        left = self._left
        if left.rows and not self._is_announced:
            self._is_announced = True
            self._relayed = 0
            log.warning(
                "messages wait in the outbox until brokers accept them"
                " database=%s messages=%d oldest_s=%d parked=%d reason=%s",
                self.database.name,
                left.rows,
                left.oldest_ms // 1000,
                left.parked,
                self._reason or "left by another process",
            )
        elif not left.rows and self._is_announced:
            self._is_announced = False
            log.warning("no message waits in the outbox now database=%s relayed=%d", self.database.name, self._relayed)

    def _troubled(self, error: Exception) -> None:
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0][:200] or type(error).__name__
        self._troubles += 1
        trouble = f"rows cannot be relayed: {reason}. The table needs all columns of docs/outbox.md, its user UPDATE"
        if trouble != self._trouble:
            log.warning("outbox cannot be relayed now database=%s reason=%s", self.database.name, reason)
        self._trouble = trouble

    async def _relay(self) -> int:
        """Drain until nothing is left to do now; return the number of stored messages."""
        drain = self._drain or await self._connect()
        core, began_ms = drain.core, now()
        before = core.counts.sent
        while True:
            await drain.step()
            if core.has_stopped if self._is_stopping else core.is_through(began_ms):
                return core.counts.sent - before

    async def _connect(self) -> Drain:
        sender = self._sender = self._owner.new_sender()
        await sender.__aenter__()
        term = RELAY_TERM + secrets.randbits(RELAY_TERM_BITS)
        core = DrainPlan(term, LIMITS, sender, lambda: secrets.randbits(PRODUCER_BITS) or 1)
        drain = self._drain = Drain(core, sender, self._do)
        sender.on_change(drain.wake)
        sender.on_change(self._moved.set)
        return drain

    async def _disconnect(self) -> None:
        sender = self._sender
        self._sender = None
        self._drain = None
        if sender is not None:
            await sender.__aexit__(None, None, None)

    async def _do(self, work: Work) -> Any:
        answer = await self._on_rows(lambda statements: statements.do(work))
        if isinstance(work, ReadPage) and (own := self._owner.under_way(self.database)):
            return answer._replace(rows=[row for row in answer.rows if row.id not in own])
        return answer

    async def _on_rows(self, work: Callable[[Statements], Any]) -> Any:
        age_ms = self._owner.age_ms
        query = self.database.run(self._owner.table, lambda rows: work(Statements(rows, age_ms)))
        self._query = asyncio.ensure_future(query)
        return await shielded(self._query)
