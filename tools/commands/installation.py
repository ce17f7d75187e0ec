"""Core. Commands for the installation: metaservers, health, tokens, databases and their outboxes, audit trail, backups.

Reads of outboxes go to the active watchdog of a room, as named by the metaserver. Retries go through the metaserver,
which records them. The tools need no access to a database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qmq.tools.command import (
    Command,
    Kind,
    Option,
    bad,
    good,
    listing,
    of_action,
    warning,
)
from qmq.tools.table import Block, Cell, Column, Table, good_or_bad, moment, size


def _metaservers(rows: Any) -> Table:
    return Table(
        (
            Column("HTTP", "http"),
            Column("GRPC", "grpc"),
            Column("VERSION", "version", drop=2),
            Column("UP", good_or_bad("up")),
            Column("ANSWERED THIS", "answersThis", drop=1),
            Column("ID", "id", drop=3),
        ),
        rows,
    )


def _adopted(data: Any) -> Iterable[Block]:
    groups = ", ".join(data["groups"])
    if data["keep"] == "memory":
        yield good(f"the database has this metaserver's groups, {groups} among them")
    else:
        yield good(f"the database is used as it is; {groups}: forgotten")


_LEVEL = {"OK": good, "WARN": warning, "FAIL": bad}


def _level(finding: Mapping[str, Any]) -> Cell:
    return _LEVEL[finding["level"]](finding["level"])


def _findings(findings: Any) -> Iterable[Block]:
    columns = (Column("", _level), Column("STEP", "step"), Column("FOUND", "found", fold=30))
    yield Table(columns, list(_brief(findings)))
    todo = [finding for finding in findings if finding["do"]]
    for finding in todo:
        yield ""
        yield _LEVEL[finding["level"]](f"{finding['level']} {finding['step']}: {finding['found']}")
        yield f"  {finding['do']}"
    yield ""
    yield warning(f"{len(todo)} to look at") if todo else good("nothing is wrong")


def _brief(findings: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield all failures, and the first success of each step with the number of the others."""
    by_step: dict[str, list[Mapping[str, Any]]] = {}
    for finding in findings:
        by_step.setdefault(finding["step"], []).append(finding)
    for of_step in by_step.values():
        fine = [finding for finding in of_step if finding["level"] == "OK"]
        if fine:
            more = f" (and {len(fine) - 1} more)" if len(fine) > 1 else ""
            yield {**fine[0], "found": fine[0]["found"] + more}
        yield from (finding for finding in of_step if finding["level"] != "OK")


def _settings(data: Any) -> Iterable[Block]:
    rows = [
        {"process": process["process"], "name": name, "value": value}
        for process in data["processes"]
        for name, value in process["settings"].items()
    ]
    yield Table((Column("PROCESS", "process"), Column("SETTING", "name"), Column("VALUE", "value", fold=30)), rows)
    for name, why in data["unasked"].items():
        yield warning(f"{name} did not answer: {why}")
    if data["more"]:
        yield warning(f"{data['more']:,} brokers were not asked: name a broker group")


INSTALLATION = (
    of_action("ListMetaservers", "", listing(_metaservers)),
    of_action("Settings", "--brokerGroup=g1", _settings),
    of_action("AdoptDatabase", "--keep=memory", _adopted, look="Doctor"),
    Command(
        "Doctor",
        "check an installation from this machine: names, ports, versions, clocks, token, "
        "roles, copies, disks. Ends with 1 if a step failed",
        "",
        (
            Option(
                "transitions",
                "show each broker's states as well, and its last moves between them",
                "",
                Kind.FLAG,
                alone="true",
                local=True,
            ),
        ),
        show=_findings,
        timeout_s=45,
    ),
)


def _dbs(rows: Any) -> Table:
    return Table(
        (
            Column("DATABASE", "url"),
            Column("USER", "username"),
            Column("ROOM", "room"),
            Column("TABLE", lambda row: row.get("table", "")),
            Column("ROWS/S", lambda row: row.get("rate", "")),
            Column("TLS", lambda row: row.get("tls", "").partition("&")[0].removeprefix("sslmode=")),
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
    of_action(
        "AddDb",
        "--host=db1 --port=3306 --username=qmq --password-file=db1.password",
        lambda _: [good("the database is registered")],
        look="ListDbs",
        secret_unless=lambda arguments: arguments.get("type") == "sqlite" or bool(arguments.get("tlsCert")),
    ),
    of_action("RemoveDb", "--host=db1 --port=3306", lambda _: [good("the database is forgotten")], look="ListDbs"),
    of_action("ListDbs", "", listing(_dbs)),
    of_action("ListWatchdogs", "", listing(_watchdogs)),
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
    of_action(
        "AddToken",
        "--name=shop --role=client --subjects=order.* --days=365 --out=shop.token",
        _new_token,
        look="ListTokens",
        keep=_keep_token,
        more=(Option("out", "write the token's text to this file, readable by you alone", "", Kind.PATH, local=True),),
    ),
    of_action("RevokeToken", "--id=2f51c7a09b3e", lambda _: [good("the token is revoked")], look="ListTokens"),
    of_action("ListTokens", "", listing(_tokens)),
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


def _keep_definitions(data: Any) -> tuple[str, dict[str, Any]]:
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    counts = {name: len(rows) for name, rows in data.items() if isinstance(rows, list)}
    return text, {"bytes": len(text.encode()), "rows": counts}


def _imported(data: Any) -> Iterable[Block]:
    counts = ", ".join(f"{count:,} {name}" for name, count in data["imported"].items())
    yield good(f"imported: {counts}") if counts else good("this cluster has all of it")
    if data["tokensMissing"]:
        yield warning(f"AddToken makes the tokens that are missing: {', '.join(data['tokensMissing'])}")


UPKEEP = (
    of_action("AuditTrail", "--brokerGroup=g1 --since=24h", _trail),
    of_action(
        "Backup",
        "--file=qmq-metadata.json",
        _backed_up,
        keep=_keep_backup,
        more=(
            Option(
                "file",
                "file to write, - for standard output; an old one is replaced at the end",
                kind=Kind.PATH,
                local=True,
            ),
        ),
    ),
    of_action(
        "ExportDefinitions",
        "--file=definitions.json",
        _backed_up,
        keep=_keep_definitions,
        more=(
            Option(
                "file",
                "file to write, - for standard output; an old one is replaced at the end",
                kind=Kind.PATH,
                local=True,
            ),
        ),
    ),
    of_action("ImportDefinitions", "--file=definitions.json", _imported, look="AuditTrail --name=ImportDefinitions"),
    of_action("Restore", "--file=qmq-metadata.json", _restored, look="AuditTrail --name=Restore"),
)


_ROOM = Option("room", "namespace of the watchdog", default="default")
_DATABASE = Option("database", "only this one, as ListDbs names it", default="")
_OLDER = Option("older", "seconds after which a waiting row counts as stuck", "60", Kind.NUMBER)
_WATCHDOG = Option("watchdog", "host:port of the active watchdog, if its own address is unreachable", default="")


def _ids_fault(arguments: Mapping[str, str]) -> str:
    ids = arguments.get("ids", "")
    if ids and "database" not in arguments:
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
        fault_of=_ids_fault,
    ),
)
