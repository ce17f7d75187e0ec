"""Shell. ExportDefinitions and ImportDefinitions: operators' settings as one JSON document for another cluster.

    {"format": "qmq definitions", "version": 1, "time": ms,
     "brokerGroups": [{"name", "kind", "tag", "failover"}], "subjects": [{"name", "tag"}],
     "routes": [{"subject", "brokerGroups"}], "marks": [{"subject", "brokerGroup"}],
     "offline": [{"subject", "consumerGroup", "clientId"}], "limits": [as ListLimits],
     "tokens": [{"name", "role", "subjects", "groups", "expires"}]}

An import adds and sets; it removes nothing. Brokers and secrets are not part of it: AddBroker and AddToken make those.
Backup holds everything of one cluster instead, and Restore replaces it.
"""

from __future__ import annotations

import asyncio
import json
from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any

from qmq.errors import InvalidName, OperatorError
from qmq.metaserver.access import is_valid
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.consumers import DROP_OLDEST, EXPIRED_DEAD_LETTER, limit, limits_json, offline_json
from qmq.metaserver.actions.context import ROUTES_AT_ONCE, ActionContext, Handler, wall_ms
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.model import DELAY, Directory, Group, Offline, ReadonlyMark, Route, Routes, TokenRow
from qmq.metaserver.storage.changes import AddSubject, Change, DecidedOn, SetGroupState, SetMark, SetOffline, SetRoute
from qmq.operator_limits import OperatorLimits
from qmq.subjects import check_name, check_subject

FORMAT, VERSION = "qmq definitions", 1
LISTS = ("brokerGroups", "subjects", "routes", "marks", "offline", "limits", "tokens")
REASONS_MAX = 10
SHOWN_MAX = 100


def group_json(group: Group) -> dict[str, Any]:
    kind = "DELAY" if group.kind == DELAY else "NORMAL"
    return {"name": group.name, "kind": kind, "tag": group.tag, "failover": group.failover}


def token_json(row: TokenRow) -> dict[str, Any]:
    """Return a token without its id, salt and hash."""
    scope = {"subjects": list(row.subjects), "groups": list(row.groups)}
    return {"name": row.name, "role": row.role, **scope, "expires": row.expires_ms}


async def _export(context: ActionContext, arguments: Arguments) -> Any:
    directory, now = context.registry.directory, wall_ms()
    routes = []
    for number, route in enumerate(list(context.registry.routes.values())):
        if route.groups:
            routes.append({"subject": route.subject, "brokerGroups": list(route.groups)})
        if number % ROUTES_AT_ONCE == ROUTES_AT_ONCE - 1:
            await asyncio.sleep(0)
    return {
        "format": FORMAT,
        "version": VERSION,
        "time": now,
        "brokerGroups": [group_json(group) for _, group in sorted(directory.groups.items())],
        "subjects": [{"name": info.name, "tag": info.tag} for _, info in sorted(directory.subjects.items())],
        "routes": sorted(routes, key=lambda route: str(route["subject"])),
        "marks": [{"subject": mark.subject, "brokerGroup": mark.group} for mark in sorted(directory.marks)],
        "offline": [offline_json(rule) for rule in sorted(directory.offline)],
        "limits": [limits_json(row) for row in sorted(directory.limits)],
        "tokens": [token_json(row) for row in context.registry.tokens if is_valid(row, now)],
    }


def import_definitions(directory: Directory, routes: Routes, tokens: Iterable[TokenRow], document: Any) -> Plan:
    """Plan to add the document's entries that this cluster lacks, and to set those that differ."""
    if fault := _fault(document):
        return refused(fault)
    try:
        work = _Import(directory, routes, document)
    except (InvalidName, KeyError, TypeError, ValueError, AttributeError) as error:
        return refused(
            f"the document has a wrong entry: {type(error).__name__} {error}; ExportDefinitions shows the form"
        )
    if work.reasons:
        more = len(work.reasons) - REASONS_MAX
        return refused(*work.reasons[:REASONS_MAX], *([f"and {more:,} more"] if more > 0 else []))
    names = {row.name for row in tokens}
    missing = sorted({str(row["name"]) for row in document["tokens"]} - names)
    counts = {name: len(rows) for name, rows in work.after.items() if rows}
    return Plan(
        (DecidedOn(directory.version), *work.changes) if work.changes else (),
        subjects=frozenset(work.subjects),
        groups=frozenset(work.groups),
        everything=True,
        before={name: rows[:SHOWN_MAX] for name, rows in work.before.items() if rows},
        after={name: rows[:SHOWN_MAX] for name, rows in work.after.items() if rows},
        data={"imported": counts, "tokensMissing": missing},
    )


def _fault(document: Any) -> str:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return "these are no definitions of qmq; ExportDefinitions writes them, and Restore takes a backup"
    if document.get("version") != VERSION:
        return f"version {str(document.get('version'))[:20]} of definitions; this metaserver reads version {VERSION}"
    wrong = [name for name in LISTS if not isinstance(document.get(name), list)]
    return f"{', '.join(wrong)}: missing, or no list" if wrong else ""


class _Import:
    """Changes of one import, decided list by list. Raises KeyError, TypeError and the like for a wrong entry."""

    def __init__(self, directory: Directory, routes: Routes, document: Mapping[str, Any]) -> None:
        self._directory = directory
        self._routes = ChainMap[str, Route]({}, dict(routes) if not isinstance(routes, dict) else routes)
        """With the routes of the document: limits may need them."""
        self._routed: dict[str, SetRoute] = {}
        self._changes: list[Change] = []
        self.reasons: list[str] = []
        self.subjects: set[str] = set()
        self.groups: set[str] = set()
        self.before: dict[str, list[Any]] = {name: [] for name in LISTS}
        self.after: dict[str, list[Any]] = {name: [] for name in LISTS}
        for row in document["brokerGroups"]:
            self._group(row)
        for row in document["subjects"]:
            self._subject(row)
        for row in document["routes"]:
            self._route(row)
        for row in document["marks"]:
            self._mark(row)
        for row in document["offline"]:
            self._offline(row)
        for row in document["limits"]:
            self._limits(row)

    @property
    def changes(self) -> tuple[Change, ...]:
        return (*self._changes, *self._routed.values())

    def _note(self, name: str, before: Any, after: Any, *changes: Change) -> None:
        self._changes += changes
        self.after[name].append(after)
        if before is not None:
            self.before[name].append(before)

    def _known(self, group: str) -> Group | None:
        known = self._directory.groups.get(group)
        if known is None:
            text = f"there is no broker group {group[:100]} here; AddBroker adds it first"
            self.reasons += [text] if text not in self.reasons else []
        return known

    def _group(self, row: Mapping[str, Any]) -> None:
        known = self._known(row["name"])
        if known is None:
            return
        before = group_json(known)
        if row["kind"] != before["kind"]:
            self.reasons.append(f"{known.name} has the kind {before['kind']} here, and {row['kind']} in the document")
            return
        if row["failover"] not in ("on", "off", "default"):
            raise ValueError(f"failover {row['failover']!r}")
        if row["tag"]:
            check_name("tag", row["tag"])
        after = before | {"tag": row["tag"], "failover": row["failover"]}
        if after != before:
            self.groups.add(known.name)
            change = SetGroupState(known.name, tag=row["tag"], failover=row["failover"])
            self._note("brokerGroups", before, after, change)

    def _subject(self, row: Mapping[str, Any]) -> None:
        name, tag = check_name("subject", row["name"]), check_name("tag", row["tag"])
        known = self._directory.subjects.get(name)
        if known is not None and known.tag != tag:
            self.reasons.append(f"the subject {name} has the tag {known.tag} here, and {tag} in the document")
        elif known is None:
            self.subjects.add(name)
            self._note("subjects", None, {"name": name, "tag": tag}, AddSubject(name, tag))

    def _route(self, row: Mapping[str, Any]) -> None:
        subject, groups = check_name("subject", row["subject"]), [str(name) for name in row["brokerGroups"]]
        known_groups = [self._known(name) for name in groups]  # all of them, to name each missing one
        if None in known_groups:
            return
        known = self._routes.get(subject, Route(subject, (), 0))
        after = tuple(dict.fromkeys((*known.groups, *groups)))
        if after != known.groups:
            self.subjects.add(subject)
            self.groups |= set(groups)
            before = {"subject": subject, "brokerGroups": list(known.groups)} if known.groups else None
            self._set_route(SetRoute(subject, after, known.version))
            self._note("routes", before, {"subject": subject, "brokerGroups": list(after)})

    def _set_route(self, change: SetRoute) -> None:
        self._routed[change.subject] = change
        self._routes[change.subject] = Route(change.subject, change.groups, change.version)

    def _mark(self, row: Mapping[str, Any]) -> None:
        mark = ReadonlyMark(str(row["subject"]), str(row["brokerGroup"]))
        if self._known(mark.group) is not None and mark not in self._directory.marks:
            self.groups.add(mark.group)
            self._note("marks", None, {"subject": mark.subject, "brokerGroup": mark.group}, SetMark(mark))

    def _offline(self, row: Mapping[str, Any]) -> None:
        rule = Offline(str(row["subject"]), str(row["consumerGroup"]), str(row["clientId"]))
        if rule not in self._directory.offline:
            self._note("offline", None, offline_json(rule), SetOffline(rule))

    def _limits(self, row: Mapping[str, Any]) -> None:
        after = OperatorLimits(
            check_subject(str(row["subject"])),
            str(row["group"]),
            expires_after_s=_count(row["expiresAfterS"]),
            expired_die=row["expired"] == EXPIRED_DEAD_LETTER,
            messages_max=_count(row["messagesMax"]),
            drops_oldest=row["whenFull"] == DROP_OLDEST,
            per_second=_count(row["perSecond"]),
            bytes_max=_count(row["bytesMax"]),
            dead_letters_to=str(row["deadLettersTo"]),
        )
        plan = limit(self._directory, self._routes, after)
        self.reasons += plan.refusals
        if plan.changes:
            self.subjects.add(after.subject)
            for change in plan.changes:
                if isinstance(change, SetRoute):
                    self._set_route(change)
            own = [change for change in plan.changes if not isinstance(change, DecidedOn | SetRoute)]
            self._note("limits", plan.before, plan.after, *own)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is no number of 0 or more")
    return value


async def _import(context: ActionContext, arguments: Arguments) -> Plan:
    registry = context.registry
    try:
        document = json.loads(arguments["definitions"])
    except ValueError as error:
        raise OperatorError(f"the definitions are no JSON: {error}") from None
    return import_definitions(registry.directory, registry.routes, registry.tokens, document)


HANDLERS = {"ExportDefinitions": Handler(look=_export), "ImportDefinitions": Handler(plan=_import)}
