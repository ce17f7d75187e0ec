"""Shell. Actions on the installation itself: what was done, backup and restore, metaservers."""

from __future__ import annotations

import json
from typing import Any

from qmq.metaserver.actions import upkeep_plans
from qmq.metaserver.actions.desk import Desk
from qmq.metaserver.actions.doctor import stored_metaservers
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.plan import Plan
from qmq.metaserver.actions.shapes import audit_json, metaserver_json
from qmq.metaserver.actions.words import Words

DATABASE_WAIT_MS = 60_000
"""A dump of 100,000 subjects takes seconds."""


async def _audit_trail(desk: Desk, words: Words) -> Any:
    about = [words[name] for name in ("brokerGroup", "subject", "request") if words[name]]
    rows = await desk.database.read(
        lambda repository: repository.audit_trail(
            words.number("before") or None,
            words.number("limit"),
            who=words["who"],
            action=words["name"],
            since_ms=words.number("since"),
            until_ms=words.number("until"),
            about=about,
        ),
        timeout_ms=DATABASE_WAIT_MS,
    )
    full = len(rows) == words.number("limit")
    whole = words.is_given("request")
    return {"rows": [audit_json(row, whole=whole) for row in rows], "next": rows[-1].id if rows and full else None}


async def _backup(desk: Desk, words: Words) -> Any:
    return await desk.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)


async def _restore(desk: Desk, words: Words) -> Plan:
    present = await desk.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)
    return upkeep_plans.restore(json.loads(words["backup"]), present, forced=words.flag("force"))


async def _adopt_database(desk: Desk, words: Words) -> Plan:
    present = await desk.database.read(lambda repository: repository.dump(), timeout_ms=DATABASE_WAIT_MS)
    return upkeep_plans.adopt_database(
        desk.registry.mirror.lost_groups(),
        present,
        lambda: desk.registry.dump_memory(present),
        keeps_memory=words["keep"] == "memory",
    )


async def _list_metaservers(desk: Desk, words: Words) -> Any:
    alive = {row.id: row for row in desk.registry.peers()}
    known = {**{row.id: row for row in await stored_metaservers(desk)}, **alive}
    rows = sorted(known.values(), key=lambda row: row.http_address)
    return [metaserver_json(row, up=row.id in alive, own=row.id == desk.own_id) for row in rows]


HANDLERS = {
    "AuditTrail": Handler(look=_audit_trail),
    "Backup": Handler(look=_backup),
    "Restore": Handler(plan=_restore),
    "AdoptDatabase": Handler(plan=_adopt_database),
    "ListMetaservers": Handler(look=_list_metaservers),
}
