"""Shell. Operators' settings besides roles and routes: readonly marks, subjects, offline consumers, data sources."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, insert, select, update

from qmq.metaserver.model import ALL_SUBJECTS, DataSource, Offline, ReadonlyMark, SubjectInfo
from qmq.metaserver.storage.changes import AlreadyThere, NotThere, UnknownGroup
from qmq.metaserver.storage.sql import checked, now_ms
from qmq.metaserver.storage.tables import (
    broker_group,
    client_offline_state,
    datasource_config,
    operator_limits,
    readonly_broker_group_setting,
    subject_info,
)
from qmq.operator_limits import OperatorLimits
from qmq.subjects import check_name

OFFLINE = 1
"""QMQ's number; online is the absence of a row, or any other number."""

_marks, _offline, _sources = readonly_broker_group_setting, client_offline_state, datasource_config
_limits = operator_limits


def load_marks(connection: Connection) -> frozenset[ReadonlyMark]:
    return frozenset(ReadonlyMark(row.subject, row.broker_group) for row in connection.execute(select(_marks)))


def set_mark(connection: Connection, mark: ReadonlyMark) -> None:
    """Store a mark; an existing one stays. Raises UnknownGroup."""
    _check_star("subject", mark.subject)
    group = broker_group.c
    exists = select(group.id).where(group.group_name == mark.group, group.kind != 0)
    if connection.execute(exists).first() is None:
        raise UnknownGroup(mark.group)
    values = {"subject": mark.subject, "broker_group": mark.group, "create_time": now_ms()}
    _insert_if_missing(connection, _marks, _is_mark(mark), values)


def unset_mark(connection: Connection, mark: ReadonlyMark) -> None:
    connection.execute(delete(_marks).where(_is_mark(mark)))


def load_offline(connection: Connection) -> frozenset[Offline]:
    rows = connection.execute(select(_offline).where(_offline.c.state == OFFLINE))
    return frozenset(Offline(row.subject_info, row.consumer_group, row.client_id) for row in rows)


def set_offline(connection: Connection, offline: Offline) -> None:
    for noun, value in zip(("subject", "consumer group", "client id"), offline, strict=True):
        _check_star(noun, value)
    values = {
        "subject_info": offline.subject,
        "consumer_group": offline.group,
        "client_id": offline.consumer,
        "state": OFFLINE,
    }
    unset_offline(connection, offline)  # a row of another state exists
    connection.execute(insert(_offline).values(**checked(_offline, values)))


def unset_offline(connection: Connection, offline: Offline) -> None:
    connection.execute(delete(_offline).where(_is_offline(offline)))


def load_limits(connection: Connection) -> frozenset[OperatorLimits]:
    return frozenset(
        OperatorLimits(
            row.subject_info,
            row.consumer_group,
            row.expires_after_s,
            bool(row.expired_die),
            row.messages_max,
            bool(row.drops_oldest),
            row.per_second,
            row.bytes_max,
            row.dead_letters_to,
        )
        for row in connection.execute(select(_limits))
    )


def set_limits(connection: Connection, limits: OperatorLimits) -> None:
    """Replace the limits of a subject and group; without any limit there is no row."""
    check_name("subject", limits.subject)
    _check_star("consumer group", limits.group)
    same = and_(_limits.c.subject_info == limits.subject, _limits.c.consumer_group == limits.group)
    connection.execute(delete(_limits).where(same))
    if not limits.is_none:
        values = limits._asdict()
        values |= {"subject_info": values.pop("subject"), "consumer_group": values.pop("group")}
        connection.execute(insert(_limits).values(**checked(_limits, values)))


def load_subjects(connection: Connection) -> dict[str, SubjectInfo]:
    columns = subject_info.c
    rows = connection.execute(select(columns.name, columns.tag, columns.update_time))
    return {row.name: SubjectInfo(row.name, row.tag, row.update_time) for row in rows}


def add_subject(connection: Connection, name: str, tag: str) -> None:
    """Announce a subject. Raises AlreadyThere."""
    now = now_ms()
    values = {"name": check_name("subject", name), "tag": tag, "create_time": now, "update_time": now}
    if not _insert_if_missing(connection, subject_info, subject_info.c.name == name, values):
        raise AlreadyThere(f"the subject {name} is there already")


def load_data_sources(connection: Connection) -> list[DataSource]:
    return [
        DataSource(
            row.url,
            row.user_name,
            row.password,
            row.room,
            row.status,
            row.update_time,
            row.table_name,
            row.rate,
            row.age_s,
        )
        for row in connection.execute(select(_sources).order_by(_sources.c.id))
    ]


def add_data_source(connection: Connection, source: DataSource) -> None:
    """Store a data source, or replace the one with this url."""
    now = now_ms()
    values = {
        "url": source.url,
        "user_name": source.user_name,
        "password": source.password,
        "room": source.room,
        "status": source.status,
        "update_time": now,
        "table_name": source.table,
        "rate": source.rate,
        "age_s": source.age_s,
    }
    same = _sources.c.url == source.url
    if connection.execute(update(_sources).where(same).values(**checked(_sources, values))).rowcount == 0:
        connection.execute(insert(_sources).values(**values, create_time=now))


def remove_data_source(connection: Connection, url: str) -> None:
    if connection.execute(delete(_sources).where(_sources.c.url == url)).rowcount == 0:
        raise NotThere(f"there is no data source {url}")


def _check_star(noun: str, name: str) -> None:
    if name != ALL_SUBJECTS:
        check_name(noun, name)


def _is_mark(mark: ReadonlyMark) -> ColumnElement[bool]:
    return and_(_marks.c.subject == mark.subject, _marks.c.broker_group == mark.group)


def _is_offline(offline: Offline) -> ColumnElement[bool]:
    return and_(
        _offline.c.subject_info == offline.subject,
        _offline.c.consumer_group == offline.group,
        _offline.c.client_id == offline.consumer,
    )


def _insert_if_missing(connection: Connection, table: Table, same: ColumnElement[bool], values: dict[str, Any]) -> bool:
    """The lock of the version row keeps two transactions from inserting the same row."""
    if connection.execute(select(table.c.id).where(same)).first() is not None:
        return False
    connection.execute(insert(table).values(**checked(table, values)))
    return True
