"""Core. Commands for outboxes of applications: stuck rows, retries, comparison with the logs.

Reads go to the active watchdog of a room, as named by the metaserver. Retries go through the metaserver, which records
them. The tools need no access to a database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qmq.tools.command import Command, Kind, Option, good, of_action
from qmq.tools.table import Block, Cell

_ROOM = Option("room", "namespace of the watchdog", default="default")
_DATABASE = Option("database", "only this one, as ListDbs names it", default="")
_OLDER = Option("older", "seconds after which a waiting row counts as stuck", "60", Kind.NUMBER)
_WATCHDOG = Option("watchdog", "host:port of the active watchdog, if its own address is unreachable", default="")


def _retries_something(words: Mapping[str, str]) -> str:
    ids = words.get("ids", "")
    if ids and "database" not in words:
        return "--ids belong to one database: name it with --database"
    if not all(word.isascii() and word.isdecimal() for word in ids.split(",") if word):
        return "--ids are whole numbers with commas between them"
    return ""


def _retried(data: Mapping[str, Any]) -> Iterator[Block]:
    for database, rows in data["retried"].items():
        yield good(f"{database}: {rows} rows are to be sent again")
    if not data["retried"]:
        yield Cell("no row is parked")


OUTBOX = (
    Command(
        "OutboxStuck",
        "list stuck rows of outboxes: parked, or waiting too long",
        "--older=600",
        (
            _ROOM,
            _DATABASE,
            _OLDER,
            Option("limit", "at most this many rows of each database", "20", Kind.NUMBER),
            _WATCHDOG,
        ),
        runs="qmq.tools.outbox:stuck",
    ),
    Command(
        "OutboxReconcile",
        "find stuck rows in the brokers' logs; reads only",
        "--older=600 --limit=100",
        (
            _ROOM,
            _DATABASE,
            _OLDER,
            Option("limit", "at most this many rows of each database", "100", Kind.NUMBER),
            _WATCHDOG,
        ),
        runs="qmq.tools.outbox:reconcile",
    ),
    of_action(
        "OutboxRetry",
        "--database=mmm://db1:3306 --ids=17,18",
        _retried,
        look="OutboxStuck --room={room}",
        needs=_retries_something,
    ),
)
