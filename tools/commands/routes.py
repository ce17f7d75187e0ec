"""Core. Commands for subjects and routes: broker groups of a subject, readonly marks, drains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qmq.tools.command import good, listing, of_action, warning
from qmq.tools.table import Block, Column, Table, good_or_bad, moment, span

NAMES_MAX = 5
_ROUTE = (
    Column("SUBJECT", "subject"),
    Column("BROKER GROUPS", "brokerGroups", fold=12),
    Column("VERSION", "version", drop=1),
    Column("CHANGED", moment("updateTime"), drop=2),
)


def _routes(routes: Any) -> Table:
    return Table(_ROUTE, routes, empty="no route; a subject gets one with its first producer or consumer")


def _route(route: Any) -> Iterable[Block]:
    yield Table(_ROUTE, [route])
    if tag := route.get("tag"):
        yield f"tag {tag}"
    if route.get("groups"):
        yield ""
        yield Table(_AS_CLIENTS_GET_IT, route["groups"])


_AS_CLIENTS_GET_IT = (
    Column("BROKER GROUP", "brokerGroup"),
    Column("SERVED", good_or_bad("served")),
    Column("PRODUCE TO IT", good_or_bad("writable")),
    Column("MARKED READONLY", "readonly"),
    Column("DRAINING", "draining"),
)


def _changed_route(route: Any) -> Iterable[Block]:
    yield good(f"{route['subject']} is served by {', '.join(route['brokerGroups'])}")


def _added_subject(subject: Any) -> Iterable[Block]:
    yield good(f"{subject['name']} is known with the tag {subject['tag']}")


def _count_changed(data: Any) -> Iterable[Block]:
    count = data["changed"]
    yield (
        good(f"{count:,} {'route is' if count == 1 else 'routes are'} changed")
        if count
        else warning("no route has the group; nothing was changed")
    )


ROUTES = (
    of_action(
        "AddNewSubject", "--subject=order.changed --tag=fast", _added_subject, look="AuditTrail --subject={subject}"
    ),
    of_action("ListSubjectRoutes", "--prefix=order.", listing(_routes)),
    of_action("QuerySubjectRoute", "--subject=order.changed", _route),
    of_action(
        "AddSubjectBrokerGroup",
        "--subject=order.changed --brokerGroup=g3",
        _changed_route,
        look="QuerySubjectRoute --subject={subject}",
    ),
    of_action(
        "RemoveSubjectBrokerGroup",
        "--subject='*' --brokerGroup=g1",
        _count_changed,
        look="ListSubjectRoutes --brokerGroup={brokerGroup}",
    ),
    of_action(
        "ExtendSubjectRoute",
        "--relatedSubject='*' --relatedBrokerGroup=g1 --newBrokerGroup=g3",
        _count_changed,
        look="ListSubjectRoutes --brokerGroup={newBrokerGroup}",
    ),
    of_action(
        "RemoveSubject",
        "--subject=order.old",
        lambda data: [good(f"the route of {data['removed']} is forgotten")],
        look="QuerySubjectRoute --subject={subject}",
    ),
)


def _marked(data: Any) -> Iterable[Block]:
    yield good("marked readonly: producers use other groups, consumers continue")
    yield from _holders(data)
    if stranded := (data.get("withoutOtherGroup") or {}).get("count"):
        names = ", ".join(data["withoutOtherGroup"]["names"][:NAMES_MAX])
        if names == "*":
            yield warning("delayed messages have no other group of delay servers now")
        else:
            yield warning(f"{stranded:,} subjects have no other group that accepts produces: {names}")


def _unmarked(data: Any) -> Iterable[Block]:
    yield good("the mark is removed")
    left = data.get("readonlySubjects") or []
    if left:
        yield warning(f"the group is still marked readonly for {', '.join(left[:NAMES_MAX])}")


def _holders(data: Mapping[str, Any]) -> Iterable[Block]:
    """Yield the number of clients with the old route."""
    if data.get("allKnow"):
        yield good("no client holds the old route")
        return
    waited = f" after {span(data['waitedMs'])}" if data.get("waitedMs") else ""
    yield warning(f"{data['producers']:,} producers and {data['consumers']:,} consumers hold the old route{waited}")
    if unasked := data.get("metaserversUnasked"):
        yield warning(f"and clients of {', '.join(unasked)}, which did not answer")


def _drained(data: Any) -> Iterable[Block]:
    yield good("draining: no new subjects, no producers")
    yield from _holders(data)
    if data.get("unknown"):
        yield warning(f"its contents are unknown: {data['unknown']}")
    elif data.get("empty"):
        yield good("no message waits in it for a consumer group")
    elif data.get("left"):
        if data["messagesLeft"]:
            yield warning(f"{data['messagesLeft']:,} messages wait in it for consumer groups; look again with Lag")
        if dead := data.get("deadLettersLeft"):
            yield warning(f"{dead:,} dead letters are in it: UndrainGroup and Redrive, or Redrive --to another subject")
        yield Table(_LEFT, data["left"])


_LEFT = (
    Column("SUBJECT", "subject"),
    Column("GROUP", "group"),
    Column("MESSAGES", "messages"),
    Column("DEAD LETTERS", "deadLetters"),
    Column("OLDEST", moment("oldest"), drop=1),
)


def _undrained(data: Any) -> Iterable[Block]:
    yield good("the group takes subjects and producers again")


def _readonly(data: Any) -> Table:
    rows = [{"why": "marked", **row} for row in data["marks"]] + [
        {"why": "draining", **row} for row in data["draining"]
    ]
    return Table(
        (
            Column("GROUP", "brokerGroup"),
            Column("SUBJECT", "subject"),
            Column("WHY", "why"),
            Column("PRODUCERS ON OLD ROUTE", "producers"),
            Column("WATCHERS", "watchers", drop=2),
            Column("METASERVERS UNASKED", "metaserversUnasked", drop=1),
        ),
        sorted(rows, key=lambda row: (row["brokerGroup"], row["subject"])),
        empty="no broker group is marked readonly or drained",
    )


def _tagged(data: Any) -> Iterable[Block]:
    yield good(f"{data['brokerGroup']} has the tag {data['tag']}" if data.get("tag") else "the group has no tag now")


GROUPS = (
    of_action(
        "MarkReadonlyBrokerGroup",
        "--brokerGroup=g1 --wait",
        _marked,
        typed="MarkReadonly",
        look="ListReadonly --brokerGroup={brokerGroup}",
    ),
    of_action(
        "UnMarkReadonlyBrokerGroup",
        "--brokerGroup=g1",
        _unmarked,
        typed="UnMarkReadonly",
        look="ListReadonly --brokerGroup={brokerGroup}",
    ),
    of_action("ListReadonly", "", listing(_readonly)),
    of_action("DrainGroup", "--brokerGroup=g1 --wait=120", _drained, look="ListBrokerGroups"),
    of_action("UndrainGroup", "--brokerGroup=g1", _undrained, look="ListBrokerGroups"),
    of_action("SetGroupTag", "--brokerGroup=g1 --tag=fast", _tagged, look="ListBrokerGroups"),
)
