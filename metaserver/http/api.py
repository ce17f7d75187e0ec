"""Shell. The JSON API: every operator's action at `/api/v1/<Action>`, and the document that describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from metaserver.actions import ACTIONS, Action, Answer, Status
from metaserver.http import errors, openapi
from metaserver.http.errors import HttpError, to_json
from metaserver.http.guard import Endpoint, Refused, caller_of, needs
from metaserver.http.running import ActionsPort, run_within
from qmq.errors import InvalidName, InvalidRequest
from qmq.rights import TokenRole

_CODES = {
    "InvalidRequest": errors.INVALID,
    "InvalidName": errors.INVALID,
    "MissingRight": errors.MISSING_RIGHT,
}
"""What an action refuses for a reason that the request alone shows."""
_STATUS_CODES = {Status.REFUSED: errors.REFUSED, Status.UNKNOWN: errors.UNKNOWN, Status.WAIT: errors.NOT_SERVED}


def make_routes(actions: ActionsPort, *, version: str) -> list[Route]:
    """Make the routes of all actions and of their description."""
    document = to_json(openapi.describe(ACTIONS.values(), version=version))

    @needs(*TokenRole)
    async def describe(request: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [Route(f"{openapi.PREFIX}/openapi.json", describe, methods=["GET"])]
    for action in ACTIONS.values():
        methods = ["POST"] if action.changes else ["GET", "POST"]
        routes.append(Route(f"{openapi.PREFIX}/{action.name}", _endpoint(actions, action), methods=methods))
    return routes


def _endpoint(actions: ActionsPort, action: Action) -> Endpoint:
    @needs(action.role)
    async def run(request: Request) -> Response:
        try:
            words = await _read(action, request)
        except (InvalidRequest, InvalidName) as error:
            raise Refused(errors.INVALID, str(error)) from None
        return _respond(await run_within(actions, action, words, caller_of(request)))

    return run


async def _read(action: Action, request: Request) -> Mapping[str, str]:
    if request.method == "POST":
        if request.query_params:
            raise InvalidRequest("a POST has its parameters in its body, not in its address")
        words = openapi.read_body(action, await request.body())
    else:
        words = openapi.read_query(action, request.query_params.multi_items())
    if names := openapi.missing(action, words):
        raise InvalidRequest(f"{', '.join(names)}: missing")
    return words


def _respond(answer: Answer) -> Response:
    if answer.done:
        content: dict[str, Any] = {"data": answer.data, "message": answer.message}
        return Response(to_json(content), media_type="application/json")
    code = _CODES.get(answer.code) or _STATUS_CODES[answer.status]
    headers = {"Retry-After": "1"} if code == errors.NOT_SERVED else {}
    details = answer.details if answer.data is None else {**answer.details, "data": answer.data}
    error = HttpError(code, answer.message, details=details, headers=headers)
    return Response(error.body(), error.status, error.headers, media_type="application/json")
