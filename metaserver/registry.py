"""Shell. The metaserver's state in memory: what the database holds and what brokers said, kept together.

Answers come from memory, so that routes and heartbeats go on while the database is away. Every change is written to
the database first; then what changed is read, and everybody who waits is woken. `metaserver.upkeep` follows the
changes of other metaservers and stores, in the background, what brokers say.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from metaserver import roles, routing
from metaserver.awake import AwakeClock
from metaserver.changes import Changes
from metaserver.database import AnswerLate, Database, DatabaseAway
from metaserver.db.changes import Change, Order, RestoreAll, SetRoles
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
    part,
)
from metaserver.roles import RoleChange
from metaserver.routing import GroupRoute, Loads, Placement
from metaserver.snapshot import Snapshot
from qmq.errors import OperatorError, OutcomeUnknown
from qmq.types import Role

log = logging.getLogger("qmq.metaserver")

Ask = Callable[[Question], Awaitable[None]]
TakeTokens = Callable[[list[TokenRow]], None]

AUDIT_ROWS_READ = 200
"""So many newest rows are looked through for a change whose commit got lost; it is seconds old."""
REGISTER_TRIES = 3
LATE_S = 5.0
"""A database that answers again has answered what it was asked before, or will not."""
LOOK_FIRST = "it does not tell now; look at AuditTrail once it does, before you repeat this"
MANY = 100
"""More changes than these in one transaction get the time of a reading of everything."""
LOAD_MS = 60_000
"""How long a reading of everything may take: 100,000 routes take a few seconds."""


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
        self._groups_min, self._groups_new = groups_min, groups_new
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()
        self.storing = asyncio.Lock()
        """Held while sightings are stored or read: what is read is never older than what we know to be stored."""
        self._routes: dict[str, Route] = {}
        self._seen: dict[str, int] = {"directory": -1, "routes": -1, "sightings": -1}
        self._published = -1
        self._loads = Loads()
        self.routes: Mapping[str, Route] = self._routes
        self.find = self._routes.get
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
        self.take_routes(routes, all_of_them=not after)
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

    def take_routes(self, routes: Iterable[Route], *, all_of_them: bool = False) -> None:
        """Know these routes; those without groups are gone."""
        routes = list(routes)
        if all_of_them:
            gone = self._routes.keys() - {route.subject for route in routes}
            routes += [replace(self._routes[subject], groups=()) for subject in gone]
        for route in routes:
            before = self._routes.get(route.subject)
            if before is not None and before.version > route.version and not all_of_them:
                continue  # what was just stored may be read late
            self._loads.moved(route.subject, before.groups if before else (), route.groups)
            if route.groups:
                self._routes[route.subject] = route
            else:
                self._routes.pop(route.subject, None)

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Know what a file holds; all of it is read anew once the database answers."""
        self.take_directory(snapshot.directory, snapshot.tokens)
        self.take_routes(snapshot.routes.values(), all_of_them=True)
        self.liveness.take_rows(snapshot.sightings, now_ms=self.now_ms())
        self.is_loaded = True

    # -- changing the database ------------------------------------------------------------------------------------

    async def change(self, changes: Iterable[Change], audit: AuditRow) -> None:
        """Store an operator's changes, all or none, and apply them here at once.

        Raises:
            DatabaseAway: nothing was changed. OutcomeUnknown: perhaps it was; the database went away in between.
            OperatorError: what the repository refused; nothing was changed.
        """
        orders = tuple(changes)
        async with self._writing:
            await self._store(orders, audit)

    async def change_roles(self, decide: Callable[[Directory], RoleChange], audit: AuditRow | None = None) -> None:
        """Decide on the newest directory and store the decision; raises as `change`, and what `decide` raises."""
        async with self._writing:
            await self.catch_up()
            change = decide(self.directory)
            await self._store((SetRoles(change),), audit or AuditRow("metaserver", "", "change_roles"))
        log.info("roles changed broker_group=%s term=%d %s", change.group, change.term + 1, _parts(change))

    async def _store(self, changes: tuple[Change, ...], audit: AuditRow) -> None:
        began_ms, order = time.time_ns() // 1_000_000, Order()
        try:
            many = any(isinstance(change, RestoreAll) for change in changes) or len(changes) > MANY
            await self.database.write(lambda r: r.change(changes, audit, order), timeout_ms=LOAD_MS if many else 0)
        except CommitUnknown as error:
            try:
                stored = await self._was_stored(audit, began_ms, error)
            except OutcomeUnknown:
                order.is_withdrawn = True  # it may not even have begun; who looks for it later must not be overtaken
                raise
            if not stored:
                raise DatabaseAway("the connection broke, and the change was not stored") from error
        try:
            await self.catch_up()
        except DatabaseAway:
            log.error("change stored but not read back action=%s: the database went away", audit.action)

    async def settle(self) -> None:
        """As `reload`, once every change that was under way is stored, or gone.

        Raises:
            DatabaseAway, CommitUnknown: nobody can say yet.
        """
        await self.database.probe()
        await self._stand_in_line()
        await self.catch_up()

    async def _stand_in_line(self) -> None:
        """Wait behind all changes that are under way: a broken connection's commit may still be on its way."""
        try:
            await self.database.write(lambda r: r.settle())
        except AnswerLate:
            raise
        except CommitUnknown:
            pass  # it had its turn, so whatever was before it is over

    async def _was_stored(self, audit: AuditRow, began_ms: int, error: CommitUnknown) -> bool:
        """Find out whether a change was stored whose commit was not answered: its audit row is part of it."""
        try:
            await self.database.probe()
            told = await _late_answer(error) if isinstance(error, AnswerLate) else None
            if told is not None:
                return told
            await self._stand_in_line()
            rows = await self.database.read(lambda r: r.audit_trail(limit=AUDIT_ROWS_READ, since_ms=began_ms))
        except (DatabaseAway, CommitUnknown, TimeoutError) as failed:
            raise OutcomeUnknown(f"{error}; {LOOK_FIRST}") from failed
        return any(_is_same(row, audit) for row in rows)

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
            known = self.directory.find(said.key) or _refuse_unknown(said, self.directory)
        doubt = self.liveness.doubt(said.key)
        if doubt is not None and doubt.incarnation != said.incarnation:
            await ask(doubt)
        self.liveness.check_free(said.key, said.incarnation, now_ms=self.now_ms())
        for attempt in range(REGISTER_TRIES):
            known = self.directory.find(said.key) or _refuse_unknown(said, self.directory)
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
        async with self._writing:
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

    async def routes_for(self, subjects: list[str]) -> list[list[GroupRoute]]:
        """Return the routes of legal subjects; those that are missing or too short are stored, in one transaction.

        Returns:
            One route for each subject; an empty one where no broker group can take it.

        Raises:
            DatabaseAway, CommitUnknown: a subject has no route yet, and none can be stored now.
        """
        orders = self._orders(subjects)
        if orders:
            try:
                stored = await self.database.write(lambda r: r.store_routes(orders))
                # What happened to a route since may have been read meanwhile; what was read is never older.
                self.take_routes(route for route in stored if route.changed > self._seen["routes"])
                self._metrics.routes_created.inc(len(orders))
                self.publish(news=True)
            except (DatabaseAway, CommitUnknown):
                if any(version == 0 for _, _, version in orders):
                    raise
        return [self.known_route(subject) or [] for subject in subjects]

    async def route(self, subject: str) -> list[GroupRoute]:
        """As `routes_for`, for one subject."""
        return (await self.routes_for([subject]))[0]

    def known_route(self, subject: str) -> list[GroupRoute] | None:
        """The route as it is in memory; None: there is none yet."""
        route = self._routes.get(subject)
        if route is None:
            return None
        return routing.route_for_clients(subject, route.groups, self.directory, self._takes)

    def _orders(self, subjects: list[str]) -> list[tuple[str, tuple[str, ...], int]]:
        placement: Placement | None = None
        orders = []
        for subject in dict.fromkeys(subjects):
            route = self._routes.get(subject)
            groups = route.groups if route else ()
            if route and not self.is_short(subject, groups):
                continue
            placement = placement or Placement(
                self.directory, self._takes, self._loads, groups_min=self._groups_min, groups_new=self._groups_new,
                stored_bytes=self._stored_bytes(),
            )  # fmt: skip
            chosen = placement.choose(subject, groups)
            if chosen and set(chosen) != set(groups):
                orders.append((subject, chosen, route.version if route else 0))
        return orders

    def is_short(self, subject: str, groups: Sequence[str]) -> bool:
        return routing.is_short(subject, groups, self.directory, groups_min=self._groups_min)

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
        return {subject: self._routes[subject] for group in groups for subject in self._loads.of(group)}

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


def _parts(change: RoleChange) -> str:
    return f"master={change.master and change.master.key} slave={change.slave and change.slave.key}"


def _is_same(row: AuditRow, audit: AuditRow) -> bool:
    """Whether a row that was read is what was to be stored: JSON makes lists of tuples."""
    said, known = (
        json.dumps([each.who, each.peer, each.action, dict(each.parameters), each.before, each.after], sort_keys=True)
        for each in (row, audit)
    )
    return said == known


def _refuse_unknown(said: Broker, directory: Directory) -> Broker:
    vacant = next((group for group in directory.groups.values() if group.half_swapped), None)
    master, slave = (part(role, said.kind) for role in (Role.MASTER, Role.SLAVE))
    command, group, role = "AddBroker", said.group or "GROUP", f"{master:d} (master) or {slave:d} (slave)"
    if vacant and vacant.kind == said.kind and said.group in ("", vacant.name):
        command, group, role = "ReplaceBroker", vacant.name, f"{slave:d}"
    raise OperatorError(
        f"{said.key} is no broker here. Run: tools/tools.sh {command} --metaserver=HOST:PORT --token=TOKEN "
        f"--brokerGroup={group} --role={role} --hostname={said.hostname} --ip={said.ip} "
        f"--servePort={said.serve_port} --syncPort={said.sync_port}"
    )
