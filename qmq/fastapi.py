"""Shell. Producers and consumers with the lifetime of a FastAPI application.

    clients = Clients(producer, consumer)
    app = FastAPI(lifespan=clients.lifespan)

    @app.get("/health", dependencies=[Depends(clients.check)])
    async def health() -> None: ...

    @app.post("/orders")
    async def order(producer: Annotated[qmq.Producer, Depends(clients.producer)]) -> None: ...

The application defines the route for health checks, if it needs one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from qmq.client.lifespan import Lifespan


class Clients(Lifespan):
    """Clients of an application, opened in this order and closed in reverse: see `qmq.client.lifespan`."""

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Lifespan for `FastAPI(lifespan=…)`.

        Raises:
            InvalidRequest: a consumer has no listeners.
        """
        async with self._opened():
            yield

    def check(self) -> None:
        """Raise HTTP 503 if a consumer does not run or has no connection to a broker, or messages wait in a producer's
        outbox; a dependency for health routes. The detail holds the reason, and the number and age of messages.
        """
        _raise(self._why_not_healthy())

    def check_running(self) -> None:
        """Raise HTTP 503 if a consumer does not run; a dependency for an orchestrator, which restarts the application.
        Waiting outbox messages do not count, because a restart would send none of them.
        """
        _raise(self._why_not_running())


def _raise(reason: str) -> None:
    if reason:
        raise HTTPException(503, reason)
