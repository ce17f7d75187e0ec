"""Shell. Routes of subjects, each with its own version, and the consumer groups of subjects.

A removed route remains for a while as a row without groups, so that readers of changes see the removal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, delete, insert, or_, select, update

from qmq.metaserver.model import ConsumerGroupRow, Route
from qmq.metaserver.storage.changes import StaleVersion, UnknownGroup, ValueRefused
from qmq.metaserver.storage.groups import existing_groups
from qmq.metaserver.storage.sql import BadRows, checked, chunks, now_ms, parse_names, to_json
from qmq.metaserver.storage.tables import consumer_group, subject_route
from qmq.subjects import check_name, real_subject, retry_subject

REMOVED_KEPT_MS = 30 * 24 * 3600 * 1000
"""Time until rows of removed routes are deleted: far longer than a metaserver runs without its database."""

RouteOrder = tuple[str, tuple[str, ...], int]
"""Subject, groups, expected version (0: there is none yet)."""

_columns = subject_route.c
_select = select(
    _columns.subject_info, _columns.broker_group_json, _columns.version, _columns.changed, _columns.update_time
)


def load_routes(connection: Connection, after: int, bad: BadRows) -> list[Route]:
    """Read routes that changed after that version, removed ones too; with 0, all existing ones."""
    known: dict[str, tuple[str, ...]] = {}  # most routes of a small installation share a few lists
    numbers: dict[int, int] = {}  # routes that were written together share the number: 6 MB less for 100,000
    routes = []
    for row in connection.execute(_select.where(_columns.changed > after) if after else _select):
        try:
            groups = known.get(row.broker_group_json)
            if groups is None:
                groups = known[row.broker_group_json] = parse_names(row.broker_group_json)
        except (ValueError, TypeError) as error:
            bad.note("subject_route", row.subject_info, error)
            continue
        if groups or after:
            changed, time_ms = (numbers.setdefault(number, number) for number in (row.changed, row.update_time))
            routes.append(Route(row.subject_info, groups, row.version, changed, time_ms))
    return routes


def is_listed_since(connection: Connection, version: int, group: str, *, without: str = "") -> bool:
    """Return whether a route with `group` and without `without` was made or changed after this version of all
    routes.
    """
    changed = load_routes(connection, version, BadRows())
    return any(group in route.groups and without not in route.groups for route in changed)


def store_routes(connection: Connection, orders: Sequence[RouteOrder], changed: int, bad: BadRows) -> list[Route]:
    """Create or change each route that still has the expected version.

    Args:
        changed: version of all routes, raised by this transaction.

    Returns:
        The stored routes afterwards, in this order; no groups: they do not exist, or the row is invalid.
    """
    now, existing = now_ms(), existing_groups(connection)
    wanted = {subject: (groups, version) for subject, groups, version in reversed(orders)}
    stored, unreadable = _read(connection, list(wanted), bad)
    new: list[dict[str, Any]] = []
    old: list[dict[str, Any]] = []
    for subject in sorted(wanted.keys() - unreadable):
        groups, version = wanted[subject]
        before = stored.get(subject)
        kept = before.groups if before else ()
        names = tuple(name for name in groups if name in existing or name in kept)
        if names and version == (before.version if before and kept else 0):
            stored[subject] = Route(subject, names, before.version + 1 if before else 1, changed, now)
            (old if before else new).append(_values(stored[subject]))
    if new:
        connection.execute(insert(subject_route), [{**values, "create_time": now} for values in new])
    if old:
        connection.execute(_update_each, [{f"new_{key}": value for key, value in values.items()} for values in old])
    return [stored.get(subject) or Route(subject, (), 0) for subject, _, _ in orders]


def set_routes(connection: Connection, orders: Sequence[RouteOrder], changed: int) -> None:
    """Create or change routes by compare-and-set, all or none, many of them in one statement.

    Raises:
        StaleVersion, UnknownGroup, ValueRefused: the transaction must end.
    """
    now, existing = now_ms(), existing_groups(connection)
    stored, unreadable = _read(connection, [subject for subject, _, _ in orders], BadRows())
    new: list[dict[str, Any]] = []
    old: list[dict[str, Any]] = []
    for subject, groups, version in orders:
        if not groups:
            raise ValueRefused(f"a route of {subject} without any group is none; remove it instead")
        before = stored.get(subject)
        kept = before.groups if before else ()
        if version != (before.version if before and kept else 0):
            raise StaleVersion(subject)
        if unknown := [name for name in groups if name not in existing and name not in kept]:
            raise UnknownGroup(unknown[0])
        if subject in unreadable:  # the version still increases from any value
            _overwrite(connection, subject, groups, changed)
            continue
        stored[subject] = Route(subject, tuple(groups), before.version + 1 if before else 1, changed, now)
        (old if before else new).append(_values(stored[subject]))
    if new:
        connection.execute(insert(subject_route), [{**values, "create_time": now} for values in new])
    if old:
        connection.execute(_update_each, [{f"new_{key}": value for key, value in values.items()} for values in old])


def remove_routes(connection: Connection, orders: Sequence[tuple[str, int]], changed: int) -> None:
    """Remove routes by compare-and-set on their versions, all or none, many of them in one statement.

    Raises:
        StaleVersion: the transaction must end.
    """
    now = now_ms()
    stored, _ = _read(connection, [subject for subject, _ in orders], BadRows())
    gone = []
    for subject, version in orders:
        before = stored.pop(subject, None)
        if before is None or not before.groups or version != before.version:
            raise StaleVersion(subject)
        gone.append(_values(Route(subject, (), version + 1, changed, now)))
    connection.execute(_update_each, [{f"new_{key}": value for key, value in values.items()} for values in gone])
    old = (_columns.broker_group_json == "[]", _columns.update_time < now - REMOVED_KEPT_MS)
    connection.execute(delete(subject_route).where(*old))


def _overwrite(connection: Connection, subject: str, groups: Sequence[str], changed: int) -> None:
    """Write over a row that cannot be read."""
    values = _values(Route(subject, tuple(groups), 1, changed, now_ms()))
    del values["version"]
    row = _columns.subject_info == subject
    connection.execute(update(subject_route).where(row).values(**values, version=_columns.version + 1))


def _read(connection: Connection, subjects: list[str], bad: BadRows) -> tuple[dict[str, Route], set[str]]:
    """Return the rows of these subjects, and the subjects with an invalid row."""
    stored, unreadable = {}, set()
    for chunk in chunks(subjects):
        for row in connection.execute(_select.where(_columns.subject_info.in_(chunk))):
            try:
                groups = parse_names(row.broker_group_json)
            except ValueError as error:
                bad.note("subject_route", row.subject_info, error)
                unreadable.add(row.subject_info)
                continue
            stored[row.subject_info] = Route(row.subject_info, groups, row.version, row.changed, row.update_time)
    return stored, unreadable


def _values(route: Route) -> dict[str, Any]:
    values = {
        "subject_info": check_name("subject", route.subject),
        "broker_group_json": to_json(route.groups),
        "version": route.version,
        "changed": route.changed,
        "update_time": route.update_time_ms,
    }
    return checked(subject_route, values)


_update_each = (
    update(subject_route)
    .where(_columns.subject_info == bindparam("new_subject_info"))
    .values({name: bindparam(f"new_{name}") for name in ("broker_group_json", "version", "changed", "update_time")})
)


GroupKey = tuple[str, str]
_groups = consumer_group.c


def load_consumer_groups(connection: Connection, keys: Sequence[GroupKey]) -> dict[GroupKey, ConsumerGroupRow]:
    """Return the existing rows of these (subject, consumer group) keys."""
    wanted, found = set(keys), dict[GroupKey, ConsumerGroupRow]()
    for subjects in chunks(sorted({subject for subject, _ in wanted})):
        names = sorted({group for subject, group in wanted if subject in set(subjects)})
        for groups in chunks(names):
            where = and_(_groups.subject.in_(subjects), _groups.group_name.in_(groups))
            found |= {row.key: row for row in map(_group_row, connection.execute(select(consumer_group).where(where)))}
    return {key: row for key, row in found.items() if key in wanted}


def load_consumer_groups_of(connection: Connection, subject: str) -> list[ConsumerGroupRow]:
    """Return the rows of a subject; of an empty name, of all."""
    query = select(consumer_group).order_by(_groups.subject, _groups.group_name)
    return [
        _group_row(row) for row in connection.execute(query.where(_groups.subject == subject) if subject else query)
    ]


def load_broadcasts(connection: Connection, before_ms: int, after: GroupKey, rows_max: int) -> list[ConsumerGroupRow]:
    """Return rows of broadcast consumers that were stored before this time, in order of their keys."""
    is_after = or_(_groups.subject > after[0], and_(_groups.subject == after[0], _groups.group_name > after[1]))
    query = select(consumer_group).where(_groups.broadcast, _groups.create_time < before_ms, is_after)
    ordered = query.order_by(_groups.subject, _groups.group_name).limit(rows_max)
    return [_group_row(row) for row in connection.execute(ordered)]


def store_consumer_groups(
    connection: Connection, rows: Sequence[ConsumerGroupRow], replaced: Sequence[ConsumerGroupRow]
) -> None:
    """Insert rows in place of `replaced`; raises IntegrityError if one exists already."""
    for row in replaced:
        is_row = and_(_is_group(row), _groups.mark == row.mark, _groups.create_time == row.created_ms)
        connection.execute(delete(consumer_group).where(is_row))
    # In a fixed order: two metaservers that store the same groups cannot deadlock.
    values = [checked(consumer_group, _group_values(row)) for row in sorted(rows, key=lambda row: row.key)]
    if values:
        connection.execute(insert(consumer_group), values)


def forget_consumer_groups(connection: Connection, subject: str, group: str = "") -> None:
    """Remove the rows of a subject and of its retry and dead-letter subjects; or of the named group and its mailbox."""
    if group:
        for name in (subject, retry_subject(subject, group)):
            connection.execute(delete(consumer_group).where(_groups.subject == name, _groups.group_name == group))
        return
    derived = _groups.subject.like("\\%%", escape="\\")
    names = connection.execute(select(_groups.subject).distinct().where(or_(_groups.subject == subject, derived)))
    for chunk in chunks([row.subject for row in names if real_subject(row.subject) == subject]):
        connection.execute(delete(consumer_group).where(_groups.subject.in_(chunk)))


def _is_group(row: ConsumerGroupRow) -> ColumnElement[bool]:
    return and_(_groups.subject == row.subject, _groups.group_name == row.group)


def _group_values(row: ConsumerGroupRow) -> dict[str, object]:
    return {
        "subject": row.subject,
        "group_name": row.group,
        "since_ms": row.since_ms,
        "mark": row.mark,
        "members_json": to_json(row.members),
        "create_time": row.created_ms,
        "broadcast": row.is_broadcast,
    }


def _group_row(row: Row[Any]) -> ConsumerGroupRow:
    try:
        members = parse_names(row.members_json)
    except ValueError:  # edited by hand: it then begins with the first message, wherever it has no position
        members = ()
    return ConsumerGroupRow(
        row.subject, row.group_name, row.since_ms, row.mark, members, row.create_time, bool(row.broadcast)
    )
