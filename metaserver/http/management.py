"""Shell. `POST /management`: operators' actions in QMQ's protocol, answers byte for byte as QMQ's tools expect them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.routing import APIRoute

from qmq.commands.action import DETAILS, Action, Status, Style
from qmq.commands.catalog import ACTIONS
from qmq.errors import AccessError
from qmq.metaserver.actions import Answer
from qmq.metaserver.actions.shapes import as_qmq
from qmq.metaserver.actions.words import unknown_word
from qmq.metaserver.http import endpoints
from qmq.metaserver.http.endpoints import JSON, TEXT, ActionsPort, run_within
from qmq.metaserver.http.guard import TOKEN_HEADER, asks_itself
from qmq.rights import Caller, TokenRole

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Body:
    """HTTP answer; its status is always 200."""

    text: str
    media_type: str = JSON_TYPE


def no_such_action(name: str) -> Body:
    """Return the answer to a missing or unknown action; plain text, as QMQ's."""
    if not name:
        return Body("need provide action param", TEXT_TYPE)
    return Body(f"unknown action: {name[:100]}\n{unknown_word('action', name, ACTIONS)}", TEXT_TYPE)


def refused_token(text: str) -> Body:
    """Return the answer to a bad or missing token, in any style of action."""
    return _json(_envelope(Status.REFUSED, text, None))


def render(action: Action, answer: Answer, given: Mapping[str, str]) -> Body:
    """Format an answer in the style of its action."""
    details = given.get(DETAILS, "").lower() == "true"
    if answer.done:
        data = answer.data if details else as_qmq(action, answer.data)
        is_preview = isinstance(answer.data, dict) and "dryRun" in answer.data
        if action.style is Style.RAW and not is_preview:
            return _json(data)
        if action.style is Style.MAP:
            return _json({"data": data})
        return _json(_envelope(answer.status, answer.message, data))
    if action.style is Style.MAP or (action.style is Style.RAW and action.changes):
        shown = {"error": answer.message, **answer.details}
        if answer.status is not Status.REFUSED:  # QMQ's tools have no other status; ours distinguish them
            shown["status"] = int(answer.status)
        return _json(shown if answer.data is None else {**shown, "data": answer.data})
    return _json(_envelope(answer.status, answer.message, answer.data))


def _envelope(status: Status, message: str, data: Any) -> dict[str, Any]:
    return {"status": int(status), "message": message, "data": data}


def _json(content: Any) -> Body:
    return Body(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


ANYBODY = Caller("anybody", TokenRole.VIEWER)

LONG_BYTES = 65_536
"""Forms above this size are parsed on a thread: a backup with 100,000 subjects takes three to nine seconds."""


_FORM = {"type": "object", "required": ["action"], "properties": {"action": {"type": "string"}}}
_BODY = {"content": {"application/x-www-form-urlencoded": {"schema": _FORM}}}


def make_route(actions: ActionsPort, *, open_lists: bool) -> APIRoute:
    """Make the route. `open_lists`: lists that QMQ answers without a token need none."""

    @asks_itself
    async def manage(request: Request) -> Response:
        words = await _read_words(request)
        caller: Caller | None = request.scope["qmq.caller"]
        name = words.get("action", "")
        action = ACTIONS.get(name)
        has_token = bool(request.headers.get(TOKEN_HEADER) or request.headers.get("authorization"))
        if open_lists and not has_token and action is not None and not action.needs_token:
            caller = ANYBODY
        if caller is None:
            return _respond(refused_token(f"{request.scope.get('qmq.refusal')} (header {TOKEN_HEADER})"))
        if action is None:
            return _respond(no_such_action(name))
        try:
            caller.require_role(action.role)
        except AccessError as error:
            return _respond(render(action, Answer(Status.REFUSED, str(error), code=type(error).__name__), words))
        return _respond(render(action, await run_within(actions, action, words, caller), words))

    summary = (
        "operators' actions in QMQ's protocol: `action` and its parameters in a form or the address; status 200 always"
    )
    return endpoints.make_route(
        "POST", "/management", manage, summary=summary, content={**JSON, **TEXT}, extra={"requestBody": _BODY}
    )


async def _read_words(request: Request) -> Mapping[str, str]:
    """Return the parameters of the query string and the form body; the body takes precedence, as with QMQ's tools."""
    body = await request.body()
    form = _parse(body) if len(body) < LONG_BYTES else await asyncio.to_thread(_parse, body)
    return {**dict(request.query_params), **form}


def _parse(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def _respond(body: Body) -> Response:
    return Response(body.text.encode("utf-8", "backslashreplace"), media_type=body.media_type)
