"""Shell. Clients that were seen with a subject: one row each, with when it was seen first and last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from metaserver.db.limits import checked
from metaserver.db.rows import chunks, now_ms
from metaserver.db.tables import client_meta_info
from metaserver.model import ClientKey, ClientRow

_columns = client_meta_info.c
_KEY = ("subject_info", "client_type", "consumer_group", "client_id")


def note_clients(connection: Connection, rows: Sequence[ClientRow]) -> None:
    """Write down that these clients are here now."""
    now, stored = now_ms(), _stored(connection, [row.key.subject for row in rows])
    wanted = {row.key: _values(row, now) for row in rows}
    new = [{**values, "create_time": now} for key, values in wanted.items() if key not in stored]
    old = [{f"new_{k}": v for k, v in values.items()} for key, values in wanted.items() if key in stored]
    if new:
        connection.execute(insert(client_meta_info), new)
    if old:
        connection.execute(_update_each, old)


def list_clients(connection: Connection, *, subject: str, group: str, since_ms: int, limit: int) -> list[ClientRow]:
    """Read clients, those seen last first; an empty word stands for all."""
    query = select(client_meta_info).order_by(_columns.update_time.desc(), _columns.id.desc()).limit(limit)
    if subject:
        query = query.where(_columns.subject_info == subject)
    if group:
        query = query.where(_columns.consumer_group == group)
    if since_ms:
        query = query.where(_columns.update_time >= since_ms)
    return [
        ClientRow(
            ClientKey(row.subject_info, row.client_type, row.consumer_group, row.client_id),
            row.app_code,
            row.room,
            row.create_time,
            row.update_time,
        )
        for row in connection.execute(query)
    ]


def forget_clients(connection: Connection, before_ms: int) -> int:
    """Delete clients that were not seen since; return how many."""
    return connection.execute(delete(client_meta_info).where(_columns.update_time < before_ms)).rowcount


def _stored(connection: Connection, subjects: list[str]) -> set[ClientKey]:
    keys = (_columns.subject_info, _columns.client_type, _columns.consumer_group, _columns.client_id)
    stored: set[ClientKey] = set()
    for chunk in chunks(sorted(set(subjects))):
        stored.update(ClientKey(*row) for row in connection.execute(select(*keys).where(keys[0].in_(chunk))))
    return stored


def _values(row: ClientRow, now: int) -> dict[str, Any]:
    values = dict(zip(_KEY, row.key, strict=True)) | {"app_code": row.app, "room": row.room, "update_time": now}
    return checked(client_meta_info, values)


_update_each = (
    update(client_meta_info)
    .where(*(_columns[name] == bindparam(f"new_{name}") for name in _KEY))
    .values({name: bindparam(f"new_{name}") for name in ("app_code", "room", "update_time")})
)
