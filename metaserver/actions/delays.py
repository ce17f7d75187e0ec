"""Shell. Actions on delayed messages: statistics, lists, schedules, cancellation."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import Any, TypeVar

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.context import ActionContext, Handler, PartlyDone, answers_of, wall_ms
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.model import DELAY, AuditRow, Broker, Group
from qmq.proto import qmq_pb2 as pb

log = logging.getLogger("qmq.metaserver")

HOUR_MS = 3_600_000
CANCELLED, SENT, UNKNOWN = "cancelled", "sent", "unknown"

A = TypeVar("A")


async def _stats(context: ActionContext, arguments: Arguments) -> Any:
    begin_ms = wall_ms()
    request = pb.DelayStatsRequest(
        subject=arguments["subject"], begin_ms=begin_ms, end_ms=begin_ms + arguments.number("hours") * HOUR_MS
    )
    answers, unasked = await _ask_all(context, arguments, lambda broker: context.brokers.delay_stats(broker, request))
    hours: dict[int, int] = {}
    for answer in answers.values():
        for hour in answer.hours:
            hours[hour.begin_ms] = hours.get(hour.begin_ms, 0) + hour.messages
    return {
        "groups": [_stats_json(name, answer) for name, answer in answers.items()],
        "hours": [{"begin": begin, "messages": hours[begin]} for begin in sorted(hours)],
        "unasked": unasked,
    }


def _stats_json(name: str, answer: pb.DelayStatsAnswer) -> dict[str, Any]:
    return {
        "brokerGroup": name,
        "pendingMessages": answer.pending_messages,
        "pendingBytes": answer.pending_bytes,
        "loadedMessages": answer.loaded_messages,
        "waitingMessages": answer.waiting_messages,
        "inFlight": dict(answer.in_flight),
        "nextDue": answer.next_due_ms,
        "clockOffMs": answer.clock_off_ms,
        "dueMessages": answer.due_messages,
        "dueAgeMs": answer.due_age_ms,
        "waiting": [
            {"subject": subject.subject, "messages": subject.messages, "why": subject.why, "ageMs": subject.age_ms}
            for subject in answer.waiting
        ],
    }


async def _list(context: ActionContext, arguments: Arguments) -> Any:
    limit = arguments.number("limit")
    request = pb.ListDelayedRequest(
        subject=arguments["subject"],
        begin_ms=arguments.number("since"),
        end_ms=arguments.number("until"),
        messages_max=limit,
    )
    answers, unasked = await _ask_all(context, arguments, lambda broker: context.brokers.list_delayed(broker, request))
    parts = [[_message_json(name, message) for message in answer.messages] for name, answer in answers.items()]
    count = sum(map(len, parts))
    messages = list(islice(merge(*parts, key=lambda message: (message["due"], message["number"])), limit))
    is_more = count > limit or any(answer.more for answer in answers.values())
    return {"messages": messages, "more": is_more, "unasked": unasked}


def _message_json(name: str, message: pb.DelayedMessage) -> dict[str, Any]:
    return {
        "brokerGroup": name,
        "subject": message.subject,
        "id": message.id,
        "key": message.key,
        "due": message.due_ms,
        "created": message.created_ms,
        "number": message.number,
        "bytes": message.bytes,
        "problem": message.problem,
    }


async def _schedules(context: ActionContext, arguments: Arguments) -> Any:
    limit = arguments.number("limit")
    request = pb.ListDelayedRequest(subject=arguments["subject"], messages_max=limit, recurring=True)
    answers, unasked = await _ask_all(context, arguments, lambda broker: context.brokers.list_delayed(broker, request))
    rows = [
        _schedule_json(name, message)
        for name, answer in answers.items()
        for message in answer.messages
        if message.HasField("schedule") and arguments["owner"] in ("", message.schedule.owner)
    ]
    rows.sort(key=lambda row: (row["next"], row["subject"], row["name"]))
    is_more = len(rows) > limit or any(answer.more for answer in answers.values())
    return {"schedules": rows[:limit], "more": is_more, "unasked": unasked}


def _schedule_json(name: str, message: pb.DelayedMessage) -> dict[str, Any]:
    schedule = message.schedule
    return {
        "brokerGroup": name,
        "subject": message.subject,
        "name": schedule.name,
        "owner": schedule.owner,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "next": message.due_ms,
    }


async def _plan_cancel(context: ActionContext, arguments: Arguments) -> Plan:
    if not arguments.names("ids") and not arguments.names("keys"):
        return refused("name the messages: ids, keys or both, separated by commas")
    try:
        groups = _groups(context, arguments)
    except OperatorError as refusal:
        return refused(str(refusal))
    return Plan(
        orders=True,
        subjects=frozenset({arguments["subject"]}),
        groups=frozenset(group.name for group in groups),
        before={"ids": arguments.names("ids"), "keys": arguments.names("keys")},
    )


async def _carry_out_cancel(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    """Send the order to every group, since a message is in one of them. The audit row is written first, the outcome
    second.
    """
    try:
        await context.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"no delay server was asked, as the database failed: {error}") from error
    ids, keys = arguments.names("ids"), arguments.names("keys")
    request = pb.CancelDelayedRequest(subject=arguments["subject"], ids=ids, keys=keys)
    answers, failed = await _ask_all(context, arguments, lambda broker: context.brokers.cancel_delayed(broker, request))
    outcomes = {
        "ids": _fates(ids, [answer.ids for answer in answers.values()]),
        "keys": _fates(keys, [answer.keys for answer in answers.values()]),
    }
    result = "done" if not failed else "partly done" if answers else "failed"
    try:
        await context.registry.change((), replace(audit, after=outcomes, result=result))
    except QmqError as error:  # the delay servers have done it, and the first row records the beginning
        log.warning("end of CancelDelayed not recorded subject=%s reason=%s", arguments["subject"], error)
    data = {"subject": arguments["subject"], **outcomes, "unasked": failed}
    if failed and (keys or UNKNOWN in outcomes["ids"].values()):  # an id means one message, a key maybe many
        text = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise PartlyDone(
            f"not every group of delay servers answered: {text}. Repeat it; that changes nothing else", data
        )
    return data


def _fates(names: list[str], answers: Iterable[Iterable[str]]) -> dict[str, str]:
    """Return the fate of each message, as reported with certainty by any group."""
    answers_by_group = [list(answer) for answer in answers]
    fates = {}
    for place, name in enumerate(names):
        each = {answer[place] for answer in answers_by_group if place < len(answer)}
        fates[name] = next((fate for fate in (CANCELLED, SENT) if fate in each), UNKNOWN)
    return fates


def _groups(context: ActionContext, arguments: Arguments) -> list[Group]:
    groups, only = context.registry.directory.groups_of(DELAY), arguments["brokerGroup"]
    if only and only not in groups:
        raise OperatorError(f"there is no group {only} of delay servers; ListBrokerGroups names them")
    if not groups:
        raise OperatorError("there is no group of delay servers; AddBroker with roles 5 and 6 adds one")
    return [groups[name] for name in sorted(groups) if only in ("", name)]


async def _ask_all(
    context: ActionContext, arguments: Arguments, ask: Callable[[Broker], Awaitable[A]]
) -> tuple[dict[str, A], dict[str, str]]:
    """Ask the masters of the delay groups; return the answers, and for each missing one the reason."""

    async def ask_master(group: Group) -> A:
        return await ask(context.master_of(group))

    return await answers_of(_groups(context, arguments), ask_master)


HANDLERS = {
    "DelayStats": Handler(look=_stats),
    "ListDelayed": Handler(look=_list),
    "ListSchedules": Handler(look=_schedules),
    "CancelDelayed": Handler(plan=_plan_cancel, carry_out=_carry_out_cancel),
}
