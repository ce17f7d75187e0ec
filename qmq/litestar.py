"""Shell. Producers and consumers with the lifetime of a Litestar application.

    clients = Clients(producer, consumer)

    @get("/health", guards=[clients.check])
    async def health() -> None: ...

    @post("/orders")
    async def order(producer: NamedDependency[qmq.Producer]) -> None: ...

    app = Litestar([health, order], lifespan=[clients.lifespan], dependencies=clients.dependencies)

The application defines the route for health checks, if it needs one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.exceptions import ServiceUnavailableException
from litestar.handlers import BaseRouteHandler

from qmq.client.lifespan import Lifespan


class Clients(Lifespan):
    """Clients of an application, opened in this order and closed in reverse: see `qmq.client.lifespan`."""

    @asynccontextmanager
    async def lifespan(self, app: Litestar) -> AsyncIterator[None]:
        """Lifespan for `Litestar(lifespan=[…])`.

        Raises:
            InvalidRequest: a consumer has no listeners.
        """
        async with self._opened():
            yield

    @property
    def dependencies(self) -> dict[str, Provide]:
        """The first producer, for parameters `producer`."""
        return {"producer": Provide(self.producer, sync_to_thread=False)}

    def check(self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        """Raise HTTP 503 if a consumer does not run or has no connection to a broker, or messages wait in a producer's
        outbox; a guard for health routes. The detail holds the reason, and the number and age of messages.
        """
        _raise(self._why_not_healthy())

    def check_running(self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        """Raise HTTP 503 if a consumer does not run; a guard for an orchestrator, which restarts the application.
        Waiting outbox messages do not count, because a restart would send none of them.
        """
        _raise(self._why_not_running())


def _raise(reason: str) -> None:
    if reason:
        raise ServiceUnavailableException(reason)
