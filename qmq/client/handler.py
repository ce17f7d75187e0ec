"""Shell. Calls of application functions: accepted kinds, filters, threads, and the work that a call returns.

A call may return before its work is done, and a message acked at that moment may be lost. `check_callable` rejects
functions whose body a call would not run. `finished` completes the work that a call returned, for instance a coroutine.

A filter gets the message and `handle`, which calls the next filter or the handler. The first filter of the list is the
outermost. `handle` returns when all work that the handler returned has ended.

`Publishing` sends the messages that a handler returns.

A thread belongs to one worker of a listener. Threads are daemons, so a blocking handler that never ends does not keep
its process from ending. With the standard library's pools it would.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from queue import SimpleQueue
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, NoneType, WrapperDescriptorType
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakSet

from qmq.client import django_connections
from qmq.client.batch import Receipts
from qmq.client.parameters import BoundHandler
from qmq.client.received import ReceivedMessage
from qmq.errors import InvalidRequest
from qmq.message import Message

F = TypeVar("F", asyncio.Future[Any], Future[Any])

_PLAIN = frozenset({NoneType, bool, int, float, str, bytes, dict})
"""Types of most results, which hold no work."""
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR | inspect.CO_COROUTINE
_after_commit: WeakSet[Any] = WeakSet()


def check_callable(role: str, value: object) -> bool:
    """Return whether `value` is a coroutine function; another function may still return an awaitable.

    Raises:
        InvalidRequest: `value` cannot be called, or a call would not run its body.
    """
    inner = value
    while True:
        if type(inner) is FunctionType and not inner.__dict__ and not inner.__code__.co_flags & _SUSPENDED:
            return False  # the usual case; inspect takes 2 µs
        if type(inner) is BuiltinFunctionType:
            return False
        if isinstance(inner, partial):
            inner = inner.func
            continue
        if isinstance(inner, (MethodType, staticmethod, classmethod)):
            inner = inner.__func__
            continue
        if isinstance(inner, type):
            name = inner.__qualname__
            raise InvalidRequest(
                f"{role} is the class {name}: a call only makes an object. Give a method of one: {name}(…).method"
            )
        if inspect.iscoroutinefunction(inner):
            return True
        if inspect.isasyncgenfunction(inner) or (inspect.isgeneratorfunction(inner) and not _is_coroutine(inner)):
            raise InvalidRequest(
                f"{role} contains yield: a call of {value!r:.100} would not run its body. "
                "Remove yield, or give a function that iterates to the end"
            )
        if not callable(inner):
            raise InvalidRequest(f"{role} is a function, not {value!r:.100}")
        call = type(inner).__call__
        if isinstance(call, WrapperDescriptorType | MethodDescriptorType):  # a function, or written in C
            return False
        inner = call


def check_plain(role: str, value: Any) -> Any:
    """Return `value`, a function with a result that is used at once; raises InvalidRequest for a coroutine function."""
    if check_callable(role, value):
        raise InvalidRequest(f"{role} is a plain function: def, not async def")
    return value


def _is_coroutine(generator_function: Any) -> bool:
    """Return whether `types.coroutine` made the function."""
    return bool(generator_function.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE)


async def finished(result: Any, *, is_sent: bool = False) -> Any:
    """Complete the work that a call returned and return its result: await it, or wait for a future of a pool.

    Args:
        is_sent: whether the caller sends returned messages.

    Raises:
        InvalidRequest: the work, or a message, was returned and nothing will run or send it.
    """
    while type(result) not in _PLAIN:
        if isinstance(result, asyncio.Future | Future) and result in _after_commit:
            return result
        if inspect.isawaitable(result):
            result = await result
        elif isinstance(result, Future):
            result = await asyncio.wrap_future(result)
        elif (pool := sys.modules.get("multiprocessing.pool")) and isinstance(result, pool.ApplyResult):
            result = await asyncio.to_thread(result.get)
        elif type(result) in (list, tuple, set):
            return [await finished(part, is_sent=is_sent) for part in result]
        else:
            if not is_sent and isinstance(result, Message) and not isinstance(result, ReceivedMessage):
                raise InvalidRequest(
                    f"the function returned {result!r:.100}, which is not sent: see Consumer(producer=…)"
                )
            _check_no_work(result)
            return result
    return result


def _check_no_work(result: Any) -> None:
    if isinstance(result, Generator | AsyncGenerator | map | filter):
        remedy = "Iterate over it to the end"
    elif callable(result) and type(result).__module__ != "unittest.mock":
        remedy = "Call it"
    else:
        return
    raise InvalidRequest(f"the function returned {result!r:.100}, which does not run. {remedy}, or return None")


def after_commit(future: F) -> F:
    """Mark a future that ends with a transaction. Waiting for it inside the transaction's function would deadlock."""
    _after_commit.add(future)
    return future


def call_back(
    call: Callable[[Any], object], given: object, failed: Callable[[BaseException], None], tasks: set[asyncio.Task[Any]]
) -> None:
    """Call a callback on the event loop; an awaitable it returns runs as one of `tasks`."""
    try:
        result = call(given)
    except (Exception, asyncio.CancelledError) as error:
        failed(error)
        return
    if type(result) in _PLAIN:
        return

    def ended(task: asyncio.Task[object]) -> None:
        tasks.discard(task)
        if error := asyncio.CancelledError() if task.cancelled() else task.exception():
            failed(error)

    task = asyncio.create_task(finished(result))
    tasks.add(task)
    task.add_done_callback(ended)


AsyncHandler = Callable[[ReceivedMessage], Awaitable[object]]
BlockingHandler = Callable[[ReceivedMessage], object]
Handler = Callable[..., object]
"""Function for a message, a payload, both, or lists of them: see `qmq.client.parameters`."""
AsyncFilter = Callable[[ReceivedMessage, AsyncHandler], Awaitable[object]]
BlockingFilter = Callable[[ReceivedMessage, BlockingHandler], object]
Filter = AsyncFilter | BlockingFilter
Given = ReceivedMessage | list[ReceivedMessage]
"""Argument of a handler: a message, or a list of messages."""
HandlerCall = Callable[[Any], Awaitable[object]]
"""Handler inside its filters; takes the handler's argument."""


class Publishes(Protocol):
    """Completes the result of a handler and sends the messages in it."""

    reply_to: str | None

    def __call__(self, result: object, given: Given, /) -> Awaitable[object]: ...


class FilteredHandler:
    """Checked handler with its filters. Made for a listener; `route` makes the call of each worker.

    Raises:
        InvalidRequest: a plain function filters a coroutine function, a call would not run a function's body, or the
            handler's parameters are not those of `qmq.client.parameters`.
    """

    def __init__(
        self,
        handler: Handler,
        filters: Sequence[Filter],
        *,
        is_batch: bool = False,
        publish: Publishes | None = None,
    ) -> None:
        self.is_blocking: bool = not check_callable("a handler", handler)
        self.name: str = (
            f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', type(handler).__name__)}"
        )
        self.bound: BoundHandler = BoundHandler(handler, is_batch=is_batch, is_blocking=self.is_blocking)
        self.has_filters: bool = bool(filters)
        self.publish = publish
        outer, inner = list[Filter](), list[Filter]()
        for filter_ in filters:
            (outer if check_callable("a filter", filter_) else inner).append(filter_)
        if inner and not self.is_blocking:
            raise InvalidRequest("filters of a coroutine function are coroutine functions: async def")
        if [*outer, *inner] != list(filters):
            raise InvalidRequest("filters that are coroutine functions come before those that run in the thread")
        self._outer = cast(list[AsyncFilter], outer)
        self._handler: Handler = self.bound.call
        if publish is not None:
            self._handler = partial(_call_and_publish, self._handler, publish)
        for plain in reversed(inner):
            self._handler = partial(_call_plain_filter, plain, partial(_call_to_end, self._handler))

    def route(self, thread: HandlerThread | WorkerThread | None) -> HandlerCall:
        """Return the function to await for each call, in the worker's thread if the handler blocks.

        A coroutine function without filters is returned as it is: another layer costs 0.1 µs a call.
        """
        next_call = cast(HandlerCall, self._handler)
        if thread is not None:
            next_call = partial(thread.run, partial(_call_to_end, self._handler))
        elif django_connections.is_configured():
            next_call = partial(django_connections.closing_old, partial(_awaited, next_call))
        for filter_ in reversed(self._outer):
            next_call = cast(HandlerCall, partial(_call_filter, filter_, next_call))
        return next_call


async def _call_filter(filter_: AsyncFilter, next_call: HandlerCall, message: ReceivedMessage) -> object:
    """Call a filter, and check that the work it began with `handle` has ended."""
    begun: list[Coroutine[Any, Any, object]] = []

    def handle(message: ReceivedMessage) -> Coroutine[Any, Any, object]:
        begun.append(work := _awaited(next_call, message))
        return work

    result = await finished(await filter_(message, handle))
    for work in begun:
        if inspect.getcoroutinestate(work) != inspect.CORO_CLOSED:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            text = f"the filter {filter_!r:.100} returned before its handler ended: write await handle(message)"
            raise InvalidRequest(text)
    return result


async def _awaited(call: HandlerCall, message: ReceivedMessage) -> object:
    return await finished(await call(message))


def _call_plain_filter(filter_: Callable[..., object], handle: BlockingHandler, message: ReceivedMessage) -> object:
    return filter_(message, handle)


def _call_to_end(call: Callable[[Any], object], given: Given) -> object:
    """Call a function in a handler's thread, and wait for the work it returns, which runs on the event loop."""
    result = call(given)
    return result if result is None else _thread.own.finish(result)


def _call_and_publish(call: Handler, publish: Publishes, given: Given) -> object:
    result = call(given)
    return None if result is None else publish(result, given)


class HandlerThread:
    """Thread for the calls of a blocking handler, one at a time. Made by a worker on its event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._rest: Future[object] | None = None
        """Returned work of the current call, while it runs on the event loop."""
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    async def run(
        self, handler: Callable[[Any], object], given: Given, left: Callable[[], None] = lambda: None
    ) -> object:
        """Call the handler in this thread, with the caller's context variables; return or raise its result.

        Args:
            left: called on the event loop when a call has ended after its caller was cancelled.
        """
        future: asyncio.Future[object] = self._loop.create_future()
        context = contextvars.copy_context()
        self._calls.put(partial(self._call, future, context, handler, given, left))
        try:
            return await future
        except asyncio.CancelledError:
            if (rest := self._rest) is not None:
                rest.cancel()
            raise

    def finish(self, result: object) -> object:
        """Wait in the thread until returned work has ended on the event loop."""
        try:
            self._rest = asyncio.run_coroutine_threadsafe(_rest(result), self._loop)
            return self._rest.result()
        finally:
            self._rest = None

    def close(self) -> None:
        """End the thread after the current call."""
        self._calls.put(None)

    def _serve(self) -> None:
        _thread.own = self
        while (call := self._calls.get()) is not None:
            call()
        django_connections.close_all()

    def _call(
        self,
        future: asyncio.Future[object],
        context: contextvars.Context,
        handler: Callable[[Any], object],
        given: Given,
        left: Callable[[], None],
    ) -> None:
        django_connections.close_old()
        try:
            finish = partial(future.set_result, context.run(handler, given))
        except _ENDS as error:
            finish = partial(future.set_exception, RuntimeError(f"the handler raised {error!r}"))
        except BaseException as error:
            finish = partial(future.set_exception, error)
        django_connections.close_old()
        try:
            self._loop.call_soon_threadsafe(_finish, future, finish, left)
        except RuntimeError:
            pass  # the loop ended before this handler; no result is expected


_ENDS = StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit
"""Exceptions that would end more than a call."""
_thread = threading.local()
"""Its attribute `own` is the HandlerThread of the current thread."""


async def _rest(result: object) -> object:
    try:
        return await finished(result)
    except _ENDS as error:
        raise RuntimeError(f"the handler raised {error!r}") from error


def _finish(future: asyncio.Future[object], finish: Callable[[], None], left: Callable[[], None]) -> None:
    if future.done():
        left()
    else:
        finish()


class HungThreads:
    """Count of a listener's threads whose call exceeded its time limit. A thread cannot be stopped. Used on the event
    loop.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._ended = asyncio.Event()

    def add(self) -> None:
        self.count += 1

    def remove(self) -> None:
        self.count -= 1
        self._ended.set()

    async def room(self, most: int) -> None:
        """Wait until fewer than `most` threads hang, because each further call that hangs takes another thread."""
        while self.count >= most:
            self._ended.clear()
            await self._ended.wait()


class WorkerThread:
    """Thread of one worker, replaced while it hangs in a call after its caller was cancelled.

    Args:
        threads_max: returns the limit of hanging threads. At the limit the next call waits until one ends.
    """

    def __init__(self, name: str, hung: HungThreads, threads_max: Callable[[], int]) -> None:
        self._name = name
        self._hung = hung
        self._threads_max = threads_max
        self._thread: HandlerThread | None = HandlerThread(name)

    async def run(self, handler: Callable[[Any], object], given: Given) -> object:
        """Call the handler in the thread: see `HandlerThread.run`."""
        thread = await self.ready()
        try:
            return await thread.run(handler, given, self._hung.remove)
        except asyncio.CancelledError:
            self._hung.add()
            self.close()
            raise

    @property
    def is_hung(self) -> bool:
        """Whether the thread still hangs in an abandoned call and no other thread has replaced it."""
        return self._thread is None

    async def ready(self) -> HandlerThread:
        """Wait until a call can begin; return its thread."""
        if self._thread is None:
            await self._hung.room(self._threads_max())
            self._thread = HandlerThread(self._name)
        return self._thread

    def close(self) -> None:
        """End the thread after its call."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None


async def within(seconds: float, call: HandlerCall, given: Any) -> object:
    """Await a call and its returned work; after `seconds` cancel it and raise TimeoutError."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await finished(await call(given))
    except TimeoutError:
        if not limit.expired():
            raise
    raise TimeoutError(f"the handler ran longer than its timeout, {seconds:g} s")


class Sends(Protocol):
    """A producer, or a wrapper of one."""

    async def send_many(self, messages: Iterable[Message], /) -> Receipts: ...


class Publishing:
    """Sender of the messages that one handler returns, before the message that it handles is acked.

    They are sent at least once: if the process ends before the ack, the message is handled again, and the returned
    messages are sent again with the same ids.

    Args:
        reply_to: subject of results that are no messages; without it these are ignored.
    """

    def __init__(self, producer: Sends, reply_to: str | None) -> None:
        self._producer = producer
        self.reply_to = reply_to

    async def __call__(self, result: object, given: Given) -> None:
        """Complete a result and send its messages.

        Raises:
            QmqError: a message is not known to be stored, so the handler has failed.
        """
        messages = self._messages_of(await finished(result, is_sent=True))
        if not messages:
            return
        if isinstance(given, ReceivedMessage):
            for number, message in enumerate(messages):
                if message.id is None:
                    message.id = _id_of(given, message.subject, number)
        for receipt in await self._producer.send_many(messages):
            receipt.check()

    def _messages_of(self, result: Any) -> list[Message]:
        parts = result if isinstance(result, list | tuple) else [result]
        messages = [part for part in parts if isinstance(part, Message) and not isinstance(part, ReceivedMessage)]
        if messages or result is None or isinstance(result, ReceivedMessage) or self.reply_to is None:
            return messages
        return [Message.of(self.reply_to, result)]


def _id_of(given: ReceivedMessage, subject: str, number: int) -> str:
    """Return the id of a handler's message: the same at each delivery of the message that it handles."""
    parts = (str(given.id), given.group, subject, str(number))
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def check_producer(producer: Sends | None) -> Sends | None:
    """Return the producer of a consumer; raises InvalidRequest."""
    if producer is not None and not callable(getattr(producer, "send_many", None)):
        raise InvalidRequest(f"producer= is a qmq.Producer, not {producer!r:.100}")
    return producer


@asynccontextmanager
async def opened_for(producer: Any) -> AsyncIterator[None]:
    """Keep a consumer's producer open, unless the application opened it."""
    if producer is None or getattr(producer, "is_open", True):
        yield
        return
    async with producer:
        yield
