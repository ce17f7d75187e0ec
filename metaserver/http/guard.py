"""Shell. Guard of every HTTP request: a valid token with the right role, limits of size and time.

Routes are closed by default. An endpoint opens itself with `needs(role)`, `open_to_all` or `refuses_itself`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qmq.errors import AccessError, MissingRight, NotServed
from qmq.http_port import BodyTooLarge, nothing, read_body, replay
from qmq.metaserver.access import Access
from qmq.metaserver.http import models
from qmq.metaserver.http.models import HttpError
from qmq.metaserver.rpc.access import Refusals, wall_ms
from qmq.rights import Caller, TokenRole

log = logging.getLogger("qmq.metaserver")

TOKEN_HEADER = "X-Api-Token"
BEARER = "bearer "
PEER_CHARS_MAX = 100
"""Length limit for the peer address that a trusted proxy reports."""

Endpoint = Callable[..., Awaitable[Response]]
E = TypeVar("E", bound=Callable[..., Any])


def needs(*roles: TokenRole) -> Callable[[E], E]:
    """Admit callers with one of these roles."""

    def mark(endpoint: E) -> E:
        endpoint.roles = frozenset(roles)  # type: ignore[attr-defined]
        return endpoint

    return mark


def open_to_all(endpoint: E) -> E:
    """Admit every caller: health, and the metaserver's address."""
    endpoint.is_open = True  # type: ignore[attr-defined]
    return endpoint


def refuses_itself(endpoint: E) -> E:
    """Admit callers without a valid token too: the endpoint refuses them in a form of its own."""
    endpoint.refuses_itself = True  # type: ignore[attr-defined]
    return endpoint


def is_open(endpoint: object) -> bool:
    return getattr(endpoint, "is_open", False)


def caller_of(request: Request) -> Caller:
    """Return the caller that the guard admitted."""
    caller: Caller = request.scope["qmq.caller"]
    return caller


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request."""

    body_bytes_max: int
    admin_body_bytes_max: int
    """For admins: they restore backups."""
    body_timeout_ms: int
    """Time for the whole body to arrive."""


class Refused(Exception):
    """Ends a request with this error."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.error = HttpError(code, message, **more)


class Guard:
    """ASGI middleware in front of FastAPI. Added by `build_app`."""

    def __init__(self, app: ASGIApp, *, access: Access, refusals: Refusals, limits: Limits) -> None:
        self._app = app
        self._access = access
        self._refusals = refusals
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, no lifespan
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            caller = self._let_in(scope)
            body = await self._read(receive, caller)
            scope["qmq.caller"] = caller
            await self._app(scope, replay(body, receive), noting)
        except Refused as refused:
            await _send(refused.error, scope, send)
        except Exception:
            reference = secrets.token_hex(4)
            log.exception("request failed reference=%s method=%s path=%r", reference, scope["method"], scope["path"])
            if not has_begun:
                error = HttpError(models.INTERNAL, f"the metaserver failed on this request; reference {reference}")
                await _send(error, scope, send)

    def identify(self, headers: Mapping[bytes, bytes], peer: str) -> Caller:
        """Return the caller for a token; raises AccessError."""
        token = headers.get(TOKEN_HEADER.lower().encode(), b"")
        authorization = headers.get(b"authorization", b"")
        if not token and authorization[: len(BEARER)].lower() == BEARER.encode():
            token = authorization[len(BEARER) :].strip()
        try:
            return self._access.check(token, now_ms=wall_ms(), peer=peer)
        except AccessError as error:
            self._refusals.note("http", peer, str(error))
            raise

    def _let_in(self, scope: Scope) -> Caller | None:
        """Return the caller, checked for the role that the route needs; None: an open route, or one that
        `refuses_itself`. Raises Refused.
        """
        route, allowed = _find(scope)
        endpoint = route.endpoint if route else None
        if is_open(endpoint):
            return None
        headers = dict(scope["headers"])
        peer = scope["client"][0][:PEER_CHARS_MAX] if scope.get("client") else ""
        try:
            caller = self.identify(headers, peer)
            if route is None:
                raise _no_route(scope, allowed)
            if not getattr(endpoint, "refuses_itself", False):
                caller.require_role(*getattr(endpoint, "roles", ()))
        except NotServed as error:
            raise Refused(models.NOT_SERVED, str(error)) from None
        except MissingRight as error:
            raise Refused(models.MISSING_RIGHT, str(error)) from None
        except AccessError as error:
            if getattr(endpoint, "refuses_itself", False):
                scope["qmq.refusal"] = error
                return None
            headers_out = {"WWW-Authenticate": 'Bearer realm="qmq"'}
            raise Refused(models.UNAUTHORIZED, str(error), headers=headers_out) from None
        return caller

    async def _read(self, receive: Receive, caller: Caller | None) -> bytes:
        limits = self._limits
        is_admin = caller is not None and caller.may(TokenRole.ADMIN)
        bytes_max = limits.admin_body_bytes_max if is_admin else limits.body_bytes_max
        try:
            body = await read_body(receive, bytes_max=bytes_max, timeout_s=limits.body_timeout_ms / 1000)
        except BodyTooLarge as error:
            setting = "" if is_admin else " (request_bytes_max)"
            raise Refused(models.TOO_LARGE, f"{error}{setting}", headers=_CLOSE) from None
        except TimeoutError:
            text = f"the request did not arrive within {limits.body_timeout_ms} ms"
            raise Refused(models.TOO_SLOW, text, headers=_CLOSE) from None
        if body is None:
            raise Refused(models.TOO_SLOW, "the client left before its request was complete")
        return body


_CLOSE = {"Connection": "close"}


def _find(scope: Scope) -> tuple[Route | None, set[str]]:
    """Return the route of this path and method; else the methods of the path."""
    allowed: set[str] = set()
    for route in scope["app"].routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route, set()
        if match is Match.PARTIAL:
            allowed |= set(route.methods or ())
    return None, allowed


def _no_route(scope: Scope, allowed: set[str]) -> Refused:
    path = str(scope["path"])[:100]
    if not allowed:
        return Refused(models.NOT_FOUND, f"there is nothing at {path}")
    text = f"{scope['method'][:20]} is not for {path}"
    return Refused(models.METHOD, text, headers={"Allow": ", ".join(sorted(allowed))})


async def _send(error: HttpError, scope: Scope, send: Send) -> None:
    response = Response(error.body(), error.status, error.headers, media_type="application/json")
    await response(scope, nothing, send)
