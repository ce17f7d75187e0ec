"""Shell. Endpoints of the HTTP side: their entries in the OpenAPI document, the time limit of their actions.

`POST /management` runs operators' actions in QMQ's protocol; its answers are byte for byte as QMQ's tools expect them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request, Response, Security
from fastapi.params import Depends
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer

from qmq.commands.action import DETAILS, Style
from qmq.commands.catalog import ACTIONS
from qmq.errors import AccessError
from qmq.metaserver.actions import Action, Answer, Status
from qmq.metaserver.actions.arguments import unknown_word
from qmq.metaserver.actions.shapes import as_qmq
from qmq.metaserver.http import models
from qmq.metaserver.http.guard import TOKEN_HEADER, is_open, refuses_itself
from qmq.metaserver.http.models import Error
from qmq.rights import Caller, TokenRole

log = logging.getLogger("qmq.metaserver")

GRACE_MS = 1000
"""Added to the time limit of an action, so that its own answer comes first."""

_running: set[asyncio.Task[Answer]] = set()
"""Changes that outlive their caller's connection; asyncio would drop tasks without a reference."""


class ActionsPort(Protocol):
    """`metaserver.actions.Actions`."""

    async def run(self, name: str, arguments: Mapping[str, str], caller: Caller) -> Answer: ...


async def run_within(actions: ActionsPort, action: Action, arguments: Mapping[str, str], caller: Caller) -> Answer:
    """Run an action within its time limit. Exceptions that are bugs pass through."""
    task = asyncio.create_task(actions.run(action.name, arguments, caller))
    _running.add(task)
    task.add_done_callback(_running.discard)
    limit_ms = action.wait_ms + _asked_wait_ms(arguments) + GRACE_MS
    try:
        await asyncio.wait([task], timeout=limit_ms / 1000)
    finally:
        if not task.done():
            task.add_done_callback(_report_late_error)
    if task.done():
        return task.result()
    if not action.changes:
        task.cancel()
        return Answer(Status.WAIT, f"{action.name} was not done within {limit_ms} ms")
    return Answer(Status.UNKNOWN, f"{action.name} was not done within {limit_ms} ms and continues; check its outcome")


def _report_late_error(task: asyncio.Task[Answer]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("action failed after its caller left: %r", error)


def _asked_wait_ms(arguments: Mapping[str, str]) -> int:
    text = str(arguments.get("waitMs", ""))
    return min(int(text), 600_000) if text.isascii() and text.isdigit() and len(text) < 10 else 0


TEXT: Mapping[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
JSON: Mapping[str, Any] = {"application/json": {"schema": {}}}
STOPS: Mapping[int | str, Any] = {503: {"description": "this metaserver stops"}}

_TOKENS = [
    Security(APIKeyHeader(name=TOKEN_HEADER, scheme_name="token", auto_error=False)),
    Security(HTTPBearer(scheme_name="bearer", auto_error=False)),
]
"""Only for the document: the guard checks the token earlier."""
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ERRORS: Mapping[int | str, Any] = {
    status: {"description": code, **({"model": Error} if code == models.UNAUTHORIZED else {"content": _ERROR})}
    for code, status in models.STATUS.items()
}
"""All but one are references, because FastAPI builds a validator for each model, which took half of the start."""


def make_route(
    method: str,
    path: str,
    endpoint: Any,
    *,
    summary: str,
    role: str = "",
    content: Mapping[str, Any] | None = None,
    responses: Mapping[int | str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    dependencies: Sequence[Depends] = (),
    **options: Any,
) -> APIRoute:
    """Make a route.

    Args:
        role: role that the document names.
        content: media types of the answer, if it is no model.
        extra: further fields of the document.
    """
    is_closed = not is_open(endpoint)
    answers: dict[int | str, Any] = {**(_ERRORS if is_closed else {}), **(responses or {})}
    extras = {**({"x-role": role} if role else {}), **(extra or {})}
    if content is not None:
        answers[200] = {"description": summary, "content": dict(content)}
        options["response_class"] = Response
    options.setdefault("operation_id", endpoint.__name__)
    return APIRoute(
        path,
        endpoint,
        methods=[method],
        summary=summary,
        responses=answers,
        openapi_extra=extras,
        dependencies=[*(_TOKENS if is_closed else ()), *dependencies],
        # JSON without a content type is accepted: no browser can send the token by itself.
        strict_content_type=False,
        **options,
    )


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document without FastAPI's own 422 errors, which are answered as 400."""
    document = app.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


# -- POST /management -------------------------------------------------------------------------------------------------

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


def render(action: Action, answer: Answer, arguments: Mapping[str, str]) -> Body:
    """Format an answer in the style of its action."""
    details = arguments.get(DETAILS, "").lower() == "true"
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


def management_route(actions: ActionsPort, *, open_lists: bool) -> APIRoute:
    """Make the route. `open_lists`: lists that QMQ answers without a token need none."""

    @refuses_itself
    async def manage(request: Request) -> Response:
        arguments = await _read_arguments(request)
        caller: Caller | None = request.scope["qmq.caller"]
        name = arguments.get("action", "")
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
            return _respond(render(action, Answer(Status.REFUSED, str(error), code=type(error).__name__), arguments))
        return _respond(render(action, await run_within(actions, action, arguments, caller), arguments))

    summary = (
        "operators' actions in QMQ's protocol: `action` and its parameters in a form or the address; status 200 always"
    )
    return make_route(
        "POST", "/management", manage, summary=summary, content={**JSON, **TEXT}, extra={"requestBody": _BODY}
    )


async def _read_arguments(request: Request) -> Mapping[str, str]:
    """Return the parameters of the query string and the form body; the body takes precedence, as with QMQ's tools."""
    body = await request.body()
    form = _parse(body) if len(body) < LONG_BYTES else await asyncio.to_thread(_parse, body)
    return {**dict(request.query_params), **form}


def _parse(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def _respond(body: Body) -> Response:
    return Response(body.text.encode("utf-8", "backslashreplace"), media_type=body.media_type)
