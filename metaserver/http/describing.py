"""Shell. Makes FastAPI's routes with what the OpenAPI document says of them: who may, what errors look like.

Who may is written once, as the mark of the endpoint that the guard reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Response, Security
from fastapi.params import Depends
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer

from qmq.metaserver.http import errors
from qmq.metaserver.http.guard import TOKEN_HEADER, is_open
from qmq.metaserver.http.models import Error

TEXT: Mapping[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
JSON: Mapping[str, Any] = {"application/json": {"schema": {}}}
STOPS: Mapping[int | str, Any] = {503: {"description": "this metaserver stops"}}

_TOKENS = [
    Security(APIKeyHeader(name=TOKEN_HEADER, scheme_name="token", auto_error=False)),
    Security(HTTPBearer(scheme_name="bearer", auto_error=False)),
]
"""For the document: the guard has looked at the token long before."""
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ERRORS: Mapping[int | str, Any] = {
    status: {"description": code, **({"model": Error} if code == errors.UNAUTHORIZED else {"content": _ERROR})}
    for code, status in errors.STATUS.items()
}
"""Written as references, but for one: FastAPI makes a validator of each model, which took half of the start."""


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
        role: what the document names as the role that is needed.
        content: media types of the answer, where it is no model.
        extra: what else the document says of it.
    """
    is_closed = not is_open(endpoint)
    answers: dict[int | str, Any] = {**(_ERRORS if is_closed else {}), **(responses or {})}
    said = {**({"x-role": role} if role else {}), **(extra or {})}
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
        openapi_extra=said,
        dependencies=[*(_TOKENS if is_closed else ()), *dependencies],
        # Programs that send JSON without saying so are understood: no browser can send the token by itself.
        strict_content_type=False,
        **options,
    )


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, without FastAPI's own errors of status 422, which are ours of status 400."""
    document = app.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
