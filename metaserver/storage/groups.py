"""Shell. Broker groups and their brokers: the row (group, term, master, slaves), changed only by compare-and-set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.model import AS_SETTING, DELAY, NORMAL, Broker, BrokerKey, Group
from qmq.metaserver.roles.rules import RoleChange
from qmq.metaserver.storage.changes import GroupInUse, NotThere, StaleTerm, UnknownGroup
from qmq.metaserver.storage.sql import BadRows, checked, now_ms, parse_names
from qmq.metaserver.storage.tables import (
    REMOVED,
    acknowledged_point,
    broker,
    broker_group,
    broker_sighting,
    readonly_broker_group_setting,
    subject_route,
)
from qmq.replication.assignment import FillOrder, SyncMode
from qmq.subjects import check_name
from qmq.types import Role


def load_groups(connection: Connection, bad: BadRows) -> dict[str, Group]:
    """Read all groups with their brokers; invalid rows are left out."""
    rows = {}
    for row in connection.execute(select(broker_group).where(broker_group.c.kind != REMOVED)):
        if row.kind not in (NORMAL, DELAY):
            bad.note("broker_group", row.group_name, f"kind {row.kind} is unknown")
        elif not isinstance(row.term, int) or row.term < 1:  # SQLite stores any type
            bad.note("broker_group", row.group_name, f"{row.term!r} is no term")
        else:
            rows[row.group_name] = row
    holders: dict[tuple[str, Role], list[Broker]] = {}
    for row in connection.execute(select(broker).order_by(broker.c.id)):
        try:
            kind = rows[row.group_name].kind if row.group_name in rows else NORMAL
            holder = replace(_broker(row), kind=kind)
            same = holders.setdefault((row.group_name, holder.role), [])
            if same and holder.role == Role.MASTER:
                raise ValueError(f"{row.group_name} has another master, {same[0].key}")
            same.append(holder)
        except (ValueError, TypeError) as error:
            bad.note("broker", f"{row.hostname}:{row.serve_port}", error)
    return {name: _group(row, holders) for name, row in rows.items()}


def set_roles(connection: Connection, change: RoleChange) -> None:
    """Compare the term, raise it, set all roles at once. Raises StaleTerm."""
    now = now_ms()
    try:
        _raise_term(connection, change, now)
        connection.execute(delete(broker).where(broker.c.group_name == change.group))
        holders = change.brokers
        if holders:
            connection.execute(insert(broker), [_broker_values(holder, now) for holder in holders])
    except IntegrityError:  # another transaction added the same broker, or created the same group
        raise StaleTerm(change.group) from None
    gone = set(change.before.brokers if change.before else ()) - set(holders)
    staying = {holder.key for holder in holders}
    _forget(connection, [member.key for member in gone if member.key not in staying])


def store_addresses(connection: Connection, moved: Broker) -> None:
    """Store a broker's addresses; its role stays."""
    _update_broker(connection, moved.key, ip=moved.ip, sync_port=moved.sync_port)


def store_registration(connection: Connection, registered: Broker, before: Broker | None) -> None:
    """Store a broker's registration; with `before`, only if the row still equals it. Raises StaleTerm."""
    if before is not None and _brokers(connection, registered.group).get(registered.key) != before:
        raise StaleTerm(registered.group)
    _update_broker(
        connection,
        registered.key,
        ip=registered.ip,
        sync_port=registered.sync_port,
        control_port=registered.control_port,
        metrics_port=registered.metrics_port,
        incarnation=registered.incarnation,
        instance=registered.instance,
        complete=registered.complete,
    )


def store_complete(connection: Connection, slave: Broker, *, term: int, complete: bool) -> None:
    """Store whether a slave is complete, unless its role or its disk changed meanwhile."""
    if _term(connection, slave.group) == term:
        connection.execute(
            update(broker)
            .where(_is(slave.key), broker.c.role == Role.SLAVE, broker.c.incarnation == slave.incarnation)
            .values(complete=complete, update_time=now_ms())
        )


def store_fill_order(connection: Connection, slave: BrokerKey, order: FillOrder) -> None:
    """Store an operator's order about a filling. Raises NotThere."""
    _update_broker(connection, slave, fill_id=order.fill_id, fill_allowed=order.is_allowed)


def set_state(connection: Connection, group: str, **values: bool | str | int) -> None:
    """Set columns of a group. Raises UnknownGroup."""
    live = (broker_group.c.group_name == group, broker_group.c.kind != REMOVED)
    new = checked(broker_group, {**values, "update_time": now_ms()})
    if connection.execute(update(broker_group).where(*live).values(**new)).rowcount != 1:
        raise UnknownGroup(group)


def remove_group(connection: Connection, group: str, term: int) -> None:
    """Remove a group and its marks. Raises StaleTerm, UnknownGroup, GroupInUse."""
    present = _term(connection, group)
    if present is None:
        raise UnknownGroup(group)
    if present != term:
        raise StaleTerm(group)
    if holders := _brokers(connection, group):
        raise GroupInUse(f"{group} has brokers still: {', '.join(map(str, sorted(holders)))}; remove them first")
    if subjects := _subjects_of(connection, group):
        raise GroupInUse(f"{len(subjects)} routes name {group} still, {subjects[0]} for one; change them first")
    marks = readonly_broker_group_setting
    connection.execute(delete(marks).where(marks.c.broker_group == group))
    _forget_points(connection, group)
    connection.execute(update(broker_group).where(broker_group.c.group_name == group).values(kind=REMOVED))


def existing_groups(connection: Connection) -> set[str]:
    """Return the names of groups that a route may list: groups of brokers, not of delay servers."""
    return set(connection.scalars(select(broker_group.c.group_name).where(broker_group.c.kind == NORMAL)))


def all_names(connection: Connection) -> frozenset[str]:
    """Return the names of all groups, removed ones too."""
    return frozenset(connection.scalars(select(broker_group.c.group_name)))


def forget_group(connection: Connection, group: str, term: int) -> None:
    """Store the row of a removed group, which holds only its term, for a group that the database lost.

    Raises StaleTerm: it has a row again.
    """
    if group in all_names(connection):
        raise StaleTerm(group)
    now = now_ms()
    values = {"group_name": group, "kind": REMOVED, "term": term, "half_swapped": False, "create_time": now}
    connection.execute(insert(broker_group).values(**checked(broker_group, {**values, "update_time": now})))


def _raise_term(connection: Connection, change: RoleChange, now: int) -> None:
    if change.before is None:
        _create(connection, change, now)
        return
    raised = connection.execute(
        update(broker_group)
        .where(broker_group.c.group_name == change.group, broker_group.c.term == change.term)
        .where(broker_group.c.kind != REMOVED)
        .values(term=change.new_term, half_swapped=change.half_swapped, min_copies=change.min_copies, update_time=now)
    )
    # A registration changes a broker without a new term; overwriting it would lose the disk's name.
    stored = set(_brokers(connection, change.group).values())
    if raised.rowcount != 1 or stored != set(change.before.brokers):
        raise StaleTerm(change.group)


def _create(connection: Connection, change: RoleChange, now: int) -> None:
    fresh: dict[str, Any] = {"kind": change.kind, "half_swapped": False, "tag": "", "draining": False, "is_full": False}
    fresh |= {
        "min_copies": change.min_copies,
        "lost_term": 0,
        "failover": AS_SETTING,
        "sync_mode": str(SyncMode.AUTOMATIC),
        "create_time": now,
        "update_time": now,
    }
    removed = (broker_group.c.group_name == change.group, broker_group.c.kind == REMOVED)
    term_before = connection.scalars(select(broker_group.c.term).where(*removed)).one_or_none()
    if term_before is not None:
        # Points of a group that a restore removed still exist, and a metaserver may store more.
        _forget_points(connection, change.group)
        term = max(term_before, change.above) + 1
        connection.execute(update(broker_group).where(*removed).values(term=term, **fresh))
        return
    values = {"group_name": check_name("broker group", change.group), "term": change.new_term, **fresh}
    connection.execute(insert(broker_group).values(**checked(broker_group, values)))


def _forget_points(connection: Connection, group: str) -> None:
    """Delete the points of a group: a copy that lacks one would wait for ever for the copy that has it."""
    connection.execute(delete(acknowledged_point).where(acknowledged_point.c.group_name == group))


def _term(connection: Connection, group: str) -> int | None:
    live = (broker_group.c.group_name == group, broker_group.c.kind != REMOVED)
    return connection.scalars(select(broker_group.c.term).where(*live)).one_or_none()


def _brokers(connection: Connection, group: str) -> dict[BrokerKey, Broker]:
    brokers = {}
    for row in connection.execute(select(broker).where(broker.c.group_name == group)):
        try:
            member = _broker(row)
        except (ValueError, TypeError):
            continue  # left out by `load_groups`
        brokers[member.key] = member
    return brokers


def _subjects_of(connection: Connection, group: str) -> list[str]:
    subjects = []
    for subject, text in connection.execute(
        select(subject_route.c.subject_info, subject_route.c.broker_group_json).order_by(subject_route.c.id)
    ):
        try:
            named = group in parse_names(text)
        except ValueError:
            named = group in text  # a repair of that row may mean this group
        if named:
            subjects.append(subject)
    return subjects


def _update_broker(connection: Connection, key: BrokerKey, **values: Any) -> None:
    new = checked(broker, {**values, "update_time": now_ms()})
    if connection.execute(update(broker).where(_is(key)).values(**new)).rowcount != 1:
        raise NotThere(f"there is no broker {key}; ListBrokers names them")


def _forget(connection: Connection, keys: Iterable[BrokerKey]) -> None:
    same = [and_(broker_sighting.c.hostname == k.hostname, broker_sighting.c.serve_port == k.serve_port) for k in keys]
    if same:
        connection.execute(delete(broker_sighting).where(or_(*same)))


def _is(key: BrokerKey) -> Any:
    return and_(broker.c.hostname == key.hostname, broker.c.serve_port == key.serve_port)


def _group(row: Row[Any], holders: dict[tuple[str, Role], list[Broker]]) -> Group:
    return Group(
        name=row.group_name,
        term=row.term,
        master=next(iter(holders.get((row.group_name, Role.MASTER), ())), None),
        slaves=tuple(holders.get((row.group_name, Role.SLAVE), ())),
        update_time_ms=row.update_time,
        half_swapped=row.half_swapped,
        kind=row.kind,
        tag=row.tag,
        draining=row.draining,
        full=row.is_full,
        min_copies=row.min_copies,
        lost_term=row.lost_term,
        failover=row.failover,
        sync_mode=row.sync_mode,
    )


def _broker(row: Row[Any]) -> Broker:
    """Read a row of `broker`; raises ValueError for an invalid one."""
    ports = (row.control_port, row.metrics_port)  # 0 before it registered
    for least, port in ((1, row.serve_port), (1, row.sync_port), *((0, port) for port in ports)):
        if not least <= port < 65536:
            raise ValueError(f"port {port} does not exist")
    return Broker(
        group=row.group_name,
        role=Role(row.role),
        hostname=row.hostname,
        ip=row.ip,
        serve_port=row.serve_port,
        sync_port=row.sync_port,
        control_port=row.control_port,
        metrics_port=row.metrics_port,
        incarnation=row.incarnation,
        complete=bool(row.complete),
        fill_id=row.fill_id,
        fill_allowed=bool(row.fill_allowed),
        instance=row.instance,
    )


def _broker_values(holder: Broker, now: int) -> dict[str, Any]:
    values = {
        "group_name": holder.group,
        "role": int(holder.role),
        "hostname": holder.hostname,
        "ip": holder.ip,
        "serve_port": holder.serve_port,
        "sync_port": holder.sync_port,
        "control_port": holder.control_port,
        "metrics_port": holder.metrics_port,
        "incarnation": holder.incarnation,
        "complete": holder.complete,
        "fill_id": holder.fill_id,
        "fill_allowed": holder.fill_allowed,
        "instance": holder.instance,
        "create_time": now,
        "update_time": now,
    }
    return checked(broker, values)
