"""Shell. The metaserver's state in memory: what the database holds and what brokers said, kept together.

Answers come from memory, so that routes and heartbeats go on while the database is away. Every change is written to
the database first; then what changed is read, and everybody who waits is woken. `metaserver.upkeep` follows the
changes of other metaservers and stores, in the background, what brokers say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from metaserver import roles
from metaserver.awake import AwakeClock
from metaserver.changes import Changes
from metaserver.commits import LOAD_MS, Commits
from metaserver.database import Database, DatabaseAway
from metaserver.db.changes import Change
from metaserver.db.errors import CommitUnknown, StaleTerm
from metaserver.liveness import Liveness, Question
from metaserver.metrics import GroupReading, Metrics
from metaserver.model import (
    ALL_SUBJECTS,
    AuditRow,
    Broker,
    BrokerKey,
    Directory,
    Group,
    MetaserverRow,
    ReplicaState,
    Route,
    TokenRow,
)
from metaserver.route_table import RouteTable
from metaserver.snapshot import Snapshot

log = logging.getLogger("qmq.metaserver")

Ask = Callable[[Question], Awaitable[None]]
TakeTokens = Callable[[list[TokenRow]], None]

REGISTER_TRIES = 3


class Registry:
    """Created by main, ends with the process. All methods are called from the loop.

    Args:
        take_tokens: told of all API tokens, whenever they were read.
    """

    def __init__(
        self, database: Database, liveness: Liveness, metrics: Metrics, clock: AwakeClock, take_tokens: TakeTokens, *,
        groups_min: int, groups_new: int,
    ) -> None:  # fmt: skip
        self.database, self.liveness = database, liveness
        self._metrics, self._clock, self._take_tokens = metrics, clock, take_tokens
        self._table = RouteTable(groups_min=groups_min, groups_new=groups_new)
        self._commits = Commits(database, self.catch_up)
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
        self.news = asyncio.Event()
        """Set when there is something to store."""
        self.is_loaded = False
        self.is_stopping = False
        metrics.observe_groups(self._read_groups)

    # -- reading the database -------------------------------------------------------------------------------------

    @property
    def database_is_up(self) -> bool:
        return self.database.is_up

    @property
    def revision(self) -> tuple[int, ...]:
        """Another one after each change of what is known."""
        return (*self._seen.values(), self.liveness.version)

    @property
    def routes_version(self) -> int:
        return self._seen["routes"]

    async def catch_up(self) -> None:
        """Read what changed since it was last read, and wake who waits for it. Raises DatabaseAway."""
        async with self._reading:
            versions = await self.database.probe()
            news = False
            try:
                if versions["directory"] != self._seen["directory"]:
                    await self._read_directory()
                    news = True
                if versions["routes"] != self._seen["routes"]:
                    await self._read_routes(versions["routes"])
                    news = True
                if versions["sightings"] != self._seen["sightings"]:
                    await self._read_sightings(versions["sightings"])
                self.is_loaded = True
            finally:  # what was read will not be read again, even if the next reading fails or is cancelled
                self.publish(news=news)

    async def reload(self) -> None:
        """As `catch_up`: afterwards memory is what the database was at a moment after the call."""
        await self.catch_up()

    async def _read_directory(self) -> None:
        known = self.directory
        directory, tokens = await self.database.read(lambda r: (r.load(known), r.load_tokens()), timeout_ms=LOAD_MS)
        self.take_directory(directory, tokens)
        self._seen["directory"] = directory.version

    async def _read_routes(self, version: int) -> None:
        after = self._seen["routes"] if 0 <= self._seen["routes"] < version else 0  # only a restore makes it go back
        seen, routes = await self.database.read(lambda r: r.load_routes(after), timeout_ms=LOAD_MS)
        self._table.take(routes, all_of_them=not after)
        self._seen["routes"] = seen

    async def _read_sightings(self, version: int) -> None:
        after = self._seen["sightings"] if 0 <= self._seen["sightings"] < version else 0
        async with self.storing:
            seen, rows = await self.database.read(lambda r: r.load_sightings(after), timeout_ms=LOAD_MS)
            self.liveness.take_rows(rows, now_ms=self.now_ms())
        self._seen["sightings"] = seen

    def take_directory(self, directory: Directory, tokens: list[TokenRow]) -> None:
        before, self.directory, self.tokens = self.directory, directory, tokens
        if directory.groups is not before.groups:
            self.liveness.forget(broker.key for broker in before.brokers() if directory.find(broker.key) is None)
        self._take_tokens(tokens)
        self.directory_changes.publish(directory.told_anew(before))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Know what a file holds; all of it is read anew once the database answers."""
        self.take_directory(snapshot.directory, snapshot.tokens)
        self._table.take(snapshot.routes.values(), all_of_them=True)
        self.liveness.take_rows(snapshot.sightings, now_ms=self.now_ms())
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

    async def register(self, said: Broker, ask: Ask) -> Broker:
        """Store what a broker said about itself, if it is news; return it with group and role.

        Args:
            said: group and role of it are not looked at.
            ask: asks a broker whether it is there.

        Raises:
            OperatorError: it was not added, its place is taken, or it must not serve with this data directory.
            DatabaseAway: it says something new, which cannot be stored now.
        """
        known = self.directory.find(said.key)
        if known is None:
            await self.catch_up()  # perhaps another metaserver added it
            known = self.directory.find(said.key) or roles.refuse_unknown(said, self.directory)
        doubt = self.liveness.doubt(said.key)
        if doubt is not None and doubt.incarnation != said.incarnation:
            await ask(doubt)
        self.liveness.check_free(said.key, said.incarnation, now_ms=self.now_ms())
        for attempt in range(REGISTER_TRIES):
            known = self.directory.find(said.key) or roles.refuse_unknown(said, self.directory)
            roles.check_kind(known, said)
            roles.check_registration(known, said.incarnation)
            self.liveness.claim(said.key, said.incarnation, now_ms=self.now_ms())
            same_disk = known.incarnation == said.incarnation
            complete = known.complete and same_disk
            broker = replace(said, group=known.group, role=known.role, kind=known.kind, complete=complete)
            if broker == known:
                break
            try:
                await self._store_registration(broker, known)
                break
            except StaleTerm:  # what we know of it is a moment old
                if attempt + 1 == REGISTER_TRIES:
                    raise
                await self.catch_up()
        return broker

    async def _store_registration(self, broker: Broker, before: Broker) -> None:
        async with self._commits.writing:
            await self.database.write(lambda r: r.store_registration(broker, before))
            await self.catch_up()

    def join(self, key: BrokerKey, incarnation: str) -> str:
        """Begin a session of heartbeats; return its name. Raises PlaceTaken."""
        session = self.liveness.join(key, incarnation, now_ms=self.now_ms())
        self.publish()
        return session

    def beat(self, key: BrokerKey, session: str, state: ReplicaState) -> bool:
        """Note a heartbeat; False: that session was replaced by a newer one. Never waits for the database."""
        if not self.liveness.beat(key, session, state, now_ms=self.now_ms()):
            return False
        self._note_completeness(key, state)
        self.publish()
        return True

    def leave(self, key: BrokerKey, session: str) -> None:
        self.liveness.leave(key, session, now_ms=self.now_ms())
        self.publish()

    def _note_completeness(self, key: BrokerKey, state: ReplicaState) -> None:
        """Let it be stored what a master's heartbeat says about its slave, when that is news."""
        broker = self.directory.find(key)
        group = self.directory.groups.get(broker.group) if broker else None
        if group is None or group.slave is None or group.master is None or group.master.key != key:
            return
        complete = roles.slave_complete(group, state)
        if complete is None or not group.slave.incarnation or group.slave.complete == complete:
            self.completeness.pop(group.slave.key, None)
            return
        self.completeness[group.slave.key] = (group.slave, group.term, complete)
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
        self._metrics.routes_created.inc(len(orders))
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

    def _read_groups(self) -> list[GroupReading]:
        return [
            (
                g.name,
                g.term,
                self.is_writable(g),
                {broker.role.name.lower(): self.is_up(broker) for broker in g.brokers},
            )
            for g in self.directory.groups.values()
        ]
