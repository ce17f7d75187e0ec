"""Shell. How a message reaches its handler: through filters, as a coroutine or in a thread.

A filter is called with the message and the rest of the way, `handle`: what it does before and after is its own, and so
is what it makes of an exception. The first filter of the list is the outermost.

A thread belongs to one worker of a listener and ends with it. Threads are daemons: a blocking handler that never ends
does not keep its process from ending, as the standard library's pools would.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

from qmq.client.received import ReceivedMessage
from qmq.errors import InvalidRequest

AsyncHandler = Callable[[ReceivedMessage], Awaitable[object]]
AsyncBatchHandler = Callable[[list[ReceivedMessage]], Awaitable[object]]
BlockingHandler = Callable[[ReceivedMessage], object]
BlockingBatchHandler = Callable[[list[ReceivedMessage]], object]
Handler = AsyncHandler | BlockingHandler | AsyncBatchHandler | BlockingBatchHandler
AsyncFilter = Callable[[ReceivedMessage, AsyncHandler], Awaitable[object]]
BlockingFilter = Callable[[ReceivedMessage, BlockingHandler], object]
Filter = AsyncFilter | BlockingFilter
Given = ReceivedMessage | list[ReceivedMessage]
"""What a handler is called with: a message, or some where it asked for several at a time."""
Way = Callable[[Any], Awaitable[object]]
"""To a handler, through its filters; it takes what the handler takes."""


class Handling:
    """A handler with its filters, checked. Made for a listener; `route` makes the way of each of its workers.

    Raises:
        InvalidRequest: a plain function as a filter where no thread runs it; a handler that cannot be called.
    """

    def __init__(self, handler: Handler, filters: Sequence[Filter], *, is_batch: bool = False) -> None:
        for one in (handler, *filters):
            if not callable(one):
                raise InvalidRequest(f"a handler or filter is a function, not {one!r}")
        _check_call(handler, is_batch)
        self.is_blocking = not _is_coroutine_function(handler)
        outer = [one for one in filters if _is_coroutine_function(one)]
        inner = [one for one in filters if not _is_coroutine_function(one)]
        if inner and not self.is_blocking:
            raise InvalidRequest("filters of a coroutine function are coroutine functions: async def")
        if [*outer, *inner] != list(filters):
            raise InvalidRequest("filters that are coroutine functions come before those that run in the thread")
        self._outer = cast(list[AsyncFilter], outer)
        self._handler: Handler = handler
        for plain in reversed(inner):
            self._handler = partial(_call_filter, plain, self._handler)

    def route(self, thread: HandlerThread | None) -> Way:
        """Return what to await for each call; with the thread of the worker if the handler is blocking."""
        way = cast(Way, self._handler)
        if thread is not None:
            way = partial(thread.run, self._handler)
        for one in reversed(self._outer):
            way = cast(Way, partial(_call_filter, one, way))
        return way


def _call_filter(one: Callable[..., Any], handle: Callable[[Any], object], message: ReceivedMessage) -> Any:
    return one(message, handle)


def _check_call(handler: Handler, is_batch: bool) -> None:
    """Refuse a handler whose parameters are others than it is called with: each message would fail, and die of it."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # some that are written in C do not tell
        return
    try:
        signature.bind(None)
    except TypeError as error:
        given = "a list of messages" if is_batch else "the message"
        raise InvalidRequest(f"{handler!r:.100} is called with {given} alone: {error}") from None


def _is_coroutine_function(one: object) -> bool:
    return inspect.iscoroutinefunction(one) or inspect.iscoroutinefunction(getattr(one, "__call__", None))  # noqa: B004


class HandlerThread:
    """One thread that makes the calls of a blocking handler, one at a time. Made by a worker on its event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    async def run(self, handler: Callable[[Any], object], given: Given) -> object:
        """Call the handler, with the context variables of the caller; return what it returns, raise what it raises."""
        future: asyncio.Future[object] = self._loop.create_future()
        context = contextvars.copy_context()
        self._calls.put(partial(self._call, future, context, handler, given))
        return await future

    def close(self) -> None:
        """End after the call that runs."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(
        self,
        future: asyncio.Future[object],
        context: contextvars.Context,
        handler: Callable[[Any], object],
        given: Given,
    ) -> None:
        try:
            result = context.run(handler, given)
            if inspect.iscoroutine(result):
                result.close()
                raise InvalidRequest("a handler that returns a coroutine is declared as such: async def")
            finish = partial(future.set_result, result)
        except (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # it would end more than a call
            finish = partial(future.set_exception, RuntimeError(f"the handler raised {error!r}"))
        except BaseException as error:
            finish = partial(future.set_exception, error)
        try:
            self._loop.call_soon_threadsafe(_finish, future, finish)
        except RuntimeError:
            pass  # the loop ended before this handler did; nobody waits any more


def _finish(future: asyncio.Future[object], finish: Callable[[], None]) -> None:
    if not future.done():
        finish()
