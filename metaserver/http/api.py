"""Shell. JSON API: every operator's action at `/api/v1/<Action>`, parsed and described by FastAPI."""

from __future__ import annotations

from typing import Any

from fastapi import Body, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from qmq.metaserver.actions import ACTIONS, Action, Answer, Status
from qmq.metaserver.http import errors, models
from qmq.metaserver.http.endpoints import ActionsPort, describe, make_route, run_within
from qmq.metaserver.http.errors import HttpError, to_json
from qmq.metaserver.http.guard import Endpoint, Refused, caller_of, needs
from qmq.metaserver.http.models import Done, body_model, query_model, words_of
from qmq.rights import TokenRole

PREFIX = "/api/v1"

_CODES = {
    "InvalidRequest": errors.INVALID,
    "InvalidName": errors.INVALID,
    "MissingRight": errors.MISSING_RIGHT,
}
"""Refusals that follow from the request alone."""
_STATUS_CODES = {Status.REFUSED: errors.REFUSED, Status.UNKNOWN: errors.UNKNOWN, Status.WAIT: errors.NOT_SERVED}


def make_routes(app: FastAPI, actions: ActionsPort) -> list[APIRoute]:
    """Return the routes of all actions and of the OpenAPI document of `app`."""

    @needs(*TokenRole)
    async def document(request: Request) -> Response:
        return Response(to_json(describe(app)), media_type="application/json")

    routes = [make_route("GET", f"{PREFIX}/openapi.json", document, summary="this", include_in_schema=False)]
    for action in ACTIONS.values():
        if not action.changes:
            endpoint = _endpoint(actions, action, query_model(action), Query())
            routes.append(_action_route("GET", action, endpoint, operation_id=f"get{action.name}"))
        if action.name == "Doctor":  # for monitoring, at an address without a version
            endpoint = _endpoint(actions, action, query_model(action), Query())
            routes.append(_action_route("GET", action, endpoint, operation_id="doctor", path="/api/doctor"))
        model = body_model(action)
        is_needed = any(field.is_required() for field in model.model_fields.values())
        endpoint = _endpoint(actions, action, model, Body() if is_needed else Body(default_factory=model))
        routes.append(_action_route("POST", action, endpoint, operation_id=action.name))
    return routes


def handle_errors(app: FastAPI) -> None:
    """Answer FastAPI's validation errors in the form of ours."""

    @app.exception_handler(RequestValidationError)
    async def not_as_described(request: Request, error: RequestValidationError) -> Response:
        text = models.describe(error.errors(), ACTIONS.get(request.scope["route"].name))
        return _refuse(HttpError(errors.INVALID, text))

    @app.exception_handler(HTTPException)
    async def not_readable(request: Request, error: HTTPException) -> Response:
        return _refuse(HttpError(errors.INVALID, f"the body is no JSON: {error.detail}"))


def _action_route(method: str, action: Action, endpoint: Endpoint, *, operation_id: str, path: str = "") -> APIRoute:
    return make_route(
        method,
        path or f"{PREFIX}/{action.name}",
        endpoint,
        summary=action.summary,
        role=action.role,
        name=action.name,
        description=f"Needs a token with the role {action.role}.",
        operation_id=operation_id,
        response_model=Done,
        response_description="the answer",
        dependencies=[Depends(_once)],
    )


def _endpoint(actions: ActionsPort, action: Action, model: type[BaseModel], source: Any) -> Endpoint:
    @needs(action.role)
    async def run(request: Request, given: BaseModel = source) -> Response:
        return _respond(await run_within(actions, action, words_of(given), caller_of(request)))

    run.__annotations__["given"] = model
    return run


async def _once(request: Request) -> None:
    """Reject requests that FastAPI accepts: repeated parameters, and a query besides a body."""
    names = [name for name, _ in request.query_params.multi_items()]
    if names and request.method == "POST":
        raise Refused(errors.INVALID, "a POST has its parameters in its body, not in its address")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Refused(errors.INVALID, f"{', '.join(twice)[:1000]}: given twice")


def _respond(answer: Answer) -> Response:
    """Encode directly: FastAPI would walk through each of 100,000 routes twice."""
    if answer.done:
        content: dict[str, Any] = {"data": answer.data, "message": answer.message}
        return Response(to_json(content), media_type="application/json")
    code = _CODES.get(answer.code) or _STATUS_CODES[answer.status]
    headers = {"Retry-After": "1"} if code == errors.NOT_SERVED else {}
    details = answer.details if answer.data is None else {**answer.details, "data": answer.data}
    return _refuse(HttpError(code, answer.message, details=details, headers=headers))


def _refuse(error: HttpError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type="application/json")
