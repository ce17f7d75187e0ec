"""Shell. API tokens and the audit trail."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, insert, or_, select, update

from qmq.metaserver.model import AuditRow, TokenRow
from qmq.metaserver.storage.changes import AlreadyThere, NotThere
from qmq.metaserver.storage.sql import BadRows, checked, now_ms, parse_names, to_json
from qmq.metaserver.storage.tables import api_token, audit_trail
from qmq.rights import TokenRole

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
