"""Shell. Ends streams whose token was revoked or has expired meanwhile: the acceptor looks at it only once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from qmq.errors import AccessError
from qmq.metaserver.access import Access
from qmq.metaserver.rpc.tokens import wall_ms
from qmq.rpc_access import TOKEN_KEY
from qmq.ticking import until_next_second

REVIEW_S = 6.0
"""What is revoked ends within a minute."""
TURN = 100
"""Streams ended before others have their turn."""


class Visits:
    """The streams that are open. Made by the servicer; main runs `run` as a task; used on the loop."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._tokens: dict[Any, str] = {}

    @contextmanager
    def open(self, context: Any) -> Iterator[None]:
        """While a stream is served. `context`: grpc.aio.ServicerContext; grpcio comes without types."""
        self._tokens[context] = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
        try:
            yield
        finally:
            del self._tokens[context]

    async def run(self) -> None:
        """Look at the tokens again, and again, until cancelled."""
        while True:
            await asyncio.sleep(until_next_second(asyncio.get_running_loop().time(), REVIEW_S))
            await self.review()

    async def review(self) -> None:
        """End the streams whose token is not valid any more."""
        reasons = {token: self._refusal(token) for token in set(self._tokens.values())}
        ended = [(context, reason) for context, token in self._tokens.items() if (reason := reasons[token])]
        for number, (context, reason) in enumerate(ended, start=1):
            with suppress(grpc.aio.AbortError, grpc.aio.UsageError):  # so it ends; or it has ended by itself
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
            if number % TURN == 0:
                await asyncio.sleep(0)

    def _refusal(self, token: str) -> str:
        try:
            self._access.check(token, now_ms=wall_ms())
        except AccessError as error:
            return str(error)
        return ""
