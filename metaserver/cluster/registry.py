"""Shell. The metaserver's state in memory: what the database holds and what brokers said, kept together.

Answers come from memory, so that routes and heartbeats go on while the database is away. Every change is written to
the database first; then what changed is read, and everybody who waits is woken. `metaserver.cluster.upkeep` follows the
changes of other metaservers and stores, in the background, what brokers say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.changes import Changes
from qmq.metaserver.cluster.liveness import STOP_ONE, AwakeClock, Liveness, PlaceTaken, Question
from qmq.metaserver.cluster.old_database import OldRow, ReportedTerms
from qmq.metaserver.cluster.snapshot import Snapshot
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
    SightingRow,
    TokenRow,
)
from qmq.metaserver.observability.metrics import GroupReading, Metrics
from qmq.metaserver.roles import promotion, rules
from qmq.metaserver.roles.promotion import Refusal
from qmq.metaserver.routes.placement import RouteTable
from qmq.metaserver.storage.backup import dump_of
from qmq.metaserver.storage.changes import Change, SetRoles
from qmq.metaserver.storage.commits import LOAD_MS, Commits
from qmq.metaserver.storage.database import Database, DatabaseAway, DatabaseSetAside, deciding
from qmq.metaserver.storage.errors import CommitUnknown, StaleTerm
from qmq.replication.points import Point
from qmq.types import NO_EPOCH, Role

log = logging.getLogger("qmq.metaserver")

Ask = Callable[[Question], Awaitable[None]]
TakeTokens = Callable[[list[TokenRow]], None]

REGISTER_TRIES = 3
REFUSED_SHOWN_MS = 60_000
"""A process that is refused registers again each second or two."""
AWAY_MS = 10_000
"""A slave of several that is away for less goes on counting as in sync at the last report: when it is back and confirms
what is acknowledged, a power cut may come before the database has that, and the restarted master waits for it."""
NO_POINT = Point(NO_EPOCH, 0, 0)


class Registry:
    """Created by main, ends with the process. All methods are called from the loop.

    Args:
        take_tokens: told of all API tokens, whenever they were read.
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
        self.database, self.liveness = database, liveness
        self.metrics, self._clock, self._take_tokens = metrics, clock, take_tokens
        self._table = RouteTable(groups_min=groups_min, groups_new=groups_new)
        self._commits = Commits(database, self.catch_up)
        self._reported = ReportedTerms()
        self._known_terms: dict[BrokerKey, int] = {}
        """What brokers wrote down, by their newest registration here: without a part they do not say it again."""
        self._registered: frozenset[str] = frozenset()
        """Groups whose brokers are registered, here or by the snapshot."""
        self._rows: frozenset[str] | None = None
        """Names of all groups that the database ever had; None: not read yet."""
        self._reading = asyncio.Lock()
        self.storing = asyncio.Lock()
        """Held while sightings are stored or read: what is read is never older than what we know to be stored."""
        self._seen: dict[str, int] = {"directory": -1, "routes": -1, "sightings": -1}
        self._published = -1
        self.routes: Mapping[str, Route] = self._table.known
        self.find = self.routes.get
        self.directory = Directory()
        self.tokens: list[TokenRow] = []
        self.changes = Changes()
        """Anything that a client may see."""
        self.directory_changes = Changes()
        """What brokers are told: groups, brokers, marks and offline states; each change is about some brokers' keys."""
        self.completeness: dict[BrokerKey, tuple[Broker, int, bool]] = {}
        """What masters say about their slaves and the database does not have yet."""
        self._away_since: dict[BrokerKey, int] = {}
        """Since when masters say of slaves that they are not in sync, and the database has that they are."""
        self.points: dict[tuple[str, str], Point] = {}
        """Acknowledged points, by group and incarnation, that heartbeats told and the database does not have yet."""
        self.stored_points: dict[tuple[str, str], Point] = {}
        """Those that it was given a moment ago."""
        self._heard: dict[BrokerKey, ReplicaState] = {}
        """What was taken in as each broker's state since the directory was read, or points are to be stored again."""
        self._heard_in: Directory | None = None
        self.points_rose = asyncio.Event()
        """Set when there is one more."""
        self.no_failover: dict[str, tuple[Refusal, str]] = {}
        """Groups whose master is gone, and why the slave does not become the master by itself."""
        self.news = asyncio.Event()
        """Set when there is something to store."""
        self.refused: dict[BrokerKey, tuple[str, int]] = {}
        """Brokers as which another process was refused, why, and when on this clock the last time."""
        self.doubted = asyncio.Event()
        """Set when there may be a broker to ask whether it is there."""
        self.is_loaded = False
        self.is_stopping = False
        metrics.observe_groups(self._read_groups)

    # -- reading the database -------------------------------------------------------------------------------------

    @property
    def revision(self) -> tuple[int, ...]:
        """Another one after each change of what is known."""
        return (*self._seen.values(), self.liveness.version)

    @property
    def routes_version(self) -> int:
        return self._seen["routes"]

    async def catch_up(self, ask: Callable[[], Awaitable[dict[str, int]]] | None = None) -> None:
        """Read what changed since it was last read, and wake who waits for it. Raises DatabaseAway.

        Args:
            ask: asks the database for its versions, by the way; else it is probed for them.
        """
        async with self._reading:
            versions = await (ask or self.database.probe)()
            news = False
            try:
                if versions["directory"] != self._seen["directory"] or self.database.set_aside_because:
                    await self._read_directory(versions["directory"])
                    news = True
                if versions["routes"] != self._seen["routes"]:
                    await self._read_routes(versions["routes"])
                    news = True
                if versions["sightings"] != self._seen["sightings"]:
                    await self._read_sightings(versions["sightings"])
                self.is_loaded = True
            finally:  # what was read will not be read again, even if the next reading fails or is cancelled
                self.publish(news=news)

    def read_anew(self) -> None:
        """The database was put back: what is in it now may have the version of what was read before."""
        self._seen = dict.fromkeys(self._seen, -1)

    async def reload(self) -> None:
        """As `catch_up`: afterwards memory is what the database was at a moment after the call."""
        await self.catch_up()

    async def _read_directory(self, version: int) -> None:
        goes_on = 0 <= self._seen["directory"] < version and not self.database.set_aside_because
        known = self.directory if goes_on else None  # equal versions of two databases say nothing
        with deciding():
            directory, tokens, rows = await self.database.read(
                lambda r: (r.load(known), r.load_tokens(), r.group_names()), timeout_ms=LOAD_MS
            )
        self._rows = rows
        self._judge()
        if not goes_on:
            self._seen.update(routes=-1, sightings=-1)
        self.take_directory(directory, tokens)
        self._seen["directory"] = directory.version

    def _judge(self) -> None:
        """Set the database aside while it lacks a row of a group with registered brokers. Raises DatabaseSetAside."""
        if self._rows is None:
            return
        lost = self.lost_groups()
        self.database.set_aside(old_database.describe(lost) if lost else "")
        if lost:
            raise DatabaseSetAside(self.database.set_aside_because)

    def lost_groups(self) -> dict[str, int]:
        """Groups that the database has lost, with the newest term of each that is known."""
        rows = self._rows or frozenset()
        names = old_database.find_lost(self._registered, self._reported.unknown(rows), rows)
        return {name: self._reported.floor(name) for name in names}

    def expect(self, snapshot: Snapshot) -> None:
        """Hold the database, once it is read, against what a file has from before."""
        self._registered = old_database.registered(snapshot.directory)
        self._reported.note_rows(snapshot.directory.groups.values())

    def dump_memory(self, present: Mapping[str, Any]) -> dict[str, Any]:
        """What is in memory as a dump of the tables; what only the database has is taken from `present`."""
        return dump_of(self.directory, list(self.routes.values()), self.tokens, self._reported.floors(), present)

    async def _read_routes(self, version: int) -> None:
        after = self._seen["routes"] if 0 <= self._seen["routes"] < version else 0  # only a restore makes it go back
        seen, routes = await self.database.read(lambda r: r.load_routes(after), timeout_ms=LOAD_MS)
        self._table.take(routes, all_of_them=not after)
        self._seen["routes"] = seen

    async def _read_sightings(self, version: int) -> None:
        after = self._seen["sightings"] if 0 <= self._seen["sightings"] < version else 0
        async with self.storing:
            seen, rows = await self.database.read(lambda r: r.load_sightings(after), timeout_ms=LOAD_MS)
            self.liveness.take_rows(rows, now_ms=self.now_ms(), are_all=not after)
            if self.liveness.has_news:
                self.news.set()
        self._note_terms(rows)
        self._seen["sightings"] = seen

    def take_directory(self, directory: Directory, tokens: list[TokenRow]) -> None:
        before, self.directory, self.tokens = self.directory, directory, tokens
        if directory.groups is not before.groups:
            self.liveness.forget(broker.key for broker in before.brokers() if directory.find(broker.key) is None)
            self._forget_points(before.groups.keys() - directory.groups.keys())
        self._registered = old_database.registered(directory)
        self._reported.note_rows(directory.groups.values())
        self._take_tokens(tokens)
        self.directory_changes.publish(directory.told_anew(before))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Know what a file holds; all of it is read anew once the database answers."""
        self.take_directory(snapshot.directory, snapshot.tokens)
        self._table.take(snapshot.routes.values(), all_of_them=True)
        self.liveness.take_rows(snapshot.sightings, now_ms=self.now_ms())
        self._note_terms(snapshot.sightings)
        self.is_loaded = True

    # -- changing the database ------------------------------------------------------------------------------------

    async def change(self, changes: Iterable[Change], audit: AuditRow) -> None:
        """Store an operator's changes, all or none, and apply them here at once.

        Raises:
            DatabaseAway: nothing was changed. OutcomeUnknown: perhaps it was; the database went away in between.
            OperatorError: what the repository refused; nothing was changed.
        """
        await self._commits.change(changes, audit)

    async def settle(self) -> None:
        """As `reload`, once every change that was under way is stored, or gone.

        Raises:
            DatabaseAway, CommitUnknown: nobody can say yet.
        """
        await self._commits.settle()

    # -- brokers --------------------------------------------------------------------------------------------------

    async def register(self, said: Broker, ask: Ask, *, term: int = 0) -> Broker:
        """Store what a broker said about itself, if it is news; return it with group and role.

        Args:
            said: group and role of it are not looked at.
            ask: asks a broker whether it is there.
            term: the newest one that the broker has written down.

        Raises:
            OperatorError: it was not added, its place is taken, or it must not serve with this data directory.
            DatabaseAway: it says something new, which cannot be stored now.
        """
        self._reported.note(said.group, term)
        known = self.directory.find(said.key)
        if known is None:
            await self.catch_up()  # perhaps another metaserver added it
            if self.directory.find(said.key) is None:
                self._judge()
            known = self.directory.find(said.key) or rules.refuse_unknown(said, self.directory)
        doubt, has_moved = self.liveness.doubt(said.key), rules.may_be_copy(known, said)
        if doubt is not None and (doubt.incarnation != said.incarnation or has_moved):
            await ask(doubt)
        for attempt in range(REGISTER_TRIES):
            known = self.directory.find(said.key) or rules.refuse_unknown(said, self.directory)
            rules.check_kind(known, said)
            self._check_place(known, said)
            is_older = rules.is_older(known, said, term, self.last_state(known))
            rules.check_registration(known, said.incarnation, is_older=is_older)
            self.liveness.claim(said.key, said.incarnation, now_ms=self.now_ms())
            same_disk = known.incarnation == said.incarnation
            complete = known.complete and same_disk
            broker = replace(
                said,
                group=known.group,
                role=known.role,
                kind=known.kind,
                complete=complete,
                fill_id=known.fill_id,
                fill_allowed=known.fill_allowed,
            )
            if broker == known:
                break
            try:
                await self._store_registration(broker, known)
                break
            except StaleTerm:  # what we know of it is a moment old
                if attempt + 1 == REGISTER_TRIES:
                    raise
                await self.catch_up()
        self._known_terms[said.key] = term
        return broker

    def _check_place(self, known: Broker, said: Broker) -> None:
        """Raise PlaceTaken while another process is heard as this broker, here or by its master."""
        has_moved, group = rules.may_be_copy(known, said), self.directory.groups[known.group]
        try:
            self.liveness.check_free(said.key, said.incarnation, now_ms=self.now_ms(), has_moved=has_moved)
            if has_moved and self._is_in_sync(group, known):
                raise PlaceTaken(
                    f"another process is connected to the master of {group.name} as {known.key}, from another address "
                    f"or directory: one of the two data directories is a copy of the other. {STOP_ONE}"
                )
        except PlaceTaken as error:
            self.refused[said.key] = str(error), self.now_ms()
            raise

    def _is_in_sync(self, group: Group, slave: Broker) -> bool:
        """Whether the group's master, which is heard here, has this slave in sync."""
        master = self.state(group.master) if group.master and slave.role == Role.SLAVE else None
        is_heard_here = group.master is not None and self.liveness.where(group.master.key) == self.liveness.own
        return is_heard_here and master is not None and slave.incarnation in master.in_step

    def refused_lately(self, broker: Broker) -> str:
        """Say why another process was refused as this broker within the last minute; empty: none was."""
        text, refused_ms = self.refused.get(broker.key, ("", 0))
        return text if self.now_ms() - refused_ms <= REFUSED_SHOWN_MS else ""

    async def _store_registration(self, broker: Broker, before: Broker) -> None:
        if rules.is_elsewhere(before, broker) and self.old_row(broker.group) is None:
            return await self._begin_elsewhere(broker)
        async with self._commits.writing:
            await self.database.write(lambda r: r.store_registration(broker, before))
            await self.catch_up()

    async def _begin_elsewhere(self, broker: Broker) -> None:
        """Give a broker its part in a new term: nobody counts the process that had it. Raises as `change`."""
        group = self.directory.groups[broker.group]
        change = rules.begin_elsewhere(group, broker, above=self.term_floor(group.name))
        cause = f"{broker.key} has started on another machine or directory, or its machine was started again"
        audit = AuditRow("metaserver", "", "NewTerm", {"brokerGroup": group.name, "cause": cause}, result="done")
        await self.change((SetRoles(change),), audit)
        log.warning("new term broker_group=%s term=%d: %s", group.name, change.new_term, cause)

    def join(self, key: BrokerKey, incarnation: str) -> str:
        """Begin a session of heartbeats; return its name. Raises PlaceTaken."""
        session = self.liveness.join(key, incarnation, now_ms=self.now_ms())
        self.publish()
        return session

    def beat(self, key: BrokerKey, session: str, state: ReplicaState) -> bool:
        """Note a heartbeat; False: that session was replaced by a newer one. Never waits for the database."""
        if not state.term:
            state = replace(state, known_term=self._known_terms.get(key, 0))
        if not self.liveness.beat(key, session, state, now_ms=self.now_ms()):
            return False
        if self._heard_in is not self.directory:
            self._heard_in = self.directory
            self._heard.clear()
        if self._heard.get(key) is not state:  # most beats of who has nothing to do say what the one before said
            self._heard[key] = state
            self._take_in(key, state)
        self._note_completeness(key, state)  # also what was said before: others' words may have taken its place
        self.publish()
        return True

    def _take_in(self, key: BrokerKey, state: ReplicaState) -> None:
        if broker := self.directory.find(key):
            self._reported.note(broker.group, state.term)
            self._reported.note_promise(broker.group, state.promised_term)
            master = self.directory.groups[broker.group].master
            if state.lost_master and master is not None and self.liveness.suspect(master.key, now_ms=self.now_ms()):
                self.doubted.set()
            place = broker.group, state.incarnation
            if state.point is not None and state.point != self.stored_points.get(place):
                self.points[place] = state.point
                self.points_rose.set()

    def _forget_points(self, groups: Collection[str]) -> None:
        """Of groups that are no more: one that is made anew under such a name lacks what they acknowledged."""
        for place in [place for place in self.points if place[0] in groups]:
            del self.points[place]

    def store_points_again(self) -> None:
        """Let all points that the next heartbeats say be stored, also those that were: the database may be older."""
        self.stored_points.clear()
        self._heard.clear()

    async def points_of(self, group: str, *, must_be_read: bool = False) -> Points:
        """Return what the group's copies said to be acknowledged, all that is stored and all that is known here.

        While the database is away it is what brokers said here, which the others may know better.

        Args:
            must_be_read: a master is chosen, or begins, by them. Then DatabaseAway is raised.
        """
        stored = Points()
        try:
            stored = await self.database.read(lambda r: r.load_points(group))
        except DatabaseAway:
            if must_be_read:
                raise
        here = {
            incarnation: point
            for (name, incarnation), point in self.points.items()
            if name == group and point.epoch.term >= stored.loss_accepted_term
        }
        newer = {name: point for name, point in here.items() if point > stored.by_incarnation.get(name, NO_POINT)}
        return replace(stored, by_incarnation={**stored.by_incarnation, **newer})

    def leave(self, key: BrokerKey, session: str) -> None:
        self.liveness.leave(key, session, now_ms=self.now_ms())
        self.doubted.set()
        self.publish()

    def reported_term(self, group: str) -> int:
        """The newest term that any broker of the group reported; 0: none did."""
        return self._reported.newest(group)

    def term_floor(self, group: str) -> int:
        """A new term of the group is above this: it was reported by a broker, or given out."""
        return self._reported.floor(group)

    def given_term(self, group: str) -> int:
        """As `term_floor`, but without what was only promised: that may be asked for again."""
        return self._reported.given(group)

    def old_row(self, group: str) -> OldRow | None:
        """What is to be said of a group whose row is older than its brokers; None: it is not."""
        row = self.directory.groups.get(group)
        if row is None:
            return None
        return old_database.judge(row, self.reported_term(group), self.own_state, given=self.term_floor(group))

    def old_rows(self) -> list[str]:
        """Names of groups whose row is older than their brokers."""
        return self._reported.above_rows(self.directory.groups)

    def own_state(self, broker: Broker) -> ReplicaState | None:
        """What a broker that is up last reported, with the data directory that the row names."""
        state = self.state(broker)
        return state if state is not None and state.incarnation in ("", broker.incarnation) else None

    def _note_terms(self, rows: Iterable[SightingRow]) -> None:
        for row in rows:
            broker = self.directory.find(row.key)
            if broker is not None and row.state is not None:
                self._reported.note(broker.group, max(row.state.term, row.state.known_term))

    def _note_completeness(self, key: BrokerKey, state: ReplicaState) -> None:
        """Let it be stored what a heartbeat says about slaves of its group, when that is news."""
        broker = self.directory.find(key)
        group = self.directory.groups.get(broker.group) if broker else None
        for slave in group.slaves if group else ():
            assert group is not None
            complete = rules.slave_complete(group, slave, key, state) if slave.incarnation else None
            if complete is None:
                continue
            if not complete and key != slave.key and slave.complete:
                away_ms = self.now_ms() - self._away_since.setdefault(slave.key, self.now_ms())
                if away_ms < AWAY_MS:
                    continue
            else:
                self._away_since.pop(slave.key, None)
            if slave.complete == complete:
                self.completeness.pop(slave.key, None)
                continue
            self.completeness[slave.key] = (slave, group.term, complete)
            self.news.set()

    # -- routes ---------------------------------------------------------------------------------------------------

    async def routes_for(self, subjects: list[str]) -> None:
        """Store the routes of legal subjects that are missing or too short, in one transaction.

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
            return  # those that are short serve on
        # What happened to a route since may have been read meanwhile; what was read is never older.
        self._table.take(route for route in stored if route.changed > self._seen["routes"])
        self.metrics.routes_created.inc(len(orders))
        self.publish(news=True)

    def is_short(self, subject: str, groups: Sequence[str]) -> bool:
        return self._table.is_short(subject, groups, self.directory)

    def _stored_bytes(self) -> dict[str, int]:
        """Bytes in the logs of groups whose masters beat here."""
        found = {}
        for group in self.directory.groups.values():
            state = self.state(group.master) if group.master else None
            if state is not None and state.log_end:
                found[group.name] = state.log_end - state.log_start
        return found

    def routes_of(self, groups: Iterable[str]) -> dict[str, Route]:
        """The routes that list one of these groups, by subject."""
        return self._table.of_groups(groups)

    # -- answers --------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Time for liveness: it only goes forward, and stands still while the process does."""
        return self._clock.at(time.monotonic_ns() // 1_000_000)

    def is_writable(self, group: Group) -> bool:
        """Whether the group takes messages of subjects that nobody marked readonly."""
        return self._takes(group) and not group.draining and not self.directory.is_marked(group.name, ALL_SUBJECTS)

    def _takes(self, group: Group) -> bool:
        return self.liveness.is_writable(group, now_ms=self.now_ms())

    def is_up(self, broker: Broker) -> bool:
        return self.liveness.is_up(broker.key, now_ms=self.now_ms())

    def may_be_up(self, broker: Broker) -> bool:
        return self.liveness.may_be_up(broker, now_ms=self.now_ms())

    def state(self, broker: Broker) -> ReplicaState | None:
        return self.liveness.state(broker.key, now_ms=self.now_ms())

    def is_gone(self, broker: Broker, silence_ms: int) -> str:
        """Say why a broker counts as gone; empty: it does not."""
        now_ms = self.now_ms()
        if broker.incarnation and not self.liveness.may_be_up(broker, now_ms=now_ms):
            return "it is down"
        silent_ms = self.liveness.silent_ms(broker.key, now_ms=now_ms)
        return f"it is silent for {silent_ms} ms" if silent_ms >= silence_ms else ""

    def why_no_failover(self, group: Group) -> tuple[str, str] | None:
        """Say why no slave of a group whose master is gone becomes the master by itself, and what to do about it; None:
        nothing to say."""
        if (found := self.no_failover.get(group.name)) is None:
            return None
        why, text = found
        return text, promotion.way_on(why, group)

    def last_state(self, broker: Broker) -> ReplicaState | None:
        """What a broker said last, whether it is up or not."""
        return self.liveness.last_state(broker.key)

    async def lacking(self, broker: Broker) -> str:
        """Say what a broker's copy lacks, by its own last words; empty: nothing that it knows of."""
        state = self.liveness.last_state(broker.key)
        if state is None or not rules.is_rolled_back(state) or state.incarnation != broker.incarnation:
            return ""
        points = await self.points_of(broker.group)
        newest = max(points.by_incarnation.values(), default=None)
        return (
            f"{broker.key} was rolled back (its disk was put back, or forgot what it had fsynced): it lacks what "
            f"{broker.group} acknowledged up to {newest}"
        )

    def peers(self) -> list[MetaserverRow]:
        """All metaservers that are alive, this one too."""
        now = self.now_ms()
        return [row for row in self.liveness.peers.rows if not self.liveness.peers.is_silent(row.id, now_ms=now)]

    def publish(self, *, news: bool = False) -> None:
        """Wake who waits, if an answer changed since they were last woken."""
        if self.liveness.has_news:
            self.news.set()
        if news or self._published != self.liveness.version:
            self._published = self.liveness.version
            self.changes.publish()

    def stop(self) -> None:
        """Let streams end: brokers and clients go to another metaserver, or wait for this one."""
        self.is_stopping = True
        self.directory_changes.publish()
        self.changes.publish()

    def _roles_up(self, group: Group) -> dict[str, bool]:
        """Whether the master is up, and whether all slaves are; a role that nobody has is left out."""
        roles_of = {"master": [group.master] if group.master else [], "slave": list(group.slaves)}
        return {role: all(map(self.is_up, brokers)) for role, brokers in roles_of.items() if brokers}

    def _read_groups(self) -> list[GroupReading]:
        return [
            (
                g.name,
                g.term,
                self.is_writable(g),
                self._roles_up(g),
                self.reported_term(g.name) > g.term,
            )
            for g in self.directory.groups.values()
        ]
