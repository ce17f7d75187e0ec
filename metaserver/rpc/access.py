"""Shell. Access of gRPC calls: the acceptor, counts of refusals, the end of streams with an invalid token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from qmq.errors import AccessError, NotServed
from qmq.metaserver.access import RPC_ROLES, Access
from qmq.metaserver.observability.metrics import Metrics
from qmq.rights import Caller
from qmq.rpc_access import TOKEN_KEY, RpcAcceptor
from qmq.ticking import until_next_second

log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000
REVIEW_S = 6.0
"""Time between reviews, so that a revoked token's streams end within a minute."""
STREAMS_PER_PASS = 100
"""Streams ended before the task yields."""


def make_acceptor(access: Access, refusals: Refusals) -> RpcAcceptor:
    """Return the interceptor of every call."""

    async def check(token: str) -> Caller:
        return access.check(token, now_ms=wall_ms())

    def refused(method: str, peer: str, reason: str) -> None:
        refusals.note(method, peer, reason)

    return RpcAcceptor(RPC_ROLES, check, refused)


def wall_ms() -> int:
    """Return milliseconds since 1970, as tokens' times are shown to people."""
    return time.time_ns() // 1_000_000


class Refusals:
    """Counts rejected requests and logs each once: there may be thousands a second.

    Created by main for both acceptors, HTTP and gRPC; used on the loop.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, str]] = set()

    def note(self, call: str, peer: str, reason: str) -> None:
        """Record a refusal. `call`: the method or address; `peer`: the host without its port."""
        self._metrics.refused_tokens.inc()
        if (peer, reason) in self._logged:
            return
        if len(self._logged) >= REMEMBERED_MAX:
            self._logged.clear()
        self._logged.add((peer, reason))
        log.warning("refused at=%.100s peer=%s: %s", call, peer, reason)


class Visits:
    """Open streams. Their tokens are reviewed, as the acceptor checks a token only when the stream opens.

    Made by the servicer; main runs `run` as a task; used on the loop.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._tokens: dict[Any, str] = {}

    @contextmanager
    def open(self, context: Any) -> Iterator[None]:
        """Register a stream while it is served. `context`: grpc.aio.ServicerContext; grpcio has no types."""
        self._tokens[context] = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
        try:
            yield
        finally:
            del self._tokens[context]

    async def run(self) -> None:
        """Review the tokens until cancelled."""
        while True:
            await asyncio.sleep(until_next_second(asyncio.get_running_loop().time(), REVIEW_S))
            await self.review()

    async def review(self) -> None:
        """End the streams with a token that is no longer valid."""
        reasons = {token: self._refusal(token) for token in set(self._tokens.values())}
        ended = [(context, reason) for context, token in self._tokens.items() if (reason := reasons[token])]
        for number, (context, reason) in enumerate(ended, start=1):
            with suppress(
                grpc.aio.AbortError, grpc.aio.UsageError
            ):  # `abort` raises; or the stream has ended by itself
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
            if number % STREAMS_PER_PASS == 0:
                await asyncio.sleep(0)

    def _refusal(self, token: str) -> str:
        try:
            self._access.check(token, now_ms=wall_ms())
        except AccessError as error:
            return str(error)
        except NotServed:  # the token cannot be judged now
            pass
        return ""
