"""Shell. Actions on the installation itself: what was done, backup and restore, metaservers, its health."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from qmq.errors import NotServed, OperatorError, QmqError
from qmq.metaserver import roles
from qmq.metaserver.access import is_valid
from qmq.metaserver.actions import upkeep_plans
from qmq.metaserver.actions.causes import one_per_cause
from qmq.metaserver.actions.desk import Desk, together, wall_ms
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.plan import Plan
from qmq.metaserver.actions.shapes import audit_json, broker_json, metaserver_json
from qmq.metaserver.actions.words import Words
from qmq.metaserver.database import DatabaseSetAside
from qmq.metaserver.lost_groups import COMMANDS
from qmq.metaserver.model import Broker, Group, MetaserverRow, part
from qmq.replication.readonly import WAY_OUT, Reason
from qmq.rights import Caller
from qmq.types import Role

DATABASE_WAIT_MS = 60_000
"""A dump of 100,000 subjects takes seconds."""
BY_OPERATOR = "operator"
"""A broker's reason to take no messages that is no trouble: a mark or a drain, which its group's line tells."""
REFUSALS_SHOWN = 3
EXPIRES_SOON_MS = 14 * 24 * 3600 * 1000


async def _audit_trail(desk: Desk, words: Words) -> Any:
    about = [words[name] for name in ("brokerGroup", "subject", "request") if words[name]]
    rows = await desk.database.read(
        lambda repository: repository.audit_trail(
            words.number("before") or None,
            words.number("limit"),
            who=words["who"],
            action=words["name"],
            since_ms=words.number("since"),
            until_ms=words.number("until"),
            about=about,
        ),
        timeout_ms=DATABASE_WAIT_MS,
    )
    full = len(rows) == words.number("limit")
    whole = words.is_given("request")
    return {"rows": [audit_json(row, whole=whole) for row in rows], "next": rows[-1].id if rows and full else None}


async def _backup(desk: Desk, words: Words) -> Any:
    return await desk.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)


async def _restore(desk: Desk, words: Words) -> Plan:
    present = await desk.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)
    return upkeep_plans.restore(json.loads(words["backup"]), present, forced=words.flag("force"))


async def _adopt_database(desk: Desk, words: Words) -> Plan:
    present = await desk.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)
    return upkeep_plans.adopt_database(
        desk.registry.lost_groups(),
        present,
        lambda: desk.registry.dump_memory(present),
        keeps_memory=words["keep"] == "memory",
    )


async def _list_metaservers(desk: Desk, words: Words) -> Any:
    alive = {row.id: row for row in desk.registry.peers()}
    known = {**{row.id: row for row in await _stored_metaservers(desk)}, **alive}
    rows = sorted(known.values(), key=lambda row: row.http_address)
    return [metaserver_json(row, up=row.id in alive, own=row.id == desk.own_id) for row in rows]


async def _stored_metaservers(desk: Desk) -> list[MetaserverRow]:
    try:
        return await desk.database.read(lambda repository: repository.load_metaservers())
    except NotServed:
        return []  # then those that are alive are all that is known


async def _doctor(desk: Desk, words: Words, caller: Caller) -> Any:
    """Facts, and of each whether it is as it should be; the tool asks from its own side, and puts both together."""
    database, brokers = await asyncio.gather(_database(desk), _brokers(desk))
    tokens, metaservers = await _tokens(desk), await _metaservers(desk)
    checks = one_per_cause([database, *brokers, *_groups(desk), *tokens, _passwords(desk), _routes(desk), metaservers])
    return {
        "version": desk.version,
        "time": wall_ms(),
        "caller": {"name": caller.name, "role": str(caller.role)},
        "healthy": all(check["ok"] for check in checks),
        "checks": checks,
    }


async def _database(desk: Desk) -> dict[str, Any]:
    began = time.monotonic()
    try:
        await desk.database.read(lambda repository: repository.ping())
    except DatabaseSetAside as error:
        return _check("database", False, str(error), COMMANDS)
    except QmqError as error:
        return _check("database", False, str(error), "start it, or correct the setting database")
    bad = desk.bad_rows()
    took_ms = round((time.monotonic() - began) * 1000)
    if bad:
        return _check(
            "database",
            False,
            f"{bad} rows make no sense and are left out",
            "the log names them; repair them",
        )
    return _check("database", True, f"answers in {took_ms} ms")


async def _brokers(desk: Desk) -> list[dict[str, Any]]:
    brokers = sorted(desk.registry.directory.brokers(), key=lambda broker: (broker.group, broker.role))
    return await together([_broker(desk, broker) for broker in brokers])


async def _broker(desk: Desk, broker: Broker) -> dict[str, Any]:
    name = f"broker {broker.key} ({broker.part.name} of {broker.group})"
    facts = broker_json(broker, up=desk.registry.is_up(broker)) | {"incarnation": broker.incarnation, "answers": False}
    facts["minCopies"] = desk.find_group(broker.group).min_copies
    if not broker.incarnation:
        return _check(name, False, "never registered", facts=facts)
    try:
        state = await desk.brokers.replica_status(broker)
    except QmqError as error:
        return _check(name, False, str(error), facts=facts)
    facts["answers"] = True
    try:
        roles.check_registration(broker, state.incarnation or broker.incarnation)
    except OperatorError as other_disk:
        return _check(name, False, "runs on another data directory than before", str(other_disk), facts)
    if not facts["up"]:
        return _check(name, False, "answers, but sends no heartbeats", "look whether it reaches the metaserver", facts)
    if troubles := [reason for reason in state.readonly_reasons if reason != BY_OPERATOR]:
        facts["reasons"] = troubles
        found = f"{'takes no messages' if broker.role == Role.MASTER else 'is no whole copy'}: {', '.join(troubles)}"
        return _check(name, False, found, "; ".join(_way_out(reason, broker) for reason in troubles), facts)
    return _check(name, True, "up", facts=facts)


def _way_out(reason: str, broker: Broker) -> str:
    """What ends a broker's reason; a newer version may have others."""
    if reason == Reason.UNFILLED and broker.role == Role.SLAVE:
        return f"tools.sh SyncReplica --brokerGroup={broker.group} --host={broker.key} (docs/runbook.md, {reason})"
    return f"{WAY_OUT[Reason(reason)]} (docs/runbook.md, {reason})" if reason in tuple(Reason) else "see its log"


def _groups(desk: Desk) -> list[dict[str, Any]]:
    groups = [group for _, group in sorted(desk.registry.directory.groups.items())]
    return [*(_group(desk, group) for group in groups), *(_loss(group) for group in groups if group.lost_term)]


def _loss(group: Group) -> dict[str, Any]:
    """Messages that were acknowledged are gone, until somebody says that whoever has to know of it does."""
    return _check(
        f"loss of {group.name}",
        False,
        f"an operator accepted in term {group.lost_term} that acknowledged messages are lost",
        f"tools.sh AuditTrail --brokerGroup={group.name} says which; "
        f"tools.sh AcknowledgeLoss --brokerGroup={group.name} ends this",
    )


def _group(desk: Desk, group: Group) -> dict[str, Any]:
    name, marked = f"group {group.name}", desk.registry.directory.readonly_subjects(group.name)
    if group.half_swapped:
        return _check(
            name, False, "is half swapped", f"finish it with ReplaceBroker --role={part(Role.SLAVE, group.kind):d}"
        )
    if old := desk.registry.old_row(group.name):
        return _check(name, False, old.found, old.remedy)
    if group.master is None or not group.slaves:
        lacks = "slave" if group.master else "master"
        return _check(name, False, f"has no {lacks}", f"AddBroker adds a {lacks}")
    if group.draining or marked:
        return _check(name, True, "is drained" if group.draining else f"is marked readonly for {', '.join(marked[:3])}")
    if (why := desk.registry.why_no_failover(group)) is not None:
        found, remedy = why
        return _check(name, False, f"has no master, and no slave becomes it by itself: {found}", remedy)
    if not desk.registry.is_writable(group):
        return _check(
            name, False, "takes no messages", "ReplicaStatus says why", {"group": group.name, "takesNothing": True}
        )
    return _check(name, True, "takes messages")


async def _tokens(desk: Desk) -> list[dict[str, Any]]:
    try:
        rows = await desk.database.read(lambda repository: repository.load_tokens())
    except QmqError:
        return []  # the database's own line says it
    now = wall_ms()
    ending = sorted(
        (row for row in rows if is_valid(row, now) and 0 < row.expires_ms < now + EXPIRES_SOON_MS),
        key=lambda row: row.expires_ms,
    )
    if not ending:
        return [_check("tokens", True, f"{sum(is_valid(row, now) for row in rows)} valid")]
    days = (ending[0].expires_ms - now) // (24 * 3600 * 1000)
    text = f"{len(ending)} expire within two weeks, first that of {ending[0].name} ({ending[0].id}) in {days} days"
    return [_check("tokens", False, text, "AddToken makes the next one; two of one name may be valid")]


def _passwords(desk: Desk) -> dict[str, Any]:
    text = "can be stored" if desk.vault.is_open else "cannot be stored: no key; only AddDb needs one"
    return _check("passwords of databases", True, text)


def _routes(desk: Desk) -> dict[str, Any]:
    refusals = list(desk.refusals().values())
    if not refusals:
        return _check("routes", True, "each client gets those it asks for")
    text = f"new subjects or clients are refused: {'; '.join(refusals[:REFUSALS_SHOWN])}"
    return _check("routes", False, text, "raise the setting that is named, or end what needs so many")


async def _metaservers(desk: Desk) -> dict[str, Any]:
    alive = {row.id for row in desk.registry.peers()}
    silent = sorted(row.http_address for row in await _stored_metaservers(desk) if row.id not in alive)
    if silent:
        return _check(
            "metaservers", False, f"silent: {', '.join(silent)}", "start them, or wait until they are forgotten"
        )
    return _check("metaservers", True, f"{len(alive)} up")


def _check(name: str, ok: bool, found: str, remedy: str = "", facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "remedy": remedy, "facts": dict(facts or {})}


HANDLERS = {
    "AuditTrail": Handler(look=_audit_trail),
    "Backup": Handler(look=_backup),
    "Restore": Handler(plan=_restore),
    "AdoptDatabase": Handler(plan=_adopt_database),
    "ListMetaservers": Handler(look=_list_metaservers),
    "Doctor": Handler(look_as=_doctor),
}
