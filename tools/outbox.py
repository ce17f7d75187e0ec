"""Shell. OutboxStuck and OutboxReconcile: stuck rows of outboxes, as the active watchdog of a room reports them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from qmq.control_plane import DIRECT
from qmq.tools.call import CallFailed, Exit, post
from qmq.tools.command import LIST_TIMEOUT_S, bad, warning
from qmq.tools.session import Session
from qmq.tools.table import Block, Cell, Column, Table
from qmq.tools.terminal import complain, show

_ROW = (
    Column("ID", "id"),
    Column("STATE", "state"),
    Column("AGE S", lambda row: round(row["age"])),
    Column("ERRORS", "errors", drop=1),
    Column("SUBJECT", "subject"),
    Column("MESSAGE", "messageId", fold=12),
)
_REASON = Column("REASON", "reason", fold=20)


def stuck_blocks(answer: Mapping[str, Any]) -> Iterator[Block]:
    yield from _each(answer, _stuck)


def _stuck(database: Mapping[str, Any]) -> Iterator[Block]:
    line = (
        f"{database['pending']} to be sent ({database['claimed']} of them under way), "
        f"oldest {round(database['oldest'])} s"
    )
    yield f"{database['database']}: {line}"
    if database["parked"]:
        yield bad(f"{database['parked']} parked: not sent until OutboxRetry")
    if database["rows"]:
        yield Table((*_ROW, _REASON), database["rows"])


def reconciled_blocks(answer: Mapping[str, Any]) -> Iterator[Block]:
    yield from _each(answer, _reconciled)


def _reconciled(database: Mapping[str, Any]) -> Iterator[Block]:
    counts = database["counts"]
    yield (
        f"{database['database']}: of {sum(counts.values())} rows {counts['inLog']} are in a log, "
        f"{counts['notInLog']} are in none, {counts['unchecked']} could not be checked"
    )
    more = (Column("LOG", "log"), Column("WHERE", lambda row: row["where"] or row["why"], fold=20))
    if database["rows"]:
        yield Table((*_ROW, *more), database["rows"])


def problems_of(answer: Mapping[str, Any]) -> list[str]:
    return [
        f"{database['database']}: {database['problem']}" for database in answer["databases"] if "problem" in database
    ]


def _each(answer: Mapping[str, Any], blocks: Any) -> Iterator[Block]:
    if not answer["databases"]:
        yield Cell("no database is registered in this room")
    for database in answer["databases"]:
        if "problem" in database:
            yield warning(f"{database['database']}: not looked at, {database['problem']}")
        else:
            yield from blocks(database)


ANSWER_S = 45.0
"""A search in the logs takes 15 s, after the answers of the databases."""


class Unanswered(Exception):
    """No watchdog answered the request; the text gives the reason."""

    def __init__(self, exit_status: Exit, text: str) -> None:
        super().__init__(text)
        self.exit = exit_status


def ask_watchdog(session: Session, path: str, **arguments: str) -> Any:
    """Return the watchdog's answer, parsed from JSON. Raises Unanswered."""
    address = session.values["watchdog"] or _active(session)
    query = urlencode({name: value for name, value in arguments.items() if value})
    request = urllib.request.Request(f"http://{address}{path}?{query}", headers={"X-Api-Token": session.token})
    try:
        with DIRECT.open(request, timeout=ANSWER_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        exit_status = Exit.UNREACHABLE if error.code >= 500 else Exit.REFUSED
        raise Unanswered(exit_status, _problem(error)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unanswered(Exit.UNREACHABLE, f"the watchdog at {address} does not answer: {error}") from None


def _active(session: Session) -> str:
    try:
        answer = post(session.metaserver, session.token, {"action": "ListWatchdogs"}, timeout_s=LIST_TIMEOUT_S)
    except CallFailed as error:
        raise Unanswered(Exit.UNREACHABLE, str(error)) from None
    if answer.exit is not Exit.DONE:
        raise Unanswered(answer.exit, answer.message)
    room = session.values["room"]
    row = next((row for row in answer.data if row["room"] == room), None)
    if row is None or not row["address"]:
        raise Unanswered(Exit.UNREACHABLE, f"no watchdog of the room {room!r} is active; ListWatchdogs shows all")
    return str(row["address"])


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["problem"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the watchdog answered {error.code} {error.reason}"


def look(session: Session, path: str, blocks: Callable[[Any], Iterable[Any]]) -> Exit:
    """Request the rows that the options select, and print them; `blocks` formats the answer."""
    arguments = {name: session.values[name] for name in ("database", "older", "limit")}
    try:
        answer = ask_watchdog(session, path, **arguments)
    except Unanswered as why:
        complain(str(why))
        return why.exit
    if session.as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        show(blocks(answer))
    return Exit.UNREACHABLE if problems_of(answer) else Exit.DONE


def stuck(session: Session) -> Exit:
    return look(session, "/outbox/stuck", stuck_blocks)


def reconcile(session: Session) -> Exit:
    return look(session, "/outbox/reconcile", reconciled_blocks)
