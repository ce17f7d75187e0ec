"""Shell. Sends routes, and each change of them, to the clients that watch them.

An idle watcher costs nothing: a change wakes only the hub. The hub finds the entries concerned, encodes each once, and
sends these bytes to its watchers. A slow client delays no other: it is sent the newest route next, not every change.

Known routes are answered from memory. New subjects and short routes are collected and stored many at a time; while the
database is away, only they wait.

Each kind of groups has a hub. Delayed messages of any subject may go to any group of delay servers, so their route is
one for all subjects, is not stored, and follows from the groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from qmq.errors import CallError, InvalidRequest, MissingRight, QmqError
from qmq.metaserver.cluster.mirror import Changes
from qmq.metaserver.model import ALL_SUBJECTS, DELAY, NORMAL, Directory, Group, ReadonlyMark, Route
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.routes.audience import Audience, ClientInfo, Counts, Entry, Quotas, Seat, Send, Watch
from qmq.metaserver.routes.encoding import MISSING_RIGHT, GroupViews, RouteBytes, route_bytes, update_bytes
from qmq.rights import CONSUME, PRODUCE, Caller
from qmq.subjects import check_subject, real_subject

log = logging.getLogger("qmq.metaserver")

GATHER_S = 0.005
"""Changes within this time are processed together; with 2,000 groups one look costs about as much."""
PAUSE_S_MAX = 0.25
"""Longest wait before the next look. Updating 20,000 watchers takes seconds, and later changes would wait for them."""
STORE_WAIT_S = 0.5
"""Longest wait of an answer for new subjects; then it is sent without them, and they follow."""
REPEAT_S = 1.0
"""Time until a failed route is stored again, while it is watched."""
STORED_AT_ONCE = 1_000
"""New subjects in one transaction: those of 100 clients that start at once."""
ENTRIES_PER_PASS = 100
"""Routes encoded, or seats added, before the task yields: a few milliseconds."""
UPDATE_ROUTES_MAX = 500
"""Routes in one update: 200 kB, which a client reads in a few milliseconds. A swap changes all its routes at once."""
UPDATED_AT_ONCE = 250
"""Watchers updated before the task yields: some 12 ms."""
BATCHES_UNDER_WAY = 4
"""Batches of sends in progress. Sends to 20,000 watchers at once would take 40 MB, which the process never returns."""
SEND_WAIT_S = 0.1
"""Time for which a watcher that does not read delays later ones, once; then it is skipped until it reads."""
NAME_CHARS_MAX = 1_000
"""Longest invalid name that is kept with its refusal while its watch lasts."""
POLL_KEPT_S = 20.0
"""A client that polls every 5 s counts as connected for this time."""


NO_ROUTE = "has no route yet; it gets one with its first producer or consumer"
NO_GROUP_YET = "there is no broker group that takes new subjects; AddBroker adds one"


class RouteSource(Protocol):
    """Part of the registry that the hub uses."""

    @property
    def changes(self) -> Changes: ...

    @property
    def directory(self) -> Directory: ...

    @property
    def find(self) -> Callable[[str], Route | None]:
        """Return the route of a real subject, or None. The same object until it changes."""
        ...

    @property
    def routes_version(self) -> int:
        """Differs after each change of a route, except by `routes_for`."""
        ...

    def is_short(self, subject: str, groups: Sequence[str]) -> bool:
        """Return whether a route lists so few groups that `routes_for` should extend it."""
        ...

    def is_writable(self, group: Group) -> bool: ...

    async def routes_for(self, subjects: list[str]) -> object: ...


class TooManyWatches(CallError):
    """The clients of this token have reached their bound of watches. Close some; known routes stay in use."""


class WatchHub:
    """Routes of one kind of groups. Made by main, which runs `run` as a task; all methods are called from the loop.

    Args:
        allow: returns how many of a number of new subjects a caller may create now, and why not the others.
        kind: of the groups in its routes.
    """

    def __init__(
        self,
        registry: RouteSource,
        metrics: Metrics,
        allow: Callable[[Caller, int], tuple[int, str]],
        quotas: Quotas,
        kind: int = NORMAL,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._allow = allow
        self._quotas = quotas
        self._audience = Audience()
        self._views = GroupViews(kind)
        self._marks: frozenset[ReadonlyMark] = frozenset()
        self._routes_version = -1
        self._short: dict[Entry, None] = {}
        self._wanted: dict[str, str] = {}
        """Real subjects that need the database, and why they still wait."""
        self._problem = ""
        self._want_some = asyncio.Event()
        self._stored = asyncio.Event()
        self._polled: dict[tuple[str, str, bool], Watch] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._revision = time.time_ns() // 1_000_000  # clients of an earlier process saw lower ones

    async def run(self) -> None:
        """Process the registry's changes and store new routes, until cancelled."""
        self._concerned()  # so that the first client finds the groups
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look_at_changes())
                tasks.create_task(self._store_wanted())
        finally:
            for task in self._sending:
                task.cancel()

    # Watchers on streams.

    def join(
        self,
        *,
        app: str,
        client_id: str,
        produces: bool,
        caller: Caller,
        send: Send | None,
        looks_only: bool = False,
    ) -> Watch:
        """Begin a watch; `send` takes one update at a time. Raises TooManyWatches."""
        if why := self._quotas.open(caller, time.monotonic()):
            raise TooManyWatches(why)
        watch = Watch(app, client_id, produces, caller, send, looks_only)
        self._audience.watches[watch] = None
        self._metrics.watches.inc()
        return watch

    def leave(self, watch: Watch) -> None:
        if watch in self._audience.watches:
            self.forget(watch, list(watch.seats))
            self._audience.leave(watch)
            self._quotas.close(watch.caller)
            self._metrics.watches.dec()

    def forget(self, watch: Watch, subjects: Iterable[str]) -> None:
        """Remove routes that a client no longer uses."""
        before = len(watch.seats)
        for entry in self._audience.drop(watch, subjects):
            self._short.pop(entry, None)
        self._quotas.remove(watch.caller, before - len(watch.seats))

    async def ask(self, watch: Watch, subjects: Sequence[str], held: Mapping[str, int]) -> None:
        """Answer a request with the routes that differ from those held or sent. Later changes follow."""
        watch.asking = True  # changes from now on are in the answer
        seats = await self._take_seats(watch, subjects, held)
        watch.asking, watch.owes_answer = False, True
        for seat in seats:
            _owe(seat)
        self._serve(watch)

    def confirm(self, watch: Watch, held: Mapping[str, int]) -> None:
        """Record the versions that a client uses."""
        for name, version in held.items():
            if seat := watch.seats.get(name):
                seat.used = version

    # Polling watchers.

    async def poll(
        self,
        subjects: Sequence[str],
        held: Mapping[str, int],
        caller: Caller,
        *,
        app: str,
        client_id: str,
        produces: bool,
    ) -> list[RouteBytes]:
        """Return the routes that differ from those held. The client counts as a watcher for a while.

        Raises:
            TooManyWatches: known routes stay in use.
        """
        self._forget_polls()
        key = caller.name, client_id, produces
        watch = self._polled.get(key)
        if watch is None:
            watch = self.join(app=app, client_id=client_id, produces=produces, caller=caller, send=None)
            self._polled[key] = watch
        watch.seen_s = time.monotonic()
        seats = await self._take_seats(watch, subjects, held)
        for seat in seats:
            seat.sent = held.get(seat.entry.name, 0)
        return [seat.next_route() for seat in seats if seat.is_news]

    def _forget_polls(self) -> None:
        oldest_s = time.monotonic() - POLL_KEPT_S
        for key in [key for key, watch in self._polled.items() if watch.seen_s < oldest_s]:
            self.leave(self._polled.pop(key))

    # Operators' questions.

    def old_routes(self, broker_group: str, subject: str) -> Counts:
        """Count the clients of this metaserver that may still use the group as writable."""
        self._forget_polls()
        return self._audience.old_routes(broker_group, subject)

    def clients(self) -> list[ClientInfo]:
        self._forget_polls()
        return self._audience.clients()

    # Seats and entries.

    async def _take_seats(self, watch: Watch, subjects: Sequence[str], held: Mapping[str, int]) -> list[Seat]:
        """Add subjects to a watcher; wait a moment for those that must be stored first."""
        names = list(dict.fromkeys(subjects))
        seats = []
        for number, name in enumerate(names, start=1):
            seats.append(watch.seats.get(name) or self._take_seat(watch, name))
            if number % ENTRIES_PER_PASS == 0:
                await asyncio.sleep(0)
        for seat in seats:
            if version := held.get(seat.entry.name):
                seat.confirm(version)
        try:
            async with asyncio.timeout(STORE_WAIT_S):
                while any(not seat.entry.route.version for seat in seats):
                    await self._stored.wait()
        except TimeoutError:
            pass
        return seats

    def _take_seat(self, watch: Watch, name: str) -> Seat:
        """Add one subject to a watcher. A refused one is answered and not kept."""
        if len(name) > NAME_CHARS_MAX:
            return _refusal(watch, name, f"a name of more than {NAME_CHARS_MAX} characters is no subject's")
        if watch.send is None and len(watch.seats) >= self._quotas.bounds.subjects_max:
            self.forget(watch, [next(iter(watch.seats))])  # it polls, so each request names every route it uses
        if why := self._quotas.add(watch.caller, len(watch.seats), time.monotonic()):
            return _refusal(watch, name, why)
        try:
            check_subject(name)
            watch.caller.require_subject(PRODUCE if watch.produces else CONSUME, name)
        except (CallError, MissingRight) as error:
            log.debug("subject refused app=%s subject=%.200r reason=%s", watch.app, name, error)
            code = MISSING_RIGHT if isinstance(error, MissingRight) else ""
            return self._audience.take_refusal(watch, name, route_bytes(name, refused=str(error), code=code))
        route = self._registry.find(real_subject(name)) if watch.looks_only else None
        if watch.looks_only and not (route and route.groups):
            return self._audience.take_refusal(watch, name, route_bytes(name, refused=f"{name} {NO_ROUTE}"))
        seat = self._audience.take_seat(watch, name, real_subject(name))
        if not seat.entry.route.version:
            self._settle(seat.entry)
        return seat

    def _settle(self, entry: Entry) -> list[Seat]:
        """Encode an entry's content again; return the seats to update."""
        if not entry.seats:
            return []  # all watchers left meanwhile
        route = self._registry.find(entry.real)
        entry.source = route
        self._want_more(entry, route)
        if route is not None:
            content = self._views.route(entry.name, entry.real, route.groups, self._registry.directory)
            changed = self._audience.settle(entry, *content)
        elif self._wanted.get(entry.real) == "":
            return []  # it is being stored
        else:
            changed = self._audience.settle(
                entry, route_bytes(entry.name, refused=self._wanted.get(entry.real, NO_GROUP_YET))
            )
        self._revision += changed
        return list(entry.seats) if changed else []

    def _want_more(self, entry: Entry, route: Route | None) -> None:
        """Order a missing or short route, unless that was tried since the groups last changed."""
        groups = route.groups if route else ()
        if route and not self._registry.is_short(entry.real, groups):
            self._short.pop(entry, None)
            return
        self._short[entry] = None
        if entry.tried != self._views.state and self._views.has_more_than(groups):
            self._wanted.setdefault(entry.real, self._problem)
            self._want_some.set()

    # Changes.

    async def _look_at_changes(self) -> None:
        with self._registry.changes.watch() as wake:
            while True:
                wake.clear()
                began = time.monotonic()
                await self._look()
                # However fast changes come, half of the time stays free for other tasks; updates yield anyway.
                await asyncio.sleep(min(max(GATHER_S, time.monotonic() - began), PAUSE_S_MAX))
                await wake.wait()

    async def _look(self) -> None:
        """Find the changes since the last look, and update the watchers concerned."""
        concerned = self._concerned()
        for begin in range(0, len(concerned), ENTRIES_PER_PASS):
            seats = [seat for entry in concerned[begin : begin + ENTRIES_PER_PASS] for seat in self._settle(entry)]
            await self._update(seats)
            await asyncio.sleep(0)

    def _concerned(self) -> list[Entry]:
        """Return the entries with a change: a group's state, a mark, or the stored route."""
        directory, find, audience = self._registry.directory, self._registry.find, self._audience
        concerned: list[Entry] = []
        if self._registry.routes_version != self._routes_version:
            self._routes_version = self._registry.routes_version
            concerned += [entry for entry in audience.entries.values() if find(entry.real) is not entry.source]
        changed = self._views.look(directory, self._registry.is_writable)
        for name in sorted(changed):
            concerned += audience.entries_of_group(name)
        marks, self._marks = directory.marks ^ self._marks, directory.marks
        if marks:
            self._views.state += 1
        for mark in marks:
            concerned += audience.entries_of_subject(mark.subject)
        if changed or marks:
            concerned += self._short
        return list(dict.fromkeys(concerned))

    async def _update(self, seats: list[Seat]) -> None:
        """Update watchers, a few hundred at a time; those behind one connection one after another."""
        seats.sort(key=_peer)
        batches: deque[list[asyncio.Task[None]]] = deque()
        for begin in range(0, len(seats), UPDATED_AT_ONCE):
            sending = []
            for seat in seats[begin : begin + UPDATED_AT_ONCE]:
                _owe(seat)
                if task := self._serve(seat.watch):
                    sending.append(task)
            batches.append(sending)
            await asyncio.sleep(0)
            if len(batches) == BATCHES_UNDER_WAY and (oldest := batches.popleft()):
                await asyncio.wait(oldest, timeout=SEND_WAIT_S)

    def _serve(self, watch: Watch) -> asyncio.Task[None] | None:
        """Start sending a watcher its updates, unless a task does; return the task."""
        if watch.send is None or watch.sending or watch.asking or not (watch.owed or watch.owes_answer):
            return None
        watch.sending = True
        task = asyncio.get_running_loop().create_task(self._send(watch, watch.send))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    async def _send(self, watch: Watch, send: Send) -> None:
        """Send a watcher its updates until none is left."""
        try:
            while (watch.owed or watch.owes_answer) and not watch.asking:
                owed, watch.owed = watch.owed, []
                is_answer, watch.owes_answer = watch.owes_answer, False
                for seat in owed:
                    seat.owed = False
                for begin in range(0, max(len(owed), 1), UPDATE_ROUTES_MAX):
                    routes = [seat.next_route() for seat in owed[begin : begin + UPDATE_ROUTES_MAX] if seat.is_news]
                    if routes or is_answer:
                        is_answer = False
                        watch.revision = max(watch.revision + 1, self._revision)
                        self._metrics.route_updates.inc(len(routes))
                        await send(update_bytes(watch.revision, routes))
        except Exception as error:  # the stream broke; its reader ends too
            log.debug("route watch broke app=%s reason=%s", watch.app, type(error).__name__)
            watch.send = None
        finally:
            watch.sending = False

    # Storing.

    async def _store_wanted(self) -> None:
        while True:
            await self._want_some.wait()
            self._want_some.clear()
            while self._wanted:
                if not await self._store(list(islice(self._wanted, STORED_AT_ONCE))):
                    await asyncio.sleep(REPEAT_S)

    async def _store(self, subjects: list[str]) -> bool:
        """Store missing and short routes, and update waiting watchers. False: retry the rest later."""
        state, waits = self._views.state, self._ration(subjects)
        # A subject without watchers is dropped: no client's allowance would pay for it.
        ready = [name for name in subjects if name not in waits and self._audience.entries_of_subject(name)]
        try:
            if ready:
                await self._registry.routes_for(ready)
            self._problem = ""
        except Exception as error:  # the database is away: known routes stay in use, the others are retried
            if not self._problem:
                log.warning("routes not stored subjects=%d reason=%s", len(ready), error)
            self._problem = f"the route cannot be stored now: {_reason(error)}"
            waits |= dict.fromkeys(ready, self._problem)
        entries = [entry for subject in subjects for entry in self._audience.entries_of_subject(subject)]
        for entry in entries:
            entry.tried = state
        for subject in subjects:
            del self._wanted[subject]
        self._wanted |= waits
        seats = [seat for entry in entries for seat in self._settle(entry)]
        self._stored.set()
        self._stored = asyncio.Event()
        await self._update(seats)
        return not waits

    def _ration(self, subjects: list[str]) -> dict[str, str]:
        """Return the new subjects that their clients may not create yet, with the reason."""
        new: dict[str, tuple[Caller, list[str]]] = {}
        for subject in subjects:
            watch = next(
                (seat.watch for entry in self._audience.entries_of_subject(subject) for seat in entry.seats), None
            )
            if watch and self._registry.find(subject) is None:
                new.setdefault(watch.caller.name, (watch.caller, []))[1].append(subject)
        waits: dict[str, str] = {}
        for caller, names in new.values():
            allowed, why = self._allow(caller, len(names))
            if later := names[allowed:]:
                self._quotas.note(caller, why, time.monotonic())
                waits |= dict.fromkeys(later, why)
        return waits


def _refusal(watch: Watch, name: str, why: str) -> Seat:
    """Return a refusal that is sent once and not kept."""
    return Seat(watch, Entry(name, "", route_bytes(name, refused=why)))


def _owe(seat: Seat) -> None:
    if not seat.owed and seat.watch.send is not None:
        seat.owed = True
        seat.watch.owed.append(seat)


def _peer(seat: Seat) -> str:
    return seat.watch.caller.peer


def _reason(error: Exception) -> str:
    """Return the text of an error for clients. Only our own texts are sent: a database's may quote anything."""
    return str(error) if isinstance(error, QmqError) else "the database does not answer"


class DelayRoutes:
    """Route of delayed messages, as a source for a hub. Made by `RouteHubs`."""

    def __init__(self, registry: RouteSource) -> None:
        self._registry = registry
        self._directory: Directory | None = None
        self._route = Route(ALL_SUBJECTS, (), version=0)

    @property
    def changes(self) -> Changes:
        return self._registry.changes

    @property
    def directory(self) -> Directory:
        return self._registry.directory

    @property
    def routes_version(self) -> int:
        return self.find(ALL_SUBJECTS).version

    def find(self, subject: str) -> Route:
        if self._directory is not self._registry.directory:
            self._directory = self._registry.directory
            groups = tuple(sorted(self._directory.groups_of(DELAY)))
            if groups != self._route.groups:
                self._route = Route(ALL_SUBJECTS, groups, self._route.version + 1)
        return self._route

    def is_short(self, subject: str, groups: Sequence[str]) -> bool:
        return False  # it lists every group

    def is_writable(self, group: Group) -> bool:
        return self._registry.is_writable(group)

    async def routes_for(self, subjects: list[str]) -> None:
        """Do nothing: the route is not stored."""


class RouteHubs:
    """Hubs by kind of groups.

    Made by main, which runs `run` as a task; all methods are called from the loop. Arguments: see `WatchHub`.
    """

    def __init__(
        self, registry: RouteSource, metrics: Metrics, allow: Callable[[Caller, int], tuple[int, str]], quotas: Quotas
    ) -> None:
        self._quotas = quotas
        self._hubs = {
            NORMAL: WatchHub(registry, metrics, allow, quotas),
            DELAY: WatchHub(DelayRoutes(registry), metrics, allow, quotas, kind=DELAY),
        }
        metrics.observe_quotas(lambda: quotas.subjects, lambda: quotas.refused)

    async def run(self) -> None:
        """Process the registry's changes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for hub in self._hubs.values():
                tasks.create_task(hub.run())

    def of(self, kind: int) -> WatchHub:
        """Return the hub for a kind of groups; 0 stands for normal ones. Raises InvalidRequest."""
        hub = self._hubs.get(kind or NORMAL)
        if hub is None:
            raise InvalidRequest(f"kind {kind} of groups is unknown; {NORMAL} is of brokers, {DELAY} of delay servers")
        return hub

    def old_routes(self, broker_group: str, subject: str) -> Counts:
        """Count the clients of this metaserver that may still use the group as writable."""
        counts = [hub.old_routes(broker_group, subject) for hub in self._hubs.values()]
        return Counts(*(sum(numbers) for numbers in zip(*counts, strict=True)))

    def refusals(self) -> dict[str, str]:
        """Return the tokens with clients beyond a bound at present, and the reasons."""
        return self._quotas.refusals(time.monotonic())

    def clients(self) -> list[ClientInfo]:
        return [client._replace(kind=kind) for kind, hub in self._hubs.items() for client in hub.clients()]
