"""Shell. Actions on a broker group: readonly marks, drains, tags, failover, rates, quarantined log parts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.context import ActionContext, Handler, OldRoutes, together
from qmq.metaserver.actions.plan import LISTED_MAX, Plan, refused
from qmq.metaserver.console.display import Reading, per_second
from qmq.metaserver.model import ALL_SUBJECTS, DELAY, AuditRow, Broker, Directory, Group, ReadonlyMark, Route, Routes
from qmq.metaserver.storage.changes import (
    DecidedOn,
    SetGroupState,
    SetMark,
    UnsetMark,
)
from qmq.proto import qmq_pb2 as pb


def mark_readonly(directory: Directory, routes: Routes, subject: str, group: str, *, readonly: bool) -> Plan:
    """Plan a mark that routes producers of a subject, or of all, away from a group; or its end."""
    if group not in directory.groups:
        return refused(_no_group(group))
    mark = ReadonlyMark(subject, group)
    is_set = mark in directory.marks
    is_known = subject == ALL_SUBJECTS or subject in routes or subject in directory.subjects
    if not is_known and not is_set:  # the mark of a removed subject can still be removed
        return refused(f"no subject {subject} is known; ListSubjectRoutes names them")
    change = SetMark(mark) if readonly else UnsetMark(mark)
    marked = directory.readonly_subjects(group)
    after = sorted({*marked, subject} if readonly else {*marked} - {subject})
    takes_any = directory.groups[group].kind == DELAY
    subjects = frozenset({subject}) if takes_any else served(routes, group, subject)
    return Plan(
        (change,) if is_set != readonly else (),
        subjects=subjects,
        groups=frozenset({group}),
        before={"readonlySubjects": marked},
        after={"readonlySubjects": after},
        data={"result": "success", "subject": subject, "brokerGroup": group, "readonlySubjects": after},
    )


def stranded(directory: Directory, routes: Routes, group: str, subjects: Iterable[str]) -> list[str]:
    """Return subjects with producers that have no other group than `group`."""

    def is_open(name: str, subject: str) -> bool:
        other = directory.groups.get(name)
        return other is not None and name != group and not other.draining and not directory.is_marked(name, subject)

    delay_groups = directory.groups_of(DELAY)
    if group in delay_groups:
        return sorted(subject for subject in subjects if not any(is_open(name, subject) for name in delay_groups))
    return sorted(
        subject
        for subject in subjects
        if subject in routes and not any(is_open(name, subject) for name in routes[subject].groups)
    )


def set_draining(directory: Directory, routes: Routes, group: str, *, draining: bool) -> Plan:
    """Plan a drain, which stops new subjects and producers of a group; or its end."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    refusals = []
    alike = directory.groups_of(known.kind)
    others = [name for name, other in alike.items() if name != group and other.master and not other.draining]
    if draining and not others:
        noun = "delayed messages" if known.kind == DELAY else "messages"
        refusals.append(f"no other group would be left to take {noun}: {group} is the only one that is not drained")
    change = SetGroupState(group, draining=draining)
    changes = (
        (DecidedOn(directory.version), change) if draining else (change,)
    )  # else two drains could take the last two groups
    return Plan(
        changes if known.draining != draining else (),
        refusals=tuple(refusals),
        subjects=served(routes, group, ALL_SUBJECTS),
        groups=frozenset({group}),
        before={"draining": known.draining},
        after={"draining": draining},
        data={"brokerGroup": group, "draining": draining},
    )


def set_tag(directory: Directory, group: str, tag: str) -> Plan:
    """Plan SetGroupTag. Existing routes stay; the tag counts when a subject gets its route."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    if known.kind == DELAY:
        return refused(
            f"{group} is a group of delay servers, which accept delayed messages of every subject with any tag"
        )
    return Plan(
        (SetGroupState(group, tag=tag),) if known.tag != tag else (),
        groups=frozenset({group}),
        whole_groups=True,
        before={"tag": known.tag},
        after={"tag": tag},
        data={"brokerGroup": group, "tag": tag},
    )


def set_failover(directory: Directory, group: str, failover: str) -> Plan:
    """Plan SetFailover: turn a group's automatic failover `on`, `off` or to `default`."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    return Plan(
        (SetGroupState(group, failover=failover),) if known.failover != failover else (),
        groups=frozenset({group}),
        whole_groups=True,
        before={"failover": known.failover},
        after={"failover": failover},
        data={"brokerGroup": group, "failover": failover},
    )


def acknowledge_loss(directory: Directory, group: str) -> Plan:
    """Plan AcknowledgeLoss: close an accepted loss; the audit trail keeps it."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    return Plan(
        (DecidedOn(directory.version), SetGroupState(group, lost_term=0)) if known.lost_term else (),
        groups=frozenset({group}),
        whole_groups=True,
        before={"lostTerm": known.lost_term},
        after={"lostTerm": 0},
        data={"brokerGroup": group, "lostTerm": known.lost_term},
    )


def served(routes: Routes, group: str, subject: str) -> frozenset[str]:
    """Return the subjects that a group serves: the given one, or all."""
    if subject != ALL_SUBJECTS:
        return frozenset({subject})
    return frozenset(route.subject for route in routes.values() if group in route.groups)


def _no_group(group: str) -> str:
    return f"there is no broker group {group}; ListBrokerGroups names them"


R = TypeVar("R")

LOOK_AGAIN_S = 0.1
"""Routes reach clients within tens of milliseconds."""


async def _mark(context: ActionContext, arguments: Arguments) -> Plan:
    return await _plan_mark(context, arguments, readonly=True)


async def _unmark(context: ActionContext, arguments: Arguments) -> Plan:
    return await _plan_mark(context, arguments, readonly=False)


async def _plan_mark(context: ActionContext, arguments: Arguments, *, readonly: bool) -> Plan:
    directory, subject, group = context.registry.directory, arguments["subject"], arguments["brokerGroup"]
    return await _on_routes(
        context,
        subject,
        group,
        lambda routes: mark_readonly(directory, routes, subject, group, readonly=readonly),
    )


async def _on_routes(context: ActionContext, subject: str, group: str, work: Callable[[Mapping[str, Route]], R]) -> R:
    """Run `work` on the routes that a mark of this subject, or of all, affects."""
    if subject == ALL_SUBJECTS:
        return await context.on_routes_of({group}, work)
    return work(context.registry.routes)


async def _after_mark(context: ActionContext, arguments: Arguments, plan: Plan) -> Any:
    directory, group = context.registry.directory, arguments["brokerGroup"]
    without = await _on_routes(
        context, arguments["subject"], group, lambda routes: stranded(directory, routes, group, plan.subjects)
    )
    held = await wait_for_old_routes(context, group, arguments["subject"], arguments.number("waitMs"))
    return {**plan.data, **held, "withoutOtherGroup": {"count": len(without), "names": without[:LISTED_MAX]}}


async def wait_for_old_routes(context: ActionContext, group: str, subject: str, wait_ms: int) -> dict[str, Any]:
    """Count the clients that may still use a group as writable; wait until there are none, or for `wait_ms`."""
    began = time.monotonic()
    counts = await context.clients.old_routes(group, subject)
    while not _are_all_current(counts) and (time.monotonic() - began) * 1000 < wait_ms:
        await asyncio.sleep(LOOK_AGAIN_S)
        counts = await context.clients.old_routes(group, subject)
    return {
        "producers": counts.producers,
        "consumers": counts.consumers,
        "watchers": counts.watchers,
        "metaserversUnasked": list(counts.unasked),
        "allKnow": _are_all_current(counts),
        "waitedMs": round((time.monotonic() - began) * 1000) if wait_ms else 0,
    }


def _are_all_current(counts: OldRoutes) -> bool:
    return not counts.producers and not counts.consumers and not counts.unasked


async def _list_readonly(context: ActionContext, arguments: Arguments) -> Any:
    marks = [mark for mark in sorted(context.registry.directory.marks) if arguments["brokerGroup"] in ("", mark.group)]
    counts = await together([wait_for_old_routes(context, mark.group, mark.subject, 0) for mark in marks])
    shown = [
        {"subject": mark.subject, "brokerGroup": mark.group, **held} for mark, held in zip(marks, counts, strict=True)
    ]
    draining = [
        {"brokerGroup": name, "subject": ALL_SUBJECTS, "draining": True}
        for name, group in sorted(context.registry.directory.groups.items())
        if group.draining and arguments["brokerGroup"] in ("", name)
    ]
    return {"marks": shown, "draining": draining}


async def _drain(context: ActionContext, arguments: Arguments) -> Plan:
    return await _plan_draining(context, arguments, draining=True)


async def _undrain(context: ActionContext, arguments: Arguments) -> Plan:
    return await _plan_draining(context, arguments, draining=False)


async def _plan_draining(context: ActionContext, arguments: Arguments, *, draining: bool) -> Plan:
    directory, group = context.registry.directory, arguments["brokerGroup"]
    return await context.on_routes_of({group}, lambda routes: set_draining(directory, routes, group, draining=draining))


async def _after_drain(context: ActionContext, arguments: Arguments, plan: Plan) -> Any:
    """Return the rest of a drain: producers that may still send, waiting messages, dead letters, routes with the
    group.
    """
    name = arguments["brokerGroup"]
    held = await wait_for_old_routes(context, name, ALL_SUBJECTS, arguments.number("waitMs"))
    contents = await context.contents(name, ALL_SUBJECTS)
    left = contents.most_first
    return {
        **plan.data,
        **held,
        "subjects": len(plan.subjects),
        "messagesLeft": sum(leftover.messages for leftover in left),
        "deadLettersLeft": sum(leftover.dead_letters for leftover in left),
        "left": [
            {
                "subject": leftover.subject,
                "group": leftover.consumer_group,
                "messages": leftover.messages,
                "deadLetters": leftover.dead_letters,
                "oldest": leftover.oldest_ms,
            }
            for leftover in left[:LISTED_MAX]
        ],
        "unknown": contents.unknown,
        "empty": held["allKnow"] and not left and not contents.unknown,
    }


async def _set_tag(context: ActionContext, arguments: Arguments) -> Plan:
    return set_tag(context.registry.directory, arguments["brokerGroup"], arguments["tag"])


async def _set_failover(context: ActionContext, arguments: Arguments) -> Plan:
    return set_failover(context.registry.directory, arguments["brokerGroup"], arguments["failover"])


async def _acknowledge_loss(context: ActionContext, arguments: Arguments) -> Plan:
    return acknowledge_loss(context.registry.directory, arguments["brokerGroup"])


async def _rates(context: ActionContext, arguments: Arguments) -> Any:
    """Return the rates of the master since its process began; a change of roles begins anew."""
    group = context.find_group(arguments["brokerGroup"])
    try:
        samples = (await context.brokers.rates(context.master_of(group))).samples
    except QmqError as error:
        return {"brokerGroup": group.name, "rates": [], "unasked": {group.name: str(error)}}
    readings = [Reading(sample.at_ms, {"taken": sample.taken, "delivered": sample.delivered}) for sample in samples]
    rates = [{"at": rate.at_ms, **rate.values} for rate in per_second(readings)]
    return {"brokerGroup": group.name, "rates": rates, "unasked": {}}


log = logging.getLogger("qmq.metaserver")


async def _list_quarantine(context: ActionContext, arguments: Arguments) -> Any:
    brokers = context.find_group(arguments["brokerGroup"]).brokers
    answers = await asyncio.gather(*(_ask_quarantine(context, broker) for broker in brokers))
    return {
        "brokers": [_copy_json(broker, found) for broker, found in zip(brokers, answers, strict=True)],
        "unasked": {
            str(broker.key): str(found)
            for broker, found in zip(brokers, answers, strict=True)
            if isinstance(found, QmqError)
        },
    }


async def _ask_quarantine(context: ActionContext, broker: Broker) -> pb.QuarantineAnswer | QmqError:
    try:
        return await context.brokers.quarantine(broker, pb.QuarantineRequest())
    except QmqError as error:
        return error


def _copy_json(broker: Broker, answer: pb.QuarantineAnswer | QmqError) -> dict[str, Any]:
    parts = [] if isinstance(answer, QmqError) else [_part_json(part) for part in answer.parts]
    return {
        "hostname": broker.hostname,
        "servePort": broker.serve_port,
        "bytes": sum(part["bytes"] for part in parts),
        "bytesMax": None if isinstance(answer, QmqError) else answer.bytes_max,
        "parts": parts,
    }


def _part_json(part: pb.KeptPart) -> dict[str, Any]:
    return {
        "name": part.name,
        "begin": part.begin,
        "end": part.end,
        "why": part.why,
        "bytes": part.bytes,
        "messages": part.messages,
        "evidence": part.evidence,
    }


async def _plan_clear(context: ActionContext, arguments: Arguments) -> Plan:
    """Plan ClearQuarantine. Evidence is cleared by name only, so an operator must have seen it."""
    try:
        broker = _broker_at(context.find_group(arguments["brokerGroup"]), arguments["host"])
        answer = await context.brokers.quarantine(broker, pb.QuarantineRequest())
    except OperatorError as refusal:
        return refused(str(refusal))
    named, parts = arguments.names("parts"), [_part_json(part) for part in answer.parts]
    if unknown := set(named) - {part["name"] for part in parts}:
        return refused(f"{', '.join(sorted(unknown))}: {broker.key} has no such part; ListQuarantine names them")
    cleared = [part for part in parts if (part["name"] in named if named else not part["evidence"])]
    evidence = len(parts) - len(cleared)
    if not cleared:
        more = f"; {evidence} parts are evidence, and go by name: --parts" if evidence else ""
        return refused(f"{broker.key} has nothing to clear{more}")
    return Plan(orders=True, groups=frozenset({broker.group}), before=cleared, after=[])


async def _carry_out_clear(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    """Clear the planned parts. The audit row is written first, because cleared parts are gone."""
    broker = _broker_at(context.find_group(arguments["brokerGroup"]), arguments["host"])
    try:
        await context.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"nothing was cleared, as the database failed: {error}") from error
    request = pb.QuarantineRequest(cleared=[part["name"] for part in plan.before])
    answer = await context.brokers.quarantine(broker, request)
    cleared = [_part_json(part) for part in answer.parts]
    try:
        await context.registry.change((), replace(audit, after={"cleared": cleared}, result="done"))
    except QmqError as error:  # it is cleared, and the first row records the beginning
        log.warning("end of ClearQuarantine not recorded broker=%s reason=%s", broker.key, error)
    return {"broker": str(broker.key), "bytes": sum(part["bytes"] for part in cleared), "cleared": cleared}


def _broker_at(group: Group, host: str) -> Broker:
    """Return the broker with this hostname, or hostname:port. Raises OperatorError."""
    named = [broker for broker in group.brokers if host in (broker.hostname, str(broker.key))]
    if len(named) == 1:
        return named[0]
    brokers = ", ".join(str(broker.key) for broker in named or group.brokers)
    raise OperatorError(
        f"{host} is {'several brokers' if named else 'no broker'} of {group.name}: name one of {brokers}"
    )


HANDLERS = {
    "MarkReadonlyBrokerGroup": Handler(plan=_mark, afterwards=_after_mark),
    "UnMarkReadonlyBrokerGroup": Handler(plan=_unmark),
    "ListReadonly": Handler(look=_list_readonly),
    "DrainGroup": Handler(plan=_drain, afterwards=_after_drain),
    "UndrainGroup": Handler(plan=_undrain),
    "SetGroupTag": Handler(plan=_set_tag),
    "SetFailover": Handler(plan=_set_failover),
    "AcknowledgeLoss": Handler(plan=_acknowledge_loss),
    "Rates": Handler(look=_rates),
    "ListQuarantine": Handler(look=_list_quarantine),
    "ClearQuarantine": Handler(plan=_plan_clear, carry_out=_carry_out_clear),
}
