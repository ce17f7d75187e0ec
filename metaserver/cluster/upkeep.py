"""Shell. Background tasks of the metaserver: read other metaservers' changes, store reports, query silent brokers.

Each task continues while the database is away. Heartbeats and routes wait for none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import replace
from functools import partial

from qmq.errors import NotServed, OperatorError, OutcomeUnknown
from qmq.metaserver.actions.shapes import parts_json
from qmq.metaserver.cluster.liveness import Question
from qmq.metaserver.cluster.old_database import OldRow
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.cluster.snapshot import Snapshots
from qmq.metaserver.model import AuditRow, Broker, BrokerKey, LeaseRow, MetaserverRow, ReplicaState
from qmq.metaserver.roles.failover import Promises
from qmq.metaserver.routes.placement import wider_routes
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.metaserver.storage.changes import CommitUnknown, SetRoles, StaleTerm
from qmq.metaserver.storage.database import DatabaseAway
from qmq.metaserver.storage.repository import Repository
from qmq.ticking import SECOND_S, until_next_second

log = logging.getLogger("qmq.metaserver")

TICK_S = 0.1
STORE_GAP_S = 0.1
"""Reports within this time are stored in one transaction."""
CLOCK_READ_S = 2.0
"""Longest time between two readings of the clock, below `liveness.PAUSE_MS`."""
STORED_AGAIN_S = 10.0
"""Unchanged rows are stored again after this time: a restored database may have lost them."""
EARLY_S = 0.005
"""Timers may fire this much early."""
AGAIN_S = 1.0
"""Wait before a failed write is repeated."""
SNAPSHOT_GAP_S = 4.0
SNAPSHOT_SHARE = 20
"""Share of the time that large snapshots may take: one twentieth."""
ASKED_AT_ONCE = 32


class Upkeep:
    """Background tasks. Made by main; `run` ends when it is cancelled."""

    def __init__(
        self, registry: Registry, brokers: Brokers, snapshots: Snapshots, own: MetaserverRow, *, poll_ms: int
    ) -> None:
        self._registry = registry
        self._brokers = brokers
        self._snapshots = snapshots
        self._own = own
        self._poll_s = poll_ms / 1000
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._promises = Promises(registry, brokers)
        self._stored_beat: int | None = None
        """Counter in our stored row; None: not stored yet."""
        self._shown_until_s = 0.0
        """Time to store our row again, even if no other metaserver reads it."""
        self._beat_s = 0.0
        """Time of the next look at the database."""
        self._named: dict[str, str] = {}
        """Logged text of each group with an old row and disagreeing brokers."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (
                self._follow,
                self._store,
                self._store_points,
                self._watch_silence,
                self._keep_snapshot,
                self._raise_rows,
            ):
                tasks.create_task(work())

    async def stop(self) -> None:
        """Store pending reports and remove our row. Bounded, also while the database is away."""
        await self.store()
        try:
            await self._registry.database.write(lambda r: r.remove_metaserver(self._own.id))
        except (DatabaseAway, CommitUnknown) as error:
            log.warning("stopping without the database: %s", error)
        await self._snapshots.save(self._registry)

    async def store(self) -> None:
        """Store pending reports now. Bounded, also while the database is away or another metaserver stores the same."""
        try:
            await self._store_news()
            await self._store_points_once()
        except (DatabaseAway, CommitUnknown) as error:
            log.warning("reports of brokers not stored: %s", error)
        except Exception:
            log.exception("reports of brokers not stored")

    async def ask(self, question: Question) -> None:
        """Query a silent broker and record the result."""
        async with self._asking:
            state = await self._ask(question)
        liveness, now_ms = self._registry.liveness, self._registry.now_ms()
        was_up = liveness.is_up(question.key, now_ms=now_ms)
        liveness.answered(question, state, now_ms=now_ms)
        if was_up and not liveness.is_up(question.key, now_ms=now_ms):
            log.warning("broker down broker=%s: it sends no heartbeats and does not answer", question.key)
        self._registry.publish()

    async def hold_lease(self, wish: LeaseRow, *, take: bool, release: bool) -> LeaseRow:
        """Keep, take or release a lease; return its row afterwards (see `storage.heartbeats`).

        Raises:
            DatabaseAway: nothing was changed. CommitUnknown: it may have been.
        """
        return await self._registry.database.write(lambda r: r.hold_lease(wish, take=take, release=release))

    async def _ask(self, question: Question) -> ReplicaState | None:
        broker = self._registry.directory.find(question.key)
        if broker is None or not broker.control_port:
            return None
        try:
            state = await self._brokers.replica_status(broker)
        except NotServed:
            return None
        except OperatorError as error:  # the broker runs, but rejects our token, for instance
            log.warning("broker refused the query broker=%s: %s", question.key, error)
            return self._registry.state(broker) or ReplicaState(role=int(broker.role), term=0)
        is_same = state.incarnation in ("", question.incarnation) and state.instance in ("", broker.instance)
        return state if is_same else None

    async def _follow(self) -> None:
        """Read other metaservers' changes; once a second, raise our counter in the same transaction."""
        while True:
            now_s = asyncio.get_running_loop().time()
            is_due = now_s >= self._beat_s - EARLY_S
            if is_due:
                self._beat_s = now_s + until_next_second(now_s, SECOND_S)
            try:
                shows_life = is_due and self._registry.database.is_up
                await self._registry.mirror.catch_up(self._show_life if shows_life else None)
            except (DatabaseAway, CommitUnknown):
                pass  # logged by `Database`; this loop retries
            except Exception:
                log.exception("the database returned invalid rows; the last reading stays in use")
                await asyncio.sleep(AGAIN_S)
            wait_s = max(0.0, self._beat_s - asyncio.get_running_loop().time())
            await asyncio.sleep(wait_s if self._is_alone() else min(wait_s, self._poll_s))

    def _is_alone(self) -> bool:
        """Return whether no other metaserver had a row at a reading within the timeout."""
        peers = self._registry.liveness.peers
        return not peers.is_unread(now_ms=self._registry.now_ms()) and {row.id for row in peers.rows} <= {self._own.id}

    async def _show_life(self) -> dict[str, int]:
        """Raise our counter and read those of the others; return the versions of all shared rows."""
        registry, peers = self._registry, self._registry.liveness.peers
        if self._is_alone() and time.monotonic() < self._shown_until_s:
            ids, versions = await registry.database.read(lambda r: r.look())
            if ids == {self._own.id}:
                self._beat_in_memory()
                return versions
        own = self._own = replace(self._own, beat=self._own.beat + 1)
        try:
            rows, versions, before = await registry.database.write(lambda r: r.beat(own))
        except (DatabaseAway, CommitUnknown):
            raise
        except Exception:
            log.exception("own row not stored; other metaservers will count this one as silent")
            return await registry.database.probe()
        if self._stored_beat is not None and (before is None or before < self._stored_beat):
            registry.mirror.read_anew()
        self._stored_beat = own.beat
        self._shown_until_s = time.monotonic() + STORED_AGAIN_S
        peers.read(rows, mentioned=registry.liveness.mentioned(), now_ms=registry.now_ms())
        for id in peers.forgotten():
            await registry.database.write(partial(_remove, id=id))
        return versions

    def _beat_in_memory(self) -> None:
        """Raise our counter in memory only: no other metaserver reads it."""
        registry = self._registry
        self._own = replace(self._own, beat=self._own.beat + 1)
        mentioned = registry.liveness.mentioned()
        registry.liveness.peers.read([self._own], mentioned=mentioned, now_ms=registry.now_ms())

    async def _store(self) -> None:
        """Store brokers' sightings when they change."""
        while True:
            await self._registry.news.wait()
            await asyncio.sleep(STORE_GAP_S)
            try:
                await self._store_news()
            except (DatabaseAway, CommitUnknown):
                await asyncio.sleep(AGAIN_S)
            except Exception:
                log.exception("reports of brokers not stored; retrying")
                await asyncio.sleep(AGAIN_S)

    async def _store_news(self) -> None:
        registry = self._registry
        async with registry.mirror.storing:
            registry.news.clear()
            rows = registry.liveness.news()
            try:
                if rows:
                    await registry.database.write(lambda r: r.store_sightings(rows))
            except BaseException:
                registry.liveness.not_stored(rows)
                registry.news.set()
                raise
            registry.liveness.stored(rows)
        waiting = registry.reports.completeness
        for key, (slave, term, complete) in list(waiting.items()):
            try:
                await registry.database.write(partial(_store_complete, slave=slave, term=term, complete=complete))
            except BaseException:
                registry.news.set()
                raise
            if waiting.get(key) == (slave, term, complete):  # else a newer report came meanwhile
                del waiting[key]

    async def _store_points(self) -> None:
        """Store acknowledged points once a second while they rise."""
        again_s = 0.0
        while True:
            await self._until_points(again_s)
            await asyncio.sleep(_pause_s())
            if time.monotonic() >= again_s:
                self._registry.store_points_again()
                again_s = time.monotonic() + STORED_AGAIN_S
            try:
                await self._store_points_once()
            except (DatabaseAway, CommitUnknown):
                pass
            except Exception:
                log.exception("acknowledged points not stored; retrying")

    async def _until_points(self, again_s: float) -> None:
        """Wait until there is a point to store, or all must be stored again."""
        registry = self._registry
        if not registry.reports.points:
            registry.points_rose.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, again_s - time.monotonic())):
                    await registry.points_rose.wait()

    async def _store_points_once(self) -> None:
        registry = self._registry
        points = dict(registry.reports.points)
        if points:
            await registry.database.write(lambda r: r.store_points(points))
            registry.reports.points_are_stored(points)

    async def _watch_silence(self) -> None:
        """Detect silent brokers and query them."""
        registry, asking = self._registry, dict[BrokerKey, asyncio.Task[None]]()
        try:
            while True:
                registry.liveness.tick(now_ms=registry.now_ms())
                registry.publish()
                if not registry.is_stopping:
                    for question in registry.liveness.to_ask(now_ms=registry.now_ms()):
                        # A query to a machine that is gone takes the whole timeout; others must not wait for it.
                        if question.key not in asking or asking[question.key].done():
                            asking[question.key] = asyncio.create_task(self.ask(question))
                await self._until_silence()
        finally:
            for task in asking.values():
                task.cancel()

    async def _until_silence(self) -> None:
        """Wait until a broker may have become silent, but read the clock often enough for `AwakeClock`."""
        registry = self._registry
        quiet_s = registry.liveness.quiet_ms(now_ms=registry.now_ms()) / 1000
        registry.doubted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(TICK_S, min(quiet_s, _pause_s(CLOCK_READ_S)))):
                await registry.doubted.wait()

    async def _raise_rows(self) -> None:
        """Repair rows that are older than their brokers: the database was restored from an old copy."""
        while True:
            for name in self._registry.old_rows():
                try:
                    await self.raise_row(name)
                except (NotServed, OperatorError, OutcomeUnknown) as error:
                    log.warning("old row of a group not repaired broker_group=%s error=%s", name, error)
                except Exception:
                    log.exception("old row of a group not repaired broker_group=%s", name)
            await self._end_promises()
            await self._widen_routes()
            await asyncio.sleep(_pause_s(CLOCK_READ_S))

    async def _widen_routes(self) -> None:
        """Extend routes of dead-letter subjects to every group that stores dead letters in them."""
        registry = self._registry
        changes = wider_routes(registry.directory.limits, registry.routes)
        for change, before in [(change, list(registry.routes[change.subject].groups)) for change in changes]:
            arguments = {"subject": change.subject}
            audit = AuditRow("metaserver", "", "WidenRoute", arguments, before, change.groups, result="done")
            try:
                await registry.change((change,), audit)
                log.warning("route of dead letters extended subject=%s groups=%s", change.subject, change.groups)
            except (NotServed, OperatorError, OutcomeUnknown) as error:
                log.warning("route of dead letters not extended subject=%s error=%s", change.subject, error)
            except Exception:
                log.exception("route of dead letters not extended subject=%s", change.subject)

    async def _end_promises(self) -> None:
        try:
            await self._promises.look()
        except (NotServed, OperatorError, OutcomeUnknown) as error:
            log.warning("promised term not begun: %s", error)
        except Exception:
            log.exception("promised term not begun")

    async def raise_row(self, name: str) -> None:
        """Raise a row to the roles all brokers of its group agree on, by compare-and-set; log once if they disagree."""
        registry = self._registry
        await registry.mirror.catch_up()  # another metaserver may have changed the roles meanwhile
        old = registry.old_row(name)
        if old is None:
            self._named.pop(name, None)
            return
        if old.change is None:
            if self._named.get(name) != old.found:
                log.error("row of a group is old broker_group=%s: %s; %s", name, old.found, old.remedy)
                self._named[name] = old.found
            return
        audit = _audit_of(old)
        try:
            await registry.change((SetRoles(old.change),), audit)
        except StaleTerm:
            return  # another metaserver was first; the next round checks the rest
        registry.metrics.rows_raised.inc()
        log.warning("old row of a group repaired broker_group=%s term=%d: %s", name, old.change.new_term, old.found)

    async def _keep_snapshot(self) -> None:
        saved: object = None
        gap_s = SNAPSHOT_GAP_S
        while True:
            await asyncio.sleep(_pause_s(math.ceil(gap_s)))
            if self._registry.mirror.is_loaded and saved != (revision := self._registry.mirror.revision):
                began = time.monotonic()
                await self._snapshots.save(self._registry)
                gap_s = max(SNAPSHOT_GAP_S, SNAPSHOT_SHARE * (time.monotonic() - began))
                saved = revision


def _pause_s(every_s: float = SECOND_S) -> float:
    return until_next_second(asyncio.get_running_loop().time(), every_s)


def _audit_of(old: OldRow) -> AuditRow:
    change, group = old.change, old.group
    assert change is not None, "the brokers agree"
    named = {"brokerGroup": group.name}
    return AuditRow("metaserver", "", "AdoptRoles", named, parts_json(group), parts_json(change), result="done")


def _remove(repository: Repository, *, id: str) -> None:
    repository.remove_metaserver(id)


def _store_complete(repository: Repository, *, slave: Broker, term: int, complete: bool) -> None:
    repository.store_complete(slave, term=term, complete=complete)
