"""Core. Commands about who may do what, and who did what: tokens, registered databases, the audit trail."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from qmq.tools.command import ANY_GROUP, ANY_SUBJECT, FORCE, Command, Kind, Option, bad, good, listing, warning
from qmq.tools.table import Block, Cell, Column, Table, moment, size

_DB = (
    Option("type", "kind of the database: mmm, mysql, mariadb, postgresql, sqlite", default="mmm"),
    Option("host", "its server; SQLite has none", default=""),
    Option("port", "the server's port; default 3306, of PostgreSQL 5432", "", Kind.PORT),
    Option("database", "its name on the server, default qmq_produce; of SQLite the path of the file", default=""),
)


def _dbs(rows: Any) -> Table:
    return Table(
        (
            Column("DATABASE", "url"),
            Column("USER", "username"),
            Column("ROOM", "room"),
            Column("TABLE", lambda row: row.get("table", "")),
            Column("ROWS/S", lambda row: row.get("rate", "")),
            Column("STATE", "status"),
            Column("CHANGED", moment("updateTime"), drop=1),
        ),
        rows,
        empty="no database is registered",
    )


def _watchdogs(rows: Any) -> Table:
    return Table(
        (
            Column("ROOM", "room"),
            Column("ACTIVE", "active"),
            Column("ADDRESS", "address"),
            Column("TERM", "term"),
            Column("SEEN", moment("updateTime"), drop=1),
        ),
        rows,
        empty="no watchdog has run yet",
    )


DATABASES = (
    Command(
        "AddDb",
        "register an application's database for the watchdog",
        "--host=db1 --port=3306 --username=qmq --password-file=db1.password",
        (
            *_DB,
            Option("username", "its user; SQLite has none", default=""),
            Option("password", "the user's password", "", Kind.SECRET, not_with=("type", "sqlite")),
            Option("room", "namespace of the watchdog that scans it", default="default"),
            Option("table", "name of the outbox: table, or schema.table; default qmq_msg_queue", default=""),
            Option("rate", "rows a second that are sent at most; default 10000", "", Kind.NUMBER),
            Option("age", "seconds that a row is left to its application; default 60", "", Kind.NUMBER),
        ),
        lambda _: [good("the database is registered")],
        changes=True,
        has_details=True,
        look="ListDbs",
    ),
    Command(
        "RemoveDb",
        "forget a database",
        "--host=db1 --port=3306",
        _DB,
        lambda _: [good("the database is forgotten")],
        changes=True,
        look="ListDbs",
    ),
    Command("ListDbs", "list registered databases, without passwords", "", show=listing(_dbs)),
    Command(
        "ListWatchdogs", "list rooms of watchdogs, and which watchdog is active in each", "", show=listing(_watchdogs)
    ),
)


def _new_token(data: Any) -> Iterable[Block]:
    token = f"token {data['id']} of {data['name']} ({data['role']})"
    if "keptIn" in data:
        yield good(f"{token}; its text is in {data['keptIn']}, and nowhere else")
    else:
        yield good(f"{token}; its text is shown this once:")
        yield data["token"]


def _keep_token(data: Any) -> tuple[str, dict[str, Any]]:
    return f"{data['token']}\n", {name: value for name, value in data.items() if name != "token"}


def _tokens(rows: Any) -> Table:
    return Table(
        (
            Column("ID", "id"),
            Column("NAME", "name"),
            Column("ROLE", "role"),
            Column("VALID", _validity),
            Column("SUBJECTS", lambda row: row.get("subjects") or "all", fold=16),
            Column("GROUPS", lambda row: row.get("groups") or "all", drop=2, fold=10),
            Column("EXPIRES", moment("expires"), drop=1),
            Column("CREATED", moment("created"), drop=3),
        ),
        rows,
        empty="no token; the key of the installation is the only one",
    )


def _validity(token: Mapping[str, Any]) -> Cell:
    return good("yes") if token.get("valid") else bad("revoked") if token.get("revoked") else warning("expired")


TOKENS = (
    Command(
        "AddToken",
        "make an API token; its text is shown once",
        "--name=shop --role=client --subjects=order.* --days=365 --out=shop.token",
        (
            Option("name", "whose token it is; two of one name may be valid, for rotation"),
            Option("role", "what it is for", choices=("viewer", "operator", "admin", "client", "broker")),
            Option(
                "subjects",
                "only these subjects (prefix*, produce:…, consume:…, redrive:…), separated by commas",
                default="",
            ),
            Option("groups", "only these broker groups (prefix*), separated by commas", default=""),
            Option("days", "days for which it is valid; default: for ever", default="", kind=Kind.NUMBER),
            Option("out", "write the token's text to this file, readable by you alone", "", Kind.PATH, local=True),
        ),
        _new_token,
        changes=True,
        look="ListTokens",
        keep=_keep_token,
    ),
    Command(
        "RevokeToken",
        "end a token at once",
        "--id=2f51c7a09b3e",
        (Option("id", "its id, as ListTokens shows it"),),
        lambda _: [good("the token is revoked")],
        changes=True,
        look="ListTokens",
    ),
    Command("ListTokens", "list tokens: name, role, scope, expiry; never their texts", "", show=listing(_tokens)),
)


def _trail(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("ID", "id", drop=3),
            Column("TIME", moment("time"), fold=10),
            Column("WHO", "who"),
            Column("FROM", "peer", drop=2),
            Column("ACTION", "action", fold=18),
            Column("PARAMETERS", _parameters, fold=24),
            Column("REQUEST", lambda row: row["parameters"].get("request"), drop=4),
            Column("RESULT", "result"),
        ),
        data["rows"],
        empty="nothing was changed",
    )
    if data.get("next"):
        yield f"more with --before={data['next']}"


def _parameters(row: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in row["parameters"].items()
        if name not in ("request", "details")
    )


def _keep_backup(data: Any) -> tuple[str, dict[str, Any]]:
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    return text, {"bytes": len(text.encode()), "rows": {name: len(rows) for name, rows in data["tables"].items()}}


def _backed_up(data: Any) -> Iterable[Block]:
    rows = ", ".join(f"{count:,} {name}" for name, count in data["rows"].items() if count)
    yield good(f"{data['keptIn']}: {size(data['bytes'])}; {rows}")


def _restored(data: Any) -> Iterable[Block]:
    yield good("the metadata of the backup is in place")


UPKEEP = (
    Command(
        "AuditTrail",
        "list who changed what, newest first",
        "--brokerGroup=g1 --since=24h",
        (
            Option("who", "only of this token name", default=""),
            Option("name", "only this action", default=""),
            Option("request", "only the request of this number", default=""),
            ANY_GROUP,
            ANY_SUBJECT,
            Option("since", "only from then on (2026-01-31T12:00:00Z; 24h: ago)", "", Kind.MOMENT),
            Option("until", "only before then", "", Kind.MOMENT),
            Option("limit", "at most this many rows; default: 100", default="", kind=Kind.NUMBER),
            Option("before", "only rows with a smaller id: the next page", default="", kind=Kind.NUMBER),
        ),
        _trail,
    ),
    Command(
        "Backup",
        "write all metadata to a file, readable by you alone: it holds hashes of tokens and passwords as stored",
        "--file=qmq-metadata.json",
        (
            Option(
                "file",
                "file to write, - for standard output; an old one is replaced at the end",
                kind=Kind.PATH,
                local=True,
            ),
        ),
        _backed_up,
        timeout_s=90,
        keep=_keep_backup,
    ),
    Command(
        "Restore",
        "put the metadata of a backup in place; only into an empty metaserver, or with --force",
        "--file=qmq-metadata.json",
        (Option("file", "file that Backup wrote", kind=Kind.FILE, sent_as="backup"), FORCE),
        _restored,
        changes=True,
        look="AuditTrail --name=Restore",
        timeout_s=180,
    ),
)
