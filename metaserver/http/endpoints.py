"""Shell. Endpoints of the HTTP side: their entries in the OpenAPI document, and the time limit of their actions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Response, Security
from fastapi.params import Depends
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer

from qmq.metaserver.actions import Action, Answer, Status
from qmq.metaserver.http import errors
from qmq.metaserver.http.guard import TOKEN_HEADER, is_open
from qmq.metaserver.http.models import Error
from qmq.rights import Caller

log = logging.getLogger("qmq.metaserver")

GRACE_MS = 1000
"""Added to the time limit of an action, so that its own answer comes first."""

_going_on: set[asyncio.Task[Answer]] = set()
"""Changes that outlive their caller's connection; asyncio would drop tasks without a reference."""


class ActionsPort(Protocol):
    """`metaserver.actions.Actions`."""

    async def run(self, name: str, words: Mapping[str, str], caller: Caller) -> Answer: ...


async def run_within(actions: ActionsPort, action: Action, words: Mapping[str, str], caller: Caller) -> Answer:
    """Run an action within its time limit. Exceptions that are bugs pass through."""
    task = asyncio.create_task(actions.run(action.name, words, caller))
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)
    limit_ms = action.wait_ms + _asked_wait_ms(words) + GRACE_MS
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


def _asked_wait_ms(words: Mapping[str, str]) -> int:
    text = str(words.get("waitMs", ""))
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
    status: {"description": code, **({"model": Error} if code == errors.UNAUTHORIZED else {"content": _ERROR})}
    for code, status in errors.STATUS.items()
}
"""References but for one: FastAPI builds a validator for each model, which took half of the start."""


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
