"""Core. Watchers of routes: their entries, the version each was sent, and the version it still uses.

An entry is a watched route under the requested name: a retry subject is an entry of its own, with the groups of its
real subject. A seat is one watcher at one entry.

A watcher may still use (`Seat.used`) the version it confirmed last, or the first one it was sent. So a route counts as
old until its watcher confirms a newer one.

Quotas bound the watched routes of a token. A bound rejects new watches only. Clients repeat a rejected request every
ten seconds, so a token without a recent refusal has all its watches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.metaserver.model import ALL_SUBJECTS, NORMAL
from qmq.metaserver.routes.encoding import RouteBytes
from qmq.rights import Caller, TokenRole

NOTHING = RouteBytes(0, b"")
"""Content of an entry while its route is being made."""

UNSURE = -1
"""Sent version that forces a new update."""

Send = Callable[[bytes], Awaitable[None]]


class Counts(NamedTuple):
    """Numbers of watchers of routes with a broker group: producers, consumers, all."""

    producers: int
    consumers: int
    watchers: int


class ClientInfo(NamedTuple):
    """Client that is connected or polls."""

    app: str
    client_id: str
    peer: str
    subjects: tuple[str, ...]
    produces: bool
    streams: bool
    """True: changes are pushed. False: it polls over HTTP."""
    kind: int = NORMAL
    """Kind of the groups in its routes."""


@dataclass(slots=True, eq=False)
class Entry:
    """Watched route. `real`: the subject that provides its groups; empty: the name was rejected."""

    name: str
    real: str
    route: RouteBytes = NOTHING
    groups: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    """Writable groups."""
    seats: dict[Seat, None] = field(default_factory=dict)
    """Watchers in order of arrival, which is the order of updates."""
    source: object = None
    """Stored route of the content."""
    tried: int = -1
    """State of the groups when a longer route was last tried."""


@dataclass(slots=True, eq=False)
class Seat:
    """One watcher at one entry. Version 0: none."""

    watch: Watch
    entry: Entry
    sent: int = 0
    used: int = 0
    owed: bool = False
    """Whether it is in its watcher's `owed`."""

    @property
    def is_news(self) -> bool:
        """Return whether the entry's route differs from the sent one."""
        return self.entry.route.version not in (0, self.sent)

    def confirm(self, version: int) -> None:
        """Record the version that a request names. If it is not the sent one, the route is sent again.

        An update in flight arrives after the request was written, and another metaserver may have sent a version.
        """
        self.used = version
        self.sent = version if self.sent in (0, version) else UNSURE

    def next_route(self) -> RouteBytes:
        """Record the route as sent, and return it."""
        route = self.entry.route
        self.sent = route.version
        self.used = self.used or route.version
        return route


@dataclass(slots=True, eq=False)
class Watch:
    """Watcher: one stream, or one polling client."""

    app: str
    client_id: str
    produces: bool
    caller: Caller
    send: Send | None
    """None: it polls, or its stream broke."""
    looks_only: bool = False
    """This watch creates no routes."""
    seats: dict[str, Seat] = field(default_factory=dict)
    owed: list[Seat] = field(default_factory=list)
    """Seats that may need an update."""
    owes_answer: bool = False
    asking: bool = False
    """An answer is being made; nothing is sent before it."""
    sending: bool = False
    """A task is sending, and checks `owed` afterwards."""
    revision: int = 0
    """Version of the last update."""
    seen_s: float = 0.0
    """Time of the last poll."""


class Audience:
    """All watchers and their entries. Made by the hub, which calls it from the loop."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.watches: dict[Watch, None] = {}
        self._by_group: dict[str, dict[Entry, None]] = {}
        self._more: dict[str, dict[Entry, None]] = {}
        """Entries of retry and dead-letter subjects, by their real subject."""

    def entries_of_group(self, group: str) -> Collection[Entry]:
        return self._by_group.get(group, {}).keys()

    def entries_of_subject(self, real: str) -> list[Entry]:
        """Return the subject's entry, and those of its retry and dead-letter subjects."""
        own, more = self.entries.get(real), self._more.get(real, {})
        return [*more] if own is None else [own, *more]

    def take_seat(self, watch: Watch, name: str, real: str) -> Seat:
        """Add an entry to a watcher."""
        entry = self.entries.get(name)
        if entry is None:
            entry = self.entries[name] = Entry(name, real)
            if name != real:
                self._more.setdefault(real, {})[entry] = None
        seat = watch.seats[entry.name] = Seat(watch, entry)
        entry.seats[seat] = None
        return seat

    def take_refusal(self, watch: Watch, name: str, route: RouteBytes) -> Seat:
        """Give a watcher an entry of its own that holds the reason why it may not watch `name`."""
        seat = watch.seats[name] = Seat(watch, Entry(name, "", route))
        return seat

    def leave(self, watch: Watch) -> None:
        """Remove a watcher, which has no seats any more."""
        self.watches.pop(watch, None)
        watch.owed.clear()  # a reference cycle would remain, and collecting these stops the process for long

    def drop(self, watch: Watch, names: Iterable[str]) -> list[Entry]:
        """Remove some of a watcher's seats; return the entries without watchers, which are removed too."""
        ended = []
        for name in names:
            if (seat := watch.seats.pop(name, None)) is None:
                continue
            entry = seat.entry
            entry.seats.pop(seat, None)
            if not entry.seats and self.entries.get(entry.name) is entry:
                del self.entries[entry.name]
                self._index(entry, ())
                if entry.name != entry.real:
                    self._remove(self._more, entry.real, entry)
                ended.append(entry)
        return ended

    def settle(
        self, entry: Entry, route: RouteBytes, groups: tuple[str, ...] = (), offered: tuple[str, ...] = ()
    ) -> bool:
        """Set an entry's content; return whether it changed."""
        if groups != entry.groups:  # also without a visible change: groups without a master are not in the route
            self._index(entry, groups)
        if route.version == entry.route.version:
            return False
        entry.route, entry.offered = route, groups if offered == groups else offered  # the usual case, stored once
        return True

    def old_routes(self, group: str, subject: str) -> Counts:
        """Count clients that may still use the group as writable, for `subject` or for any (`*`).

        While the entry offers the group, these are all clients with any version of the route, afterwards those with an
        older one.
        """
        watching, old = set(), set()
        for entry in self.entries_of_group(group):
            if subject not in (ALL_SUBJECTS, entry.real):
                continue
            is_offered = group in entry.offered
            for seat in entry.seats:
                watching.add(seat.watch)
                if seat.used and (is_offered or seat.used != entry.route.version):
                    old.add(seat.watch)
        producers = sum(1 for watch in old if watch.produces)
        return Counts(producers, len(old) - producers, len(watching))

    def clients(self) -> list[ClientInfo]:
        return [
            ClientInfo(
                watch.app,
                watch.client_id,
                watch.caller.peer,
                tuple(watch.seats),
                watch.produces,
                watch.send is not None,
            )
            for watch in self.watches
        ]

    def _index(self, entry: Entry, groups: tuple[str, ...]) -> None:
        for name in entry.groups:
            self._remove(self._by_group, name, entry)
        entry.groups = groups
        for name in groups:
            self._by_group.setdefault(name, {})[entry] = None

    @staticmethod
    def _remove(index: dict[str, dict[Entry, None]], key: str, entry: Entry) -> None:
        index[key].pop(entry, None)
        if not index[key]:
            del index[key]


REFUSED_S = 60.0
"""Time for which a refusal counts: several repeats of its client."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of watches. Holders of the installation's key have `subjects_max` only.

    `subjects_max`: of one watch. `token_subjects_max`, `token_watches_max`: of all clients of one token together.
    """

    subjects_max: int
    token_subjects_max: int
    token_watches_max: int


class Refusal(NamedTuple):
    """Last refusal of a token's clients, with the reason."""

    at_s: float
    reason: str


@dataclass(slots=True)
class _Usage:
    watches: int = 0
    subjects: int = 0


@dataclass(slots=True)
class Quotas:
    """Watches and subjects per token. Made by main for all hubs, which report every change."""

    bounds: Bounds
    refused: int = 0
    """Refusals; only grows."""
    _used: dict[str, _Usage] = field(default_factory=dict)
    _refusals: dict[str, Refusal] = field(default_factory=dict)

    @property
    def subjects(self) -> int:
        """Number of watched routes, each counted for every watch that has it."""
        return sum(usage.subjects for usage in self._used.values())

    def open(self, caller: Caller, now_s: float) -> str:
        """Count one more watch; return why it is refused, or ""."""
        used = self._used.setdefault(caller.name, _Usage())
        if caller.role != TokenRole.CLUSTER and used.watches >= self.bounds.token_watches_max:
            why = f"has {used.watches} watches, the most that one token may have (token_watches_max)"
            return self._refuse(caller, why, now_s)
        used.watches += 1
        return ""

    def close(self, caller: Caller) -> None:
        used = self._used[caller.name]
        used.watches -= 1
        if not used.watches:
            del self._used[caller.name]

    def add(self, caller: Caller, watched: int, now_s: float) -> str:
        """Count one more subject in a watch that has `watched`; return why it is refused, or ""."""
        used, bounds = self._used[caller.name], self.bounds
        if watched >= bounds.subjects_max:
            why = f"has a client that watches {watched} subjects, the most that one may (watch_subjects_max)"
            return self._refuse(caller, why, now_s)
        if caller.role != TokenRole.CLUSTER and used.subjects >= bounds.token_subjects_max:
            why = f"watches {used.subjects} subjects, the most that one token may (token_subjects_max)"
            return self._refuse(caller, why, now_s)
        used.subjects += 1
        return ""

    def remove(self, caller: Caller, subjects: int) -> None:
        self._used[caller.name].subjects -= subjects

    def refusals(self, now_s: float) -> dict[str, str]:
        """Return the tokens with a recent refusal, and the last reason of each."""
        self._refusals = {name: refusal for name, refusal in self._refusals.items() if now_s - refusal.at_s < REFUSED_S}
        return {name: refusal.reason for name, refusal in self._refusals.items()}

    def note(self, caller: Caller, reason: str, now_s: float) -> None:
        """Record a refusal, also one that was decided elsewhere."""
        self.refused += 1
        self._refusals[caller.name] = Refusal(now_s, reason)

    def _refuse(self, caller: Caller, why: str, now_s: float) -> str:
        reason = f"token {caller.name!r} {why}"
        self.note(caller, reason, now_s)
        return reason
