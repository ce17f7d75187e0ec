"""Shell. Actions on the databases that the watchdog scans. A password is encrypted before it is stored, never shown."""

from __future__ import annotations

from typing import Any

from qmq.errors import InvalidRequest, OperatorError
from qmq.metaserver.actions.desk import Desk
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.shapes import source_json, watchdog_json
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import WATCHDOGS, DataSource
from qmq.metaserver.storage.changes import AddDataSource, RemoveDataSource
from qmq.metaserver.storage.sql import checked
from qmq.metaserver.storage.tables import LONG_NAME_CHARS_MAX, datasource_config
from qmq.outbox.table import table_name

SQLITE = "sqlite"
PORTS = {"mmm": 3306, "mysql": 3306, "mariadb": 3306, "postgresql": 5432, SQLITE: 1}
"""Type of a database -> its server's usual port. `mmm` is QMQ's word for MySQL. A file has no server; with a host all
the same, as older registrations have one, the port is a part of its name."""


async def _add(desk: Desk, words: Words) -> Plan:
    url = _url(words)
    try:
        _check(words)
        stored = desk.vault.encrypt(words["password"]) if words["password"] else ""
        table = table_name(words["table"])
        checked(datasource_config, {"url": url})  # made of parts that are legal each for itself
    except (OperatorError, InvalidRequest) as refusal:
        return refused(str(refusal))
    if len(stored) > LONG_NAME_CHARS_MAX:
        return refused(f"password is too long: encrypted it has {len(stored)} characters, {LONG_NAME_CHARS_MAX} fit")
    known = await _find(desk, url)
    source = DataSource(
        url, words["username"], stored, words["room"], table=table, rate=words.number("rate"), age_s=words.number("age")
    )
    shown = source_json(source)
    del shown["updateTime"]
    return Plan(
        (AddDataSource(source),),
        everything=True,
        before=source_json(known) if known else None,
        after=shown,
        data={"result": "register success", **shown, "replaced": known is not None},
    )


async def _remove(desk: Desk, words: Words) -> Plan:
    known = await _find(desk, url := _url(words))
    if known is None:
        return refused(f"no database {url} is registered; ListDbs names them")
    return Plan((RemoveDataSource(url),), everything=True, before=source_json(known), data={"removed": url})


async def _list(desk: Desk, words: Words) -> Any:
    return [source_json(source) for source in await desk.database.read(lambda repository: repository.data_sources())]


async def _find(desk: Desk, url: str) -> DataSource | None:
    sources = await desk.database.read(lambda repository: repository.data_sources())
    return next((source for source in sources if source.url == url), None)


def _url(words: Words) -> str:
    """Return the name of a database: type://host:port/database, of SQLite also type:///path."""
    kind, server = words["type"], ""
    if kind != SQLITE or words["host"]:
        server = f"{words['host']}:{words.number('port') or PORTS.get(kind, 0)}"
    return f"{kind}://{server}/{words['database']}" if words["database"] else f"{kind}://{server}"


def _check(words: Words) -> None:
    """Check that the words say where the database is; raises InvalidRequest."""
    if (kind := words["type"]) not in PORTS:
        raise InvalidRequest(f"type {kind!r} is none of {', '.join(PORTS)}")
    if kind == SQLITE:
        if not words["database"].startswith("/"):
            raise InvalidRequest("database is the whole path of the file: --database=/var/lib/shop/shop.db")
        return
    for name, option in (("host", "--host"), ("username", "--username"), ("password", "--password-file")):
        if not words[name]:
            raise InvalidRequest(f"{name} is empty; a database of type {kind} needs {option}")


async def _watchdogs(desk: Desk, words: Words) -> Any:
    rows = await desk.database.read(lambda repository: repository.leases())
    return [watchdog_json(row, room=row.name.removeprefix(WATCHDOGS)) for row in rows if row.name.startswith(WATCHDOGS)]


HANDLERS = {
    "AddDb": Handler(plan=_add),
    "RemoveDb": Handler(plan=_remove),
    "ListDbs": Handler(look=_list),
    "ListWatchdogs": Handler(look=_watchdogs),
}
