"""Shell. Actions on API tokens. A token's text is answered once, when it is made, and written down nowhere."""

from __future__ import annotations

import secrets
from typing import Any

from qmq.errors import QmqError
from qmq.metaserver.access import is_valid, new_token
from qmq.metaserver.actions.desk import Desk, wall_ms
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import TokenRow
from qmq.metaserver.storage.changes import AddToken, RevokeToken

DAY_MS = 24 * 3600 * 1000


async def _add(desk: Desk, words: Words) -> Plan:
    for name in ("subjects", "groups"):
        if words.is_given(name) and not words.names(name):  # a script's empty variables would make it unlimited
            return refused(f"{name} {words[name]!r} names none; leave it away for a token that is not limited")
    known = await desk.database.read(lambda repository: repository.load_tokens())
    try:
        row, text = new_token(
            words["name"],
            words["role"],
            known=known,
            random_bytes=secrets.token_bytes,
            now_ms=wall_ms(),
            lifetime_ms=words.number("days") * DAY_MS,
            subjects=words.names("subjects"),
            groups=words.names("groups"),
        )
    except QmqError as refusal:
        return refused(str(refusal))
    shown = _token_json(row)
    return Plan((AddToken(row),), everything=True, after=shown, data={**shown, "token": text})


async def _revoke(desk: Desk, words: Words) -> Plan:
    known = {row.id: row for row in await desk.database.read(lambda repository: repository.load_tokens())}
    row = known.get(words["id"])
    if row is None:
        return refused(f"there is no token {words['id']}; ListTokens names them")
    if row.revoked_ms:
        return Plan(everything=True, before=_token_json(row), data=_token_json(row))
    return Plan((RevokeToken(row.id),), everything=True, before=_token_json(row), data={"revoked": row.id})


async def _list(desk: Desk, words: Words) -> Any:
    rows = await desk.database.read(lambda repository: repository.load_tokens())
    return [_token_json(row) for row in sorted(rows, key=lambda row: (row.name, row.created_ms))]


def _token_json(row: TokenRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "role": row.role,
        "subjects": list(row.subjects),
        "groups": list(row.groups),
        "created": row.created_ms,
        "expires": row.expires_ms,
        "revoked": row.revoked_ms,
        "valid": is_valid(row, wall_ms()),
    }


HANDLERS = {
    "AddToken": Handler(plan=_add),
    "RevokeToken": Handler(plan=_revoke),
    "ListTokens": Handler(look=_list),
}
