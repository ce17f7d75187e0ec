"""Core. Values of the model as JSON: QMQ's fields first, in its order and with its names, then ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qmq.commands.action import Action
from qmq.metaserver.model import (
    ALL_SUBJECTS,
    DELAY,
    AuditRow,
    Broker,
    DataSource,
    Group,
    LeaseRow,
    MetaserverRow,
    PartedTail,
    ReplicaState,
    Route,
    SubjectInfo,
)
from qmq.metaserver.roles.rules import RoleChange
from qmq.replication.readonly import explain
from qmq.sql_drivers import registered
from qmq.types import Endpoint

SHOWN_MAX = 20
"""Number of subjects of one change that a list of the trail shows."""


def broker_json(broker: Broker, *, up: bool | None = None) -> dict[str, Any]:
    """Return QMQ's broker; `up` is left out if None."""
    shown = {
        "group": broker.group,
        "role": broker.part.name,
        "hostname": broker.hostname,
        "ip": broker.ip,
        "servePort": broker.serve_port,
        "syncPort": broker.sync_port,
        "controlPort": broker.control_port,
        "metricsPort": broker.metrics_port,
    }
    return shown if up is None else shown | {"up": up}


def group_json(
    group: Group,
    *,
    state: ReplicaState | None,
    writable: bool,
    readonly_subjects: list[str],
    copies: Sequence[tuple[Broker, bool, ReplicaState | None]] = (),
) -> dict[str, Any]:
    """Return QMQ's broker group. `state`: last report of its master, None while it is down; `copies`: each broker,
    whether it is up, and its last report.
    """
    return {
        "groupName": group.name,
        "master": _address(group.master),
        "slaves": [_address(slave) for slave in group.slaves],
        "updateTime": group.update_time_ms,
        "brokerState": "RW" if writable else "R" if state else "NRW",
        "tag": group.tag,
        "kind": "DELAY" if group.kind == DELAY else "NORMAL",
        "ext": None,
        "term": group.term,
        "writable": writable,
        "readonlySubjects": readonly_subjects,
        "readonlyReasons": list(state.readonly_reasons) if state else [],
        "halfSwapped": group.half_swapped,
        "draining": group.draining,
        "full": group.full,
        "minCopies": group.min_copies,
        "lostTerm": group.lost_term,
        "failover": group.failover,
        "syncMode": group.sync_mode,
        "why": why_not(group, state, readonly_subjects) if not writable else [],
        "copies": [_copy_json(*copy, state) for copy in copies],
    }


def why_not(group: Group, state: ReplicaState | None, readonly_subjects: Iterable[str]) -> list[str]:
    """Return the reasons why a group is readonly, each with its remedy."""
    conditions = {
        "it has no master: AddBroker or ReplaceBroker gives it one": group.master is None,
        f"its master is down or silent: start it, or Failover --brokerGroup={group.name}": group.master and not state,
        "it has no slave: AddBroker adds one": not group.slaves,
        "it is half swapped: finish it with ReplaceBroker": group.half_swapped,
        "an operator drains it: UndrainGroup ends it": group.draining,
        "an operator marked it: UnMarkReadonlyBrokerGroup ends it": ALL_SUBJECTS in readonly_subjects,
    }
    readonly = set(state.readonly_reasons if state else ())
    if group.draining or ALL_SUBJECTS in readonly_subjects:
        readonly.discard("operator")
    return [text for text, applies in conditions.items() if applies] + [explain(reason) for reason in sorted(readonly)]


def _copy_json(broker: Broker, up: bool, state: ReplicaState | None, master: ReplicaState | None) -> dict[str, Any]:
    """Return a copy's last heartbeat; `lagBytes`: distance of its end from the master's. Null: another metaserver has
    the heartbeats, and the copy did not answer.
    """
    own = state if state and state.has_offsets else None
    return {
        **broker_json(broker, up=up),
        "logEnd": own and own.log_end,
        "highWatermark": own and own.high_watermark,
        "lagBytes": max(master.log_end - own.log_end, 0) if own and master and master.has_offsets else None,
        "readonlyReasons": list(state.readonly_reasons) if state else [],
    }


def route_json(route: Route) -> dict[str, Any]:
    return {
        "subject": route.subject,
        "brokerGroups": list(route.groups),
        "version": route.version,
        "updateTime": route.update_time_ms,
    }


def subject_json(info: SubjectInfo) -> dict[str, Any]:
    return {"name": info.name, "tag": info.tag, "updateTime": info.update_time_ms}


def parts_json(row: Group | RoleChange) -> dict[str, Any]:
    """Return the roles in a group, for before and after."""
    return {
        "term": row.term if isinstance(row, Group) else row.new_term,
        "master": broker_json(row.master) if row.master else None,
        "slaves": {str(slave.key): broker_json(slave) for slave in row.slaves},
        "minCopies": row.min_copies,
    }


def state_json(state: ReplicaState | None) -> dict[str, Any]:
    own = state if state and state.has_offsets else None
    return {
        "term": state and state.term,
        "boot": state and state.boot,
        "logStart": own and own.log_start,
        "logEnd": own and own.log_end,
        "flushedEnd": own and own.flushed_end,
        "matchedEnd": own and own.matched_end,
        "highWatermark": own and own.high_watermark,
        "chain": own and f"{own.chain:016x}",  # text: some JSON readers round 64-bit numbers
        "writable": state and state.writable,
        "readonlyReasons": state and list(state.readonly_reasons),
        "durability": state and state.durability,
        "lastEpoch": state and [state.last_term, state.last_boot],
        "incomplete": state and state.incomplete,
        "parted": state and state.parted and parted_json(state.parted),
    }


def parted_json(parted: PartedTail) -> dict[str, Any]:
    return {
        "offset": parted.offset,
        "messages": sum(last - first + 1 for _, first, last in parted.messages),
        "subjects": {subject: [first, last] for subject, first, last in parted.messages},
    }


def audit_json(row: AuditRow, *, whole: bool = False) -> dict[str, Any]:
    """Return a row of the trail; long values before and after are shortened unless `whole`."""
    return {
        "id": row.id,
        "time": row.time_ms,
        "who": row.who,
        "peer": row.peer,
        "action": row.action,
        "parameters": dict(row.parameters),
        "before": row.before if whole else _shortened(row.before),
        "after": row.after if whole else _shortened(row.after),
        "result": row.result,
    }


def _shortened(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > SHOWN_MAX:
        return {name: value[name] for name in list(value)[:SHOWN_MAX]} | {"…": f"and {len(value) - SHOWN_MAX:,} more"}
    if isinstance(value, list) and len(value) > SHOWN_MAX:
        return [*value[:SHOWN_MAX], f"… and {len(value) - SHOWN_MAX:,} more"]
    return value


def source_json(source: DataSource) -> dict[str, Any]:
    """Return a database without its password, which never leaves the metaserver."""
    url, tls = registered(source.url)
    return {
        "url": url,
        "username": source.user_name,
        "room": source.room,
        "status": "online" if source.status == 0 else "offline",
        "updateTime": source.update_time_ms,
        "table": source.table,
        "rate": source.rate,
        "age": source.age_s,
        "tls": tls,
    }


def watchdog_json(row: LeaseRow, *, room: str) -> dict[str, Any]:
    """Return a namespace of watchdogs: the active one, its address, its term."""
    return {
        "room": room,
        "active": row.node,
        "address": row.address,
        "term": row.term,
        "updateTime": row.update_time_ms,
    }


def metaserver_json(row: MetaserverRow, *, up: bool | None, own: bool, cluster: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "http": row.http_address,
        "grpc": row.grpc_address,
        "version": row.version,
        "up": up,
        "answersThis": own,
        "cluster": cluster,
    }


def as_qmq(action: Action, data: Any) -> Any:
    """Return QMQ's fields only, in QMQ's order."""
    if isinstance(data, dict) and "dryRun" in data:
        return data
    if action.qmq_data:
        return action.qmq_data(data)
    if not action.result_fields:
        return data
    if isinstance(data, list):
        return [as_qmq(action, part) for part in data]
    shown = {name: data[name] for name in action.result_fields}
    return shown | {"slaves": None} if "slaves" in shown else shown  # QMQ has the field and never fills it


def names(things: Iterable[str]) -> str:
    return ", ".join(sorted(things))


def _address(broker: Broker | None) -> str:
    return str(Endpoint(broker.ip, broker.serve_port)) if broker else ""
