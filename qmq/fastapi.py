"""Shell. Producers and consumers with the lifetime of a FastAPI application.

    clients = Clients(producer, consumer)
    app = FastAPI(lifespan=clients.lifespan)

    @app.get("/health", dependencies=[Depends(clients.check)])
    async def health() -> None: ...

The application defines the route for health checks, if it needs one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException

from qmq.client.consumer import Consumer
from qmq.client.health import Health, HealthState, worst
from qmq.logs import bounded

log = bounded(__name__)


class Clients:
    """Clients of an application, opened in this order and closed in reverse.

    The listeners of a Consumer run in between; at the end it drains: handlers finish, acks are sent, the rest goes
    back. Other clients, such as a Producer or a Requester, are entered and left. List producers before the consumers
    whose handlers use them.
    """

    def __init__(self, *clients: Consumer | AbstractAsyncContextManager[Any]) -> None:
        self._clients = clients
        self._running: dict[Consumer, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Lifespan for `FastAPI(lifespan=…)`.

        Raises:
            InvalidRequest: a consumer has no listeners.
        """
        async with AsyncExitStack() as stack:
            for client in self._clients:
                await stack.enter_async_context(self._run(client) if isinstance(client, Consumer) else client)
            yield

    def check(self) -> None:
        """Raise HTTP 503 if a consumer does not run or has no connection to a broker, or messages wait in a producer's
        outbox; a dependency for health routes. The detail holds the reason, and the number and age of messages.
        """
        self.check_running()
        for consumer in self._running:
            if consumer.health.state is HealthState.NOT_CONNECTED:
                raise HTTPException(503, f"consumer {consumer.id} is {consumer.health}")
        for client in self._clients:
            for left in getattr(client, "left_behind", ()):
                if left.is_degraded:
                    raise HTTPException(503, str(left))

    @property
    def health(self) -> Health:
        """Health of all clients, the worst state with its reasons."""
        return worst(client.health for client in self._clients if hasattr(client, "health"))

    def check_running(self) -> None:
        """Raise HTTP 503 if a consumer does not run; a dependency for an orchestrator, which restarts the application.
        Waiting outbox messages do not count: a restart would send none of them.
        """
        for consumer in self._clients:
            if isinstance(consumer, Consumer) and (reason := self._why_ended(consumer)) is not None:
                raise HTTPException(503, f"consumer {consumer.id} does not run{reason}")

    def _why_ended(self, consumer: Consumer) -> str | None:
        """Return the reason why a consumer does not run, with a colon before it; None: it runs."""
        if (task := self._running.get(consumer)) is None:
            return ""
        if not task.done():
            return None
        error = None if task.cancelled() else task.exception()
        return f": {error}" if error is not None else ""

    @asynccontextmanager
    async def _run(self, consumer: Consumer) -> AsyncIterator[None]:
        task = asyncio.create_task(consumer.run())
        await asyncio.sleep(0)
        if task.done():
            await task  # the consumer cannot start, so the application does not
        task.add_done_callback(lambda _: _ended(consumer, task))
        self._running[consumer] = task
        try:
            yield
        finally:
            del self._running[consumer]
            consumer.stop()
            await asyncio.wait([task])


def _ended(consumer: Consumer, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("consumer failed, the application goes on consumer=%s error=%r", consumer.id, error)
