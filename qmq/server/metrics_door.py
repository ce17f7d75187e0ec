"""Shell. The HTTP port of a broker: its metrics and its clients' connections, for who has a token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest

from qmq.errors import AccessError, MissingRight, NotServed
from qmq.replication.settings import PairSettings
from qmq.rights import TokenRole
from qmq.server.access import Access

CHECK_S = 5.0
"""More than the question to a metaserver takes."""


class MetricsDoor:
    """`GET /metrics` and `/connections` for holders of a token with the role viewer; on the HTTP server's threads.

    `connections` is called on `loop`.
    """

    def __init__(
        self, registry: CollectorRegistry, access: Access, loop: asyncio.AbstractEventLoop,
        connections: Callable[[], list[dict[str, object]]],
    ) -> None:  # fmt: skip
        self._registry, self._access, self._loop, self._connections = registry, access, loop, connections

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        if error := self._refusal(environ):
            status, text = error
            return _answer(start, status, "text/plain; charset=utf-8", f"{text}\n".encode())
        if environ["PATH_INFO"] == "/connections":
            listed = asyncio.run_coroutine_threadsafe(self._list(), self._loop).result(CHECK_S)
            return _answer(start, "200 OK", "application/json", json.dumps(listed, indent=1).encode())
        return _answer(start, "200 OK", "text/plain; version=0.0.4; charset=utf-8", generate_latest(self._registry))

    async def _list(self) -> list[dict[str, object]]:
        return self._connections()

    def _refusal(self, environ: dict[str, Any]) -> tuple[str, str] | None:
        kind, _, bearer = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        token = environ.get("HTTP_X_API_TOKEN") or (bearer.strip() if kind.lower() == "bearer" else "")
        try:
            asked = asyncio.run_coroutine_threadsafe(self._access.check(token), self._loop)
            asked.result(CHECK_S).require_role(TokenRole.VIEWER, TokenRole.BROKER)
        except MissingRight as error:
            return "403 Forbidden", str(error)
        except AccessError as error:
            return "401 Unauthorized", f"{error} (header X-Api-Token, or Authorization: Bearer)"
        except (NotServed, TimeoutError, CancelledError) as error:
            return "503 Service Unavailable", str(error) or "the token cannot be checked now"
        if environ.get("PATH_INFO") not in ("/metrics", "/connections"):
            return "404 Not Found", "there are /metrics and /connections here, nothing else"
        return None if environ.get("REQUEST_METHOD") == "GET" else ("405 Method Not Allowed", "GET is all there is")


def _answer(start: Callable[..., Any], status: str, kind: str, body: bytes) -> list[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    timeout = 10
    """Seconds that a connection may be silent."""

    def log_message(self, format: str, *values: object) -> None:
        """What is scraped every few seconds needs no line each."""


def serve_door(door: MetricsDoor, settings: PairSettings) -> tuple[WSGIServer, threading.Thread]:
    """Serve on threads of their own. Raises OSError: the port is taken."""
    server = make_server(settings.ip, settings.metrics_port, door, _Server, _Silent)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread
