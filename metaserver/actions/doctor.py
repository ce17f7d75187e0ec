"""Shell. Doctor's checks: facts, each judged good or bad. One implementation for the tools, the API, the console and
metrics.

`tools.sh Doctor`, `/api/doctor`, console    every broker is asked
metrics                                      last heartbeat of every broker

Each cause makes one finding (`metaserver.actions.causes`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from qmq.errors import NotServed, OperatorError, QmqError
from qmq.metaserver.access import is_valid
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.causes import Check, CheckKind, call_of, one_per_cause
from qmq.metaserver.actions.context import ActionContext, Handler, together, wall_ms
from qmq.metaserver.actions.shapes import broker_json, parted_json
from qmq.metaserver.cluster.old_database import COMMANDS
from qmq.metaserver.model import Broker, Group, ReplicaState, part
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.database import DatabaseSetAside
from qmq.replication.readonly import WAY_OUT, Reason
from qmq.rights import Caller
from qmq.types import Role

BY_OPERATOR = "operator"
"""Readonly reason that is no trouble: a mark or a drain, which its group's line shows."""
NO_HEARTBEATS = (
    "its log has the reason: the metaserver's row contradicts its data directory, or no metaserver is reachable"
)
REFUSALS_SHOWN = 3
EXPIRES_SOON_MS = 14 * 24 * 3600 * 1000
AT_ONCE = 100
"""Brokers or groups checked before the task yields: a few milliseconds."""

Ask = Callable[[Broker], Awaitable[ReplicaState]]
"""Returns a broker's state. Raises NotServed, OperatorError."""


async def _doctor(context: ActionContext, arguments: Arguments, caller: Caller) -> Any:
    """Return the checks of the metaserver; the tool adds those of its own machine."""
    own, here = await own_refusals(context), arguments.flag("here")
    checks = [_routes(own["routes"])] if here else await examine(context, context.brokers.replica_status, own)
    return {
        "version": context.version,
        "time": wall_ms(),
        "caller": {"name": caller.name, "role": str(caller.role)},
        "healthy": all(check["ok"] for check in checks),
        "checks": checks,
        "refusals": own,
    }


async def examine_reported(context: ActionContext, *, everywhere: bool = False) -> list[Check]:
    """Run all checks without asking a broker: cheap enough to repeat all day. `everywhere`: with the refusals of the
    other metaservers, which each have their own.
    """

    async def reported(broker: Broker) -> ReplicaState:
        state = context.registry.state(broker)
        if state is None:
            raise NotServed(f"{broker.key} sends no heartbeats")
        return state

    return await examine(context, reported, await own_refusals(context, asks=everywhere), everywhere=everywhere)


async def examine(context: ActionContext, ask: Ask, own: Mapping[str, Any], *, everywhere: bool = True) -> list[Check]:
    """Return all checks. `own`: refusals of this metaserver; `everywhere`: those of the others count, too."""
    refusals = [own, *(await _refusals_elsewhere(context) if everywhere else ())]
    places = {name: text for refused in refusals for name, text in refused["brokers"].items()}
    database, brokers = await asyncio.gather(_database(context), _brokers(context, ask, places))
    unplaced = _by_group(refusals)
    groups, tokens, metaservers = await _groups(context, unplaced), await _tokens(context), _metaservers(context)
    routes = _routes({text for refused in refusals for text in refused["routes"]})
    return one_per_cause([database, *brokers, *groups, *tokens, _passwords(context), routes, metaservers])


async def _refusals_elsewhere(context: ActionContext) -> list[Mapping[str, Any]]:
    others, _ = await context.clients.elsewhere("Doctor")
    return [other["refusals"] for other in others.values() if "refusals" in other]


async def own_refusals(context: ActionContext, *, asks: bool = True) -> dict[str, Any]:
    """Return refusals that no other metaserver has: routes of clients, places of brokers, and brokers without a place.

    Args:
        asks: brokers without a place are asked for the ends of their logs.
    """
    registry = context.registry
    unplaced = registry.registration.unplaced()
    reaches = await together([_reach(context, broker) for broker, _ in unplaced]) if asks else [[]] * len(unplaced)
    texts = {str(broker.key): registry.registration.refused_lately(broker) for broker in registry.directory.brokers()}
    return {
        "routes": list(context.refusals().values()),
        "brokers": {name: text for name, text in texts.items() if text},
        "unplaced": [
            broker_json(broker) | {"kind": broker.kind, "term": term, "reach": reach}
            for (broker, term), reach in zip(unplaced, reaches, strict=True)
        ],
    }


async def _reach(context: ActionContext, broker: Broker) -> list[int]:
    """Return the end of the log of a broker without a place, as `ReplicaState.reach`; empty: it does not answer."""
    try:
        return [*(await context.brokers.replica_status(broker)).reach]
    except QmqError:
        return []


async def copies_without_place(context: ActionContext, group: str) -> list[Mapping[str, Any]]:
    """Return the brokers that have a group's log and no place, the one with the most of the log first."""
    refusals = await own_refusals(context), *await _refusals_elsewhere(context)
    return _by_group(refusals).get(group, [])


async def _database(context: ActionContext) -> Check:
    began = time.monotonic()
    try:
        await context.database.read(lambda repository: repository.ping())
    except DatabaseSetAside as error:
        return _check(CheckKind.DATABASE, False, str(error), COMMANDS)
    except QmqError as error:
        return _check(CheckKind.DATABASE, False, str(error), "start it, or correct the setting database")
    bad = context.bad_rows()
    took_ms = round((time.monotonic() - began) * 1000)
    if bad:
        text = f"{bad} invalid rows are ignored"
        return _check(CheckKind.DATABASE, False, text, "the log names them; repair them")
    return _check(CheckKind.DATABASE, True, f"answers in {took_ms} ms")


async def _brokers(context: ActionContext, ask: Ask, places: Mapping[str, str]) -> list[Check]:
    brokers = sorted(context.registry.directory.brokers(), key=lambda broker: (broker.group, broker.role))
    checks: list[Check] = []
    for begin in range(0, len(brokers), AT_ONCE):
        checks += await together([_broker(context, broker, ask, places) for broker in brokers[begin : begin + AT_ONCE]])
    return checks


async def _broker(context: ActionContext, broker: Broker, ask: Ask, places: Mapping[str, str]) -> Check:
    facts = broker_json(broker, up=context.registry.is_up(broker)) | {
        "incarnation": broker.incarnation,
        "answers": False,
    }
    facts["minCopies"] = context.find_group(broker.group).min_copies
    of = f"{broker.key} ({broker.part.name} of {broker.group})"
    check = partial(_check, CheckKind.BROKER, of=of, facts=facts)
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
    if refused := places.get(str(broker.key)):
        return check(False, "another process with its name is refused", refused)
    if not facts["up"]:
        return check(False, "answers, but sends no heartbeats", NO_HEARTBEATS)
    if troubles := [reason for reason in state.readonly_reasons if reason != BY_OPERATOR]:
        facts["reasons"] = troubles
        found = f"{'rejects produces' if broker.role == Role.MASTER else 'is no whole copy'}: {', '.join(troubles)}"
        if state.parted is not None:
            facts["parted"] = parted = parted_json(state.parted)
            found += (
                f". It alone has {parted['messages']:,} messages, from offset {parted['offset']} of its log on: they "
                "may have been acknowledged"
            )
        return check(False, found, "; ".join(_remedy_of(reason, broker) for reason in troubles))
    if state.quarantine_full:
        found = f"keeps {state.quarantine_bytes:,} bytes in quarantine, maybe the last copies of messages"
        remedy = (
            f"qmq ListQuarantine --brokerGroup={broker.group} names them, ClearQuarantine deletes (docs/runbook.md)"
        )
        return check(False, found, remedy)
    kept = f", keeps {state.quarantine_bytes:,} bytes in quarantine" if state.quarantine_bytes else ""
    return check(True, f"up{kept}")


def _remedy_of(reason: str, broker: Broker) -> str:
    """Return the remedy for a broker's readonly reason; a newer version may have others."""
    if reason == Reason.UNFILLED and broker.role == Role.SLAVE:
        return f"qmq SyncReplica --brokerGroup={broker.group} --host={broker.key} (docs/runbook.md, {reason})"
    return f"{WAY_OUT[Reason(reason)]} (docs/runbook.md, {reason})" if reason in tuple(Reason) else "see its log"


def _by_group(refusals: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group brokers without a place, each once however many metaservers refused it, the most of a log first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    unplaced = (facts for refused in refusals for facts in refused.get("unplaced", ()))
    once = {(facts["hostname"], facts["servePort"]): facts for facts in unplaced}
    for facts in sorted(once.values(), key=lambda facts: (facts.get("reach", []), facts["term"]), reverse=True):
        found.setdefault(facts["group"], []).append(facts)
    return found


async def _groups(context: ActionContext, unplaced: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Check]:
    groups = [group for _, group in sorted(context.registry.directory.groups.items())]
    checks: list[Check] = []
    for begin in range(0, len(groups), AT_ONCE):
        checks += [_group(context, group, unplaced.get(group.name, ())) for group in groups[begin : begin + AT_ONCE]]
        await asyncio.sleep(0)
    for name in sorted(unplaced.keys() - context.registry.directory.groups.keys()):
        found, remedy = _return_places(unplaced[name], Role.MASTER)
        checks.append(_check(CheckKind.GROUP, False, f"has no row, but {found}", remedy, of=name))
    return checks + [_loss(group) for group in groups if group.lost_term]


def _loss(group: Group) -> Check:
    """Return the finding about lost acknowledged messages. It stays until an operator runs AcknowledgeLoss."""
    return _check(
        CheckKind.LOSS,
        False,
        f"an operator accepted the loss of acknowledged messages in term {group.lost_term}",
        f"qmq AuditTrail --brokerGroup={group.name} lists them; "
        f"qmq AcknowledgeLoss --brokerGroup={group.name} ends this",
        of=f"of {group.name}",
    )


def _return_places(unplaced: Sequence[Mapping[str, Any]], first: Role) -> tuple[str, str]:
    """Return the finding and the remedy of brokers that have a group's log and no place in its row."""
    named = ", ".join(f"{facts['hostname']}:{facts['servePort']}" for facts in unplaced)
    roles = [first, *[Role.SLAVE] * (len(unplaced) - 1)]
    calls = [
        call_of("AddBroker", part(role, facts["kind"]), facts) for role, facts in zip(roles, unplaced, strict=True)
    ]
    is_one = len(unplaced) == 1
    found = f"{named} {'has' if is_one else 'have'} its log and no place"
    return (
        found,
        f"keep their data directories, and return the brokers to their places: {', then '.join(calls)}; or stop them",
    )


def _group(context: ActionContext, group: Group, unplaced: Sequence[Mapping[str, Any]] = ()) -> Check:
    check, marked = (
        partial(_check, CheckKind.GROUP, of=group.name),
        context.registry.directory.readonly_subjects(group.name),
    )
    if group.half_swapped:
        return check(False, "is half swapped", f"finish it with ReplaceBroker --role={part(Role.SLAVE, group.kind):d}")
    if old := context.registry.old_row(group.name):
        return check(False, old.found, old.remedy)
    if group.master is None or not group.slaves:
        lacks = "slave" if group.master else "master"
        if unplaced:
            found, remedy = _return_places(unplaced, Role.SLAVE if group.master else Role.MASTER)
            return check(False, f"has no {lacks}, but {found}", remedy)
        first = "" if group.master else "start the brokers that have its log, then ask again; if none has it, "
        return check(False, f"has no {lacks}", f"{first}AddBroker adds a {lacks}")
    if group.draining or marked:
        return check(True, "is drained" if group.draining else f"is marked readonly for {', '.join(marked[:3])}")
    if (why := context.registry.why_no_failover(group)) is not None:
        found, remedy = why
        return check(False, f"has no master, and no slave can be promoted: {found}", remedy)
    if not context.registry.is_writable(group):
        facts = {"group": group.name, "takesNothing": True}
        return check(False, "rejects produces", "ReplicaStatus shows why", facts=facts)
    return check(True, "accepts produces")


async def _tokens(context: ActionContext) -> list[Check]:
    try:
        rows = await context.database.read(lambda repository: repository.load_tokens())
    except QmqError:
        return []  # the database's own line reports it
    now = wall_ms()
    ending = sorted(
        (row for row in rows if is_valid(row, now) and 0 < row.expires_ms < now + EXPIRES_SOON_MS),
        key=lambda row: row.expires_ms,
    )
    if not ending:
        return [_check(CheckKind.TOKENS, True, f"{sum(is_valid(row, now) for row in rows)} valid")]
    days = (ending[0].expires_ms - now) // (24 * 3600 * 1000)
    text = f"{len(ending)} expire within two weeks, first that of {ending[0].name} ({ending[0].id}) in {days} days"
    return [_check(CheckKind.TOKENS, False, text, "AddToken makes the next one; two of one name may be valid")]


def _passwords(context: ActionContext) -> Check:
    text = "can be stored" if context.vault.is_open else "cannot be stored: no key; only AddDb needs one"
    return _check(CheckKind.PASSWORDS, True, text, of="of databases")


def _routes(refusals: Collection[str]) -> Check:
    if not refusals:
        return _check(CheckKind.ROUTES, True, "every client gets its routes")
    text = f"new subjects or clients are refused: {'; '.join(sorted(refusals)[:REFUSALS_SHOWN])}"
    return _check(CheckKind.ROUTES, False, text, "raise the named setting, or reduce the number")


def _metaservers(context: ActionContext) -> Check:
    registry, check = context.registry, partial(_check, CheckKind.METASERVERS)
    peers = registry.liveness.peers
    if peers.is_unread(now_ms=registry.now_ms()):
        return check(True, "this one answers; without the database the others are unknown")
    alive = {row.http_address for row in registry.peers()}  # one that was killed and restarted has its old row, too
    silent = sorted({row.http_address for row in peers.rows} - alive)
    stopped = [address for address in peers.stopped(now_ms=registry.now_ms()) if address not in silent]
    found = [f"{word}: {', '.join(rows)}" for word, rows in (("silent", silent), ("stopped", stopped)) if rows]
    if found:
        return check(False, "; ".join(found), "start them; after a day without them this finding ends by itself")
    return check(True, f"{len({row.id for row in peers.rows} | {context.own_id})} up")


def _check(
    kind: CheckKind, ok: bool, found: str, remedy: str = "", *, of: str = "", facts: dict[str, Any] | None = None
) -> Check:
    name = f"{kind} {of}" if of else str(kind)
    return {"kind": kind, "name": name, "ok": ok, "found": found, "remedy": remedy, "facts": facts or {}}


HANDLERS = {"Doctor": Handler(look_as=_doctor)}
