"""Shell. Actions on consumer groups: lag, positions, consumers switched off, limits, connected clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.context import DATABASE, ActionContext, Handler, PartlyDone, wall_ms
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.cluster.group_starts import begin_at
from qmq.metaserver.model import ALL_SUBJECTS, AuditRow, Directory, Group, Offline, Routes
from qmq.metaserver.routes.placement import dead_letters_refusal, wider_routes
from qmq.metaserver.storage.changes import (
    Change,
    DecidedOn,
    ForgetConsumerGroups,
    SetLimits,
    SetOffline,
    UnsetOffline,
)
from qmq.operator_limits import OF_SUBJECT, OperatorLimits
from qmq.proto import qmq_pb2 as pb
from qmq.rights import CONSUME, PRODUCE
from qmq.subjects import DEAD_LETTER, is_dead_letter_subject, real_subject, retry_subject

EXPIRED_DROP, EXPIRED_DEAD_LETTER = "drop", "deadLetter"
"""Fates of expired messages."""
REFUSE, DROP_OLDEST = "refuse", "dropOldest"
"""Effects of a full backlog."""


def switch_consumers(directory: Directory, routes: Routes, rule: Offline, *, offline: bool) -> Plan:
    """Plan OnOffline: switch consumers off or on.

    Switching on all consumers of a subject and group also ends the rules for single ones, as in QMQ.
    """
    route = routes.get(real_subject(rule.subject))
    ended = [] if offline else sorted(other for other in directory.offline if _covers(rule, other))
    changes: list[Change] = [UnsetOffline(other) for other in ended]
    if offline and rule not in directory.offline:
        changes.append(SetOffline(rule))
    after = sorted(directory.offline - set(ended) | ({rule} if offline else set()))
    still = [] if offline else [other for other in after if _includes(other, rule)]
    return Plan(
        tuple(changes),
        refusals=tuple(f"they stay off by the rule {_rule(other)}; end that rule" for other in still),
        subjects=frozenset({rule.subject}) - {ALL_SUBJECTS},
        groups=frozenset(route.groups if route else ()),
        everything=rule.subject == ALL_SUBJECTS,
        before=[offline_json(other) for other in sorted(directory.offline) if other.subject == rule.subject],
        after=[offline_json(other) for other in after if other.subject == rule.subject],
        data={**offline_json(rule), "state": "offline" if offline else "online", "rules": len(changes)},
    )


def offline_json(rule: Offline) -> dict[str, str]:
    return {"subject": rule.subject, "consumerGroup": rule.group, "clientId": rule.consumer}


def limit(directory: Directory, routes: Routes, after: OperatorLimits) -> Plan:
    """Plan SetLimits or LimitGroup: replace the limits of a subject and consumer group."""
    before, others = limits_of(directory, after.key), [limit for limit in directory.limits if limit.key != after.key]
    to = after.dead_letters_to if after.dead_letters_to != before.dead_letters_to else ""
    if to and (reasons := dead_letters_refusal([*others, after], routes, after)):
        return refused(*reasons)
    route = routes.get(real_subject(after.subject))
    # Without this, two changes could form a circle, or undo each other.
    changes: tuple[Change, ...] = (DecidedOn(directory.version), SetLimits(after), *wider_routes([after], routes))
    return Plan(
        changes if after != before else (),
        subjects=frozenset({after.subject, to} if to else {after.subject}),
        groups=frozenset(route.groups if route else ()),
        needs=((CONSUME, after.subject), (PRODUCE, to)) if to else (),
        before=limits_json(before),
        after=limits_json(after),
        data=limits_json(after),
    )


def limits_of(directory: Directory, key: tuple[str, str]) -> OperatorLimits:
    return next((limit for limit in directory.limits if limit.key == key), OperatorLimits(*key))


def limits_json(limits: OperatorLimits) -> dict[str, Any]:
    return {
        "subject": limits.subject,
        "group": limits.group,
        "expiresAfterS": limits.expires_after_s,
        "expired": EXPIRED_DEAD_LETTER if limits.expired_die else EXPIRED_DROP,
        "messagesMax": limits.messages_max,
        "whenFull": DROP_OLDEST if limits.drops_oldest else REFUSE,
        "perSecond": limits.per_second,
        "bytesMax": limits.bytes_max,
        "deadLettersTo": limits.dead_letters_to,
    }


def _covers(wide: Offline, narrow: Offline) -> bool:
    """Return whether a rule has the same subject and group as another, and at least its consumers."""
    return wide[:2] == narrow[:2] and wide.consumer in (ALL_SUBJECTS, narrow.consumer)


def _includes(wide: Offline, narrow: Offline) -> bool:
    """Return whether a rule switches off everything that the other one does."""
    return all(part in (ALL_SUBJECTS, other) for part, other in zip(wide, narrow, strict=True))


def _rule(rule: Offline) -> str:
    return f"subject={rule.subject} consumerGroup={rule.group} clientId={rule.consumer}"


log = logging.getLogger("qmq.metaserver")

_QMQ_CODES = {"1": "latest", "2": "earliest"}
_ONE_BY_ONE = "limits are set for one subject or consumer group at a time; * is not allowed here"
_WITH_VALUE = ("sequence", "time")
_REMOVED = "removed"


async def _plan_reset(context: ActionContext, arguments: Arguments) -> Plan:
    """Plan a reset on every broker concerned; one refusal, or one missing answer, refuses all."""
    try:
        to = _target(arguments)
        groups = groups_of_subject(context, arguments["subject"], arguments["brokerGroup"])
    except OperatorError as refusal:
        return refused(str(refusal))
    if to == "sequence" and len(groups) > 1:
        names = ", ".join(group.name for group in groups)
        return refused(f"each broker group counts its own sequences; name one of {names} as brokerGroup")
    return await _plan_move(context, arguments, groups, to)


async def _plan_removal(context: ActionContext, arguments: Arguments) -> Plan:
    """Plan the removal of a consumer group from all brokers that have it, on its subject's route or not; one refusal
    or missing answer refuses all.
    """
    subject, name = key = arguments["subject"], arguments["group"]
    sources = [subject] if is_dead_letter_subject(subject) else [subject, retry_subject(subject, name)]
    asked = [await context.ask_all(context.groups_with_master(), source, name) for source in sources]
    having = {
        broker_group
        for answers, _ in asked
        for broker_group, answer in answers.items()
        if any(row.subject == subject or row.lag or row.consumers for row in answer.groups)  # else an emptied mailbox
    }
    unasked = {broker_group: why for _, failed in asked for broker_group, why in failed.items()}
    route = context.registry.routes.get(real_subject(subject))
    visited = having | set(route.groups if route is not None else ())
    if away := sorted(unasked.keys() - visited - {DATABASE}):
        return refused(*(f"{broker_group}, which may have it too: {unasked[broker_group]}" for broker_group in away))
    stored = await context.database.read(lambda repository: repository.consumer_groups([key]))
    if not (having or unasked or stored):
        return refused(f"no broker has a consumer group {name} of {subject}; Lag names them")
    plan = await _plan_move(
        context, arguments, [context.find_group(broker_group) for broker_group in sorted(visited)], _REMOVED
    )
    rules = _rules_of(context.registry.directory, key)
    return replace(plan, before={**plan.before, **rules}, after={**plan.after, **dict.fromkeys(rules)})


def _rules_of(directory: Directory, key: tuple[str, str]) -> dict[str, Any]:
    """Return the limits of a consumer group, and the rules that switch off its consumers, as JSON."""
    offline = [offline_json(rule) for rule in sorted(directory.offline) if rule[:2] == key]
    limits = [limits_json(limits) for limits in directory.limits if limits.key == key]
    return {name: rows for name, rows in (("offline", offline), ("limits", limits)) if rows}


def _forget(directory: Directory, key: tuple[str, str]) -> tuple[Change, ...]:
    """Return the changes after which the database has nothing of a consumer group."""
    offline = [UnsetOffline(rule) for rule in sorted(directory.offline) if rule[:2] == key]
    limits = [SetLimits(OperatorLimits(*key)) for limits in directory.limits if limits.key == key]
    return ForgetConsumerGroups(*key), *offline, *limits


async def _plan_move(context: ActionContext, arguments: Arguments, groups: list[Group], to: str) -> Plan:
    expected, failed = await _reset(context, groups, arguments, to, dry_run=True)
    return Plan(
        orders=True,
        refusals=tuple(f"{name}: {error}" for name, (error, _) in failed.items()),
        subjects=frozenset({real_subject(arguments["subject"])}),
        groups=frozenset(group.name for group in groups),
        before={name: _place(answer.before) for name, answer in expected.items()},
        after={name: _moved(answer) for name, answer in expected.items()},
        data={
            "result": "success",
            "subject": arguments["subject"],
            "group": arguments["group"],
            "to": to,
            "brokerGroups": {name: _reset_json(answer) for name, answer in expected.items()},
        },
    )


async def _carry_out_move(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    """Carry out a reset or a removal. The audit row is written first, the outcome second."""
    try:
        await context.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"no broker was asked, as the database failed: {error}") from error
    groups = [context.find_group(name) for name in sorted(plan.groups)]
    done, failed = await _reset(context, groups, arguments, plan.data["to"], dry_run=False)
    after = {name: _moved(answer) for name, answer in done.items()}
    result = "done" if not failed else "partly done" if done else "failed"
    removed = plan.data["to"] == _REMOVED and not failed
    rows = _forget(context.registry.directory, (arguments["subject"], arguments["group"])) if removed else ()
    try:
        await context.registry.change(rows, replace(audit, after=after, result=result))
    except QmqError as error:  # the brokers have done it, and the first row records the beginning
        log.warning("end of %s not recorded subject=%s reason=%s", audit.action, arguments["subject"], error)
        if removed:
            raise PartlyDone(
                f"the brokers have removed it, the database keeps its begin: {error}; repeat", plan.data
            ) from None
    data = {**plan.data, "brokerGroups": {name: _reset_json(answer) for name, answer in done.items()}}
    if not failed:
        return data
    shown = {name: error for name, (error, _) in failed.items()}
    text = "; ".join(f"{name}: {error}" for name, error in shown.items())
    if done or any(may_be_done for _, may_be_done in failed.values()):
        names = ", ".join(done) or "none for certain"
        raise PartlyDone(
            f"done on {names}; not, or not for certain, on {text}. Look with Consumers, then repeat: that changes "
            "nothing where it is done already",
            {**data, "result": result, "failed": shown},
        )
    raise OperatorError(text)


async def _reset(
    context: ActionContext, groups: Iterable[Group], arguments: Arguments, to: str, *, dry_run: bool
) -> tuple[dict[str, pb.ResetOffsetAnswer], dict[str, tuple[str, bool]]]:
    """Order or try a reset on the masters of these groups; return the results, and for each failure the reason and
    whether it may have been done.
    """
    subject, consumer_group = arguments["subject"], arguments["group"]
    value = arguments.number("value") if to in _WITH_VALUE else 0
    asked, key = list(groups), (subject, consumer_group)
    rows = await context.database.read(lambda repository: repository.consumer_groups([key]))
    calls = [
        _reset_one(
            context,
            group,
            pb.ResetOffsetRequest(
                subject=subject,
                group=consumer_group,
                to=to,
                value=value,
                dry_run=dry_run,
                begin=pb.GroupBegin(**begin_at(rows[key], group.name)._asdict()) if key in rows else None,
            ),
        )
        for group in asked
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    done, failed = {}, {}
    for group, result in zip(asked, results, strict=True):
        if isinstance(result, QmqError):
            failed[group.name] = (str(result), isinstance(result, NotServed))
        elif isinstance(result, BaseException):
            raise result
        else:
            done[group.name] = result
    return done, failed


async def _reset_one(context: ActionContext, group: Group, request: pb.ResetOffsetRequest) -> pb.ResetOffsetAnswer:
    return await context.brokers.reset_offset(context.master_of(group), request)


def _target(arguments: Arguments) -> str:
    """Return the target: QMQ's code, or our word."""
    to = _QMQ_CODES.get(arguments["code"], "")
    if arguments["to"] and to and arguments["to"] != to:
        raise OperatorError(f"code {arguments['code']} means {to}, and to is {arguments['to']}; give one of them")
    to = arguments["to"] or to
    if not to:
        raise OperatorError(
            "no position: give to=earliest, latest, sequence or time; or QMQ's code, 1 latest, 2 earliest"
        )
    if (to in _WITH_VALUE) != arguments.is_given("value"):
        raise OperatorError(f"to={to} {'needs a value' if to in _WITH_VALUE else 'takes no value'}")
    return to


def groups_of_subject(context: ActionContext, subject: str, only: str) -> list[Group]:
    """Return the broker groups of a subject's route, or only the named one. Raises OperatorError."""
    route = context.registry.routes.get(real_subject(subject))
    if route is None or not route.groups:
        raise OperatorError(f"{subject} has no route, so no consumer group either")
    if only and only not in route.groups:
        raise OperatorError(f"{only} does not serve {subject}; {', '.join(route.groups)} do")
    return [context.find_group(name) for name in route.groups if only in ("", name)]


def _place(position: int, *, skipped: int = 0, repeated: int = 0) -> dict[str, int]:
    """Return a position, and the messages skipped or repeated by moving there."""
    return {"position": position, "skipped": skipped, "repeated": repeated}


def _moved(answer: pb.ResetOffsetAnswer) -> dict[str, int]:
    return _place(answer.after, skipped=answer.skipped, repeated=answer.repeated)


def _reset_json(answer: pb.ResetOffsetAnswer) -> dict[str, int]:
    return {
        "before": answer.before,
        "after": answer.after,
        "skipped": answer.skipped,
        "repeated": answer.repeated,
    }


async def _consumers(context: ActionContext, arguments: Arguments) -> Any:
    answers, unasked = await _answers(context, arguments)
    offline, subject = context.registry.directory.offline, arguments["subject"]
    found = {
        "groups": [_progress_json(name, row, offline) for name, row in _rows(answers)],
        "unasked": unasked,
    }
    if not subject:
        return found
    producers = [
        {"brokerGroup": name, "app": row.app, "peer": row.peer, "messages": row.messages}
        for name, answer in sorted(answers.items())
        for row in answer.producers
    ]
    return found | {"bytes": {name: answer.subject_bytes for name, answer in answers.items()}, "producers": producers}


async def _lag(context: ActionContext, arguments: Arguments) -> Any:
    """Return the lag of each consumer group, summed over broker groups."""
    answers, unasked = await _answers(context, arguments, behind_max=arguments.number("limit"))
    now, lags = wall_ms(), dict[tuple[str, str], dict[str, Any]]()
    for name, row in _rows(answers):
        fresh = {"subject": row.subject, "group": row.group, "messages": 0, "oldest": 0, "deadLetters": 0}
        fresh |= {"brokerGroups": {}, "causes": {}}
        lag = lags.setdefault((row.subject, row.group), fresh)
        lag["messages"] += row.lag
        lag["deadLetters"] += row.dead_letters
        lag["oldest"] = min(filter(None, (lag["oldest"], row.oldest_ms)), default=0)
        lag["brokerGroups"][name] = row.lag
        for cause in row.causes:
            lag["causes"].setdefault(cause, []).append(name)
    for lag in lags.values():
        lag["ageSeconds"] = max(now - lag["oldest"], 0) // 1000 if lag["oldest"] else 0
    return {"lag": sorted(lags.values(), key=lambda lag: (-lag["messages"], -lag["deadLetters"])), "unasked": unasked}


async def _answers(
    context: ActionContext, arguments: Arguments, *, behind_max: int = 0
) -> tuple[dict[str, pb.ConsumersAnswer], dict[str, str]]:
    subject = arguments["subject"]
    if subject:
        groups = groups_of_subject(context, subject, "")
    else:
        groups = context.groups_with_master()
    return await context.ask_all(groups, subject, arguments["group"], behind_max=behind_max)


def _rows(answers: Mapping[str, pb.ConsumersAnswer]) -> list[tuple[str, pb.GroupProgress]]:
    rows = [(name, row) for name, answer in answers.items() for row in answer.groups]
    return sorted(rows, key=lambda pair: (pair[1].subject, pair[1].group, pair[0]))


def _progress_json(name: str, row: pb.GroupProgress, offline: frozenset[Offline]) -> dict[str, Any]:
    return {
        "brokerGroup": name,
        "subject": row.subject,
        "group": row.group,
        "firstSequence": row.first_sequence,
        "nextSequence": row.next_sequence,
        "position": row.position,
        "returned": row.returned,
        "messages": row.lag,
        "oldest": row.oldest_ms,
        "causes": list(row.causes),
        "deadLetters": row.dead_letters,
        "consumers": [
            {
                "consumer": consumer.consumer,
                "connected": consumer.connected,
                "peer": consumer.peer,
                "unacked": consumer.unacked,
                "delivered": consumer.delivered,
                "offline": _is_offline(offline, real_subject(row.subject), row.group, consumer.consumer),
            }
            for consumer in row.consumers
        ],
    }


def _is_offline(rules: frozenset[Offline], subject: str, group: str, consumer: str) -> bool:
    named = Offline(subject, group, consumer)
    return any(all(part in (ALL_SUBJECTS, name) for part, name in zip(rule, named, strict=True)) for rule in rules)


async def _switch(context: ActionContext, arguments: Arguments) -> Plan:
    rule = Offline(arguments["subject"], arguments["consumerGroup"], arguments["clientId"])
    registry = context.registry
    return switch_consumers(registry.directory, registry.routes, rule, offline=arguments["state"] == "offline")


async def _limit_subject(context: ActionContext, arguments: Arguments) -> Plan:
    subject, registry = arguments["subject"], context.registry
    if subject == ALL_SUBJECTS:
        return refused(_ONE_BY_ONE)
    limits = limits_of(registry.directory, (subject, OF_SUBJECT))
    if arguments.is_given("expiresAfterS"):
        limits = limits._replace(expires_after_s=arguments.number("expiresAfterS"))
    if arguments.is_given("expired"):
        limits = limits._replace(expired_die=arguments["expired"] == EXPIRED_DEAD_LETTER)
    if arguments.is_given("messagesMax"):
        limits = limits._replace(messages_max=arguments.number("messagesMax"))
    if arguments.is_given("bytesMax"):
        limits = limits._replace(bytes_max=arguments.number("bytesMax"))
    if arguments.is_given("whenFull"):
        limits = limits._replace(drops_oldest=arguments["whenFull"] == DROP_OLDEST)
    if limits.expired_die and is_dead_letter_subject(subject):
        return refused(f"{subject} has dead letters: expired ones can only be dropped")
    return limit(registry.directory, registry.routes, limits)


async def _limit_group(context: ActionContext, arguments: Arguments) -> Plan:
    registry = context.registry
    if ALL_SUBJECTS in (arguments["subject"], arguments["group"]):
        return refused(_ONE_BY_ONE)
    limits = limits_of(registry.directory, (arguments["subject"], arguments["group"]))
    if arguments.is_given("perSecond"):
        limits = limits._replace(per_second=arguments.number("perSecond"))
    if arguments.is_given("deadLettersTo"):
        to = arguments["deadLettersTo"]
        limits = limits._replace(dead_letters_to="" if to == DEAD_LETTER else to)
    return limit(registry.directory, registry.routes, limits)


async def _list_limits(context: ActionContext, arguments: Arguments) -> Any:
    rows = sorted(context.registry.directory.limits)
    return [limits_json(row) for row in rows if arguments["subject"] in ("", row.subject)]


async def _list_offline(context: ActionContext, arguments: Arguments) -> Any:
    rules = sorted(context.registry.directory.offline)
    return [offline_json(rule) for rule in rules if arguments["subject"] in ("", rule.subject)]


async def _clients(context: ActionContext, arguments: Arguments) -> Any:
    clients, unasked = await context.clients.connected(
        subject=arguments["subject"], app=arguments["app"], limit=arguments.number("limit"), here=arguments.flag("here")
    )
    return {"clients": clients, "unasked": list(unasked)}


HANDLERS = {
    "ResetOffset": Handler(plan=_plan_reset, carry_out=_carry_out_move),
    "RemoveConsumerGroup": Handler(plan=_plan_removal, carry_out=_carry_out_move),
    "Consumers": Handler(look=_consumers),
    "Lag": Handler(look=_lag),
    "OnOffline": Handler(plan=_switch),
    "ListOffline": Handler(look=_list_offline),
    "SetLimits": Handler(plan=_limit_subject),
    "LimitGroup": Handler(plan=_limit_group),
    "ListLimits": Handler(look=_list_limits),
    "Clients": Handler(look=_clients),
}
