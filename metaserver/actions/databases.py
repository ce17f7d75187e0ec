"""Shell. Actions on databases of applications, on their outboxes, and on the watchdogs that drain them.

A password is encrypted before it is stored and is never shown.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from qmq.access import Token, token_text
from qmq.control_plane import DIRECT
from qmq.errors import InvalidRequest, NotServed, OperatorError, OutcomeUnknown, QmqError, cause_of
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.context import ActionContext, Handler, PartlyDone, together
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.shapes import source_json, watchdog_json
from qmq.metaserver.model import WATCHDOGS, AuditRow, DataSource, LeaseRow
from qmq.metaserver.storage.changes import AddDataSource, RemoveDataSource
from qmq.metaserver.storage.sql import checked
from qmq.metaserver.storage.tables import LONG_NAME_CHARS_MAX, datasource_config
from qmq.outbox.table import table_name
from qmq.sql_drivers import Tls, registered
from qmq.types import Endpoint

SQLITE = "sqlite"
PORTS = {"mmm": 3306, "mysql": 3306, "mariadb": 3306, "postgresql": 5432, SQLITE: 1}
"""Usual port by type of database. `mmm` is QMQ's word for MySQL. A file has no server; older registrations with a host
keep the port as a part of their name.
"""


async def _add_db(context: ActionContext, arguments: Arguments) -> Plan:
    url = _url(arguments)
    try:
        _check(arguments)
        if query := _tls(arguments).query():
            url = f"{url}?{query}"
        stored = context.vault.encrypt(arguments["password"]) if arguments["password"] else ""
        table = table_name(arguments["table"])
        checked(datasource_config, {"url": url})  # its parts were checked one by one
    except (OperatorError, InvalidRequest) as refusal:
        return refused(str(refusal))
    if len(stored) > LONG_NAME_CHARS_MAX:
        return refused(f"password is too long: encrypted it has {len(stored)} characters, {LONG_NAME_CHARS_MAX} fit")
    known = await _find(context, _url(arguments))
    earlier = (RemoveDataSource(known.url),) if known is not None and known.url != url else ()
    source = DataSource(
        url,
        arguments["username"],
        stored,
        arguments["room"],
        table=table,
        rate=arguments.number("rate"),
        age_s=arguments.number("age"),
    )
    shown = source_json(source)
    del shown["updateTime"]
    return Plan(
        (*earlier, AddDataSource(source)),
        everything=True,
        before=source_json(known) if known else None,
        after=shown,
        data={"result": "register success", **shown, "replaced": known is not None},
    )


async def _remove_db(context: ActionContext, arguments: Arguments) -> Plan:
    known = await _find(context, url := _url(arguments))
    if known is None:
        return refused(f"no database {url} is registered; ListDbs names them")
    return Plan((RemoveDataSource(known.url),), everything=True, before=source_json(known), data={"removed": url})


async def _list_dbs(context: ActionContext, arguments: Arguments) -> Any:
    return [source_json(source) for source in await context.database.read(lambda repository: repository.data_sources())]


async def _find(context: ActionContext, url: str) -> DataSource | None:
    sources = await context.database.read(lambda repository: repository.data_sources())
    return next((source for source in sources if registered(source.url)[0] == url), None)


def _url(arguments: Arguments) -> str:
    """Return the name of a database: type://host:port/database; for SQLite also type:///path."""
    kind, server = arguments["type"], ""
    if kind != SQLITE or arguments["host"]:
        host = arguments["host"].strip("[]")  # a name stays as it is: the registration is found by this text
        server = str(Endpoint(host, arguments.number("port") or PORTS.get(kind, 0)))
    return f"{kind}://{server}/{arguments['database']}" if arguments["database"] else f"{kind}://{server}"


def _check(arguments: Arguments) -> None:
    """Check that the arguments locate a database; raises InvalidRequest."""
    if (kind := arguments["type"]) not in PORTS:
        raise InvalidRequest(f"type {kind!r} is none of {', '.join(PORTS)}")
    if kind == SQLITE:
        if not arguments["database"].startswith("/"):
            raise InvalidRequest("database is the whole path of the file: --database=/var/lib/shop/shop.db")
        if any(arguments[name] for name in TLS):
            raise InvalidRequest("a file has no connection, so no TLS; leave out --tls and its certificates")
        return
    for name, option in (("host", "--host"), ("username", "--username"), ("password", "--password-file")):
        if not arguments[name] and not (name == "password" and arguments["tlsCert"]):
            raise InvalidRequest(f"{name} is empty; a database of type {kind} needs {option}")


TLS = ("tls", "tlsCa", "tlsCert", "tlsKey")


def _tls(arguments: Arguments) -> Tls:
    """Return the TLS of the arguments; raises InvalidRequest with the names of the options."""
    tls = Tls(*(arguments[name] for name in TLS))
    try:
        tls.check()
        if arguments["type"] != "postgresql":
            tls.mariadb()
    except ValueError as error:
        raise InvalidRequest(
            f"{error} (sslmode is --tls, sslrootcert --tlsCa, sslcert --tlsCert, sslkey --tlsKey)"
        ) from None
    return tls


async def _watchdogs(context: ActionContext, arguments: Arguments) -> Any:
    return [watchdog_json(row, room=_room(row)) for row in await watchdog_leases(context)]


log = logging.getLogger("qmq.metaserver")

PARKED_ALONE = 999_999_999
"""Older than any waiting row, in seconds: the plan shows parked rows only."""
SHOWN_MAX = 20


async def _stuck(context: ActionContext, arguments: Arguments) -> Any:
    """List the stuck rows of each room's watchdog, and the rooms without an active or answering one."""
    rows = [row for row in await watchdog_leases(context) if arguments["room"] in ("", _room(row))]
    query = {name: arguments[name] for name in ("database", "older", "limit")}
    results = await together([_caught(context, row, query) for row in rows])
    databases: list[dict[str, Any]] = []
    unasked = {}
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, QmqError):
            unasked[_room(row)] = str(result)
        else:
            databases += [{"room": _room(row), **database} for database in result["databases"]]
    return {"databases": databases, "unasked": unasked}


async def _caught(context: ActionContext, row: LeaseRow, query: dict[str, str]) -> Any:
    try:
        return await context.watchdogs.ask(_address(row), "/outbox/stuck", query)
    except QmqError as error:
        return error


async def _plan_retry(context: ActionContext, arguments: Arguments) -> Plan:
    database, ids = arguments["database"], arguments.names("ids")
    if ids and not database:
        return refused("ids belong to one database: name it as ListDbs shows it")
    if bool(ids) != arguments.is_given("ids") or not all(word.isascii() and word.isdecimal() for word in ids):
        return refused("ids are whole numbers with commas between them")
    query = {"database": database, "older": PARKED_ALONE, "limit": SHOWN_MAX}
    found = (await context.watchdogs.ask(await _active(context, arguments), "/outbox/stuck", query))["databases"]
    parked = {answer["database"]: answer["parked"] for answer in found if "parked" in answer}
    problems = {answer["database"]: answer["problem"] for answer in found if "problem" in answer}
    rows = (
        []
        if ids
        else [f"{row['id']} {row['subject']}: {row['reason']}" for answer in found for row in answer.get("rows", ())]
    )
    again: dict[str, Any] = {"sentAgain": ids or sum(parked.values())}
    return Plan(
        orders=bool(ids) or any(parked.values()),
        everything=True,
        before={"parked": parked},
        after=again | ({"among them": rows[:SHOWN_MAX]} if rows else {}) | ({"notAsked": problems} if problems else {}),
    )


async def _carry_out_retry(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    """Carry out the retry. The audit row is written first, the outcome second."""
    address = await _active(context, arguments)
    try:
        await context.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"no watchdog was asked, as the database failed: {error}") from error
    query = {"database": arguments["database"], "ids": ",".join(arguments.names("ids"))}
    try:
        found = (await context.watchdogs.ask(address, "/outbox/retry", query, changes=True))["databases"]
    except QmqError as error:
        await _record(context, replace(audit, result="unknown" if isinstance(error, OutcomeUnknown) else "failed"))
        raise
    retried = {answer["database"]: answer["retried"] for answer in found if "retried" in answer}
    problems = {answer["database"]: answer["problem"] for answer in found if "problem" in answer}
    data = {"retried": retried, "notAsked": problems}
    await _record(context, replace(audit, after=data, result="partly done" if problems else "done"))
    if problems:  # a slow database's outcome is unknown
        text = "; ".join(f"{url}: {why}" for url, why in problems.items())
        raise PartlyDone(f"not of every database: {text}. OutboxStuck lists the rows that are parked still", data)
    return data


async def _record(context: ActionContext, audit: AuditRow) -> None:
    try:
        await context.registry.change((), audit)
    except QmqError as error:  # the watchdog has done it, and the first row records the beginning
        log.warning("end of OutboxRetry not recorded reason=%s", error)


async def watchdog_leases(context: ActionContext) -> list[LeaseRow]:
    """Return the leases of watchdogs, one per room. Raises DatabaseAway."""
    leases = await context.database.read(lambda repository: repository.leases())
    return [row for row in leases if row.name.startswith(WATCHDOGS)]


async def _active(context: ActionContext, arguments: Arguments) -> str:
    row = next((row for row in await watchdog_leases(context) if _room(row) == arguments["room"]), None)
    if row is None:
        raise OperatorError(
            f"no watchdog of the room {arguments['room']!r} was ever active; ListWatchdogs names the rooms"
        )
    return _address(row)


def _address(row: LeaseRow) -> str:
    if not row.address:
        raise NotServed(f"no watchdog of the room {_room(row)!r} is active; start one")
    return row.address


def _room(row: LeaseRow) -> str:
    return row.name.removeprefix(WATCHDOGS)


ANSWER_S = 25.0
"""A watchdog allows a database 20 s."""
ANSWER_BYTES_MAX = 16 << 20
ASKED_AT_ONCE = 8
"""Threads of a pool of its own: a hanging watchdog must not block other threads."""


class Watchdogs:
    """Calls to active watchdogs. Made by main; called from the loop.

    Args:
        token: the installation's key, which authorises orders to a watchdog.
    """

    def __init__(self, token: Token) -> None:
        self._token = token
        self._threads = ThreadPoolExecutor(ASKED_AT_ONCE, "watchdogs")

    async def ask(self, address: str, path: str, arguments: Mapping[str, Any], *, changes: bool = False) -> Any:
        """Return a watchdog's answer, parsed from JSON.

        Raises:
            OperatorError: it refuses. NotServed: no answer; nothing was changed.
            OutcomeUnknown: no answer to a call that `changes`; it may have been carried out.
        """
        query = urlencode({name: value for name, value in arguments.items() if value != ""})
        method = "POST" if changes else "GET"
        request = urllib.request.Request(
            f"http://{address}{path}?{query}", headers={"X-Api-Token": token_text(self._token)}, method=method
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _read, request)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise OperatorError(_problem(error)) from None
            lost = changes and error.code != 503
            raise (OutcomeUnknown if lost else NotServed)(f"the watchdog at {address}: {_problem(error)}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            lost = changes and not isinstance(getattr(error, "reason", None), ConnectionRefusedError)
            text = f"the watchdog at {address} does not answer: {cause_of(error)}"
            raise (OutcomeUnknown if lost else NotServed)(text) from None


def _read(request: urllib.request.Request) -> Any:
    with DIRECT.open(request, timeout=ANSWER_S) as answer:
        return json.loads(answer.read(ANSWER_BYTES_MAX))


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["problem"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"it answered {error.code} {error.reason}"


HANDLERS = {
    "AddDb": Handler(plan=_add_db),
    "RemoveDb": Handler(plan=_remove_db),
    "ListDbs": Handler(look=_list_dbs),
    "ListWatchdogs": Handler(look=_watchdogs),
    "OutboxStuck": Handler(look=_stuck),
    "OutboxRetry": Handler(plan=_plan_retry, carry_out=_carry_out_retry),
}
