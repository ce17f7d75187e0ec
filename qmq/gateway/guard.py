"""Shell. Guard of every request: token, size, time to arrive; its access log and metrics.

Every address below `/v1/` needs a token; the others admit every caller or check themselves.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qmq.errors import QmqError
from qmq.gateway.access import Access
from qmq.gateway.metrics import Metrics
from qmq.gateway.outcomes import Code, HttpError, Refused, error_of
from qmq.gateway.settings import GatewaySettings
from qmq.http_port import BodyTooLarge, nothing, read_body, replay, shown_token

log = logging.getLogger("qmq.gateway")
access_log = logging.getLogger("qmq.gateway.access")

_CLOSE = {"Connection": "close"}
PATH_CHARS_MAX = 400


def configure_access_log(is_on: bool) -> None:
    """Write one line per request to stderr, without the bound on equal lines of other logs."""
    access_log.propagate = False
    access_log.disabled = not is_on
    if is_on and (handlers := logging.getLogger().handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(handlers[0].formatter)
        access_log.handlers = [handler]


class Guard:
    """ASGI middleware in front of FastAPI. Added by `build_app`."""

    def __init__(self, app: ASGIApp, *, access: Access, metrics: Metrics, settings: GatewaySettings) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, no lifespan
        answer = _Answer(send)
        try:
            if scope["path"].startswith("/v1/"):
                scope["qmq.token"] = token = shown_token(Headers(scope=scope))
                await self._access.check(token)
            body = await self._read(receive)
            await self._app(scope, replay(body, receive), answer.send)
        except Refused as refused:
            await answer.fail(refused.error, scope)
        except QmqError as error:
            await answer.fail(error_of(error), scope)
        except Exception:
            reference = secrets.token_hex(4)
            log.exception("request failed reference=%s method=%s path=%r", reference, scope["method"], scope["path"])
            await answer.fail(
                HttpError(Code.INTERNAL, f"the gateway failed on this request; reference {reference}"), scope
            )
        finally:
            self._note(scope, answer)

    async def _read(self, receive: Receive) -> bytes:
        bytes_max, timeout_s = self._settings.body_bytes_max, self._settings.body_s_max
        try:
            body = await read_body(receive, bytes_max=bytes_max, timeout_s=timeout_s)
        except BodyTooLarge as error:
            raise Refused(Code.TOO_LARGE, f"{error} (body_bytes_max)", _CLOSE) from None
        except TimeoutError:
            raise Refused(Code.TOO_SLOW, f"the request did not arrive within {timeout_s} s", _CLOSE) from None
        if body is None:
            raise Refused(Code.TOO_SLOW, "the client left before its request was complete")
        return body

    def _note(self, scope: Scope, answer: _Answer) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if route != "none" else "any"
        seconds = time.monotonic() - answer.began_s
        self._metrics.requests.labels(method, route, answer.status).inc()
        if not answer.is_stream:
            self._metrics.seconds.labels(route).observe(seconds)
        path = repr(scope["path"][:PATH_CHARS_MAX])[1:-1].replace(" ", "%20")
        peer = scope["client"][0] if scope.get("client") else "-"
        text = "request peer=%s method=%s path=%s status=%d bytes=%d ms=%d"
        access_log.info(text, peer, scope["method"], path, answer.status, answer.bytes, seconds * 1000)


class _Answer:
    """Answer of one request: notes its status and length."""

    def __init__(self, send: Send) -> None:
        self.began_s = time.monotonic()
        self.status = 0
        self.bytes = 0
        self.is_stream = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_stream = any(
                name == b"content-type" and b"event-stream" in value for name, value in message["headers"]
            )
        self.bytes += len(message.get("body", b""))
        await self._send(message)

    async def fail(self, error: HttpError, scope: Scope) -> None:
        """Send an error, unless the answer has begun."""
        if not self.status:
            await as_response(error)(scope, nothing, self.send)


def as_response(error: HttpError) -> JSONResponse:
    return JSONResponse({"error": error.as_json()}, error.status, error.all_headers())
