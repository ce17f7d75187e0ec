"""Shell. HTTP port of a watchdog: health, metrics, and operators' commands about outboxes (tools.sh Outbox…)."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from itertools import islice

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from qmq.access import token_text
from qmq.errors import AccessError, MissingRight, NotServed, QmqError
from qmq.http_port import HEADERS, shown_token
from qmq.rights import Caller, TokenRole
from qmq.settings import shown
from qmq.watchdog.leader import Leader
from qmq.watchdog.meta_link import MetaLink
from qmq.watchdog.metrics import Metrics
from qmq.watchdog.settings import WatchdogSettings
from qmq.watchdog.watcher import Watcher

CLUSTER = Caller("cluster", TokenRole.CLUSTER)
TOKEN_VALID_S = 10.0
"""Lifetime of a cached answer of the metaserver, mainly for Prometheus, which asks often."""
TOKENS_MAX = 1_000
IDS_MAX = 10_000
ID_DIGITS_MAX = 19
"""Maximum digits of a bigint."""
RECONCILE_S = 15.0
REFUSALS_SHOWN = 10

Answering = Callable[[Request], Awaitable[Response]]


class Acceptor:
    """HTTP application. Made by main. Health needs no token; the rest needs one with the route's role."""

    def __init__(
        self, settings: WatchdogSettings, leader: Leader, watcher: Watcher, metrics: Metrics, link: MetaLink
    ) -> None:
        self._leader = leader
        self._watcher = watcher
        self._metrics = metrics
        self._link = link
        self._own = settings.token
        self._settings = shown(settings)
        self._known: dict[str, tuple[float, Caller]] = {}

    def app(self) -> Starlette:
        routes = [
            ("/health", "GET", self._health),
            ("/health/ready", "GET", self._health),
            ("/health/live", "GET", self._live),
            ("/metrics", "GET", self._guarded(TokenRole.VIEWER, self._show_metrics)),
            ("/settings", "GET", self._guarded(TokenRole.OPERATOR, self._show_settings)),
            ("/outbox/stuck", "GET", self._guarded(TokenRole.VIEWER, self._stuck)),
            ("/outbox/reconcile", "GET", self._guarded(TokenRole.VIEWER, self._reconcile)),
            ("/outbox/retry", "POST", self._guarded(TokenRole.OPERATOR, self._retry)),
        ]
        return Starlette(routes=[Route(path, answer, methods=[method]) for path, method, answer in routes])

    async def _health(self, _: Request) -> Response:
        """Answer 200 while this watchdog leads, or waits with a metaserver that answers; list troubles in any case."""
        leader = self._leader
        troubles = {url: drain.trouble for url, drain in leader.drains.items() if drain.trouble} | leader.problems
        is_well = leader.is_leader or not leader.metaserver_trouble
        body = {
            "leader": leader.is_leader,
            "term": leader.lease.term,
            "node": leader.lease.node,
            "holder": leader.lease.holder,
            "databases": len(leader.drains),
            "troubles": troubles,
            "metaserver": leader.metaserver_trouble,
            "routes": dict(islice(leader.refusals.items(), REFUSALS_SHOWN)),
        }
        return JSONResponse(body, 200 if is_well else 503)

    async def _live(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def _show_metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _show_settings(self, _: Request) -> Response:
        return JSONResponse(self._settings)

    async def _stuck(self, request: Request) -> Response:
        older_s, limit = _number(request, "older", 60), _number(request, "limit", 20)
        return JSONResponse(await self._watcher.stuck(database=_database(request), older_s=older_s, limit=limit))

    async def _reconcile(self, request: Request) -> Response:
        older_s, limit = _number(request, "older", 60), _number(request, "limit", 100)
        report = await self._watcher.reconcile(
            database=_database(request), older_s=older_s, limit=limit, seconds=RECONCILE_S
        )
        return JSONResponse(report)

    async def _retry(self, request: Request) -> Response:
        text = request.query_params.get("ids", "")
        words = [word for word in text.split(",") if word]
        are_ids = all(word.isascii() and word.isdecimal() and len(word) <= ID_DIGITS_MAX for word in words)
        if len(words) > IDS_MAX or not are_ids or bool(words) != bool(text):
            return JSONResponse({"problem": f"ids: up to {IDS_MAX} whole numbers, with commas between them"}, 400)
        ids = [int(word) for word in words] if words else None
        return JSONResponse(await self._watcher.retry(database=_database(request), ids=ids))

    def _guarded(self, role: TokenRole, answer: Answering) -> Answering:
        async def guarded(request: Request) -> Response:
            try:
                (await self._caller_of(shown_token(request.headers))).require_role(role)
                return await answer(request)
            except QmqError as error:
                return JSONResponse({"problem": str(error)}, _status(error))

        return guarded

    async def _caller_of(self, token: str) -> Caller:
        """Return the caller of a token, from the cache if possible."""
        if not token:
            raise AccessError(f"the API token is missing ({HEADERS})")
        if hmac.compare_digest(token.encode("utf-8", "surrogatepass"), token_text(self._own).encode()):
            return CLUSTER
        until, caller = self._known.get(token, (0.0, CLUSTER))
        if time.monotonic() >= until:
            self._known.pop(token, None)
            caller = await self._link.caller_of(token)
            if len(self._known) >= TOKENS_MAX:
                self._known.clear()
            self._known[token] = time.monotonic() + TOKEN_VALID_S, caller
        return caller


def _database(request: Request) -> str:
    return str(request.query_params.get("database", ""))


def _number(request: Request, name: str, default: int) -> int:
    text = str(request.query_params.get(name, default))
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else default


def _status(error: QmqError) -> int:
    if isinstance(error, MissingRight):
        return 403
    if isinstance(error, AccessError):
        return 401
    return 503 if isinstance(error, NotServed) else 409
