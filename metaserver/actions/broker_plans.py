"""Core. Changes of who is what in a broker group, as plans. What may be done is decided in `metaserver.roles.rules`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from qmq.errors import OperatorError
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.route_plans import NAMED_MAX, take_out_of_routes
from qmq.metaserver.actions.shapes import broker_json, parts_json
from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.old_database import StateOf
from qmq.metaserver.model import DELAY, Broker, BrokerKey, Directory, Group, Routes
from qmq.metaserver.roles import rules
from qmq.metaserver.roles.rules import MayBeUp, RoleChange
from qmq.metaserver.storage.changes import AcceptLoss, Change, RemoveGroup, SetGroupState, SetRoles, StoreAddresses
from qmq.replication.points import Point


def add_broker(directory: Directory, broker: Broker, *, reported: int = 0) -> Plan:
    """AddBroker.

    Args:
        reported: the newest term that any broker of the group reported, here and below.
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
    """ReplaceBroker: one call of QMQ's two, or both as one step. It answers with the row before.

    Args:
        remembered: the newest point up to which anybody knows that the group acknowledged messages.
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
    """Say, in the preview and in the audit trail, what is given up."""
    up_to = f"up to {remembered}" if remembered else "at any time"
    lost = f"what {change.group} acknowledged {up_to}, and the copy that goes on does not have"
    accepted = AcceptLoss(change.group, change.new_term)
    after = {**plan.after, "acceptedLoss": lost}
    objection = f"lost for good: {lost}. ReplicaStatus and `qmq inspect` say what each copy has"
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
    """Take a stopped broker out of its group; with the last one, the group goes, too.

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
        named = ", ".join(subjects[:NAMED_MAX]) + (", …" if len(subjects) > NAMED_MAX else "")
        objections.append(
            f"{len(subjects):,} subject{'s use' if len(subjects) > 1 else ' uses'} {change.group} ({named}), and what "
            "is not consumed there cannot be consumed any more; DrainGroup and RemoveSubjectBrokerGroup first"
        )
    group, after = change.before, None
    if group and group.kind == DELAY and any(member.incarnation for member in group.brokers):
        after = {"neverSent": f"what pends at {group.name}: DelayStats said how much, while it ran"}
        if not group.draining:
            objections.append(
                f"delayed messages that {change.group} still has would never be sent; start it again, DrainGroup, and "
                "wait until DelayStats says that nothing pends there"
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
    """SwapRoles, once both logs are proven equal."""
    return _role_plan(rules.swap_roles(group, term=term, to=to), data=None)


def fail_over(change: RoleChange) -> Plan:
    """Failover, with the slave that has most by now."""
    return _role_plan(change, data=None)


def set_copies(group: Group, min_copies: int | None, sync_mode: str, *, reported: int = 0) -> Plan:
    """SetCopies.

    Args:
        min_copies, sync_mode: None and an empty text leave it as it is.
    """
    if min_copies is None and not sync_mode:
        return refused("say what is to be set: --minCopies, --syncMode, or both")
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
    group: Group, key: BrokerKey, reported: int, state_of: StateOf, *, forced: bool, given: int = 0
) -> Plan:
    """AdoptRoles: choose the master of a group whose row is older than its brokers, which do not agree."""
    try:
        change = old_database.adopt(group, key, reported, state_of, given=given)
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
