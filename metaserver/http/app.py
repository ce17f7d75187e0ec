"""Shell. HTTP side of the metaserver: FastAPI with all addresses, and the guard in front of it.

TLS ends at nginx (docs/access.md); this port is for the machine and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.telemetry import TelemetryConfig
from starlette.routing import Route

from qmq.metaserver.access import Access
from qmq.metaserver.http import api, management
from qmq.metaserver.http.endpoints import JSON, STOPS, TEXT, ActionsPort, make_route
from qmq.metaserver.http.errors import to_json
from qmq.metaserver.http.guard import Guard, Limits, needs, open_to_all
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.rpc.access import Refusals
from qmq.rights import TokenRole
from qmq.version import VERSION

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""Requests are reported to no telemetry, whatever the environment sets."""


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
        address: `ip:port` of the gRPC server, as others reach it.
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
    api.handle_errors(app)
    # Ordered by use: FastAPI tries routes in this order, and clients' requests are the most frequent.
    app.router.routes.extend(_own_routes(address, metrics, database_trouble, is_stopping))
    app.router.routes.extend(more)
    app.router.routes.append(management.make_route(actions, open_lists=open_lists))
    app.router.routes.extend(api.make_routes(app, actions))
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

    whether = "whether it serves, and whether its database answers"
    return [
        make_route(
            "GET", "/meta/address", meta_address, summary="ip:port of the gRPC service", content=TEXT, responses=STOPS
        ),
        make_route(
            "GET", "/metrics", read_metrics, summary="metrics for Prometheus", role=TokenRole.VIEWER, content=TEXT
        ),
        make_route("GET", "/health/live", live, summary="whether the process runs", content=TEXT),
        make_route("GET", "/health/ready", ready, summary=whether, content=JSON, responses=STOPS),
    ]
