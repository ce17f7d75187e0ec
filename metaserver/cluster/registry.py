"""Shell. State of the cluster in memory: the database's rows and brokers' heartbeats, and the answers made of both.

Answers come from memory, so routes and heartbeats continue while the database is away. A change is written to the
database first, then read back; then waiting tasks are woken. `cluster.upkeep` reads the changes of other metaservers
and stores brokers' reports in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.liveness import Liveness
from qmq.metaserver.cluster.mirror import Changes, DatabaseMirror, TakeTokens
from qmq.metaserver.cluster.old_database import OldRow, ReportedTerms
from qmq.metaserver.cluster.registration import Registration
from qmq.metaserver.cluster.reports import Reports
from qmq.metaserver.cluster.sightings import AwakeClock
from qmq.metaserver.model import (
    ALL_SUBJECTS,
    AuditRow,
    Broker,
    BrokerKey,
    Directory,
    Group,
    MetaserverRow,
    Points,
    ReplicaState,
    Route,
    TokenRow,
)
from qmq.metaserver.observability.metrics import GroupReading, Metrics
from qmq.metaserver.roles import promotion, rules
from qmq.metaserver.roles.promotion import Refusal
from qmq.metaserver.routes.placement import RouteTable
from qmq.metaserver.storage.backup import dump_of
from qmq.metaserver.storage.changes import Change, CommitUnknown
from qmq.metaserver.storage.database import Commits, Database, DatabaseAway
from qmq.replication.readonly import Reason

log = logging.getLogger("qmq.metaserver")


class Registry:
    """State of the cluster. Created by main, ends with the process; all methods are called from the loop.

    Args:
        take_tokens: receives all API tokens after each reading.
    """

    def __init__(
        self,
        database: Database,
        liveness: Liveness,
        metrics: Metrics,
        clock: AwakeClock,
        take_tokens: TakeTokens,
        *,
        groups_min: int,
        groups_new: int,
    ) -> None:
        self.database = database
        self.liveness = liveness
        self.metrics = metrics
        self._clock = clock
        self._table = RouteTable(groups_min=groups_min, groups_new=groups_new)
        self.terms = ReportedTerms()
        self.reports = Reports()
        self.mirror = DatabaseMirror(
            database,
            liveness,
            self.terms,
            self.reports,
            take_tokens,
            table=self._table,
            now_ms=self.now_ms,
            publish=self.publish,
        )
        self.commits = Commits(database, self.mirror.catch_up)
        self.registration = Registration(self)
        self._published = -1
        self.routes: Mapping[str, Route] = self.mirror.routes
        self.find = self.routes.get
        self.changes = Changes()
        """Changes that clients may see."""
        self._processed: dict[BrokerKey, ReplicaState] = {}
        """Last processed state of each broker; cleared when the directory is read, and when points must be stored
        again.
        """
        self._processed_with: Directory | None = None
        self.points_rose = asyncio.Event()
        """Set when there is a point to store."""
        self.no_failover: dict[str, tuple[Refusal, str]] = {}
        """Groups without a live master, with the reason why no slave is promoted."""
        self.news = asyncio.Event()
        """Set when there is a row to store."""
        self.doubted = asyncio.Event()
        """Set when there may be a broker to query."""
        self.is_stopping = False
        metrics.observe_groups(self._read_groups)

    # -- rows of the database -------------------------------------------------------------------------------------

    @property
    def directory(self) -> Directory:
        return self.mirror.directory

    @property
    def tokens(self) -> list[TokenRow]:
        return self.mirror.tokens

    @property
    def routes_version(self) -> int:
        return self.mirror.routes_version

    def dump_memory(self, present: Mapping[str, Any]) -> dict[str, Any]:
        """Return memory as a dump of the tables; tables that are not in memory are taken from `present`."""
        return dump_of(self.directory, list(self.routes.values()), self.tokens, self.terms.floors(), present)

    # -- changing the database ------------------------------------------------------------------------------------

    async def change(self, changes: Iterable[Change], audit: AuditRow) -> None:
        """Store an operator's changes, all or none, and read them back.

        Raises:
            DatabaseAway: nothing was changed. OutcomeUnknown: the database went away during the commit.
            OperatorError: the repository refused; nothing was changed.
        """
        await self.commits.change(changes, audit)

    async def settle(self) -> None:
        """Wait until every pending change is stored or gone, then read the database.

        Raises:
            DatabaseAway, CommitUnknown: the outcome is still unknown.
        """
        await self.commits.settle()

    # -- brokers --------------------------------------------------------------------------------------------------

    def join(self, key: BrokerKey, incarnation: str) -> str:
        """Begin a session of heartbeats; return its name. Raises PlaceTaken."""
        session = self.liveness.join(key, incarnation, now_ms=self.now_ms())
        self.publish()
        return session

    def beat(self, key: BrokerKey, session: str, state: ReplicaState) -> bool:
        """Record a heartbeat. False: a newer session replaced this one. Never waits for the database."""
        if not self.liveness.beat(key, session, state, now_ms=self.now_ms()):
            return False
        if self._processed_with is not self.directory:
            self._processed_with = self.directory
            self._processed.clear()
        if self._processed.get(key) is not state:  # most heartbeats of an idle broker repeat the state before
            self._processed[key] = state
            self._take_in(key, state)
        broker = self.directory.find(key)
        if broker and self.reports.note_completeness(
            self.directory.groups[broker.group], key, state, now_ms=self.now_ms()
        ):  # also for a repeated state: another broker's report may have replaced it
            self.news.set()
        self.publish()
        return True

    def _take_in(self, key: BrokerKey, state: ReplicaState) -> None:
        if broker := self.directory.find(key):
            self.terms.note(broker.group, state.newest_term)
            self.terms.note_promise(broker.group, state.promised_term)
            master = self.directory.groups[broker.group].master
            if state.lost_master and master is not None and self.liveness.suspect(master.key, now_ms=self.now_ms()):
                self.doubted.set()
            if self.reports.note_point(broker.group, state):
                self.points_rose.set()

    def store_points_again(self) -> None:
        """Store the points of the next heartbeats again, even unchanged ones: the database may be older."""
        self.reports.store_points_again()
        self._processed.clear()

    async def points_of(self, group: str, *, must_be_read: bool = False) -> Points:
        """Return the acknowledged points of a group's copies, from the database and from heartbeats here.

        While the database is away, only heartbeats here count; other metaservers may have newer ones.

        Args:
            must_be_read: raise DatabaseAway then, as a master is chosen by the points.
        """
        stored = Points()
        try:
            stored = await self.database.read(lambda r: r.load_points(group))
        except DatabaseAway:
            if must_be_read:
                raise
        return self.reports.newest_points(group, stored)

    def leave(self, key: BrokerKey, session: str) -> None:
        self.liveness.leave(key, session, now_ms=self.now_ms())
        self.doubted.set()
        self.publish()

    def old_row(self, group: str) -> OldRow | None:
        """Return the old-row report of a group, or None."""
        row = self.directory.groups.get(group)
        if row is None:
            return None
        return old_database.judge(row, self.terms.reported(group), self.own_state, floor=self.terms.floor(group))

    def old_rows(self) -> list[str]:
        """Return the names of groups with a row older than their brokers."""
        return self.terms.above_rows(self.directory.groups)

    def own_state(self, broker: Broker) -> ReplicaState | None:
        """Return the last state of a broker that is up and has the row's data directory."""
        state = self.state(broker)
        return state if state is not None and state.incarnation in ("", broker.incarnation) else None

    # -- routes ---------------------------------------------------------------------------------------------------

    async def routes_for(self, subjects: list[str]) -> None:
        """Store missing and short routes of legal subjects, in one transaction.

        Raises:
            DatabaseAway, CommitUnknown: a subject has no route yet, and none can be stored now.
        """
        orders = self._table.orders(subjects, self.directory, self._takes, self._stored_bytes())
        if not orders:
            return
        try:
            stored = await self.database.write(lambda r: r.store_routes(orders))
        except (DatabaseAway, CommitUnknown):
            if any(version == 0 for _, _, version in orders):
                raise
            return  # short routes stay in use
        # A newer change of a route may have been read meanwhile: keep the reading.
        self._table.take(route for route in stored if route.changed > self.routes_version)
        self.metrics.routes_created.inc(len(orders))
        self.publish(news=True)

    def is_short(self, subject: str, groups: Sequence[str]) -> bool:
        return self._table.is_short(subject, groups, self.directory)

    def _stored_bytes(self) -> dict[str, int]:
        """Return the log size in bytes of each group with its master's stream here."""
        found = {}
        for group in self.directory.groups.values():
            state = self.state(group.master) if group.master else None
            if state is not None and state.log_end:
                found[group.name] = state.log_end - state.log_start
        return found

    def routes_of(self, groups: Iterable[str]) -> dict[str, Route]:
        """Return the routes that list one of these groups, by subject."""
        return self._table.of_groups(groups)

    # -- answers --------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return the time for liveness: it never decreases, and stops while the process is stopped."""
        return self._clock.at(time.monotonic_ns() // 1_000_000)

    def is_writable(self, group: Group) -> bool:
        """Return whether the group accepts messages of subjects without a readonly mark."""
        return self._takes(group) and not group.draining and not self.directory.is_marked(group.name, ALL_SUBJECTS)

    def _takes(self, group: Group) -> bool:
        return self.liveness.is_writable(group, now_ms=self.now_ms())

    def is_up(self, broker: Broker) -> bool:
        return self.liveness.is_up(broker.key, now_ms=self.now_ms())

    def may_be_up(self, broker: Broker) -> bool:
        return self.liveness.may_be_up(broker, now_ms=self.now_ms())

    def state(self, broker: Broker) -> ReplicaState | None:
        return self.liveness.state(broker.key)

    def is_gone(self, broker: Broker, silence_ms: int) -> str:
        """Return why a broker counts as gone; empty: it does not."""
        now_ms = self.now_ms()
        if broker.incarnation and not self.liveness.may_be_up(broker, now_ms=now_ms):
            return "it is down"
        silent_ms = self.liveness.silent_ms(broker.key, now_ms=now_ms)
        return f"it is silent for {silent_ms} ms" if silent_ms >= silence_ms else ""

    def why_no_failover(self, group: Group) -> tuple[str, str] | None:
        """Return why no slave is promoted although the master is gone, and the remedy; None: no such reason."""
        if (found := self.no_failover.get(group.name)) is None:
            return None
        why, text = found
        return text, promotion.remedy_of(why, group)

    def last_state(self, broker: Broker) -> ReplicaState | None:
        """Return the last state of a broker, up or down."""
        return self.liveness.last_state(broker.key)

    async def lacking(self, broker: Broker) -> str:
        """Return the reason why a broker's copy is incomplete, by its own last report; empty: no such report."""
        state = self.liveness.last_state(broker.key)
        if state is None or state.incarnation not in ("", broker.incarnation):
            return ""
        if Reason.CORRUPT in state.readonly_reasons:
            return f"the log of {broker.key} is damaged, and is repaired from another copy"
        if not rules.is_rolled_back(state):
            return ""
        points = await self.points_of(broker.group)
        newest = max(points.by_incarnation.values(), default=None)
        return (
            f"{broker.key} was rolled back (its disk was restored to an older state, or lost fsynced writes): it lacks "
            f"messages that {broker.group} acknowledged up to {newest}"
        )

    def peers(self) -> list[MetaserverRow]:
        """Return all live metaservers, this one too."""
        now = self.now_ms()
        return [row for row in self.liveness.peers.rows if not self.liveness.peers.is_silent(row.id, now_ms=now)]

    def publish(self, *, news: bool = False) -> None:
        """Wake waiting tasks if an answer changed since the last call."""
        if self.liveness.has_news:
            self.news.set()
        if news or self._published != self.liveness.version:
            self._published = self.liveness.version
            self.changes.publish()

    def stop(self) -> None:
        """End all streams: brokers and clients go to another metaserver, or wait for this one."""
        self.is_stopping = True
        self.mirror.directory_changes.publish()
        self.changes.publish()

    def _roles_up(self, group: Group) -> dict[str, bool]:
        """Return whether the master is up, and whether all slaves are; vacant roles are left out."""
        roles_of = {"master": [group.master] if group.master else [], "slave": list(group.slaves)}
        return {role: all(map(self.is_up, brokers)) for role, brokers in roles_of.items() if brokers}

    def _read_groups(self) -> list[GroupReading]:
        return [
            (
                g.name,
                g.term,
                self.is_writable(g),
                self._roles_up(g),
                self.terms.reported(g.name) > g.term,
            )
            for g in self.directory.groups.values()
        ]
