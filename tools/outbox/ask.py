"""Shell. Asks the active watchdog of a room, which the metaserver names."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

from qmq.control_plane import DIRECT
from qmq.tools.answer import Exit
from qmq.tools.call import CallFailed, post
from qmq.tools.command import LIST_TIMEOUT_S
from qmq.tools.session import Session

ANSWER_S = 45.0
"""A look at the logs takes a quarter of a minute, and the databases' answers come before it."""


class Unanswered(Exception):
    """No watchdog gave what was asked for; the text says why."""

    def __init__(self, exit_status: Exit, text: str) -> None:
        super().__init__(text)
        self.exit = exit_status


def ask_watchdog(session: Session, path: str, **words: str) -> Any:
    """Return what the watchdog answers, read from JSON. Raises Unanswered."""
    address = session.values["watchdog"] or _active(session)
    query = urlencode({name: value for name, value in words.items() if value})
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
