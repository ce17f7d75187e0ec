"""Shell. Actions on brokers: AddBroker, ReplaceBroker, RemoveBroker, SwapRoles and their lists."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from qmq.errors import OperatorError, QmqError
from qmq.metaserver.actions import broker_plans, fill_plans
from qmq.metaserver.actions.desk import Desk, together
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.shapes import broker_json, group_json, state_json
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import AuditRow, Broker, BrokerKey, Group, Points
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.database import DatabaseAway
from qmq.replication.readonly import Reason

_BROKER_WORDS = ("brokerGroup", "role", "hostname", "ip", "servePort", "syncPort")


async def _add_broker(desk: Desk, words: Words) -> Plan:
    registry, broker = desk.registry, _broker(words)
    return broker_plans.add_broker(registry.directory, broker, reported=registry.terms.floor(broker.group))


async def _replace_broker(desk: Desk, words: Words) -> Plan:
    async def plan() -> Plan:
        group = desk.registry.directory.groups.get(words["brokerGroup"])
        points = await desk.registry.points_of(words["brokerGroup"]) if words.flag("acceptLoss") else Points()
        return broker_plans.replace_broker(
            desk.registry.directory,
            _broker(words),
            desk.registry.may_be_up,
            swap=words.flag("swap"),
            accept_loss=words.flag("acceptLoss"),
            lacking=await _lacking(desk, group, words),
            master_lacking=await _master_lacking(desk, group),
            remembered=max(points.by_incarnation.values(), default=None),
            reported=desk.registry.terms.floor(words["brokerGroup"]),
        )

    return await _asked_first(desk, desk.registry.directory.groups.get(words["brokerGroup"]), plan)


async def _lacking(desk: Desk, group: Group | None, words: Words) -> str:
    """What the slave lacks that the call names; of a group with one slave, that one."""
    key = BrokerKey(words["hostname"], words.number("servePort"))
    slaves = group.slaves if group else ()
    found = next((slave for slave in slaves if slave.key == key), next(iter(slaves), None))
    return await desk.registry.lacking(found) if found else ""


async def _master_lacking(desk: Desk, group: Group | None) -> str:
    """What the master lacks: by its last words, or as its log is damaged now, which only a slave mends."""
    if group is None or group.master is None:
        return ""
    said = desk.registry.own_state(group.master)
    if said is not None and Reason.CORRUPT in said.readonly_reasons:
        return f"the log of {group.master.key} is damaged, and is mended from another copy"
    return await desk.registry.lacking(group.master)


async def _set_copies(desk: Desk, words: Words) -> Plan:
    group = desk.find_group(words["brokerGroup"])
    min_copies = words.number("minCopies") if words["minCopies"] else None
    reported = desk.registry.terms.floor(group.name)
    return broker_plans.set_copies(group, min_copies, words["syncMode"], reported=reported)


async def _sync_replica(desk: Desk, words: Words) -> Plan:
    return await _plan_filling(desk, words, fill_plans.sync_replica)


async def _cancel_sync(desk: Desk, words: Words) -> Plan:
    return await _plan_filling(desk, words, fill_plans.cancel_sync)


async def _plan_filling(desk: Desk, words: Words, plan: Callable[..., Plan]) -> Plan:
    """The slave itself says which filling is meant; its master, whether its copy counts."""
    group = desk.find_group(words["brokerGroup"])
    try:
        slave = fill_plans.slave_at(group, words["host"])
        said = await desk.brokers.replica_status(slave)
    except OperatorError as refusal:
        return refused(str(refusal))
    except QmqError as error:
        return refused(f"{words['host']} does not answer, so what it lacks is not known: {error}. Start it first")
    master = desk.registry.state(group.master) if group.master else None
    return plan(slave, said, counts=master is not None and said.incarnation in master.in_step)


async def _remove_broker(desk: Desk, words: Words) -> Plan:
    key = BrokerKey(words["hostname"], words.number("servePort"))

    async def plan() -> Plan:
        registry = desk.registry
        directory = registry.directory
        running = {broker.key for broker in directory.brokers() if registry.may_be_up(broker)}
        member = directory.find(key)
        reported = registry.terms.floor(member.group) if member else 0
        lacking = await _master_lacking(desk, directory.groups[member.group]) if member else ""
        return await desk.on_all_routes(
            lambda routes: broker_plans.remove_broker(
                directory,
                routes,
                key,
                lambda broker: broker.key in running,
                forced=words.flag("force"),
                reported=reported,
                master_lacking=lacking,
            )
        )

    known = desk.registry.directory.find(key)
    return await _asked_first(desk, desk.registry.directory.groups.get(known.group) if known else None, plan)


async def _asked_first(desk: Desk, group: Group | None, plan: Callable[[], Awaitable[Plan]]) -> Plan:
    """Plan; but before a refusal, ask the brokers: one that counts as running may have stopped this moment."""
    made = await plan()
    if made.reasons and group is not None and await desk.notice_stopped(group.brokers):
        return await plan()
    return made


async def _plan_swap(desk: Desk, words: Words) -> Plan:
    """What SwapRoles would do. Whether the slave catches up in time shows only when it is tried, and, if it beats at
    another metaserver, whether its clock is right."""
    try:
        group, slave = desk.swaps.ready(words["brokerGroup"], words["to"])
    except OperatorError as refusal:
        return refused(str(refusal))
    return broker_plans.swap_roles(group, term=group.term, to=slave.key)


async def _swap(desk: Desk, words: Words, plan: Plan, audit: AuditRow) -> Any:
    swapped = await desk.swaps.swap(words["brokerGroup"], audit, to=words["to"])
    group = swapped.group
    old_master = next((slave for slave in group.slaves if slave.key == swapped.old_master), None)
    return {
        "brokerGroup": group.name,
        "term": group.term,
        "master": group.master and broker_json(group.master, up=desk.registry.is_up(group.master)),
        "slave": old_master and broker_json(old_master, up=desk.registry.is_up(old_master)),
        "logEnd": swapped.at_end.log_end,
        "chain": f"{swapped.at_end.chain:016x}",
        "writable": swapped.writable,
        "durationMs": swapped.duration_ms,
    }


async def _plan_failover(desk: Desk, words: Words) -> Plan:
    """Which slave is chosen shows when they promise: one that has more by then."""

    async def plan() -> Plan:
        try:
            change = await desk.failovers.plan(words["brokerGroup"], master_gone=words.flag("masterGone"))
        except OperatorError as refusal:
            return refused(str(refusal))
        return broker_plans.fail_over(change)

    return await _asked_first(desk, desk.registry.directory.groups.get(words["brokerGroup"]), plan)


async def _fail_over(desk: Desk, words: Words, plan: Plan, audit: AuditRow) -> Any:
    facts, group = await desk.failovers.order(words["brokerGroup"], audit, master_gone=words.flag("masterGone"))
    return {
        "brokerGroup": group.name,
        "term": group.term,
        "master": group.master and broker_json(group.master, up=desk.registry.is_up(group.master)),
        "logEnd": facts.best_said.flushed_end,
        "acknowledged": facts.newest_point.end if facts.newest_point else 0,
        "promised": [str(slave.key) for slave in facts.eligible],
        "writable": desk.registry.is_writable(group),
    }


async def _adopt_roles(desk: Desk, words: Words) -> Plan:
    registry, group = desk.registry, desk.find_group(words["brokerGroup"])
    key = BrokerKey(words["hostname"], words.number("servePort"))
    reported, given = registry.terms.newest(group.name), registry.terms.floor(group.name)
    return broker_plans.adopt_roles(group, key, reported, registry.own_state, forced=words.flag("force"), given=given)


async def _list_brokers(desk: Desk, words: Words) -> Any:
    wanted = words["brokerGroup"]
    brokers = sorted(desk.registry.directory.brokers(), key=lambda broker: (broker.group, broker.role))
    return [broker_json(broker, up=desk.registry.is_up(broker)) for broker in brokers if wanted in ("", broker.group)]


async def _list_broker_groups(desk: Desk, words: Words) -> Any:
    groups, wanted = desk.registry.directory.groups, words["brokerGroup"]
    return [describe_group(desk, groups[name]) for name in sorted(groups) if wanted in ("", name)]


def describe_group(desk: Desk, group: Group) -> dict[str, Any]:
    registry = desk.registry
    return group_json(
        group,
        state=registry.state(group.master) if group.master else None,
        writable=registry.is_writable(group),
        readonly_subjects=registry.directory.readonly_subjects(group.name),
        copies=[(broker, registry.is_up(broker), registry.state(broker)) for broker in group.brokers],
    )


async def _replica_status(desk: Desk, words: Words) -> Any:
    if words["brokerGroup"]:
        groups = [desk.find_group(words["brokerGroup"])]
    else:
        groups = [group for _, group in sorted(desk.registry.directory.groups.items())]
    return await together([_compare(desk, group) for group in groups])


async def _compare(desk: Desk, group: Group) -> dict[str, Any]:
    acknowledged = await _acknowledged(desk, group)  # first, so that no copy is behind it because time goes by
    replicas = await asyncio.gather(*(_replica(desk, broker) for broker in group.brokers))
    asked = [replica for replica in replicas if replica["reachable"]]
    ends, chains = [replica["logEnd"] for replica in asked], {replica["chain"] for replica in asked}
    every = len(asked) == max(len(group.brokers), 2)
    return {
        "brokerGroup": group.name,
        "term": group.term,
        "writable": desk.registry.is_writable(group),
        "readonlySubjects": desk.registry.directory.readonly_subjects(group.name),
        "minCopies": group.min_copies,
        "syncMode": group.sync_mode,
        # Chains of different ends say nothing.
        "equal": len(chains) == 1 if every and len(set(ends)) == 1 else None,
        "lagBytes": max(ends[0] - min(ends[1:]), 0) if every else None,
        "acknowledged": acknowledged,
        "replicas": replicas,
    }


async def _acknowledged(desk: Desk, group: Group) -> int | None:
    """Up to where anything is remembered to be acknowledged; None: nobody can say while the database is away."""
    try:
        points = await desk.registry.points_of(group.name, must_be_read=True)
    except DatabaseAway:
        return None
    return max((point.end for point in points.by_incarnation.values()), default=0)


async def _replica(desk: Desk, broker: Broker) -> dict[str, Any]:
    """What the broker says now; when it does not answer, what its last heartbeat said, or nulls."""
    state, reachable, error = desk.registry.state(broker), False, ""
    if not broker.control_port:
        error = "it never registered"
    else:
        try:
            state, reachable = await desk.brokers.replica_status(broker), True
        except QmqError as failed:
            error = str(failed)
    return {
        "role": broker.part.name,
        "hostname": broker.hostname,
        "ip": broker.ip,
        "servePort": broker.serve_port,
        "up": desk.registry.is_up(broker),
        "reachable": reachable,
        "otherDirectory": reachable and state is not None and state.incarnation not in ("", broker.incarnation),
        "error": error,
        **state_json(state),
    }


def _broker(words: Words) -> Broker:
    return rules.parse_broker(*(words[name] for name in _BROKER_WORDS))


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
