"""Shell. Guard of every request: token, size, time to arrive; its access log and metrics.

Every address below `/v1/` needs a token; the others admit every caller or check the token themselves. Tokens are
checked at the metaserver, and brokers check them again at each connection. Without this check each wrong token would
open connections of its own, and a token without the right to a subject would wait for a route. Answers are kept for
`VALID_S`, so a revoked token ends within that time. While the metaserver does not answer, tokens that it accepted
before are admitted, as brokers do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
from collections import OrderedDict
from hashlib import sha256
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qmq.access import TOKEN_CHARS_MAX
from qmq.control_plane import find_metaserver, first_answer, get, metaserver_urls
from qmq.errors import AccessError, MissingRight, NotServed, QmqError, cause_of
from qmq.gateway.metrics import Metrics
from qmq.gateway.outcomes import Code, HttpError, Refused, error_of
from qmq.gateway.settings import GatewaySettings
from qmq.http_port import BodyTooLarge, nothing, read_body, replay, shown_token
from qmq.logs import shielded

log = logging.getLogger("qmq.gateway")
access_log = logging.getLogger("qmq.gateway.access")

_CLOSE = {"Connection": "close"}
PATH_CHARS_MAX = 400
VALID_S = 10.0
ANSWER_S = 5.0
CHECKS_MAX = 16
"""Limit of checks at the same time, so that many wrong tokens use few threads."""
KNOWN_MAX = 10_000
ANSWER_BYTES_MAX = 1 << 20
_Key = tuple[str, bytes]
"""Address at the metaserver, hash of the token."""

CLIENT = "/meta/routes"
"""Address of routes, which need the role client. Without a subject it checks the token and refuses the request."""
VIEWER = "/api/v1/ListMetaservers"


class Access:
    """Checks of tokens. Made by main; used on its loop."""

    def __init__(self, metaserver: str, app: str = "gateway") -> None:
        self._metaservers = metaserver_urls(metaserver)
        self._app = app
        self._accepted: OrderedDict[_Key, float] = OrderedDict()
        """End of the validity of accepted tokens, the one unused for longest first."""
        self._refused: dict[_Key, tuple[float, QmqError]] = {}
        self._asked: dict[_Key, asyncio.Task[QmqError | None]] = {}
        self._checks = asyncio.Semaphore(CHECKS_MAX)

    async def check_subject(self, token: str, subject: str, *, produces: bool) -> None:
        """Check that a token may produce to, or consume from, a subject.

        Raises:
            MissingRight: the token lacks the right. AccessError, NotServed: see `check`.
        """
        words = {"app": self._app, "clientId": f"{self._app}-access", "subject": subject}
        await self.check(token, f"{CLIENT}?{urlencode(words | {'produces': str(produces).lower()})}")

    async def check(self, token: str, address: str = CLIENT) -> None:
        """Check that the metaserver accepts the token at one of its addresses.

        Raises:
            AccessError: the token is missing, wrong, or lacks the role.
            NotServed: the metaserver does not answer, and never accepted the token.
        """
        if not token:
            raise AccessError("the API token is missing")
        if len(token) > TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable():
            raise AccessError("this is no API token")
        key = address, sha256(token.encode()).digest()
        if time.monotonic() < self._accepted.get(key, 0.0):
            self._accepted.move_to_end(key)
            return
        until_s, error = self._refused.get(key, (0.0, None))
        if time.monotonic() >= until_s:
            if key not in self._asked:
                self._asked[key] = asyncio.create_task(self._ask(key, token))
            error = await shielded(self._asked[key])
        if error is not None:
            raise error

    async def _ask(self, key: _Key, token: str) -> QmqError | None:
        try:
            async with self._checks:
                error = await asyncio.to_thread(self._answer, key[0], token)
        finally:
            del self._asked[key]
        until_s = time.monotonic() + VALID_S
        if error is None or (isinstance(error, NotServed) and key in self._accepted):
            self._accepted[key] = until_s
            if len(self._accepted) > KNOWN_MAX:
                self._accepted.popitem(last=False)
            return None
        if not isinstance(error, NotServed):
            self._accepted.pop(key, None)
            if len(self._refused) >= KNOWN_MAX:
                self._refused.clear()
            self._refused[key] = until_s, error
        return error

    def _answer(self, address: str, token: str) -> QmqError | None:
        """Return the error of a token, or None if it is accepted. Blocks."""

        def ask(url: str) -> QmqError | None:
            request = Request(f"{url}{address}", headers={"X-Api-Token": token})
            try:
                answer = get(request, timeout_s=ANSWER_S, bytes_max=ANSWER_BYTES_MAX)
            except HTTPError as error:
                with error:
                    return _refusal(error.code, error.read(2_000), address)
            return _missing_right(answer)

        try:
            return first_answer(self._metaservers, ask)
        except (OSError, ValueError, NotServed) as error:
            return NotServed(f"the token cannot be checked, no metaserver answers: {cause_of(error)}")

    async def trouble(self) -> str:
        """Return the reason why no metaserver answers, or ""."""
        try:
            async with self._checks:
                await asyncio.to_thread(find_metaserver, self._metaservers, timeout_s=ANSWER_S)
        except (OSError, ValueError) as error:
            return f"no metaserver answers: {cause_of(error)}"
        return ""


def _missing_right(answer: bytes) -> MissingRight | None:
    """Return the error if an answer refuses a route for the token's rights, or None: other reasons may be temporary."""
    try:
        routes = json.loads(answer)["routes"]
        return next(
            (MissingRight(route["refused"]) for route in routes if route["refusedCode"] == "MISSING_RIGHT"), None
        )
    except (KeyError, TypeError, ValueError):
        return None


def _refusal(status: int, text: bytes, address: str) -> QmqError | None:
    """Return the error that an answer of the metaserver stands for, or None if it accepts the token.

    Raises:
        NotServed: another metaserver may answer.
    """
    try:
        reason = str(json.loads(text)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        reason = f"status {status}"
    if status == 401:
        return AccessError(f"the token is rejected: {reason}")
    if status == 403:
        return MissingRight(f"the token is rejected: {reason}")
    if status == 400 and address == CLIENT:
        return None
    raise NotServed(reason)


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
    """Answer of one request, with its status and length."""

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
