"""Shell. `POST /management`: operators' actions as QMQ's own tools ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.routing import APIRoute

from qmq.errors import AccessError
from qmq.metaserver.actions import ACTIONS, Answer, Status
from qmq.metaserver.actions.management import Body, no_such_action, refused_token, render
from qmq.metaserver.http import describing
from qmq.metaserver.http.describing import JSON, TEXT
from qmq.metaserver.http.guard import TOKEN_HEADER, asks_itself
from qmq.metaserver.http.running import ActionsPort, run_within
from qmq.rights import Caller, TokenRole

ANYBODY = Caller("anybody", TokenRole.VIEWER)

LONG_BYTES = 65_536
"""A form of so many is read on a thread: that of a backup with 100,000 subjects takes three to nine seconds."""


_FORM = {"type": "object", "required": ["action"], "properties": {"action": {"type": "string"}}}
_BODY = {"content": {"application/x-www-form-urlencoded": {"schema": _FORM}}}


def make_route(actions: ActionsPort, *, open_lists: bool) -> APIRoute:
    """Make the route. `open_lists`: what QMQ lists without a token is listed without one."""

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

    summary = "as QMQ's tools ask: `action` and its parameters in a form or the address; 200 in all cases"
    return describing.make_route(
        "POST", "/management", manage, summary=summary, content={**JSON, **TEXT}, extra={"requestBody": _BODY}
    )


async def _read_words(request: Request) -> Mapping[str, str]:
    """Read parameters from the query string and, before it, from a form body, as QMQ's tools send them."""
    body = await request.body()
    form = _parse(body) if len(body) < LONG_BYTES else await asyncio.to_thread(_parse, body)
    return {**dict(request.query_params), **form}


def _parse(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def _respond(body: Body) -> Response:
    return Response(body.text.encode("utf-8", "backslashreplace"), media_type=body.media_type)
