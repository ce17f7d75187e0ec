"""Shell. Actions on which broker groups serve which subjects."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from heapq import nsmallest
from typing import Any

from qmq.errors import OperatorError
from qmq.metaserver.actions import route_plans
from qmq.metaserver.actions.desk import Desk, wall_ms
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.plan import Plan
from qmq.metaserver.actions.route_plans import Contents
from qmq.metaserver.actions.shapes import route_json
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import ALL_SUBJECTS, Route
from qmq.metaserver.storage.changes import NoRouteSince
from qmq.subjects import real_subject


async def _add_new_subject(desk: Desk, words: Words) -> Plan:
    return route_plans.add_new_subject(desk.registry.directory, words["subject"], words["tag"], now_ms=wall_ms())


async def _add_group(desk: Desk, words: Words) -> Plan:
    return route_plans.add_group(
        desk.registry.directory, desk.registry.routes, words["subject"], words["brokerGroup"], now_ms=wall_ms()
    )


async def _extend(desk: Desk, words: Words) -> Plan:
    directory, subject = desk.registry.directory, words["relatedSubject"]
    related, new = words["relatedBrokerGroup"], words["newBrokerGroup"]
    none_since = _none_since(desk, subject, related, without=new)
    plan = await desk.on_all_routes(lambda routes: route_plans.extend(directory, routes, subject, related, new))
    return replace(plan, changes=(*none_since, *plan.changes)) if plan.changes else plan


async def _remove_group(desk: Desk, words: Words) -> Plan:
    subject, group = words["subject"], words["brokerGroup"]
    contents, takes_messages = await desk.contents(group, subject), desk.takes_messages(group)
    directory, forced, none_since = desk.registry.directory, words.flag("force"), _none_since(desk, subject, group)
    plan = await desk.on_all_routes(
        lambda routes: route_plans.remove_group(
            directory, routes, subject, group, contents=contents, takes_messages=takes_messages, forced=forced
        )
    )
    return replace(plan, changes=(*none_since, *plan.changes)) if plan.changes else plan


def _none_since(desk: Desk, subject: str, group: str, *, without: str = "") -> tuple[NoRouteSince, ...]:
    """For `*`: a route that is made or changed meanwhile may need the change too. Others come all the time."""
    return (NoRouteSince(desk.registry.routes_version, group, without),) if subject == ALL_SUBJECTS else ()


async def _remove_subject(desk: Desk, words: Words) -> Plan:
    subject = words["subject"]
    route = desk.registry.routes.get(subject)
    groups = route.groups if route else ()
    held: list[Contents] = await asyncio.gather(*(desk.contents(group, subject) for group in groups))
    counts = [await desk.clients.old_routes(group, subject) for group in groups]
    return route_plans.remove_subject(
        desk.registry.routes,
        subject,
        contents=dict(zip(groups, held, strict=True)),
        users=max((count.watchers for count in counts), default=0),
        forced=words.flag("force"),
    )


async def _list(desk: Desk, words: Words) -> Any:
    prefix, group, after, limit = words["prefix"], words["brokerGroup"], words["after"], words.number("limit")

    def find(routes: dict[str, Route]) -> list[dict[str, Any]]:
        found = (
            subject
            for subject, route in routes.items()
            if subject.startswith(prefix) and subject > after and (not group or group in route.groups)
        )
        chosen = nsmallest(limit, found) if limit else sorted(found)  # of 100,000, a page of 100 is not worth a sort
        return [route_json(routes[subject]) for subject in chosen]

    return await desk.on_all_routes(find)


async def _query(desk: Desk, words: Words) -> Any:
    directory, subject = desk.registry.directory, real_subject(words["subject"])
    route = desk.registry.routes.get(subject)
    if route is None or not route.groups:
        raise OperatorError(f"{subject} has no route; it gets one with its first producer or consumer")
    info = directory.subjects.get(subject)
    return {
        **route_json(route),
        "tag": info.tag if info else "",
        "groups": [_seen(desk, route, name) for name in route.groups],
    }


def _seen(desk: Desk, route: Route, name: str) -> dict[str, Any]:
    """One group of a route, as its clients get it."""
    directory = desk.registry.directory
    group = directory.groups.get(name)
    if group is None or group.master is None:
        return {"brokerGroup": name, "served": False, "writable": False, "readonly": False, "draining": False}
    marked = directory.is_marked(name, route.subject)
    return {
        "brokerGroup": name,
        "served": True,
        "writable": desk.takes_messages(name) and not marked and not group.draining,
        "readonly": marked,
        "draining": group.draining,
    }


HANDLERS = {
    "AddNewSubject": Handler(plan=_add_new_subject),
    "ListSubjectRoutes": Handler(look=_list),
    "QuerySubjectRoute": Handler(look=_query),
    "AddSubjectBrokerGroup": Handler(plan=_add_group),
    "RemoveSubjectBrokerGroup": Handler(plan=_remove_group),
    "ExtendSubjectRoute": Handler(plan=_extend),
    "RemoveSubject": Handler(plan=_remove_subject),
}
