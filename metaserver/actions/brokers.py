"""Shell. Actions on brokers: membership, roles, copies, fills, lists. `metaserver.roles.rules` holds the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from qmq.errors import OperatorError, QmqError
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.causes import call_of
from qmq.metaserver.actions.context import ASKED_AT_ONCE, ActionContext, Handler, together
from qmq.metaserver.actions.doctor import copies_without_place
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.routes import take_out_of_routes
from qmq.metaserver.actions.shapes import broker_json, group_json, parts_json, state_json
from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.old_database import StateOf
from qmq.metaserver.model import (
    DELAY,
    AuditRow,
    Broker,
    BrokerKey,
    Directory,
    Group,
    Points,
    ReplicaState,
    Routes,
    part,
)
from qmq.metaserver.roles import rules
from qmq.metaserver.roles.rules import MayBeUp, RoleChange
from qmq.metaserver.storage.changes import (
    AcceptLoss,
    Change,
    OrderFill,
    RemoveGroup,
    SetGroupState,
    SetRoles,
    StoreAddresses,
)
from qmq.metaserver.storage.database import DatabaseAway
from qmq.plain import first_of
from qmq.replication.assignment import FillOrder
from qmq.replication.identity import Point
from qmq.replication.readonly import Reason
from qmq.types import Role


def slave_at(group: Group, host: str) -> Broker:
    """Return the slave with this hostname, or hostname:port. Raises OperatorError."""
    named = [slave for slave in group.slaves if host in (slave.hostname, str(slave.key))]
    if len(named) == 1:
        return named[0]
    slaves = ", ".join(str(slave.key) for slave in named or group.slaves) or "none"
    if named:
        raise OperatorError(f"several slaves of {group.name} are at {host}: name one of {slaves}")
    raise OperatorError(f"{host} is no slave of {group.name}; its slaves are {slaves}")


def sync_replica(slave: Broker, report: ReplicaState, *, counts: bool) -> Plan:
    """Plan SyncReplica: allow the slave's fill."""
    if not _is_being_filled(report, counts=counts):
        return refused(f"{slave.key} needs no fill: its copy is complete and catches up automatically")
    return _ordered(slave, FillOrder(report.fill_id, is_allowed=True))


def cancel_sync(slave: Broker, report: ReplicaState, *, counts: bool) -> Plan:
    """Plan CancelSync: stop the slave's fill. A slave with a counting copy is not being filled."""
    if counts:
        return refused(f"{slave.key} is in sync, so there is no fill to stop")
    if not _is_being_filled(report, counts=counts):
        return refused(f"{slave.key} is not being filled: its copy is complete and catches up automatically")
    return _ordered(slave, FillOrder(report.fill_id, is_allowed=False))


def _is_being_filled(report: ReplicaState, *, counts: bool) -> bool:
    """Return whether the slave is being filled, or waits for it."""
    return not counts and bool(report.fill_id) and (report.incomplete or Reason.UNFILLED in report.readonly_reasons)


def _ordered(slave: Broker, order: FillOrder) -> Plan:
    is_current = (slave.fill_id, slave.fill_allowed) == (order.fill_id, order.is_allowed)
    data = {**broker_json(slave), "filling": "allowed" if order.is_allowed else "stopped"}
    return Plan(
        () if is_current else (OrderFill(slave.key, order),),
        groups=frozenset({slave.group}),
        before={str(slave.key): _order_text(slave, order.fill_id)},
        after={str(slave.key): data["filling"]},
        data=data,
    )


def _order_text(slave: Broker, fill_id: str) -> str:
    if slave.fill_id != fill_id:
        return "by the group's mode"
    return "allowed" if slave.fill_allowed else "stopped"


def add_broker(directory: Directory, broker: Broker, *, reported: int = 0) -> Plan:
    """Plan AddBroker.

    Args:
        reported: newest term that any broker of the group reported, to any metaserver.
    """
    try:
        change = replace(rules.add_broker(directory, broker), above=reported)
    except OperatorError as refusal:
        return refused(str(refusal))
    return _role_plan(change, data=broker_json(broker))


def replace_broker(
    directory: Directory,
    broker: Broker,
    may_be_up: MayBeUp,
    *,
    swap: bool = False,
    accept_loss: bool = False,
    lacking: str = "",
    master_lacking: str = "",
    remembered: Point | None = None,
    reported: int = 0,
) -> Plan:
    """Plan ReplaceBroker: one of QMQ's two calls, or both in one step. The answer is the row before.

    Args:
        remembered: newest point up to which messages of the group are known to be acknowledged.
        accept_loss, lacking, master_lacking: as in `rules.replace_broker`.
    """
    decide = rules.swap_stopped if swap else partial(rules.replace_broker, master_lacking=master_lacking)
    try:
        change, before = decide(directory, broker, may_be_up, accept_loss=accept_loss, lacking=lacking)
    except OperatorError as refusal:
        return refused(str(refusal))
    data = broker_json(before)
    if change:
        change = replace(change, above=reported)
        plan = _role_plan(change, data=data)
        return _with_loss(plan, change, remembered) if accept_loss else plan
    moved = replace(before, ip=broker.ip, sync_port=broker.sync_port)
    return Plan(
        (StoreAddresses(broker),) if moved != before else (),
        groups=frozenset({broker.group}),
        whole_groups=True,
        before=data,
        after=broker_json(moved),
        data=data,
    )


def _with_loss(plan: Plan, change: RoleChange, remembered: Point | None) -> Plan:
    """Name the accepted loss in the plan and in the audit trail."""
    up_to = f"up to {remembered}" if remembered else "at any time"
    lost = f"messages that {change.group} acknowledged {up_to} and its remaining copy lacks"
    accepted = AcceptLoss(change.group, change.new_term)
    after = {**plan.after, "acceptedLoss": lost}
    objection = f"lost for good: {lost}. ReplicaStatus and `qmq inspect` show the log of each copy"
    return replace(plan, changes=(*plan.changes, accepted), after=after, objections=(objection,), forced=True)


def remove_broker(
    directory: Directory,
    routes: Routes,
    key: BrokerKey,
    may_be_up: MayBeUp,
    *,
    forced: bool,
    reported: int = 0,
    master_lacking: str = "",
) -> Plan:
    """Plan RemoveBroker: take a stopped broker out of its group; removing its last broker removes the group.

    Args:
        master_lacking: as in `rules.replace_broker`.
    """
    broker = directory.find(key)
    if broker is None:
        return refused(f"{key} is no broker; ListBrokers names them")
    try:
        change = replace(rules.remove_broker(directory, broker, may_be_up), above=reported)
    except OperatorError as refusal:
        return refused(str(refusal))
    data = broker_json(broker)
    if change.brokers:
        objections = _last_copy(change, broker, may_be_up, master_lacking)
        return replace(_role_plan(change, data=data), objections=objections, forced=forced)
    return _remove_last(directory, routes, change, data, forced=forced)


def _last_copy(change: RoleChange, slave: Broker, may_be_up: MayBeUp, master_lacking: str) -> tuple[str, ...]:
    try:
        if change.before and slave in change.before.slaves:
            rules.require_not_the_last(change.before, slave, may_be_up, master_lacking, anyway="force")
    except OperatorError as objection:
        return (str(objection),)
    return ()


def _remove_last(directory: Directory, routes: Routes, change: RoleChange, data: object, *, forced: bool) -> Plan:
    moves, subjects = take_out_of_routes(directory, routes, change.group)
    objections = []
    if subjects:
        objections.append(
            f"{len(subjects):,} subject{'s use' if len(subjects) > 1 else ' uses'} {change.group} "
            f"({first_of(subjects)}); its unconsumed messages cannot be consumed any more. Run DrainGroup and "
            "RemoveSubjectBrokerGroup first"
        )
    group, after = change.before, None
    if group and group.kind == DELAY and any(member.incarnation for member in group.brokers):
        after = {"neverSent": f"messages that pend at {group.name}: DelayStats counted them while it ran"}
        if not group.draining:
            objections.append(
                f"delayed messages that {change.group} still has would never be sent; start it again, DrainGroup, and "
                "wait until DelayStats counts nothing there"
            )
    changes: tuple[Change, ...] = (*moves, SetRoles(change), RemoveGroup(change.group, change.new_term))
    return Plan(
        changes,
        objections=tuple(objections),
        subjects=frozenset(subjects),
        groups=frozenset({change.group}),
        before={"broker": data, "routes": subjects},
        after=after,
        data=data,
        forced=forced,
    )


def swap_roles(group: Group, *, term: int, to: BrokerKey | None = None) -> Plan:
    """Plan SwapRoles, after both logs proved equal."""
    return _role_plan(rules.swap_roles(group, term=term, to=to), data=None)


def fail_over(change: RoleChange) -> Plan:
    """Plan Failover to the slave with most."""
    return _role_plan(change, data=None)


def set_copies(group: Group, min_copies: int | None, sync_mode: str, *, reported: int = 0) -> Plan:
    """Plan SetCopies.

    Args:
        min_copies, sync_mode: None and an empty text change nothing.
    """
    if min_copies is None and not sync_mode:
        return refused("nothing to set: give --minCopies, --syncMode, or both")
    try:
        change = rules.set_copies(group, min_copies) if min_copies is not None else None
    except OperatorError as refusal:
        return refused(str(refusal))
    mode = sync_mode or group.sync_mode
    copies = {"brokerGroup": group.name, "copies": len(group.brokers), "minCopies": min_copies or group.min_copies}
    data = {**copies, "syncMode": mode}
    if change is None:
        plan = Plan((), groups=frozenset({group.name}), before=copies, after=copies, data=data)
    else:
        plan = _role_plan(replace(change, above=reported), data=data)
    of_mode = (SetGroupState(group.name, sync_mode=mode),) if mode != group.sync_mode else ()
    return replace(
        plan,
        changes=(*plan.changes, *of_mode),
        before={**plan.before, "syncMode": group.sync_mode},
        after={**plan.after, "syncMode": mode},
    )


def adopt_roles(
    group: Group, key: BrokerKey, reported: int, state_of: StateOf, *, forced: bool, floor: int = 0
) -> Plan:
    """Plan AdoptRoles: choose the master of a group when its row is older than its brokers, which disagree."""
    try:
        change = old_database.adopt(group, key, reported, state_of, floor=floor)
    except OperatorError as refusal:
        return refused(str(refusal))
    assert change.master, "it was named"
    data = {"brokerGroup": group.name, "term": change.new_term, "master": broker_json(change.master)}
    against = old_database.objection(change.master, reported, state_of)
    return replace(_role_plan(change, data=data), objections=(against,) if against else (), forced=forced)


def _role_plan(change: RoleChange, *, data: object) -> Plan:
    before = change.before
    return Plan(
        (SetRoles(change),),
        groups=frozenset({change.group}),
        whole_groups=True,
        before=parts_json(before) if before else None,
        after=parts_json(change),
        data=data,
    )


_BROKER_ARGUMENTS = ("brokerGroup", "role", "hostname", "ip", "servePort", "syncPort")


async def _add_broker(context: ActionContext, arguments: Arguments) -> Plan:
    registry, broker = context.registry, _broker(arguments)
    plan = add_broker(registry.directory, broker, reported=registry.terms.floor(broker.group))
    if broker.role != Role.MASTER or plan.reasons:
        return plan
    objection = better_copy(broker, await copies_without_place(context, broker.group))
    return refused(objection) if objection else plan


def better_copy(master: Broker, copies: Sequence[Mapping[str, Any]]) -> str:
    """Return why another broker has to be the master, as it has more of the group's log and no place.

    A database that lost the group's row has no acknowledged points either: the logs alone show the best copy.

    Args:
        copies: as `copies_without_place` returns them.

    Returns:
        The reason and the remedy; empty: no copy is better, as far as is known.
    """
    ends = {f"{facts['hostname']}:{facts['servePort']}": facts.get("reach", []) for facts in copies}
    own = ends.get(str(master.key), [])
    for facts, (name, end) in zip(copies, ends.items(), strict=True):
        if not end and name != str(master.key):
            return f"{name} has a log of {master.group} and does not answer: start it, or stop it and wait a minute"
        if end > own:
            first = call_of("AddBroker", part(Role.MASTER, facts["kind"]), facts)
            found = f"{name} has more of the log of {master.group} than {master.key}"
            return f"{found}: {first}; or stop it and wait a minute"
    return ""


async def _replace_broker(context: ActionContext, arguments: Arguments) -> Plan:
    async def plan() -> Plan:
        group = context.registry.directory.groups.get(arguments["brokerGroup"])
        points = (
            await context.registry.points_of(arguments["brokerGroup"]) if arguments.flag("acceptLoss") else Points()
        )
        return replace_broker(
            context.registry.directory,
            _broker(arguments),
            context.registry.may_be_up,
            swap=arguments.flag("swap"),
            accept_loss=arguments.flag("acceptLoss"),
            lacking=await _lacking(context, group, arguments),
            master_lacking=await _master_lacking(context, group),
            remembered=max(points.by_incarnation.values(), default=None),
            reported=context.registry.terms.floor(arguments["brokerGroup"]),
        )

    return await _plan_with_check(context, context.registry.directory.groups.get(arguments["brokerGroup"]), plan)


async def _lacking(context: ActionContext, group: Group | None, arguments: Arguments) -> str:
    """Return why the named slave's copy is incomplete, in a group with one slave that one's; empty: no report of it."""
    key = BrokerKey(arguments["hostname"], arguments.number("servePort"))
    slaves = group.slaves if group else ()
    found = next((slave for slave in slaves if slave.key == key), next(iter(slaves), None))
    return await context.registry.lacking(found) if found else ""


async def _master_lacking(context: ActionContext, group: Group | None) -> str:
    """Return why the master's copy is incomplete, by its last heartbeat; empty: no report of it."""
    return await context.registry.lacking(group.master) if group and group.master else ""


async def _set_copies(context: ActionContext, arguments: Arguments) -> Plan:
    group = context.find_group(arguments["brokerGroup"])
    min_copies = arguments.number("minCopies") if arguments["minCopies"] else None
    reported = context.registry.terms.floor(group.name)
    return set_copies(group, min_copies, arguments["syncMode"], reported=reported)


async def _sync_replica(context: ActionContext, arguments: Arguments) -> Plan:
    return await _plan_filling(context, arguments, sync_replica)


async def _cancel_sync(context: ActionContext, arguments: Arguments) -> Plan:
    return await _plan_filling(context, arguments, cancel_sync)


async def _plan_filling(context: ActionContext, arguments: Arguments, plan: Callable[..., Plan]) -> Plan:
    """Plan SyncReplica or CancelSync, from the fill that the slave names and from the master, which reports whether the
    copy counts.
    """
    group = context.find_group(arguments["brokerGroup"])
    try:
        slave = slave_at(group, arguments["host"])
        report = await context.brokers.replica_status(slave)
    except OperatorError as refusal:
        return refused(str(refusal))
    except QmqError as error:
        return refused(
            f"{arguments['host']} does not answer, so its missing frames are unknown: {error}. Start it first"
        )
    master = context.registry.state(group.master) if group.master else None
    return plan(slave, report, counts=master is not None and report.incarnation in master.in_step)


async def _remove_broker(context: ActionContext, arguments: Arguments) -> Plan:
    key = BrokerKey(arguments["hostname"], arguments.number("servePort"))

    async def plan() -> Plan:
        registry = context.registry
        directory = registry.directory
        running = {broker.key for broker in directory.brokers() if registry.may_be_up(broker)}
        member = directory.find(key)
        reported = registry.terms.floor(member.group) if member else 0
        lacking = await _master_lacking(context, directory.groups[member.group]) if member else ""
        return await context.on_all_routes(
            lambda routes: remove_broker(
                directory,
                routes,
                key,
                lambda broker: broker.key in running,
                forced=arguments.flag("force"),
                reported=reported,
                master_lacking=lacking,
            )
        )

    known = context.registry.directory.find(key)
    return await _plan_with_check(context, context.registry.directory.groups.get(known.group) if known else None, plan)


async def _plan_with_check(context: ActionContext, group: Group | None, plan: Callable[[], Awaitable[Plan]]) -> Plan:
    """Return the plan; before a refusal, check the brokers: one that counts as running may have just stopped."""
    made = await plan()
    if made.reasons and group is not None and await context.notice_stopped(group.brokers):
        return await plan()
    return made


async def _plan_swap(context: ActionContext, arguments: Arguments) -> Plan:
    """Plan SwapRoles. Only the attempt shows whether the slave catches up in time and, if it sends heartbeats to
    another metaserver, whether its clock is right.
    """
    try:
        group, slave = context.swaps.ready(arguments["brokerGroup"], arguments["to"])
    except OperatorError as refusal:
        return refused(str(refusal))
    return swap_roles(group, term=group.term, to=slave.key)


async def _swap(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    swapped = await context.swaps.swap(arguments["brokerGroup"], audit, to=arguments["to"])
    group = swapped.group
    old_master = next((slave for slave in group.slaves if slave.key == swapped.old_master), None)
    return {
        "brokerGroup": group.name,
        "term": group.term,
        "master": group.master and broker_json(group.master, up=context.registry.is_up(group.master)),
        "slave": old_master and broker_json(old_master, up=context.registry.is_up(old_master)),
        "logEnd": swapped.at_end.log_end,
        "chain": f"{swapped.at_end.chain:016x}",
        "writable": swapped.writable,
        "durationMs": swapped.duration_ms,
    }


async def _plan_failover(context: ActionContext, arguments: Arguments) -> Plan:
    """Plan Failover. The slave is chosen after the slaves have promised: the one with most by then."""

    async def plan() -> Plan:
        try:
            change = await context.failovers.plan(arguments["brokerGroup"], master_gone=arguments.flag("masterGone"))
        except OperatorError as refusal:
            return refused(str(refusal))
        return fail_over(change)

    return await _plan_with_check(context, context.registry.directory.groups.get(arguments["brokerGroup"]), plan)


async def _fail_over(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    facts, group = await context.failovers.order(
        arguments["brokerGroup"], audit, master_gone=arguments.flag("masterGone")
    )
    return {
        "brokerGroup": group.name,
        "term": group.term,
        "master": group.master and broker_json(group.master, up=context.registry.is_up(group.master)),
        "logEnd": facts.best_state.flushed_end,
        "acknowledged": facts.newest_point.end if facts.newest_point else 0,
        "promised": [str(slave.key) for slave in facts.eligible],
        "writable": context.registry.is_writable(group),
    }


async def _adopt_roles(context: ActionContext, arguments: Arguments) -> Plan:
    registry, group = context.registry, context.find_group(arguments["brokerGroup"])
    key = BrokerKey(arguments["hostname"], arguments.number("servePort"))
    reported, floor = registry.terms.reported(group.name), registry.terms.floor(group.name)
    return adopt_roles(group, key, reported, registry.own_state, forced=arguments.flag("force"), floor=floor)


async def _list_brokers(context: ActionContext, arguments: Arguments) -> Any:
    wanted = arguments["brokerGroup"]
    brokers = sorted(context.registry.directory.brokers(), key=lambda broker: (broker.group, broker.role))
    return [
        broker_json(broker, up=context.registry.is_up(broker)) for broker in brokers if wanted in ("", broker.group)
    ]


async def _list_broker_groups(context: ActionContext, arguments: Arguments) -> Any:
    groups, wanted = context.registry.directory.groups, arguments["brokerGroup"]
    listed = [groups[name] for name in sorted(groups) if wanted in ("", name)]
    states = await _current_states(context, [broker for group in listed for broker in group.brokers])
    return [_describe_group(context, group, states) for group in listed]


async def _current_states(context: ActionContext, brokers: Sequence[Broker]) -> dict[BrokerKey, ReplicaState | None]:
    """Return the states of brokers. If another metaserver has the heartbeats of a copy, all copies of its group are
    asked, if they are few: beside a heartbeat of a second ago, a copy would seem to be behind.
    """
    states = {broker.key: context.registry.state(broker) for broker in brokers}
    up = [(broker, state) for broker in brokers if (state := states[broker.key]) is not None]
    elsewhere = {broker.group for broker, state in up if not state.has_offsets}
    asked = [broker for broker, _ in up if broker.group in elsewhere]
    if len(asked) <= ASKED_AT_ONCE:
        for broker, answer in zip(asked, await together([_asked(context, broker) for broker in asked]), strict=True):
            states[broker.key] = answer or states[broker.key]
    return states


async def _asked(context: ActionContext, broker: Broker) -> ReplicaState | None:
    try:
        return await context.brokers.replica_status(broker)
    except QmqError:
        return None


def _describe_group(
    context: ActionContext, group: Group, states: Mapping[BrokerKey, ReplicaState | None]
) -> dict[str, Any]:
    registry = context.registry
    return group_json(
        group,
        state=states[group.master.key] if group.master else None,
        writable=registry.is_writable(group),
        readonly_subjects=registry.directory.readonly_subjects(group.name),
        copies=[(broker, registry.is_up(broker), states[broker.key]) for broker in group.brokers],
    )


async def _replica_status(context: ActionContext, arguments: Arguments) -> Any:
    if arguments["brokerGroup"]:
        groups = [context.find_group(arguments["brokerGroup"])]
    else:
        groups = [group for _, group in sorted(context.registry.directory.groups.items())]
    return await together([_compare(context, group) for group in groups])


async def _compare(context: ActionContext, group: Group) -> dict[str, Any]:
    acknowledged = await _acknowledged(context, group)  # first, so that no copy is behind it merely by timing
    replicas = await asyncio.gather(*(_replica(context, broker) for broker in group.brokers))
    answering = [replica for replica in replicas if replica["reachable"]]
    ends, chains = [replica["logEnd"] for replica in answering], {replica["chain"] for replica in answering}
    have_all_answered = len(answering) == max(len(group.brokers), 2)
    return {
        "brokerGroup": group.name,
        "term": group.term,
        "writable": context.registry.is_writable(group),
        "readonlySubjects": context.registry.directory.readonly_subjects(group.name),
        "minCopies": group.min_copies,
        "syncMode": group.sync_mode,
        # Chains of different ends cannot be compared.
        "equal": len(chains) == 1 if have_all_answered and len(set(ends)) == 1 else None,
        "lagBytes": max(ends[0] - min(ends[1:]), 0) if group.master and have_all_answered else None,
        "acknowledged": acknowledged,
        "replicas": replicas,
    }


async def _acknowledged(context: ActionContext, group: Group) -> int | None:
    """Return the remembered acknowledged point, or None while the database is away."""
    try:
        points = await context.registry.points_of(group.name, must_be_read=True)
    except DatabaseAway:
        return None
    return max((point.end for point in points.by_incarnation.values()), default=0)


async def _replica(context: ActionContext, broker: Broker) -> dict[str, Any]:
    """Return the broker's current state; without an answer, that of its last heartbeat, or nulls."""
    state, reachable, error = context.registry.state(broker), False, ""
    if not broker.control_port:
        error = "it never registered"
    else:
        try:
            state, reachable = await context.brokers.replica_status(broker), True
        except QmqError as failed:
            error = str(failed)
    return {
        "role": broker.part.name,
        "hostname": broker.hostname,
        "ip": broker.ip,
        "servePort": broker.serve_port,
        "up": context.registry.is_up(broker),
        "reachable": reachable,
        "otherDirectory": reachable and state is not None and state.incarnation not in ("", broker.incarnation),
        "error": error,
        **state_json(state),
    }


def _broker(arguments: Arguments) -> Broker:
    return rules.parse_broker(*(arguments[name] for name in _BROKER_ARGUMENTS))


HANDLERS = {
    "AddBroker": Handler(plan=_add_broker),
    "ReplaceBroker": Handler(plan=_replace_broker),
    "RemoveBroker": Handler(plan=_remove_broker),
    "SetCopies": Handler(plan=_set_copies),
    "SyncReplica": Handler(plan=_sync_replica),
    "CancelSync": Handler(plan=_cancel_sync),
    "SwapRoles": Handler(plan=_plan_swap, carry_out=_swap),
    "Failover": Handler(plan=_plan_failover, carry_out=_fail_over),
    "AdoptRoles": Handler(plan=_adopt_roles),
    "ListBrokers": Handler(look=_list_brokers),
    "ListBrokerGroups": Handler(look=_list_broker_groups),
    "ReplicaStatus": Handler(look=_replica_status),
}
