"""Core. Changes of which broker groups serve a subject.

A plan for `*` covers every subject or none: one that cannot be changed refuses the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.shapes import route_json, subject_json
from qmq.metaserver.model import ALL_SUBJECTS, NORMAL, Directory, Route, Routes, SubjectInfo, has_route
from qmq.metaserver.routes.dead_letters import sources_left
from qmq.metaserver.storage.changes import AddSubject, Change, ForgetConsumerGroups, RemoveRoute, SetRoute
from qmq.subjects import parse_derived

NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a broker group still holds for consumers of a subject."""

    subject: str
    consumer_group: str
    messages: int
    oldest_ms: int = 0
    dead_letters: int = 0

    def __str__(self) -> str:
        messages, dead = _count(self.messages, "message"), _count(self.dead_letters, "dead letter")
        if not self.messages:
            return f"{self.consumer_group} has {dead} of {self.subject} there"
        more = f", and {dead}" if self.dead_letters else ""
        return f"{self.consumer_group} has {messages} of {self.subject} to do there{more}"


@dataclass(frozen=True, slots=True)
class Contents:
    """What is known about what a broker group still holds."""

    leftovers: tuple[Leftover, ...] = ()
    unknown: str = ""
    """Why it could not be asked."""

    @property
    def most_first(self) -> list[Leftover]:
        return sorted(self.leftovers, key=lambda left: (-left.messages, -left.dead_letters))


def add_new_subject(directory: Directory, subject: str, tag: str, *, now_ms: int) -> Plan:
    """Announce a subject. It gets its route with its first producer or consumer."""
    if reason := _derived(subject):
        return refused(reason)
    if known := directory.subjects.get(subject):
        text = f"the subject {subject} is known already, with tag {known.tag}"
        return refused(text, details={"data": subject_json(known)})
    info = subject_json(SubjectInfo(subject, tag, now_ms))
    return Plan((AddSubject(subject, tag),), subjects=frozenset({subject}), after=info, data=info)


def add_group(directory: Directory, routes: Routes, subject: str, group: str, *, now_ms: int) -> Plan:
    """Let one more group serve a subject."""
    route = routes.get(subject)
    reasons = [*_unusable(directory, group)]
    if route is None or not route.groups:
        reasons.append(_no_route(subject))
        return refused(*reasons)
    if reasons:
        return refused(*reasons, details={"subjectRoute": route_json(route)})
    if group in route.groups:
        return Plan(before=route_json(route), after=route_json(route), data=route_json(route))
    after = _with(route, (*route.groups, group), now_ms)
    return Plan(
        (SetRoute(subject, after.groups, route.version),),
        subjects=frozenset({subject}),
        groups=frozenset({group}),
        watched=frozenset(route.groups),
        before=route_json(route),
        after=route_json(after),
        data=route_json(after),
    )


def extend(directory: Directory, routes: Routes, subject: str, related: str, new: str) -> Plan:
    """Let `new` serve what `related` serves: one subject, or all of them."""
    reasons = [*_unusable(directory, new)]
    if related not in directory.groups and not any(related in route.groups for route in routes.values()):
        reasons.append(_no_group(related))
    if subject != ALL_SUBJECTS and not has_route(routes, subject):
        reasons.append(_no_route(subject))
    if reasons:
        return refused(*reasons)
    chosen = [route for route in _chosen(routes, subject) if related in route.groups and new not in route.groups]
    changes = [SetRoute(route.subject, tuple(sorted({*route.groups, new})), route.version) for route in chosen]
    return Plan(
        tuple(changes),
        subjects=frozenset(route.subject for route in chosen),
        groups=frozenset({new}) if chosen else frozenset(),
        watched=frozenset({related}),
        before=_groups_of(chosen),
        after={change.subject: list(change.groups) for change in changes},
        data={"changed": len(chosen), "newBrokerGroup": new},
    )


def remove_group(
    directory: Directory,
    routes: Routes,
    subject: str,
    group: str,
    *,
    contents: Contents,
    takes_messages: bool,
    forced: bool,
) -> Plan:
    """Take a group out of the route of a subject, or of all.

    Args:
        contents: what the group still holds of these subjects.
        takes_messages: whether the group's master is up and takes messages, marks aside.
    """
    if subject != ALL_SUBJECTS and not has_route(routes, subject):
        return refused(_no_route(subject))
    if group not in directory.groups and not any(group in route.groups for route in routes.values()):
        return refused(_no_group(group))
    chosen = [route for route in _chosen(routes, subject) if group in route.groups]
    last = {route.subject: _last(route.subject, group) for route in chosen if not _others(directory, route, group)}
    if last:
        return refused(*_first(list(last.values())), details={"data": last})
    if subject != ALL_SUBJECTS and (sources := sources_left(directory.limits, routes, subject, group)):
        return refused(_takes_dead_letters(subject, group, sources))
    subjects = frozenset(route.subject for route in chosen)
    changes = [
        SetRoute(route.subject, tuple(name for name in route.groups if name != group), route.version)
        for route in chosen
    ]
    return Plan(
        tuple(changes),
        objections=tuple(_objections(directory, subjects, group, contents, takes_messages)) if chosen else (),
        subjects=subjects,
        groups=frozenset({group}) if chosen else frozenset(),
        before=_groups_of(chosen),
        after={change.subject: list(change.groups) for change in changes},
        data={"changed": len(chosen)},
        forced=forced,
    )


def remove_subject(routes: Routes, subject: str, *, contents: Mapping[str, Contents], users: int, forced: bool) -> Plan:
    """Forget a subject's route. Its messages stay on the brokers until they are deleted for their age.

    Args:
        contents: what each broker group of the route still holds of it.
        users: clients that are connected for it.
    """
    route = routes.get(subject)
    if route is None or not route.groups:
        return refused(_no_route(subject))
    objections = [text for name, held in contents.items() for text in _left(name, held)]
    if users:
        objections.append(f"{users:,} client{'s use' if users > 1 else ' uses'} {subject} now, and would make it again")
    return Plan(
        (RemoveRoute(subject, route.version), ForgetConsumerGroups(subject)),
        objections=tuple(objections),
        subjects=frozenset({subject}),
        groups=frozenset(route.groups),
        before=route_json(route),
        data={"removed": subject},
        forced=forced,
    )


def take_out_of_routes(directory: Directory, routes: Routes, group: str) -> tuple[list[Change], list[str]]:
    """Changes that rid all routes of a group that is given up, and the subjects concerned.

    A subject that has no other group loses its route, and gets a new one when it is asked for next.
    """
    changes: list[Change] = []
    chosen = [route for route in routes.values() if group in route.groups]
    for route in chosen:
        others = tuple(name for name in route.groups if name != group)
        if _others(directory, route, group):
            changes.append(SetRoute(route.subject, others, route.version))
        else:
            changes.append(RemoveRoute(route.subject, route.version))
    return changes, sorted(route.subject for route in chosen)


def _objections(
    directory: Directory, subjects: frozenset[str], group: str, contents: Contents, takes_messages: bool
) -> Iterable[str]:
    known = directory.groups.get(group)
    if known and takes_messages and not known.draining:
        open_ones = sorted(subject for subject in subjects if not directory.is_marked(group, subject))
        if open_ones:
            count = f"{len(open_ones):,} subject{'s' if len(open_ones) > 1 else ''}"
            yield (
                f"producers of {count} ({_named(open_ones)}) may send to {group} until the last moment; first "
                f"DrainGroup, or MarkReadonly with waitMs"
            )
    yield from _left(group, contents)


def _left(group: str, contents: Contents) -> Iterable[str]:
    if contents.unknown:
        yield f"nobody can say what {group} still holds: {contents.unknown}"
    if contents.leftovers:
        most = contents.most_first
        more = f", and {len(most) - NAMED_MAX} more consumer groups wait" if len(most) > NAMED_MAX else ""
        texts = "; ".join(str(left) for left in most[:NAMED_MAX])
        again = ", and no Redrive would ask it again" if any(left.dead_letters for left in most) else ""
        yield f"not everything in {group} is consumed: {texts}{more}. Consumers would leave it at once{again}"


def _chosen(routes: Routes, subject: str) -> list[Route]:
    if subject == ALL_SUBJECTS:
        return [route for _, route in sorted(routes.items()) if route.groups]
    return [routes[subject]]


def _others(directory: Directory, route: Route, group: str) -> list[str]:
    """Groups that are left to serve the subject: names of groups that do not exist do not count."""
    return [name for name in route.groups if name != group and name in directory.groups]


def _with(route: Route, groups: Iterable[str], now_ms: int) -> Route:
    return Route(route.subject, tuple(sorted(groups)), route.version + 1, update_time_ms=now_ms)


def _groups_of(routes: Iterable[Route]) -> dict[str, list[str]]:
    return {route.subject: list(route.groups) for route in routes}


def _unusable(directory: Directory, name: str) -> Iterable[str]:
    group = directory.groups.get(name)
    if group is None:
        yield _no_group(name)
    elif group.kind != NORMAL:
        yield f"{name} is a group of delay servers; it keeps no messages of subjects"
    elif group.draining:
        yield f"{name} is being drained; UndrainGroup first"


def _derived(subject: str) -> str:
    if derived := parse_derived(subject):
        return f"{subject} belongs to {derived.real} and is where that is; it needs nothing of its own"
    return ""


def _last(subject: str, group: str) -> str:
    return f"{group} is the only broker group of {subject}; AddSubjectBrokerGroup first"


def _takes_dead_letters(subject: str, group: str, sources: list[str]) -> str:
    return (
        f"{group} stores dead letters of {_named(sources)} in {subject}, and would serve it again at once; take it "
        f"out of the routes of these first, or set another --deadLettersTo with LimitGroup"
    )


def _no_route(subject: str) -> str:
    return _derived(subject) or f"{subject} has no route; it gets one with its first producer or consumer"


def _no_group(group: str) -> str:
    return f"there is no broker group {group}; ListBrokerGroups names them"


def _count(things: int, noun: str) -> str:
    return f"{things:,} {noun}" + ("" if things == 1 else "s")


def _first(texts: list[str]) -> list[str]:
    rest = len(texts) - NAMED_MAX
    return texts[:NAMED_MAX] + ([f"and {rest:,} more subjects"] if rest > 0 else [])


def _named(names: list[str]) -> str:
    return ", ".join(names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else "")
