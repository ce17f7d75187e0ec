"""Shell. Rows of outboxes that wait or are parked: listed and sent again by the active watchdog of their room."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions.desk import Desk, together
from qmq.metaserver.actions.handler import Handler, PartlyDone
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import WATCHDOGS, AuditRow, LeaseRow

log = logging.getLogger("qmq.metaserver")

PARKED_ALONE = 999_999_999
"""No waiting row is older, in seconds: the plan shows parked rows."""
SHOWN_MAX = 20


async def _stuck(desk: Desk, words: Words) -> Any:
    """Ask each room's watchdog; a room without an active one, or whose watchdog is silent, is named."""
    rows = [row for row in await _rooms(desk) if words["room"] in ("", _room(row))]
    asked = {name: words[name] for name in ("database", "older", "limit")}
    results = await together([_caught(desk, row, asked) for row in rows])
    databases: list[dict[str, Any]] = []
    unasked = {}
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, QmqError):
            unasked[_room(row)] = str(result)
        else:
            databases += [{"room": _room(row), **one} for one in result["databases"]]
    return {"databases": databases, "unasked": unasked}


async def _caught(desk: Desk, row: LeaseRow, asked: dict[str, str]) -> Any:
    try:
        return await desk.watchdogs.ask(_address(row), "/outbox/stuck", asked)
    except QmqError as error:
        return error


async def _plan_retry(desk: Desk, words: Words) -> Plan:
    database, ids = words["database"], words.names("ids")
    if ids and not database:
        return refused("ids are those of one database: name it, as ListDbs does")
    if bool(ids) != words.is_given("ids") or not all(word.isascii() and word.isdecimal() for word in ids):
        return refused("ids are whole numbers with commas between them")
    asked = {"database": database, "older": PARKED_ALONE, "limit": SHOWN_MAX}
    found = (await desk.watchdogs.ask(await _active(desk, words), "/outbox/stuck", asked))["databases"]
    parked = {one["database"]: one["parked"] for one in found if "parked" in one}
    problems = {one["database"]: one["problem"] for one in found if "problem" in one}
    rows = (
        []
        if ids
        else [f"{row['id']} {row['subject']}: {row['reason']}" for one in found for row in one.get("rows", ())]
    )
    again: dict[str, Any] = {"sentAgain": ids or sum(parked.values())}
    return Plan(
        orders=bool(ids) or any(parked.values()),
        everything=True,
        before={"parked": parked},
        after=again | ({"among them": rows[:SHOWN_MAX]} if rows else {}) | ({"notAsked": problems} if problems else {}),
    )


async def _carry_out_retry(desk: Desk, words: Words, plan: Plan, audit: AuditRow) -> Any:
    """The row of the trail comes first, what became of it second."""
    address = await _active(desk, words)
    try:
        await desk.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"no watchdog was asked, as the database failed: {error}") from error
    asked = {"database": words["database"], "ids": ",".join(words.names("ids"))}
    try:
        found = (await desk.watchdogs.ask(address, "/outbox/retry", asked, changes=True))["databases"]
    except QmqError as error:
        await _record(desk, replace(audit, result="unknown" if isinstance(error, OutcomeUnknown) else "failed"))
        raise
    retried = {one["database"]: one["retried"] for one in found if "retried" in one}
    problems = {one["database"]: one["problem"] for one in found if "problem" in one}
    data = {"retried": retried, "notAsked": problems}
    await _record(desk, replace(audit, after=data, result="partly done" if problems else "done"))
    if problems:  # of a database that was too slow, it is unknown
        text = "; ".join(f"{url}: {why}" for url, why in problems.items())
        raise PartlyDone(f"not of every database: {text}. OutboxStuck tells what is parked still", data)
    return data


async def _record(desk: Desk, audit: AuditRow) -> None:
    try:
        await desk.registry.change((), audit)
    except QmqError as error:  # the watchdog has done it, and the first row says that it was begun
        log.warning("end of OutboxRetry not recorded reason=%s", error)


async def _rooms(desk: Desk) -> list[LeaseRow]:
    leases = await desk.database.read(lambda repository: repository.leases())
    return [row for row in leases if row.name.startswith(WATCHDOGS)]


async def _active(desk: Desk, words: Words) -> str:
    row = next((row for row in await _rooms(desk) if _room(row) == words["room"]), None)
    if row is None:
        raise OperatorError(f"no watchdog of the room {words['room']!r} was ever active; ListWatchdogs names the rooms")
    return _address(row)


def _address(row: LeaseRow) -> str:
    if not row.address:
        raise NotServed(f"no watchdog of the room {_room(row)!r} is active; start one")
    return row.address


def _room(row: LeaseRow) -> str:
    return row.name.removeprefix(WATCHDOGS)


HANDLERS = {
    "OutboxStuck": Handler(look=_stuck),
    "OutboxRetry": Handler(plan=_plan_retry, carry_out=_carry_out_retry),
}
