"""Shell. HTTP side of the metaserver: FastAPI with all addresses, and the guard in front of it.

TLS ends at nginx (docs/access.md); this port is for the machine and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from fastapi import Body, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route

from qmq.metaserver.access import Access
from qmq.metaserver.actions import ACTIONS, Action, Answer, Status
from qmq.metaserver.http import endpoints, models
from qmq.metaserver.http.endpoints import JSON, STOPS, TEXT, ActionsPort, describe, make_route, run_within
from qmq.metaserver.http.guard import Endpoint, Guard, Limits, Refused, caller_of, needs, open_to_all
from qmq.metaserver.http.models import Done, HttpError, arguments_of, body_model, query_model, to_json
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.routes.hub import RouteHubs, TooManyWatches
from qmq.metaserver.rpc.access import Refusals
from qmq.proto import qmq_pb2 as pb
from qmq.rights import TokenRole
from qmq.types import GroupKind
from qmq.version import VERSION

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""Requests are reported to no telemetry, even if the environment asks for it."""


def build_app(
    actions: ActionsPort,
    access: Access,
    metrics: Metrics,
    refusals: Refusals,
    *,
    address: str,
    database_trouble: Callable[[], str],
    limits: Limits,
    is_stopping: Callable[[], bool] = lambda: False,
    open_lists: bool = False,
    more: Iterable[Route] = (),
) -> FastAPI:
    """Build the application.

    Args:
        address: `host:port` of the gRPC server, as others reach it.
        more: further routes; each endpoint declares its roles with `needs`.
    """
    app = FastAPI(
        title="qmq metaserver",
        version=VERSION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=_NO_TELEMETRY,
    )
    app.add_middleware(Guard, access=access, refusals=refusals, limits=limits)
    _handle_errors(app)
    # Ordered by use: FastAPI tries routes in this order, and clients' requests are the most frequent.
    app.router.routes.extend(_own_routes(address, metrics, database_trouble, is_stopping))
    app.router.routes.extend(more)
    app.router.routes.append(endpoints.management_route(actions, open_lists=open_lists))
    app.router.routes.extend(_api_routes(app, actions))
    return app


def _own_routes(
    address: str, metrics: Metrics, database_trouble: Callable[[], str], is_stopping: Callable[[], bool]
) -> list[Route]:
    @open_to_all
    async def meta_address(request: Request) -> Response:
        if is_stopping():
            return PlainTextResponse("this metaserver stops; ask another one", status_code=503)
        return PlainTextResponse(address)

    @needs(TokenRole.VIEWER)
    async def read_metrics(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @open_to_all
    async def live(request: Request) -> Response:
        return PlainTextResponse("ok")

    @open_to_all
    async def ready(request: Request) -> Response:
        """Ready without the database too: routes come from memory, and are needed most then."""
        trouble = database_trouble()
        facts = {"ready": not is_stopping(), "database": not trouble} | ({"trouble": trouble} if trouble else {})
        return Response(to_json(facts), status_code=503 if is_stopping() else 200, media_type="application/json")

    summary = "whether it serves, and whether its database answers"
    return [
        make_route(
            "GET", "/meta/address", meta_address, summary="host:port of the gRPC service", content=TEXT, responses=STOPS
        ),
        make_route(
            "GET", "/metrics", read_metrics, summary="metrics for Prometheus", role=TokenRole.VIEWER, content=TEXT
        ),
        make_route("GET", "/health/live", live, summary="whether the process runs", content=TEXT),
        make_route("GET", "/health/ready", ready, summary=summary, content=JSON, responses=STOPS),
    ]


PREFIX = "/api/v1"

_CODES = {
    "InvalidRequest": models.INVALID,
    "InvalidName": models.INVALID,
    "MissingRight": models.MISSING_RIGHT,
}
"""Refusals that follow from the request alone."""
_STATUS_CODES = {Status.REFUSED: models.REFUSED, Status.UNKNOWN: models.UNKNOWN, Status.WAIT: models.NOT_SERVED}


def _api_routes(app: FastAPI, actions: ActionsPort) -> list[APIRoute]:
    """Return the JSON API: every operator's action at `/api/v1/<Action>`, and the OpenAPI document of `app`."""

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


def _handle_errors(app: FastAPI) -> None:
    """Answer FastAPI's validation errors in the form of ours."""

    @app.exception_handler(RequestValidationError)
    async def not_as_described(request: Request, error: RequestValidationError) -> Response:
        text = models.describe(error.errors(), ACTIONS.get(request.scope["route"].name))
        return _refuse(HttpError(models.INVALID, text))

    @app.exception_handler(HTTPException)
    async def not_readable(request: Request, error: HTTPException) -> Response:
        return _refuse(HttpError(models.INVALID, f"the body is no JSON: {error.detail}"))


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
        return _respond(await run_within(actions, action, arguments_of(given), caller_of(request)))

    run.__annotations__["given"] = model
    return run


async def _once(request: Request) -> None:
    """Reject requests that FastAPI accepts: repeated parameters, and a query besides a body."""
    names = [name for name, _ in request.query_params.multi_items()]
    if names and request.method == "POST":
        raise Refused(models.INVALID, "a POST has its parameters in its body, not in its address")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Refused(models.INVALID, f"{', '.join(twice)[:1000]}: given twice")


def _respond(answer: Answer) -> Response:
    """Encode directly: FastAPI would walk through each of 100,000 routes twice."""
    if answer.done:
        content: dict[str, Any] = {"data": answer.data, "message": answer.message}
        return Response(to_json(content), media_type="application/json")
    code = _CODES.get(answer.code) or _STATUS_CODES[answer.status]
    headers = {"Retry-After": "1"} if code == models.NOT_SERVED else {}
    details = answer.details if answer.data is None else {**answer.details, "data": answer.data}
    return _refuse(HttpError(code, answer.message, details=details, headers=headers))


def _refuse(error: HttpError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type="application/json")


CLIENT_TEXT_CHARS_MAX = 100


def polled_routes(hubs: RouteHubs) -> list[APIRoute]:
    """Return `GET /meta/routes`, for clients without gRPC.

        ?subject=a&subject=b&app=shop&clientId=4711&produces=true&held=a:00c0ffee00c0ffee

    `held` names the version of each route that the client uses: `subject:version`, the version in hexadecimal. The
    answer has the routes that differ, as the JSON of gRPC's RouteUpdate. Clients poll every few seconds. `kind=DELAY`
    requests all groups of delay servers instead of the groups of the route.
    """

    @needs(TokenRole.CLIENT)
    async def meta_routes(
        request: Request,
        subject: Annotated[list[str], Query(min_length=1)],
        held: Annotated[list[str], Query(default_factory=list, description="subject:version in hexadecimal")],
        app: str = "",
        clientId: str = "",
        produces: Literal["true", "false"] = "false",
        kind: Literal["NORMAL", "DELAY"] = "NORMAL",
    ) -> Response:
        try:
            routes = await hubs.of(GroupKind[kind]).poll(
                subject,
                _versions(held),
                caller_of(request),
                app=app[:CLIENT_TEXT_CHARS_MAX],
                client_id=clientId[:CLIENT_TEXT_CHARS_MAX],
                produces=produces == "true",
            )
        except TooManyWatches as error:
            raise Refused(models.NOT_SERVED, str(error)) from None
        answer = {"routes": [as_json(route.message) for route in routes]}
        return Response(to_json(answer), media_type="application/json", headers={"Cache-Control": "no-store"})

    summary = "routes of subjects, for clients without gRPC"
    return [make_route("GET", "/meta/routes", meta_routes, summary=summary, role=TokenRole.CLIENT, content=JSON)]


def _versions(held: Iterable[str]) -> dict[str, int]:
    versions = {}
    for pair in held:
        subject, colon, version = pair.rpartition(":")
        if not colon or len(version) > 16:
            raise Refused(models.INVALID, f"held={pair[:120]!r} is not subject:version")
        try:
            versions[subject] = int(version, 16)
        except ValueError:
            raise Refused(models.INVALID, f"held={pair[:120]!r}: the version is no hexadecimal number") from None
    return versions


def as_json(route: pb.SubjectRoute) -> dict[str, Any]:
    """Return one route in the form of the answer."""
    return {
        "subject": route.subject,
        "version": f"{route.version:016x}",
        "refused": route.refused,
        "refusedCode": route.refused_code,
        "groups": [
            {
                "brokerGroup": group.broker_group,
                "term": group.term,
                "writable": group.writable,
                "master": {"ip": group.master.ip, "servePort": group.master.serve_port},
            }
            for group in route.groups
        ],
    }
