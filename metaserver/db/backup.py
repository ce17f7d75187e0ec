"""Shell. All that operators made the metaserver know, as one JSON value, and back.

Layout, version 1: {"format": "qmq metadata", "version": 1, "schema": newest migration, "time": ms,
"tables": {table: [{column: value}, …]}}, without the ids that a database counts up. What metaservers only tell each
other (heartbeats, versions) is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Boolean, Connection, Table, delete, insert, select, text
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.db import tables
from qmq.metaserver.db.bad_rows import BadRows
from qmq.metaserver.db.dumps import FORMAT, REMOVED, VERSION, header_fault, lost_masters, with_disks
from qmq.metaserver.db.errors import ValueRefused
from qmq.metaserver.db.groups import load_groups
from qmq.metaserver.db.limits import checked
from qmq.metaserver.db.routes import load_routes
from qmq.metaserver.db.rows import now_ms
from qmq.metaserver.db.tokens import load_tokens

PARENTS_FIRST = (
    tables.broker_group,
    tables.broker,
    tables.readonly_broker_group_setting,
    tables.subject_info,
    tables.subject_route,
    tables.client_offline_state,
    tables.operator_limits,
    tables.consumer_group,
    tables.datasource_config,
    tables.api_token,
    tables.audit_trail,
)

Rows = list[dict[str, Any]]


def dump(connection: Connection) -> dict[str, Any]:
    """Read everything as of one moment."""
    content = {table.name: _rows(connection, table) for table in PARENTS_FIRST}
    return {"format": FORMAT, "version": VERSION, "schema": _schema(connection), "time": now_ms(), "tables": content}


def restore(connection: Connection, dumped: Mapping[str, Any], changed: int, *, is_newer: bool = False) -> None:
    """Put a dump in the place of everything.

    What must never go back does not: terms and versions of routes grow, no group gets another master, nor a broker a
    disk it had before, a revoked token stays revoked, tokens that are not in the dump stay, a slave counts as complete
    only after it was seen again, a loss that was accepted is told of, and rows of the audit trail are added.

    Args:
        is_newer: the dump is newer than what is stored: its masters are the right ones.

    Raises:
        ValueRefused: this is no dump, a row of it makes no sense, or it names another master.
    """
    content = _check(connection, dumped)
    present = {table.name: _rows(connection, table) for table in (tables.broker_group, tables.broker)}
    if not is_newer and (lost := lost_masters(present, content)):
        raise ValueRefused("; ".join(lost))
    _continue_terms(connection, content["broker_group"], is_newer=is_newer)
    _continue_routes(connection, content["subject_route"], changed)
    content["broker"] = with_disks(present, content)
    content["api_token"] = _merge_tokens(connection, content["api_token"])
    content["consumer_group"] = _merge_consumer_groups(connection, content["consumer_group"])
    content["audit_trail"] = _merge_audit(_rows(connection, tables.audit_trail), content["audit_trail"])
    try:
        for table in reversed(PARENTS_FIRST):
            if table.name in content:
                connection.execute(delete(table))
        for table in PARENTS_FIRST:
            if rows := content.get(table.name):
                connection.execute(insert(table), rows)
    except IntegrityError as error:
        raise ValueRefused(f"rows of the dump contradict each other: {error.orig}") from None
    _check_readable(connection)


def _rows(connection: Connection, table: Table) -> Rows:
    query = select(*_columns(table)).order_by(*table.primary_key.columns)
    return [dict(row._mapping) for row in connection.execute(query)]


def _columns(table: Table) -> list[Any]:
    return [column for column in table.columns if not (column.name == "id" and column.autoincrement is True)]


def _check(connection: Connection, dumped: Mapping[str, Any]) -> dict[str, Rows]:
    names = [table.name for table in PARENTS_FIRST]
    if fault := header_fault(dumped, schema=_schema(connection), tables=names):
        raise ValueRefused(fault)
    return {table.name: _check_rows(table, dumped["tables"][table.name]) for table in PARENTS_FIRST}


def _schema(connection: Connection) -> str:
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())


def _check_rows(table: Table, rows: Any) -> Rows:
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueRefused(f"the dump's table {table.name} is no list")
    columns = {column.name: column for column in _columns(table)}
    for row in rows:
        if not isinstance(row, Mapping) or row.keys() != columns.keys():
            raise ValueRefused(f"a row of the dump's table {table.name} has other columns than {', '.join(columns)}")
        for name, column in columns.items():
            if isinstance(column.type, Boolean) and not isinstance(row[name], bool):
                raise ValueRefused(f"{table.name}.{name}: {row[name]!r} is neither true nor false")
    return [checked(table, row) for row in rows]


def _continue_terms(connection: Connection, rows: Rows, *, is_newer: bool) -> None:
    """Raise each group's term above both what is stored and what the dump says; keep terms of groups that go.

    A group of which nothing is stored comes back with the term that it had: if its brokers have a newer one, they say
    so, and the row is repaired. One term more may be just theirs, of a row with other roles or copies.

    A loss that either of them tells of goes on to be told: nobody may have acknowledged it.
    """
    stored = {row["group_name"]: row for row in _rows(connection, tables.broker_group)}
    for row in rows:
        before = stored.pop(row["group_name"], None)
        if before is not None or is_newer:
            row["term"] = max(row["term"], before["term"] if before else 0) + 1
        row["lost_term"] = max(row["lost_term"], before["lost_term"] if before else 0)
    rows.extend({**row, "kind": REMOVED} for row in stored.values())


def _continue_routes(connection: Connection, rows: Rows, changed: int) -> None:
    """The same for versions of routes; one that the dump lacks becomes a removed one."""
    stored = {row["subject_info"]: row for row in _rows(connection, tables.subject_route)}
    for row in rows:
        before = stored.pop(row["subject_info"], None)
        row |= {"version": max(row["version"], before["version"] if before else 0) + 1, "changed": changed}
    gone = {"broker_group_json": "[]", "changed": changed, "update_time": now_ms()}
    rows.extend({**row, **gone, "version": row["version"] + 1} for row in stored.values())


def _merge_tokens(connection: Connection, rows: Rows) -> Rows:
    merged = {row["id"]: row for row in rows}
    for before in _rows(connection, tables.api_token):
        row = merged.setdefault(before["id"], before)
        row["revoke_time"] = row["revoke_time"] or before["revoke_time"]
    return list(merged.values())


def _merge_consumer_groups(connection: Connection, rows: Rows) -> Rows:
    """Keep the rows that are there: a group that is forgotten would begin at the end, and lose what came before."""
    stored = {(row["subject"], row["group_name"]): row for row in _rows(connection, tables.consumer_group)}
    return list(({(row["subject"], row["group_name"]): row for row in rows} | stored).values())


def _merge_audit(present: Rows, dumped: Rows) -> Rows:
    """Rows of both, by time, each once: a trail only grows."""
    names = [column.name for column in _columns(tables.audit_trail)]
    known = {tuple(row[name] for name in names) for row in present}
    lacking = [row for row in dumped if tuple(row[name] for name in names) not in known]
    return sorted([*lacking, *present], key=lambda row: row["time"])


def _check_readable(connection: Connection) -> None:
    bad = BadRows()
    load_groups(connection, bad)
    load_routes(connection, 0, bad)
    load_tokens(connection, bad)
    if len(bad):
        raise ValueRefused("rows of the dump make no sense; the log names them. Nothing was restored")
