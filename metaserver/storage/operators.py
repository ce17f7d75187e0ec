"""Shell. Operators' rows besides roles and routes: marks, subjects, limits, data sources, tokens, the audit trail."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, and_, delete, insert, or_, select, update

from qmq.metaserver.model import ALL_SUBJECTS, AuditRow, DataSource, Offline, ReadonlyMark, SubjectInfo, TokenRow
from qmq.metaserver.storage.changes import AlreadyThere, NotThere, UnknownGroup
from qmq.metaserver.storage.sql import BadRows, checked, now_ms, parse_names, to_json
from qmq.metaserver.storage.tables import (
    api_token,
    audit_trail,
    broker_group,
    client_offline_state,
    datasource_config,
    operator_limits,
    readonly_broker_group_setting,
    subject_info,
)
from qmq.operator_limits import OperatorLimits
from qmq.rights import TokenRole
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
    """Insert a row unless there is one of the same key; return whether it was inserted. The lock of the version row
    keeps two transactions from inserting the same row.
    """
    if connection.execute(select(table.c.id).where(same)).first() is not None:
        return False
    connection.execute(insert(table).values(**checked(table, values)))
    return True


AUDIT_ROWS_MAX = 1000
"""Rows of one answer; ask again from the last id for more."""


def load_tokens(connection: Connection, bad: BadRows) -> list[TokenRow]:
    """Read all tokens, revoked and expired ones too; an invalid row gives no rights."""
    tokens = []
    for row in connection.execute(select(api_token).order_by(api_token.c.create_time, api_token.c.id)):
        try:
            tokens.append(_token(row))
        except (ValueError, TypeError) as error:
            bad.note("api_token", row.id, error)
    return tokens


def add_token(connection: Connection, token: TokenRow) -> None:
    """Store a token. Raises AlreadyThere."""
    if connection.execute(select(api_token.c.id).where(api_token.c.id == token.id)).first() is not None:
        raise AlreadyThere(f"the token {token.id} is there already")
    connection.execute(insert(api_token).values(**_token_values(token)))


def revoke_token(connection: Connection, id: str) -> None:
    """Revoke a token; a revoked one keeps its time. Raises NotThere."""
    same = api_token.c.id == id
    if connection.execute(select(api_token.c.id).where(same)).first() is None:
        raise NotThere(f"there is no token {id}; ListTokens shows them")
    valid = api_token.c.revoke_time == 0
    connection.execute(update(api_token).where(same, valid).values(revoke_time=now_ms()))


def add_audit(connection: Connection, audit: AuditRow) -> None:
    """Add the audit row of an operator's action, with the present time."""
    values = {
        "time": now_ms(),
        "who": audit.who,
        "peer": audit.peer,
        "action": audit.action,
        "parameters_json": to_json(dict(audit.parameters)),
        "before_json": to_json(audit.before),
        "after_json": to_json(audit.after),
        "result": audit.result,
    }
    connection.execute(insert(audit_trail).values(**checked(audit_trail, values)))


def load_audit(
    connection: Connection,
    *,
    before: int | None,
    limit: int,
    who: str,
    action: str,
    since_ms: int,
    until_ms: int,
    about: Iterable[str],
) -> list[AuditRow]:
    """Return audit rows, the newest first; `before` is an id, `about`: names in parameters, before or after."""
    columns = audit_trail.c
    query = select(audit_trail).order_by(columns.id.desc()).limit(min(limit, AUDIT_ROWS_MAX))
    if before is not None:
        query = query.where(columns.id < before)
    if who:
        query = query.where(columns.who == who)
    if action:
        query = query.where(columns.action == action)
    if since_ms:
        query = query.where(columns.time >= since_ms)
    if until_ms:
        query = query.where(columns.time < until_ms)
    written = (columns.parameters_json, columns.before_json, columns.after_json)
    for name in about:
        query = query.where(or_(*(text.contains(to_json(name), autoescape=True) for text in written)))
    return [_audit(row) for row in connection.execute(query)]


def _token(row: Row[Any]) -> TokenRow:
    """Read a row of `api_token`; raises ValueError for an invalid one.

    No row may give the rights of the installation's key, which is a setting, even if edited by hand or restored.
    """
    if TokenRole(row.role) is TokenRole.CLUSTER:
        raise ValueError(f"no token has the role {row.role}")
    return TokenRow(
        id=row.id,
        name=row.name,
        role=row.role,
        salt=row.salt,
        hash=row.hash,
        subjects=parse_names(row.subjects_json),
        groups=parse_names(row.groups_json),
        created_ms=row.create_time,
        expires_ms=row.expire_time,
        revoked_ms=row.revoke_time,
    )


def _token_values(token: TokenRow) -> dict[str, Any]:
    values = {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "salt": token.salt,
        "hash": token.hash,
        "subjects_json": to_json(token.subjects),
        "groups_json": to_json(token.groups),
        "create_time": token.created_ms or now_ms(),
        "expire_time": token.expires_ms,
        "revoke_time": token.revoked_ms,
    }
    return checked(api_token, values)


def _audit(row: Row[Any]) -> AuditRow:
    parameters = _parse(row.parameters_json)
    return AuditRow(
        who=row.who,
        peer=row.peer,
        action=row.action,
        parameters=parameters if isinstance(parameters, dict) else {"unreadable": parameters},
        before=_parse(row.before_json),
        after=_parse(row.after_json),
        result=row.result,
        id=row.id,
        time_ms=row.time,
    )


def _parse(text: str) -> Any:
    """Parse stored JSON, or return the text itself: no row of the trail may be left out."""
    try:
        return json.loads(text)
    except ValueError:
        return text
