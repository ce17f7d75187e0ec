"""Core. Placement: which broker groups serve a subject, which of them accept produces now, and which routes to store.

A new subject gets the `groups_new` least loaded groups that accept produces. If these are fewer than `groups_min`
(QMQ's min.group.num), other groups are added, so that a subject that was created during an outage is not bound to one
group for ever. A route with too few groups is extended in the same way. Groups of another kind, missing groups, and
groups that operators keep producers away from do not count.

Subjects of dead letters follow the routes of their sources.

Consumers keep every group of the route; `writable` names the groups for producers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from heapq import heapify, heappop, heappush

from qmq.metaserver.model import ALL_SUBJECTS, NORMAL, Directory, Group, Route, Routes, has_route
from qmq.metaserver.storage.changes import SetRoute
from qmq.operator_limits import OperatorLimits
from qmq.subjects import is_derived_name

IsWritable = Callable[[Group], bool]
"""Whether a group's master accepts produces, apart from marks of single subjects."""


def serves(group: Group | None) -> bool:
    """Return whether a group can be in a route: it exists, has a master, and is not one of delay servers."""
    return group is not None and group.kind == NORMAL and group.master is not None


def takes_messages(group: Group, subject: str, directory: Directory, is_writable: IsWritable) -> bool:
    """Return whether producers of `subject` may use the group now."""
    return not group.draining and not directory.is_marked(group.name, subject) and is_writable(group)


def is_short(subject: str, groups: Iterable[str], directory: Directory, *, groups_min: int) -> bool:
    """Return whether a route lists too few groups that serve, or too few that operators keep open to its producers."""
    listed = [name for name in groups if serves(directory.groups.get(name))]
    if len(listed) < groups_min:
        return True
    kept_open = [name for name in listed if _kept_open(directory.groups[name], subject, directory)]
    return len(kept_open) < groups_min


def _kept_open(group: Group, subject: str, directory: Directory) -> bool:
    return not group.draining and not directory.is_marked(group.name, subject)


class Loads:
    """Subjects of each group. `moved` must be called for every route that is added, changed or removed."""

    def __init__(self) -> None:
        self._subjects: dict[str, set[str]] = {}

    def moved(self, subject: str, before: Iterable[str], after: Iterable[str]) -> None:
        """Record that a route listed the groups `before` and lists `after` now; either may be empty."""
        for group in before:
            self._subjects[group].discard(subject)
        for group in after:
            self._subjects.setdefault(group, set()).add(subject)

    def of(self, group: str) -> Set[str]:
        return self._subjects.get(group, frozenset())

    def subjects(self, group: str) -> int:
        """Return the number of subjects of a group."""
        return len(self.of(group))


_Entry = tuple[int, float, str]
"""A group in a heap: its reserve (see `_reserve`), its load, its name. The first choice is on top."""


class Placement:
    """Chooses groups for new and for short routes as of one moment. Made for a batch of subjects, then dropped.

    A group's load is its share of all subjects plus, where known, its share of their bytes: a new subject counts at
    once, its messages when they are stored.

    Args:
        loads: subjects of each group, as of the beginning of the batch.
        stored_bytes: bytes in groups' logs, where known.
        groups_min: a route with so many groups is not extended.
        groups_new: groups of a new subject, if so many accept produces.
    """

    def __init__(
        self,
        directory: Directory,
        is_writable: IsWritable,
        loads: Loads,
        *,
        groups_min: int,
        groups_new: int,
        stored_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self._directory = directory
        self._groups_min = groups_min
        self._groups_new = max(groups_new, groups_min)
        candidates = [group for group in directory.groups.values() if serves(group) and not group.draining]
        names = [group.name for group in candidates]
        self._step = 1.0 / _mean(loads.subjects(name) for name in names)
        self._open: dict[str, list[_Entry]] = {}
        self._spare: list[_Entry] = []
        shares = _shares(names, stored_bytes or {})
        for group in candidates:
            load = loads.subjects(group.name) * self._step + shares[group.name]
            reserve = _reserve(group, directory, is_writable)
            heap = self._spare if reserve else self._open.setdefault(group.tag, [])
            heap.append((reserve, load, group.name))
        for heap in (*self._open.values(), self._spare):
            heapify(heap)

    def choose(self, subject: str, current: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the groups for the route of `subject`, sorted: `current`, and more if they are too few.

        Args:
            current: groups of the present route, empty for a new subject. They always stay: they may hold messages.

        Returns:
            Names of groups; empty when no group can take the subject.
        """
        chosen = set(current)
        if chosen and not is_short(subject, chosen, self._directory, groups_min=self._groups_min):
            return tuple(sorted(chosen))
        listed = [group for name in chosen if (group := self._directory.groups.get(name)) and serves(group)]
        usable = sum(1 for group in listed if _kept_open(group, subject, self._directory))
        wanted = self._groups_min if listed else self._groups_new
        count = len(listed)
        for tier in self._tiers(subject):
            found = self._take(tier, wanted - usable, subject, chosen)
            usable, count = usable + len(found), count + len(found)
            if usable:  # groups of another tag only as far as needed
                wanted = self._groups_min
        count += len(self._take([self._spare], self._groups_min - count, subject, chosen))
        self._take(list(self._open.values()), self._groups_min - count, ALL_SUBJECTS, chosen)  # marked ones too
        return tuple(sorted(chosen))

    def _tiers(self, subject: str) -> list[list[list[_Entry]]]:
        """Return the groups of the subject's tag, those without a tag, and the others, in order of preference."""
        info = self._directory.subjects.get(subject)
        tag = info.tag if info else ""
        own = [self._open[tag]] if tag and tag in self._open else []
        untagged = [self._open[""]] if "" in self._open else []
        others = [heap for name, heap in self._open.items() if name not in ("", tag)]
        return [own, untagged, others]

    def _take(self, heaps: list[list[_Entry]], count: int, subject: str, chosen: set[str]) -> list[str]:
        """Add the `count` least loaded groups, neither chosen nor marked for `subject`, to `chosen`; return them.

        From then on they count as more loaded.
        """
        found: list[str] = []
        popped: list[tuple[list[_Entry], _Entry]] = []
        while len(found) < count and (heap := _least(heaps)) is not None:
            reserve, load, name = heappop(heap)
            if name not in chosen and (reserve or not self._directory.is_marked(name, subject)):
                found.append(name)
                chosen.add(name)
                load += self._step
            popped.append((heap, (reserve, load, name)))
        for heap, entry in popped:
            heappush(heap, entry)
        return found


def _least(heaps: list[list[_Entry]]) -> list[_Entry] | None:
    return min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)


def _reserve(group: Group, directory: Directory, is_writable: IsWritable) -> int:
    """Return 0 for a group that takes new subjects; otherwise a number that is higher for less suitable groups."""
    if directory.is_marked(group.name, ALL_SUBJECTS):
        return 3
    if group.full:
        return 2
    return 0 if is_writable(group) else 1


def _shares(names: list[str], stored_bytes: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes of each group relative to their mean; unknown groups count as average."""
    known = {name: stored_bytes[name] for name in names if name in stored_bytes}
    mean = _mean(known.values())
    return {name: known[name] / mean if name in known else min(len(known), 1) for name in names}


def _mean(values: Iterable[int]) -> float:
    found = list(values)
    return max(sum(found) / len(found), 1.0) if found else 1.0


RouteOrder = tuple[str, tuple[str, ...], int]
"""Subject, groups, and the version of the replaced route; 0: there is none."""


class RouteTable:
    """Stored routes in memory. Made by the registry."""

    def __init__(self, *, groups_min: int, groups_new: int) -> None:
        self._groups_min = groups_min
        self._groups_new = groups_new
        self._known: dict[str, Route] = {}
        self._loads = Loads()
        self.known: Mapping[str, Route] = self._known
        """Routes by subject, always the same object."""

    def take(self, routes: Iterable[Route], *, all_of_them: bool = False) -> None:
        """Add routes; those without groups are removed."""
        routes = list(routes)
        if all_of_them:
            gone = self._known.keys() - {route.subject for route in routes}
            routes += [replace(self._known[subject], groups=()) for subject in gone]
        for route in routes:
            before = self._known.get(route.subject)
            if before is not None and before.version > route.version and not all_of_them:
                continue  # a reading may be older than our own write
            self._loads.moved(route.subject, before.groups if before else (), route.groups)
            if route.groups:
                self._known[route.subject] = route
            else:
                self._known.pop(route.subject, None)

    def of_groups(self, groups: Iterable[str]) -> dict[str, Route]:
        """Return the routes that list one of these groups, by subject."""
        return {subject: self._known[subject] for group in groups for subject in self._loads.of(group)}

    def is_short(self, subject: str, groups: Iterable[str], directory: Directory) -> bool:
        return is_short(subject, groups, directory, groups_min=self._groups_min)

    def orders(
        self, subjects: Iterable[str], directory: Directory, is_writable: IsWritable, stored_bytes: Mapping[str, int]
    ) -> list[RouteOrder]:
        """Return the routes to store so that these subjects have one of sufficient length, as far as groups exist."""
        placement: Placement | None = None
        orders = []
        for subject in dict.fromkeys(subjects):
            route = self._known.get(subject)
            groups = route.groups if route else ()
            if route and not self.is_short(subject, groups, directory):
                continue
            placement = placement or Placement(
                directory,
                is_writable,
                self._loads,
                groups_min=self._groups_min,
                groups_new=self._groups_new,
                stored_bytes=stored_bytes,
            )
            chosen = placement.choose(subject, groups)
            if chosen and set(chosen) != set(groups):
                orders.append((subject, chosen, route.version if route else 0))
        return orders


# Routes of dead letters. A broker stores a dead letter in its own log, beside the ack of its original. So every broker
# group of the original's subject must serve the dead letters' subject, or its consumers would not connect there.


def wider_routes(limits: Iterable[OperatorLimits], routes: Routes) -> list[SetRoute]:
    """Return the changes that extend routes to every group with dead letters of their subject.

    A subject without a route gets one with its next consumer, and is extended then.
    """
    wanted: dict[str, set[str]] = {}
    for limit in limits:
        if limit.subject in routes and has_route(routes, limit.dead_letters_to):
            wanted.setdefault(limit.dead_letters_to, set()).update(routes[limit.subject].groups)
    return [
        SetRoute(to, tuple(sorted(groups | set(routes[to].groups))), routes[to].version)
        for to, groups in wanted.items()
        if not groups <= set(routes[to].groups)
    ]


def sources_left(limits: Iterable[OperatorLimits], routes: Routes, subject: str, group: str) -> list[str]:
    """Return the subjects whose dead letters `group` stores in `subject`; the group must serve it while there are
    any.
    """
    sources = {limit.subject for limit in limits if limit.dead_letters_to == subject}
    return sorted(name for name in sources if name in routes and group in routes[name].groups)


def dead_letters_refusal(limits: Iterable[OperatorLimits], routes: Routes, after: OperatorLimits) -> list[str]:
    """Return why the dead letters may not go to the subject of `after`; `limits` are those of all subjects."""
    subject, to = after.subject, after.dead_letters_to
    if not to:
        return []
    if is_derived_name(subject) or is_derived_name(to):
        return ["retry and dead-letter subjects belong to the brokers; name real subjects"]
    if not has_route(routes, to):
        return [f"{to} has no route; it gets one with its first producer or consumer"]
    if subject in _reached(limits, to):
        return [f"dead letters would return from {to} to {subject} in a circle"]
    return []


def _reached(limits: Iterable[OperatorLimits], subject: str) -> set[str]:
    """Return the subject, and those its messages may reach as dead letters of dead letters."""
    ways = [(limit.subject, limit.dead_letters_to) for limit in limits if limit.dead_letters_to]
    reached, new = {subject}, {subject}
    while new := {to for source, to in ways if source in new} - reached:
        reached |= new
    return reached
