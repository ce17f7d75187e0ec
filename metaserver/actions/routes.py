"""Shell. Actions on routes: which broker groups serve which subjects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import nsmallest
from typing import Any

from qmq.errors import OperatorError
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.context import ActionContext, Handler, wall_ms
from qmq.metaserver.actions.plan import Contents, Plan, refused
from qmq.metaserver.actions.shapes import route_json, subject_json
from qmq.metaserver.model import ALL_SUBJECTS, NORMAL, Directory, Route, Routes, SubjectInfo, has_route
from qmq.metaserver.routes.placement import sources_left
from qmq.metaserver.storage.changes import AddSubject, Change, ForgetConsumerGroups, NoRouteSince, RemoveRoute, SetRoute
from qmq.plain import first_of
from qmq.subjects import parse_derived, real_subject

NAMED_MAX = 3


def add_new_subject(directory: Directory, subject: str, tag: str, *, now_ms: int) -> Plan:
    """Plan AddNewSubject. The subject gets its route with its first producer or consumer."""
    if reason := _derived(subject):
        return refused(reason)
    if known := directory.subjects.get(subject):
        text = f"the subject {subject} is known already, with tag {known.tag}"
        return refused(text, details={"data": subject_json(known)})
    info = subject_json(SubjectInfo(subject, tag, now_ms))
    return Plan((AddSubject(subject, tag),), subjects=frozenset({subject}), after=info, data=info)


def add_group(directory: Directory, routes: Routes, subject: str, group: str, *, now_ms: int) -> Plan:
    """Plan AddSubjectBrokerGroup: add a group to the route of a subject."""
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
    """Plan ExtendSubjectRoute: add `new` to the routes with `related`, of one subject or of all."""
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
    """Plan RemoveSubjectBrokerGroup: remove a group from the route of a subject, or of all.

    Args:
        contents: messages of these subjects that the group still holds.
        takes_messages: whether the group's master is up and writable, apart from marks.
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
    """Plan RemoveSubject: remove a subject's route. Its messages stay on the brokers until retention deletes them.

    Args:
        contents: messages that each broker group of the route still holds.
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
    """Return the changes that remove a group from all routes, and the subjects concerned.

    A subject without another group loses its route, and gets a new one at its next use.
    """
    chosen = [route for route in routes.values() if group in route.groups]
    kept, removed = list[Change](), list[Change]()  # apart: changes of one kind after each other are one statement
    for route in chosen:
        others = tuple(name for name in route.groups if name != group)
        if _others(directory, route, group):
            kept.append(SetRoute(route.subject, others, route.version))
        else:
            removed.append(RemoveRoute(route.subject, route.version))
    return kept + removed, sorted(route.subject for route in chosen)


def _objections(
    directory: Directory, subjects: frozenset[str], group: str, contents: Contents, takes_messages: bool
) -> Iterable[str]:
    known = directory.groups.get(group)
    if known and takes_messages and not known.draining:
        unmarked = sorted(subject for subject in subjects if not directory.is_marked(group, subject))
        if unmarked:
            count = f"{len(unmarked):,} subject{'s' if len(unmarked) > 1 else ''}"
            yield (
                f"producers of {count} ({first_of(unmarked)}) may send to {group} until the last moment; first "
                f"DrainGroup, or MarkReadonly with waitMs"
            )
    yield from _left(group, contents)


def _left(group: str, contents: Contents) -> Iterable[str]:
    if contents.unknown:
        yield f"the contents of {group} are unknown: {contents.unknown}"
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
    """Return the other existing groups that serve the subject."""
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
        return f"{subject} belongs to {derived.real} and shares its route"
    return ""


def _last(subject: str, group: str) -> str:
    return f"{group} is the only broker group of {subject}; AddSubjectBrokerGroup first"


def _takes_dead_letters(subject: str, group: str, sources: list[str]) -> str:
    return (
        f"{group} stores dead letters of {first_of(sources)} in {subject}, and would serve it again at once; take it "
        f"out of the routes of these first, or set another --deadLettersTo with LimitGroup"
    )


def _no_route(subject: str) -> str:
    return _derived(subject) or f"{subject} has no route; it gets one with its first producer or consumer"


def _no_group(group: str) -> str:
    return f"there is no broker group {group}; ListBrokerGroups names them"


def _first(texts: list[str]) -> list[str]:
    rest = len(texts) - NAMED_MAX
    return texts[:NAMED_MAX] + ([f"and {rest:,} more subjects"] if rest > 0 else [])


async def _add_new_subject(context: ActionContext, arguments: Arguments) -> Plan:
    return add_new_subject(context.registry.directory, arguments["subject"], arguments["tag"], now_ms=wall_ms())


async def _add_group(context: ActionContext, arguments: Arguments) -> Plan:
    return add_group(
        context.registry.directory,
        context.registry.routes,
        arguments["subject"],
        arguments["brokerGroup"],
        now_ms=wall_ms(),
    )


async def _extend(context: ActionContext, arguments: Arguments) -> Plan:
    directory, subject = context.registry.directory, arguments["relatedSubject"]
    related, new = arguments["relatedBrokerGroup"], arguments["newBrokerGroup"]
    none_since = _none_since(context, subject, related, without=new)
    plan = await context.on_all_routes(lambda routes: extend(directory, routes, subject, related, new))
    return replace(plan, changes=(*none_since, *plan.changes)) if plan.changes else plan


async def _remove_group(context: ActionContext, arguments: Arguments) -> Plan:
    subject, group = arguments["subject"], arguments["brokerGroup"]
    contents, takes_messages = await context.contents(group, subject), context.takes_messages(group)
    directory, forced, none_since = (
        context.registry.directory,
        arguments.flag("force"),
        _none_since(context, subject, group),
    )
    plan = await context.on_all_routes(
        lambda routes: remove_group(
            directory, routes, subject, group, contents=contents, takes_messages=takes_messages, forced=forced
        )
    )
    return replace(plan, changes=(*none_since, *plan.changes)) if plan.changes else plan


def _none_since(context: ActionContext, subject: str, group: str, *, without: str = "") -> tuple[NoRouteSince, ...]:
    """Return the condition that no route is made or changed meanwhile that needs the change too; only for `*`."""
    return (NoRouteSince(context.registry.routes_version, group, without),) if subject == ALL_SUBJECTS else ()


async def _remove_subject(context: ActionContext, arguments: Arguments) -> Plan:
    subject = arguments["subject"]
    route = context.registry.routes.get(subject)
    groups = route.groups if route else ()
    held: list[Contents] = await asyncio.gather(*(context.contents(group, subject) for group in groups))
    counts = [await context.clients.old_routes(group, subject) for group in groups]
    return remove_subject(
        context.registry.routes,
        subject,
        contents=dict(zip(groups, held, strict=True)),
        users=max((count.watchers for count in counts), default=0),
        forced=arguments.flag("force"),
    )


async def _list_routes(context: ActionContext, arguments: Arguments) -> Any:
    prefix, group, after, limit = (
        arguments["prefix"],
        arguments["brokerGroup"],
        arguments["after"],
        arguments.number("limit"),
    )

    def find(routes: dict[str, Route]) -> list[dict[str, Any]]:
        found = (
            subject
            for subject, route in routes.items()
            if subject.startswith(prefix) and subject > after and (not group or group in route.groups)
        )
        chosen = nsmallest(limit, found) if limit else sorted(found)  # a page of 100 out of 100,000 is not worth a sort
        return [route_json(routes[subject]) for subject in chosen]

    return await context.on_all_routes(find)


async def _query_route(context: ActionContext, arguments: Arguments) -> Any:
    directory, subject = context.registry.directory, real_subject(arguments["subject"])
    route = context.registry.routes.get(subject)
    if route is None or not route.groups:
        raise OperatorError(f"{subject} has no route; it gets one with its first producer or consumer")
    info = directory.subjects.get(subject)
    return {
        **route_json(route),
        "tag": info.tag if info else "",
        "groups": [_seen(context, route, name) for name in route.groups],
    }


def _seen(context: ActionContext, route: Route, name: str) -> dict[str, Any]:
    """Return one group of a route in the form that clients get."""
    directory = context.registry.directory
    group = directory.groups.get(name)
    if group is None or group.master is None:
        return {"brokerGroup": name, "served": False, "writable": False, "readonly": False, "draining": False}
    marked = directory.is_marked(name, route.subject)
    return {
        "brokerGroup": name,
        "served": True,
        "writable": context.takes_messages(name) and not marked and not group.draining,
        "readonly": marked,
        "draining": group.draining,
    }


HANDLERS = {
    "AddNewSubject": Handler(plan=_add_new_subject),
    "ListSubjectRoutes": Handler(look=_list_routes),
    "QuerySubjectRoute": Handler(look=_query_route),
    "AddSubjectBrokerGroup": Handler(plan=_add_group),
    "RemoveSubjectBrokerGroup": Handler(plan=_remove_group),
    "ExtendSubjectRoute": Handler(plan=_extend),
    "RemoveSubject": Handler(plan=_remove_subject),
}
