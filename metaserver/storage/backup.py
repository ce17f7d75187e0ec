"""Shell. Backup of everything that operators configured, as one JSON value; its checks, and Restore.

Layout, version 1: {"format": "qmq metadata", "version": 1, "schema": newest migration, "time": ms, "tables": {table:
[{column: value}, …]}}, without the ids that a database generates. Rows that metaservers renew (heartbeats, versions)
are left out.

`dump_of` makes the same value from a metaserver's memory, for a database that has lost its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Boolean, Connection, Table, delete, insert, select, text
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.model import Directory, Group, Route, TokenRow
from qmq.metaserver.storage import tables
from qmq.metaserver.storage.changes import ValueRefused
from qmq.metaserver.storage.groups import load_groups
from qmq.metaserver.storage.operators import load_tokens
from qmq.metaserver.storage.routes import load_routes
from qmq.metaserver.storage.sql import BadRows, checked, now_ms, to_json
from qmq.metaserver.storage.tables import REMOVED
from qmq.types import Role

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
    """Read all tables as of one moment."""
    content = {table.name: _rows(connection, table) for table in PARENTS_FIRST}
    return {"format": FORMAT, "version": VERSION, "schema": _schema(connection), "time": now_ms(), "tables": content}


def restore(connection: Connection, dumped: Mapping[str, Any], changed: int, *, is_newer: bool = False) -> None:
    """Replace all tables by a dump.

    Terms and versions of routes still grow, no group gets another master, no broker an earlier disk. A revoked token
    stays revoked, and tokens that the dump lacks stay. Slaves count as incomplete until they report again, accepted
    losses stay open, and rows of the audit trail are added.

    Args:
        is_newer: the dump is newer than the database, so its masters are right.

    Raises:
        ValueRefused: this is no dump, a row of it is invalid, or it names another master.
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
    """Raise each group's term above the stored one and the dump's; keep terms of removed groups.

    A group without a stored row gets the dump's term: if its brokers have a newer one, they report it, and the row is
    repaired. The next term might be theirs already, with other roles or copies.

    An accepted loss in either of them stays open until an operator acknowledges it.
    """
    stored = {row["group_name"]: row for row in _rows(connection, tables.broker_group)}
    for row in rows:
        before = stored.pop(row["group_name"], None)
        if before is not None or is_newer:
            row["term"] = max(row["term"], before["term"] if before else 0) + 1
        row["lost_term"] = max(row["lost_term"], before["lost_term"] if before else 0)
    rows.extend({**row, "kind": REMOVED} for row in stored.values())


def _continue_routes(connection: Connection, rows: Rows, changed: int) -> None:
    """Raise versions of routes in the same way; a route that the dump lacks becomes a removed one."""
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
    """Keep stored rows: a forgotten group would begin at the end and lose earlier messages."""
    stored = {(row["subject"], row["group_name"]): row for row in _rows(connection, tables.consumer_group)}
    return list(({(row["subject"], row["group_name"]): row for row in rows} | stored).values())


def _merge_audit(present: Rows, dumped: Rows) -> Rows:
    """Return the rows of both by time, each once: rows of an audit trail are only added."""
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
        raise ValueRefused("rows of the dump are invalid; the log names them. Nothing was restored")


FORMAT, VERSION = "qmq metadata", 1

Tables = Mapping[str, Any]
"""Rows, each a mapping of columns, by name of the table."""


def header_fault(dumped: Mapping[str, Any], *, schema: str, tables: Iterable[str]) -> str:
    """Return why this is no dump of tables like ours; empty: it is one. Rows are not checked."""
    if dumped.get("format") != FORMAT or dumped.get("version") != VERSION:
        return f"this is no backup of version {VERSION} of a metaserver's tables; Backup makes one"
    if dumped.get("schema") != schema:
        return (
            f"the backup was made with tables of version {dumped.get('schema')}, these have {schema}: restore it into "
            "an empty database with the qmq that made it, then start this one on that"
        )
    content = dumped.get("tables")
    if not isinstance(content, Mapping) or content.keys() != set(tables):
        return "the backup lacks tables, or has others"
    return ""


def lost_masters(present: Tables, dumped: Tables) -> list[str]:
    """Return the groups that would get another master, which may lack messages acknowledged since.

    A master that never registered has no messages. A group that the dump lacks is removed.
    """
    masters, others = _masters(present), _masters(dumped)
    live = {name for name, row in _by_name(dumped).items() if row.get("kind") != REMOVED}
    return [
        f"{name} is served by {_key(row)}, the backup has {_key(others[name]) if name in others else 'no broker'} in "
        "its place, and lacks messages that came since: first make the two agree (SwapRoles or ReplaceBroker; "
        "RemoveBroker if the group's messages may be lost)"
        for name, row in sorted(masters.items())
        if row["incarnation"] and name in live and (name not in others or _key(others[name]) != _key(row))
    ]


def with_disks(present: Tables, dumped: Tables) -> list[dict[str, Any]]:
    """Return the dump's brokers with their present disks, and as incomplete.

    With an earlier disk, a master with an emptied one would be accepted.
    """
    disks = {_key(row): {name: row[name] for name in ("incarnation", "instance")} for row in present["broker"]}
    return [{**row, "complete": False, **disks.get(_key(row), {})} for row in dumped["broker"]]


def _masters(tables: Tables) -> dict[str, Mapping[str, Any]]:
    rows = [row for row in tables["broker"] if isinstance(row, Mapping)]
    return {str(row.get("group_name")): row for row in rows if row.get("role") == Role.MASTER}


def _by_name(tables: Tables) -> dict[str, Mapping[str, Any]]:
    return {str(row.get("group_name")): row for row in tables["broker_group"] if isinstance(row, Mapping)}


def _key(row: Mapping[str, Any]) -> str:
    return f"{row.get('hostname')}:{row.get('serve_port')}"


IN_NO_MEMORY = ("consumer_group", "datasource_config", "audit_trail")
"""Tables that memory does not hold; their rows in the database stay."""


def dump_of(
    directory: Directory,
    routes: Iterable[Route],
    tokens: Iterable[TokenRow],
    terms: Mapping[str, int],
    present: Mapping[str, Any],
) -> dict[str, Any]:
    """Make a dump that `RestoreAll` takes.

    Args:
        terms: newest term of each group that was ever reported or assigned.
        present: a dump of the database.
    """
    now = int(present["time"])
    groups = list(directory.groups.values())
    tables = {
        "broker_group": [_group(group, max(group.term, terms.get(group.name, 0)), now) for group in groups],
        "broker": [row for group in groups for row in _brokers(group, now)],
        "readonly_broker_group_setting": [
            {"subject": mark.subject, "broker_group": mark.group, "create_time": now}
            for mark in sorted(directory.marks)
        ],
        "subject_info": [
            {"name": info.name, "tag": info.tag, "create_time": now, "update_time": info.update_time_ms}
            for info in directory.subjects.values()
        ],
        "subject_route": [_route(route, now) for route in routes],
        "client_offline_state": [
            {"client_id": row.consumer, "subject_info": row.subject, "consumer_group": row.group, "state": 1}
            for row in sorted(directory.offline)
        ],
        "operator_limits": [
            {
                "subject_info": row.subject,
                "consumer_group": row.group,
                "expires_after_s": row.expires_after_s,
                "expired_die": row.expired_die,
                "per_second": row.per_second,
                "messages_max": row.messages_max,
                "drops_oldest": row.drops_oldest,
                "bytes_max": row.bytes_max,
                "dead_letters_to": row.dead_letters_to,
            }
            for row in sorted(directory.limits)
        ],
        "api_token": [_token(token) for token in tokens],
        **{name: present["tables"][name] for name in IN_NO_MEMORY},
    }
    return {"format": FORMAT, "version": VERSION, "schema": present["schema"], "time": now, "tables": tables}


def _group(group: Group, term: int, now: int) -> dict[str, Any]:
    return {
        "group_name": group.name,
        "kind": group.kind,
        "term": term,
        "half_swapped": group.half_swapped,
        "tag": group.tag,
        "draining": group.draining,
        "is_full": group.full,
        "min_copies": group.min_copies,
        "lost_term": group.lost_term,
        "failover": group.failover,
        "sync_mode": group.sync_mode,
        "create_time": now,
        "update_time": group.update_time_ms,
    }


def _brokers(group: Group, now: int) -> Rows:
    return [
        {
            "group_name": group.name,
            "role": int(broker.role),
            "hostname": broker.hostname,
            "ip": broker.ip,
            "serve_port": broker.serve_port,
            "sync_port": broker.sync_port,
            "control_port": broker.control_port,
            "metrics_port": broker.metrics_port,
            "incarnation": broker.incarnation,
            "complete": False,
            "fill_id": broker.fill_id,
            "fill_allowed": broker.fill_allowed,
            "instance": broker.instance,
            "create_time": now,
            "update_time": now,
        }
        for broker in group.brokers
    ]


def _route(route: Route, now: int) -> dict[str, Any]:
    return {
        "subject_info": route.subject,
        "broker_group_json": to_json(list(route.groups)),
        "version": route.version,
        "changed": 0,
        "create_time": now,
        "update_time": route.update_time_ms,
    }


def _token(token: TokenRow) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "salt": token.salt,
        "hash": token.hash,
        "subjects_json": to_json(list(token.subjects)),
        "groups_json": to_json(list(token.groups)),
        "create_time": token.created_ms,
        "expire_time": token.expires_ms,
        "revoke_time": token.revoked_ms,
    }
