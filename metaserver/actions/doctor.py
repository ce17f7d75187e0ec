"""Shell. Doctor's checks: facts, and of each whether it is as it should be. One implementation for all who show them.

`tools.sh Doctor`, `/api/doctor`, console    each broker is asked
metrics                                      of each broker, what its heartbeats said
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from qmq.errors import NotServed, OperatorError, QmqError
from qmq.metaserver.access import is_valid
from qmq.metaserver.actions.causes import Check, Kind, one_per_cause
from qmq.metaserver.actions.desk import Desk, together, wall_ms
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.shapes import broker_json, parted_json
from qmq.metaserver.actions.words import Words
from qmq.metaserver.cluster.old_database import COMMANDS
from qmq.metaserver.model import Broker, Group, MetaserverRow, ReplicaState, part
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.database import DatabaseSetAside
from qmq.replication.readonly import WAY_OUT, Reason
from qmq.rights import Caller
from qmq.types import Role

BY_OPERATOR = "operator"
"""A broker's reason to take no messages that is no trouble: a mark or a drain, which its group's line tells."""
NOT_HEARD = "its log says why: what the metaserver says contradicts its data directory, or it does not reach it"
REFUSALS_SHOWN = 3
EXPIRES_SOON_MS = 14 * 24 * 3600 * 1000
AT_ONCE = 100
"""Brokers or groups looked at, before others have their turn: a few milliseconds."""

Ask = Callable[[Broker], Awaitable[ReplicaState]]
"""What a broker says of itself. Raises NotServed, OperatorError: why it says nothing."""


async def _doctor(desk: Desk, words: Words, caller: Caller) -> Any:
    """The tool asks from its own side, and puts both together."""
    checks = await examine(desk, desk.brokers.replica_status)
    return {
        "version": desk.version,
        "time": wall_ms(),
        "caller": {"name": caller.name, "role": str(caller.role)},
        "healthy": all(check["ok"] for check in checks),
        "checks": checks,
    }


async def examine_reported(desk: Desk) -> list[Check]:
    """All checks without a question to a broker: cheap enough to be made all day long."""

    async def reported(broker: Broker) -> ReplicaState:
        state = desk.registry.state(broker)
        if state is None:
            raise NotServed(f"{broker.key} sends no heartbeats")
        return state

    return await examine(desk, reported)


async def examine(desk: Desk, ask: Ask) -> list[Check]:
    database, brokers = await asyncio.gather(_database(desk), _brokers(desk, ask))
    groups, tokens, metaservers = await _groups(desk), await _tokens(desk), await _metaservers(desk)
    return one_per_cause([database, *brokers, *groups, *tokens, _passwords(desk), _routes(desk), metaservers])


async def _database(desk: Desk) -> Check:
    began = time.monotonic()
    try:
        await desk.database.read(lambda repository: repository.ping())
    except DatabaseSetAside as error:
        return _check(Kind.DATABASE, False, str(error), COMMANDS)
    except QmqError as error:
        return _check(Kind.DATABASE, False, str(error), "start it, or correct the setting database")
    bad = desk.bad_rows()
    took_ms = round((time.monotonic() - began) * 1000)
    if bad:
        text = f"{bad} rows make no sense and are left out"
        return _check(Kind.DATABASE, False, text, "the log names them; repair them")
    return _check(Kind.DATABASE, True, f"answers in {took_ms} ms")


async def _brokers(desk: Desk, ask: Ask) -> list[Check]:
    brokers = sorted(desk.registry.directory.brokers(), key=lambda broker: (broker.group, broker.role))
    checks: list[Check] = []
    for begin in range(0, len(brokers), AT_ONCE):
        checks += await together([_broker(desk, broker, ask) for broker in brokers[begin : begin + AT_ONCE]])
    return checks


async def _broker(desk: Desk, broker: Broker, ask: Ask) -> Check:
    facts = broker_json(broker, up=desk.registry.is_up(broker)) | {"incarnation": broker.incarnation, "answers": False}
    facts["minCopies"] = desk.find_group(broker.group).min_copies
    of = f"{broker.key} ({broker.part.name} of {broker.group})"
    check = partial(_check, Kind.BROKER, of=of, facts=facts)
    if not broker.incarnation:
        return check(False, "never registered")
    try:
        state = await ask(broker)
    except QmqError as error:
        return check(False, str(error).removeprefix(f"{of} "))
    facts["answers"] = True
    try:
        rules.check_registration(broker, state.incarnation or broker.incarnation)
    except OperatorError as other_disk:
        return check(False, "runs on another data directory than before", str(other_disk))
    if refused := desk.registry.registration.refused_lately(broker):
        return check(False, "another process is refused in its place", refused)
    if not facts["up"]:
        return check(False, "answers, but sends no heartbeats", NOT_HEARD)
    if troubles := [reason for reason in state.readonly_reasons if reason != BY_OPERATOR]:
        facts["reasons"] = troubles
        found = f"{'takes no messages' if broker.role == Role.MASTER else 'is no whole copy'}: {', '.join(troubles)}"
        if state.parted is not None:
            facts["parted"] = parted = parted_json(state.parted)
            found += (
                f". It alone has {parted['messages']:,} messages, from offset {parted['offset']} of its log on: they "
                "may have been acknowledged"
            )
        return check(False, found, "; ".join(_way_out(reason, broker) for reason in troubles))
    if state.quarantine_full:
        found = f"keeps {state.quarantine_bytes:,} bytes that left its log, which may be the last copies of messages"
        remedy = (
            f"qmq ListQuarantine --brokerGroup={broker.group} names them, ClearQuarantine deletes (docs/runbook.md)"
        )
        return check(False, found, remedy)
    kept = f", keeps {state.quarantine_bytes:,} bytes that left its log" if state.quarantine_bytes else ""
    return check(True, f"up{kept}")


def _way_out(reason: str, broker: Broker) -> str:
    """What ends a broker's reason; a newer version may have others."""
    if reason == Reason.UNFILLED and broker.role == Role.SLAVE:
        return f"qmq SyncReplica --brokerGroup={broker.group} --host={broker.key} (docs/runbook.md, {reason})"
    return f"{WAY_OUT[Reason(reason)]} (docs/runbook.md, {reason})" if reason in tuple(Reason) else "see its log"


async def _groups(desk: Desk) -> list[Check]:
    groups = [group for _, group in sorted(desk.registry.directory.groups.items())]
    checks: list[Check] = []
    for begin in range(0, len(groups), AT_ONCE):
        checks += [_group(desk, group) for group in groups[begin : begin + AT_ONCE]]
        await asyncio.sleep(0)
    return checks + [_loss(group) for group in groups if group.lost_term]


def _loss(group: Group) -> Check:
    """Messages that were acknowledged are gone, until somebody says that whoever has to know of it does."""
    return _check(
        Kind.LOSS,
        False,
        f"an operator accepted in term {group.lost_term} that acknowledged messages are lost",
        f"qmq AuditTrail --brokerGroup={group.name} says which; "
        f"qmq AcknowledgeLoss --brokerGroup={group.name} ends this",
        of=f"of {group.name}",
    )


def _group(desk: Desk, group: Group) -> Check:
    check, marked = partial(_check, Kind.GROUP, of=group.name), desk.registry.directory.readonly_subjects(group.name)
    if group.half_swapped:
        return check(False, "is half swapped", f"finish it with ReplaceBroker --role={part(Role.SLAVE, group.kind):d}")
    if old := desk.registry.old_row(group.name):
        return check(False, old.found, old.remedy)
    if group.master is None or not group.slaves:
        lacks = "slave" if group.master else "master"
        return check(False, f"has no {lacks}", f"AddBroker adds a {lacks}")
    if group.draining or marked:
        return check(True, "is drained" if group.draining else f"is marked readonly for {', '.join(marked[:3])}")
    if (why := desk.registry.why_no_failover(group)) is not None:
        found, remedy = why
        return check(False, f"has no master, and no slave becomes it by itself: {found}", remedy)
    if not desk.registry.is_writable(group):
        facts = {"group": group.name, "takesNothing": True}
        return check(False, "takes no messages", "ReplicaStatus says why", facts=facts)
    return check(True, "takes messages")


async def _tokens(desk: Desk) -> list[Check]:
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
        return [_check(Kind.TOKENS, True, f"{sum(is_valid(row, now) for row in rows)} valid")]
    days = (ending[0].expires_ms - now) // (24 * 3600 * 1000)
    text = f"{len(ending)} expire within two weeks, first that of {ending[0].name} ({ending[0].id}) in {days} days"
    return [_check(Kind.TOKENS, False, text, "AddToken makes the next one; two of one name may be valid")]


def _passwords(desk: Desk) -> Check:
    text = "can be stored" if desk.vault.is_open else "cannot be stored: no key; only AddDb needs one"
    return _check(Kind.PASSWORDS, True, text, of="of databases")


def _routes(desk: Desk) -> Check:
    refusals = list(desk.refusals().values())
    if not refusals:
        return _check(Kind.ROUTES, True, "each client gets those it asks for")
    text = f"new subjects or clients are refused: {'; '.join(refusals[:REFUSALS_SHOWN])}"
    return _check(Kind.ROUTES, False, text, "raise the setting that is named, or end what needs so many")


async def _metaservers(desk: Desk) -> Check:
    alive = {row.id for row in desk.registry.peers()}
    silent = sorted(row.http_address for row in await stored_metaservers(desk) if row.id not in alive)
    if silent:
        return _check(
            Kind.METASERVERS, False, f"silent: {', '.join(silent)}", "start them, or wait until they are forgotten"
        )
    return _check(Kind.METASERVERS, True, f"{len(alive)} up")


def _check(
    kind: Kind, ok: bool, found: str, remedy: str = "", *, of: str = "", facts: dict[str, Any] | None = None
) -> Check:
    name = f"{kind} {of}" if of else str(kind)
    return {"kind": kind, "name": name, "ok": ok, "found": found, "remedy": remedy, "facts": facts or {}}


async def stored_metaservers(desk: Desk) -> list[MetaserverRow]:
    try:
        return await desk.database.read(lambda repository: repository.load_metaservers())
    except NotServed:
        return []  # then those that are alive are all that is known


HANDLERS = {"Doctor": Handler(look_as=_doctor)}
