"""Shell. Actions on the installation: tokens, audit trail, backup, restore, metaservers.

The text of a token is answered once, when the token is made, and stored nowhere.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from qmq.errors import NotServed, QmqError
from qmq.metaserver.access import is_valid, new_token
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.context import ActionContext, Handler, together, wall_ms
from qmq.metaserver.actions.databases import watchdog_leases
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.routes import NAMED_MAX
from qmq.metaserver.actions.shapes import audit_json, metaserver_json
from qmq.metaserver.model import DELAY, Broker, MetaserverRow, TokenRow
from qmq.metaserver.storage.backup import header_fault, lost_masters
from qmq.metaserver.storage.changes import AddToken, Change, ForgetGroup, RestoreAll, RevokeToken
from qmq.plain import first_of

KEPT = ("api_token", "audit_trail")
"""Tables that do not make a metaserver count as used: the first admin token is there from the start."""

_SUBJECT = ("subject_route", "subject_info")
_GROUP = ("broker_group", "group_name")


def restore(backup: Any, present: Mapping[str, Any], *, forced: bool) -> Plan:
    """Plan Restore: replace everything by a backup.

    Args:
        present: the current result of Backup.
    """
    tables = backup.get("tables") if isinstance(backup, dict) else None
    if not isinstance(tables, dict) or not all(isinstance(rows, list) for rows in tables.values()):
        return refused("this is no backup of a metaserver; Backup makes one")
    if fault := header_fault(backup, schema=present["schema"], tables=present["tables"]):
        return refused(fault)
    if lost := lost_masters(present["tables"], tables):
        return refused(*lost[:NAMED_MAX], *([f"and {len(lost) - NAMED_MAX} more groups"] if lost[NAMED_MAX:] else []))
    before, after = _count(present["tables"]), _count(tables)
    used = {name: count for name, count in before.items() if count and name not in KEPT}
    objections = []
    if used:
        held = ", ".join(f"{count:,} rows of {name}" for name, count in used.items())
        objections.append(f"this metaserver is in use, and would lose rows that the backup lacks: {held}")
    return Plan(
        (RestoreAll(backup),),
        objections=tuple(objections),
        subjects=_column(tables, *_SUBJECT) | _column(present["tables"], *_SUBJECT),
        groups=_column(tables, *_GROUP) | _column(present["tables"], *_GROUP),
        everything=True,
        before=before,
        after=after,
        data={"restored": after, "backupTime": backup.get("time")},
        forced=forced,
    )


def adopt_database(
    lost: Mapping[str, int],
    present: Mapping[str, Any],
    dump_memory: Callable[[], dict[str, Any]],
    *,
    keeps_memory: bool,
) -> Plan:
    """Plan AdoptDatabase, for a database that has lost groups.

    Args:
        lost: these groups, with the newest known term of each.
        present: the current result of Backup.
        dump_memory: returns the same for the metaserver's memory.
    """
    if not lost:
        return refused("the database has a row of each group with registered brokers; there is nothing to decide")
    before = _count(present["tables"])
    changes: tuple[Change, ...]
    if keeps_memory:
        memory = dump_memory()
        if missing := sorted(lost.keys() - _column(memory["tables"], *_GROUP)):
            return refused(
                f"this metaserver has {first_of(missing)} not in memory either; ask one that has it, or Restore "
                "a backup"
            )
        changes, after = (RestoreAll(memory, is_newer=True),), _count(memory["tables"])
    else:
        changes, after = tuple(ForgetGroup(name, term) for name, term in sorted(lost.items())), before
    data = {"keep": "memory" if keeps_memory else "database", "groups": sorted(lost), "rows": after}
    return Plan(
        changes, groups=frozenset(lost), whole_groups=True, everything=True, before=before, after=after, data=data
    )


def _count(tables: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(rows) for name, rows in tables.items()}


def _column(tables: Mapping[str, Any], table: str, column: str) -> frozenset[str]:
    rows = (row for row in tables.get(table, ()) if isinstance(row, dict))
    return frozenset(row[column] for row in rows if isinstance(row.get(column), str))


DATABASE_WAIT_MS = 60_000
"""A dump of 100,000 subjects takes seconds."""


async def _audit_trail(context: ActionContext, arguments: Arguments) -> Any:
    about = [arguments[name] for name in ("brokerGroup", "subject", "request") if arguments[name]]
    rows = await context.database.read(
        lambda repository: repository.audit_trail(
            arguments.number("before") or None,
            arguments.number("limit"),
            who=arguments["who"],
            action=arguments["name"],
            since_ms=arguments.number("since"),
            until_ms=arguments.number("until"),
            about=about,
        ),
        timeout_ms=DATABASE_WAIT_MS,
    )
    full = len(rows) == arguments.number("limit")
    whole = arguments.is_given("request")
    return {"rows": [audit_json(row, whole=whole) for row in rows], "next": rows[-1].id if rows and full else None}


async def _backup(context: ActionContext, arguments: Arguments) -> Any:
    return await context.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)


async def _restore(context: ActionContext, arguments: Arguments) -> Plan:
    present = await context.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)
    return restore(json.loads(arguments["backup"]), present, forced=arguments.flag("force"))


async def _adopt_database(context: ActionContext, arguments: Arguments) -> Plan:
    present = await context.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)
    return adopt_database(
        context.registry.mirror.lost_groups(),
        present,
        lambda: context.registry.dump_memory(present),
        keeps_memory=arguments["keep"] == "memory",
    )


async def _stored_metaservers(context: ActionContext) -> list[MetaserverRow]:
    try:
        return await context.database.read(lambda repository: repository.load_metaservers())
    except NotServed:
        return []  # then only the live ones are known


async def _list_metaservers(context: ActionContext, arguments: Arguments) -> Any:
    alive = {row.id: row for row in context.registry.peers()}
    known = {**{row.id: row for row in await _stored_metaservers(context)}, **alive}
    rows = sorted(known.values(), key=lambda row: row.http_address)
    name = context.settings.get("cluster", "")
    return [metaserver_json(row, up=row.id in alive, own=row.id == context.own_id, cluster=name) for row in rows]


DAY_MS = 24 * 3600 * 1000


async def _add_token(context: ActionContext, arguments: Arguments) -> Plan:
    for name in ("subjects", "groups"):
        if arguments.is_given(name) and not arguments.names(
            name
        ):  # empty variables of a script would make it unlimited
            return refused(f"{name} {arguments[name]!r} names none; leave it out for an unlimited token")
    known = await context.database.read(lambda repository: repository.load_tokens())
    try:
        row, text = new_token(
            arguments["name"],
            arguments["role"],
            known=known,
            random_bytes=secrets.token_bytes,
            now_ms=wall_ms(),
            lifetime_ms=arguments.number("days") * DAY_MS,
            subjects=arguments.names("subjects"),
            groups=arguments.names("groups"),
        )
    except QmqError as refusal:
        return refused(str(refusal))
    shown = _token_json(row)
    return Plan((AddToken(row),), everything=True, after=shown, data={**shown, "token": text})


async def _revoke_token(context: ActionContext, arguments: Arguments) -> Plan:
    known = {row.id: row for row in await context.database.read(lambda repository: repository.load_tokens())}
    row = known.get(arguments["id"])
    if row is None:
        return refused(f"there is no token {arguments['id']}; ListTokens names them")
    if row.revoked_ms:
        return Plan(everything=True, before=_token_json(row), data=_token_json(row))
    return Plan((RevokeToken(row.id),), everything=True, before=_token_json(row), data={"revoked": row.id})


async def _list_tokens(context: ActionContext, arguments: Arguments) -> Any:
    rows = await context.database.read(lambda repository: repository.load_tokens())
    return [_token_json(row) for row in sorted(rows, key=lambda row: (row.name, row.created_ms))]


def _token_json(row: TokenRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "role": row.role,
        "subjects": list(row.subjects),
        "groups": list(row.groups),
        "created": row.created_ms,
        "expires": row.expires_ms,
        "revoked": row.revoked_ms,
        "valid": is_valid(row, wall_ms()),
    }


SETTINGS_MAX = 40
"""Brokers that are queried if none is named; more have thousands of settings."""


async def _settings(context: ActionContext, arguments: Arguments) -> Any:
    """Return the settings of brokers; without a broker group, also of metaservers and active watchdogs."""
    if arguments.flag("here"):
        return {"processes": [_own_settings(context)], "unasked": {}, "more": 0}
    directory, group = context.registry.directory, arguments["brokerGroup"]
    others, unasked = ([], {}) if group else await _settings_of_others(context)
    named = context.find_group(group).brokers if group else directory.brokers()
    brokers = sorted(named, key=lambda broker: broker.key)
    answers = await together([_settings_of(context, broker) for broker in brokers[:SETTINGS_MAX]])
    shown = list(zip(brokers, answers, strict=False))
    processes = [
        {"process": str(broker.key), "kind": "delay server" if broker.kind == DELAY else "broker", "settings": answer}
        for broker, answer in shown
        if isinstance(answer, dict)
    ]
    return {
        "processes": others + processes,
        "unasked": unasked | {str(broker.key): answer for broker, answer in shown if isinstance(answer, str)},
        "more": max(len(brokers) - SETTINGS_MAX, 0),
    }


async def _settings_of_others(context: ActionContext) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the settings of all metaservers and of active watchdogs, and the reason for each missing answer."""
    answers, silent = await context.clients.elsewhere("Settings")
    found = [_own_settings(context), *(process for answer in answers.values() for process in answer["processes"])]
    found.sort(key=lambda process: str(process["process"]))
    unasked = dict.fromkeys(silent, "it does not answer, or has an older version")
    for address in await active_watchdogs(context):
        try:
            answer = await context.watchdogs.ask(address, "/settings", {})
            found.append({"process": address, "kind": "watchdog", "settings": answer})
        except QmqError as error:
            unasked[address] = str(error)
    return found, unasked


def _own_settings(context: ActionContext) -> dict[str, Any]:
    addresses = {row.id: row.http_address for row in context.registry.peers()}
    name = addresses.get(context.own_id, "this metaserver")
    return {"process": name, "kind": "metaserver", "settings": dict(context.settings)}


async def active_watchdogs(context: ActionContext) -> list[str]:
    """Return the addresses of the active watchdogs, one per room; none while the database is away."""
    try:
        return [row.address for row in await watchdog_leases(context) if row.address]
    except QmqError:
        return []


async def _settings_of(context: ActionContext, broker: Broker) -> dict[str, str] | str:
    """Return a broker's settings, or the reason for a missing answer."""
    if not broker.control_port:
        return "it never registered"
    try:
        return await context.brokers.settings(broker)
    except QmqError as error:
        return str(error)


HANDLERS = {
    "Settings": Handler(look=_settings),
    "AuditTrail": Handler(look=_audit_trail),
    "Backup": Handler(look=_backup),
    "Restore": Handler(plan=_restore),
    "AdoptDatabase": Handler(plan=_adopt_database),
    "ListMetaservers": Handler(look=_list_metaservers),
    "AddToken": Handler(plan=_add_token),
    "RevokeToken": Handler(plan=_revoke_token),
    "ListTokens": Handler(look=_list_tokens),
}
