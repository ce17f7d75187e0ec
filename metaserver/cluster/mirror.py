"""Shell. Copy of the database in memory: read after each change, and taken from a snapshot while the database is
away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.liveness import Liveness
from qmq.metaserver.cluster.old_database import ReportedTerms
from qmq.metaserver.cluster.reports import Reports
from qmq.metaserver.cluster.snapshot import Snapshot
from qmq.metaserver.model import Directory, Route, SightingRow, TokenRow
from qmq.metaserver.routes.placement import RouteTable
from qmq.metaserver.storage.database import LOAD_MS, Database, DatabaseSetAside, deciding

TakeTokens = Callable[[list[TokenRow]], None]


class Publish(Protocol):
    """Wakes tasks that wait for a change; see `Registry.publish`."""

    def __call__(self, *, news: bool = False) -> None: ...


class Changes:
    """One wake-up call for all streams; each then checks whether the change concerns it. Used from the loop only."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Event, object] = {}  # ordered, so that a simulated run repeats

    @contextmanager
    def watch(self, about: object = None) -> Iterator[asyncio.Event]:
        """Return an event that is set at each change. Clear it before reading state, so that no change is missed.

        Args:
            about: leave out changes that name other objects only.
        """
        event = asyncio.Event()
        self._watchers[event] = about
        try:
            yield event
        finally:
            self._watchers.pop(event)

    def publish(self, about: Collection[object] | None = None) -> None:
        """Wake all watchers; with `about`, only those of these objects and those of everything."""
        for event, watched in self._watchers.items():
            if about is None or watched is None or watched in about:
                event.set()


class DatabaseMirror:
    """Directory, tokens and routes in memory. Made by the registry; all methods are called from the loop.

    Args:
        take_tokens: receives all API tokens after each reading.
        now_ms: time for liveness.
        publish: called after each reading.
    """

    def __init__(
        self,
        database: Database,
        liveness: Liveness,
        terms: ReportedTerms,
        reports: Reports,
        take_tokens: TakeTokens,
        *,
        table: RouteTable,
        now_ms: Callable[[], int],
        publish: Publish,
    ) -> None:
        self._database = database
        self._liveness = liveness
        self._terms = terms
        self._reports = reports
        self._take_tokens = take_tokens
        self._table = table
        self._now_ms = now_ms
        self._publish = publish
        self._registered: frozenset[str] = frozenset()
        """Groups with registered brokers, in memory or in the snapshot."""
        self._rows: frozenset[str] | None = None
        """Names of all groups that the database ever had; None: not read yet."""
        self._reading = asyncio.Lock()
        self.storing = asyncio.Lock()
        """Held while sightings are stored or read, so that no reading is older than the rows we stored."""
        self._seen: dict[str, int] = {"directory": -1, "routes": -1, "sightings": -1}
        self.directory = Directory()
        self.tokens: list[TokenRow] = []
        self.routes: Mapping[str, Route] = table.known
        self.directory_changes = Changes()
        """Changes of assignments: groups, brokers, marks, offline consumers; each names the brokers concerned."""
        self.is_loaded = False

    @property
    def revision(self) -> tuple[int, ...]:
        """Differs after each change in memory."""
        return (*self._seen.values(), self._liveness.version)

    @property
    def routes_version(self) -> int:
        return self._seen["routes"]

    async def catch_up(self, ask: Callable[[], Awaitable[dict[str, int]]] | None = None) -> None:
        """Read everything that changed since the last reading, and wake waiting tasks. Raises DatabaseAway.

        Afterwards memory is the state of the database at a moment after the call.

        Args:
            ask: reads the database's versions along with other work; default: probe for them.
        """
        async with self._reading:
            versions = await (ask or self._database.probe)()
            news = False
            try:
                if versions["directory"] != self._seen["directory"] or self._database.set_aside_because:
                    await self._read_directory(versions["directory"])
                    news = True
                else:
                    self.check_rows()  # a broker may have reported a lost group since the last reading
                if versions["routes"] != self._seen["routes"]:
                    await self._read_routes(versions["routes"])
                    news = True
                if versions["sightings"] != self._seen["sightings"]:
                    await self._read_sightings(versions["sightings"])
                self.is_loaded = True
            finally:  # a reading is not repeated, even if the next one fails or is cancelled
                self._publish(news=news)

    def read_anew(self) -> None:
        """Read everything again: the database was restored, and equal versions may hold other rows."""
        self._seen = dict.fromkeys(self._seen, -1)

    async def _read_directory(self, version: int) -> None:
        is_newer = 0 <= self._seen["directory"] < version and not self._database.set_aside_because
        known = self.directory if is_newer else None  # equal versions of two databases prove nothing
        with deciding():
            directory, tokens, rows = await self._database.read(
                lambda r: (r.load(known), r.load_tokens(), r.group_names()), timeout_ms=LOAD_MS
            )
        self._rows = rows
        self.check_rows()
        if not is_newer:
            self._seen.update(routes=-1, sightings=-1)
        self.take_directory(directory, tokens)
        self._seen["directory"] = directory.version

    def check_rows(self) -> None:
        """Set the database aside while it lacks the row of a group with registered brokers. Raises DatabaseSetAside."""
        if self._rows is None:
            return
        lost = self.lost_groups()
        self._database.set_aside(old_database.describe(lost) if lost else "")
        if lost:
            raise DatabaseSetAside(self._database.set_aside_because)

    def lost_groups(self) -> dict[str, int]:
        """Return the groups that the database has lost, each with its newest known term."""
        rows = self._rows or frozenset()
        names = old_database.find_lost(self._registered, self._terms.unknown(rows), rows)
        return {name: self._terms.floor(name) for name in names}

    def expect(self, snapshot: Snapshot) -> None:
        """Expect the groups of a snapshot in the database, once it is read."""
        self._registered = old_database.registered(snapshot.directory)
        self._terms.note_rows(snapshot.directory.groups.values())

    async def _read_routes(self, version: int) -> None:
        after = (
            self._seen["routes"] if 0 <= self._seen["routes"] < version else 0
        )  # a smaller version only comes from a restored copy
        seen, routes = await self._database.read(lambda r: r.load_routes(after), timeout_ms=LOAD_MS)
        self._table.take(routes, all_of_them=not after)
        self._seen["routes"] = seen

    async def _read_sightings(self, version: int) -> None:
        after = self._seen["sightings"] if 0 <= self._seen["sightings"] < version else 0
        async with self.storing:
            seen, rows = await self._database.read(lambda r: r.load_sightings(after), timeout_ms=LOAD_MS)
            self._liveness.take_rows(rows, now_ms=self._now_ms(), are_all=not after)
        self._note_terms(rows)
        self._seen["sightings"] = seen

    def take_directory(self, directory: Directory, tokens: list[TokenRow]) -> None:
        before, self.directory, self.tokens = self.directory, directory, tokens
        if directory.groups is not before.groups:
            self._liveness.forget(broker.key for broker in before.brokers() if directory.find(broker.key) is None)
            self._reports.forget_groups(before.groups.keys() - directory.groups.keys())
        self._registered = old_database.registered(directory)
        self._terms.note_rows(directory.groups.values())
        self._take_tokens(tokens)
        self.directory_changes.publish(directory.brokers_affected(before))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Fill memory from a snapshot; everything is read again once the database answers."""
        self.take_directory(snapshot.directory, snapshot.tokens)
        self._table.take(snapshot.routes.values(), all_of_them=True)
        self._liveness.take_rows(snapshot.sightings, now_ms=self._now_ms())
        self._note_terms(snapshot.sightings)
        self.is_loaded = True

    def _note_terms(self, rows: Iterable[SightingRow]) -> None:
        for row in rows:
            broker = self.directory.find(row.key)
            if broker is not None and row.state is not None:
                self._terms.note(broker.group, row.state.newest_term)
