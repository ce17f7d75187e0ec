"""Shell. Clients with the lifetime of a web application, for `qmq.fastapi` and `qmq.litestar`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from qmq.client.consumer import Consumer
from qmq.client.health import Health, HealthState, worst
from qmq.client.producer import Producer
from qmq.errors import InvalidRequest
from qmq.logs import bounded

log = bounded(__name__)


class Lifespan:
    """Clients of an application, opened in this order and closed in reverse, again for each run of the application.

    The listeners of a Consumer run in between. At the end it drains: handlers finish, acks are sent, and the remaining
    messages return to their groups. Other clients, such as a Producer or a Requester, are entered and left. List
    producers before consumers with handlers that use them.
    """

    def __init__(self, *clients: Consumer | AbstractAsyncContextManager[Any]) -> None:
        self._clients = clients
        self._running: dict[Consumer, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for client in self._clients:
                await stack.enter_async_context(self._run(client) if isinstance(client, Consumer) else client)
            yield

    def producer(self) -> Producer:
        """Return the first producer; a dependency for functions that send messages, which tests may override.

        Raises:
            InvalidRequest: the clients include none.
        """
        for client in self._clients:
            if isinstance(client, Producer):
                return client
        raise InvalidRequest("these clients include no qmq.Producer: give one to Clients(…)")

    @property
    def health(self) -> Health:
        """Health of all clients, the worst state with its reasons."""
        return worst(client.health for client in self._clients if hasattr(client, "health"))

    def _why_not_healthy(self) -> str:
        """Return the reason why a client does not work now, with number and age of the messages that wait; "" if all
        work.
        """
        if reason := self._why_not_running():
            return reason
        for consumer in self._running:
            if consumer.health.state is HealthState.NOT_CONNECTED:
                return f"consumer {consumer.id} is {consumer.health}"
        unsent = (left for client in self._clients for left in getattr(client, "left_behind", ()))
        return next((str(left) for left in unsent if left.is_degraded), "")

    def _why_not_running(self) -> str:
        """Return the reason why a consumer does not run; "" if all run."""
        for consumer in self._clients:
            if isinstance(consumer, Consumer) and (reason := self._why_ended(consumer)) is not None:
                return f"consumer {consumer.id} does not run{reason}"
        return ""

    def _why_ended(self, consumer: Consumer) -> str | None:
        """Return the reason why a consumer does not run, with a colon before it, or None if it runs."""
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
        log.error("consumer failed, the application continues consumer=%s error=%r", consumer.id, error)
