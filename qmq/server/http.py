"""Shell. What a broker and a delay server answer on their HTTP port: health, metrics, clients' connections, states."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from qmq.errors import AccessError, MissingRight, NotServed
from qmq.http_port import HEADERS, shown_token
from qmq.rights import TokenRole
from qmq.server.access import Access
from qmq.server.metrics_page import render

CHECK_S = 5.0
"""More than the question to a metaserver takes."""
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Answering = Callable[[Request], Awaitable[Response]]


class CopyHttp:
    """Made by a process's main. Health is for everybody, the rest for holders of a token with the role viewer.

    Args:
        connections, readiness, states: called on the loop.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        access: Access,
        connections: Callable[[], list[dict[str, object]]],
        readiness: Callable[[], dict[str, object]],
        states: Callable[[], list[dict[str, object]]],
    ) -> None:
        self._registry, self._access = registry, access
        self._connections, self._readiness, self._states = connections, readiness, states
        self._rendering = asyncio.Lock()

    def app(self) -> Starlette:
        routes = {
            "/health/live": self._live,
            "/health/ready": self._ready,
            "/metrics": self._guarded(self._metrics),
            "/connections": self._guarded(self._list),
            "/states": self._guarded(self._list_states),
        }
        return Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()])

    async def _live(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def _ready(self, _: Request) -> Response:
        facts = self._readiness()
        return JSONResponse(facts, 200 if facts["ready"] else 503)

    async def _metrics(self, _: Request) -> Response:
        async with self._rendering:  # 10,000 subjects keep a thread busy for some 30 ms
            text = await asyncio.to_thread(lambda: render(self._registry.collect()))
        return Response(text, media_type=PROMETHEUS)

    async def _list(self, _: Request) -> Response:
        return JSONResponse(self._connections())

    async def _list_states(self, _: Request) -> Response:
        return JSONResponse(self._states())

    def _guarded(self, answer: Answering) -> Answering:
        async def guarded(request: Request) -> Response:
            try:
                async with asyncio.timeout(CHECK_S):
                    caller = await self._access.check(shown_token(request.headers))
                caller.require_role(TokenRole.VIEWER, TokenRole.BROKER)
            except MissingRight as error:
                return PlainTextResponse(f"{error}\n", 403)
            except AccessError as error:
                return PlainTextResponse(f"{error} ({HEADERS})\n", 401)
            except (NotServed, TimeoutError) as error:
                return PlainTextResponse(f"{str(error) or 'the token cannot be checked now'}\n", 503)
            return await answer(request)

        return guarded
