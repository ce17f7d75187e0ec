"""Shell. Consumer groups of the cluster: one row per subject and group, stored once, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, insert, or_, select

from qmq.metaserver.model import ConsumerGroupRow
from qmq.metaserver.storage.sql import checked, chunks, parse_names, to_json
from qmq.metaserver.storage.tables import consumer_group as table
from qmq.subjects import real_subject

Key = tuple[str, str]
_columns = table.c


def load(connection: Connection, keys: Sequence[Key]) -> dict[Key, ConsumerGroupRow]:
    """Return the rows of those of these (subject, consumer group) that have one."""
    wanted, found = set(keys), dict[Key, ConsumerGroupRow]()
    for subjects in chunks(sorted({subject for subject, _ in wanted})):
        names = sorted({group for subject, group in wanted if subject in set(subjects)})
        for groups in chunks(names):
            where = and_(_columns.subject.in_(subjects), _columns.group_name.in_(groups))
            found |= {row.key: row for row in map(_row, connection.execute(select(table).where(where)))}
    return {key: row for key, row in found.items() if key in wanted}


def load_all(connection: Connection, subject: str) -> list[ConsumerGroupRow]:
    """Return the rows of a subject; of an empty name, of all."""
    query = select(table).order_by(_columns.subject, _columns.group_name)
    return [_row(row) for row in connection.execute(query.where(_columns.subject == subject) if subject else query)]


def store(connection: Connection, rows: Sequence[ConsumerGroupRow], replaced: Sequence[ConsumerGroupRow]) -> None:
    """Insert rows in the place of those that are `replaced`; raises IntegrityError if one is there already."""
    for row in replaced:
        is_row = and_(_is(row), _columns.mark == row.mark, _columns.create_time == row.created_ms)
        connection.execute(delete(table).where(is_row))
    # In one order: two metaservers that store the same groups wait for each other, and never in a circle.
    values = [checked(table, _values(row)) for row in sorted(rows, key=lambda row: row.key)]
    connection.execute(insert(table), values)


def forget(connection: Connection, subject: str) -> None:
    """Remove the rows of a subject and of its retry and dead-letter subjects."""
    derived = _columns.subject.like("\\%%", escape="\\")
    names = connection.execute(select(_columns.subject).distinct().where(or_(_columns.subject == subject, derived)))
    for chunk in chunks([row.subject for row in names if real_subject(row.subject) == subject]):
        connection.execute(delete(table).where(_columns.subject.in_(chunk)))


def _is(row: ConsumerGroupRow) -> ColumnElement[bool]:
    return and_(_columns.subject == row.subject, _columns.group_name == row.group)


def _values(row: ConsumerGroupRow) -> dict[str, object]:
    return {
        "subject": row.subject,
        "group_name": row.group,
        "since_ms": row.since_ms,
        "mark": row.mark,
        "members_json": to_json(row.members),
        "create_time": row.created_ms,
    }


def _row(row: Row[Any]) -> ConsumerGroupRow:
    try:
        members = parse_names(row.members_json)
    except ValueError:  # edited by hand: then it begins with the first message, wherever it has no position
        members = ()
    return ConsumerGroupRow(row.subject, row.group_name, row.since_ms, row.mark, members, row.create_time)
