"""Shell. The HTTP side of the metaserver: where its gRPC port is, operators' actions, metrics, health."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from metaserver.access import Access
from metaserver.management import Management
from metaserver.metrics import Metrics
from metaserver.registry import Registry
from metaserver.rpc.tokens import wall_ms
from qmq.errors import AccessError, InvalidRequest

log = logging.getLogger("qmq.metaserver")

TOKEN_HEADER = "X-Api-Token"


def build_app(
    registry: Registry, management: Management, access: Access, metrics: Metrics, *, address: str,
    request_bytes_max: int,
) -> FastAPI:  # fmt: skip
    """Make the application. `address` is `ip:port` of the gRPC server, as others reach it."""
    app = FastAPI(title="qmq metaserver", docs_url=None, redoc_url=None)

    @app.get("/meta/address", response_class=PlainTextResponse)
    async def meta_address() -> str:
        return address

    @app.post("/management")
    async def manage(request: Request) -> Response:
        try:
            words = await _read_words(request, request_bytes_max)
        except InvalidRequest as error:
            return _json({"status": -1, "message": str(error), "data": None}, status=413)
        name = words.get("action", "")
        if not name:
            return PlainTextResponse("need provide action param")
        if name not in management.actions:
            known = ", ".join(management.actions)
            return PlainTextResponse(f"unsupported action: {name[:100]!r}; supported are {known}")
        token = request.headers.get(TOKEN_HEADER, "")
        if token or management.actions[name].needs_token:
            try:
                access.check(token, now_ms=wall_ms())
            except AccessError as error:
                metrics.refused_tokens.inc()
                log.warning("token refused action=%s peer=%s", name, request.client.host if request.client else "")
                return _json({"status": -1, "message": f"{error} (header {TOKEN_HEADER})", "data": None})
        return _json(await management.run(name, words))

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/health/live", response_class=PlainTextResponse)
    async def live() -> str:
        return "ok"

    @app.get("/health/ready")
    async def ready() -> Response:
        try:
            await registry.ping()
        except Exception as error:
            return PlainTextResponse(f"the database does not answer: {type(error).__name__}", status_code=503)
        return PlainTextResponse("ok")

    return app


async def _read_words(request: Request, bytes_max: int) -> Mapping[str, str]:
    """Read parameters from the query string and, before it, from a form body, as QMQ's tools send them."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > bytes_max:
            raise InvalidRequest(f"the request is longer than {bytes_max} bytes")
    form = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {**dict(request.query_params), **dict(form)}


def _json(content: object, status: int = 200) -> Response:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"
    return Response(text, status_code=status, media_type="application/json")
