"""Shell. The HTTP side of the metaserver, put together: each address with its endpoint, the guard around all of them.

TLS ends before it, at nginx (docs/access.md); this port is for the machine and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from metaserver.access import Access
from metaserver.http import api, management
from metaserver.http.errors import to_json
from metaserver.http.guard import Guard, Limits, needs, open_to_all
from metaserver.http.running import ActionsPort
from metaserver.metrics import Metrics
from metaserver.refusals import Refusals
from qmq.rights import TokenRole
from qmq.version import VERSION


def build_app(
    actions: ActionsPort, access: Access, metrics: Metrics, refusals: Refusals, *, address: str,
    database_is_up: Callable[[], bool], limits: Limits, is_stopping: Callable[[], bool] = lambda: False,
    open_lists: bool = False, more: Iterable[Route] = (),
) -> Guard:  # fmt: skip
    """Make the application.

    Args:
        address: `ip:port` of the gRPC server, as others reach it.
        more: routes of other parts; each endpoint says with `needs` whom it lets in.
    """

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
        """Routes are served from memory: a metaserver without its database is needed more, not less."""
        facts = {"ready": not is_stopping(), "database": database_is_up()}
        return Response(to_json(facts), status_code=503 if is_stopping() else 200, media_type="application/json")

    routes = [
        Route("/meta/address", meta_address, methods=["GET"]),
        Route("/management", management.make_endpoint(actions, open_lists=open_lists), methods=["POST"]),
        Route("/metrics", read_metrics, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        *api.make_routes(actions, version=VERSION),
        *more,
    ]
    return Guard(routes, access, refusals, limits)
