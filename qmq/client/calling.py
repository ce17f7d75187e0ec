"""Shell. Functions of the application: which kinds are taken, and how a call runs to its end.

A call may return before its work is done, and a message acked then is lost. `check_callable` rejects a function whose
body a call would not run. `finished` completes the work that only the returned object shows, or raises.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, NoneType, WrapperDescriptorType
from typing import Any, TypeVar
from weakref import WeakSet

from qmq.errors import InvalidRequest

F = TypeVar("F", asyncio.Future[Any], Future[Any])

_PLAIN = frozenset({NoneType, bool, int, float, str, bytes, dict})
"""Types of most results, which hold no work."""
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR | inspect.CO_COROUTINE
_after_commit: WeakSet[Any] = WeakSet()


def check_callable(what: str, one: object) -> bool:
    """Return whether `one` is a coroutine function; another function may still return an awaitable.

    Raises:
        InvalidRequest: `one` cannot be called, or a call would not run its body.
    """
    inner = one
    while True:
        if type(inner) is FunctionType and not inner.__dict__ and not inner.__code__.co_flags & _SUSPENDED:
            return False  # most are; inspect takes 2 µs
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
                f"{what} is the class {name}: a call only makes an object. Give a method of one: {name}(…).method"
            )
        if inspect.iscoroutinefunction(inner):
            return True
        if inspect.isasyncgenfunction(inner) or (inspect.isgeneratorfunction(inner) and not _is_coroutine(inner)):
            raise InvalidRequest(
                f"{what} contains yield: a call of {one!r:.100} would not run its body. "
                "Remove yield, or give a function that iterates to the end"
            )
        if not callable(inner):
            raise InvalidRequest(f"{what} is a function, not {one!r:.100}")
        call = type(inner).__call__
        if isinstance(call, WrapperDescriptorType | MethodDescriptorType):  # a function, or written in C
            return False
        inner = call


def check_plain(what: str, one: Any) -> Any:
    """Return `one`, whose result is used at once; raises InvalidRequest if that is not what a call returns."""
    if check_callable(what, one):
        raise InvalidRequest(f"{what} is a plain function: def, not async def")
    return one


def _is_coroutine(generator_function: Any) -> bool:
    """Return whether `types.coroutine` made it."""
    return bool(generator_function.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE)


async def finished(result: Any) -> Any:
    """Run what a call returned to completion: await it, or wait for a future of a pool. Return what comes out of it.

    Raises:
        InvalidRequest: work was returned that nothing will run.
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
            return [await finished(one) for one in result]
        else:
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
    raise InvalidRequest(f"{result!r:.100} was returned, and nothing runs it. {remedy}, or return None")


def after_commit(future: F) -> F:
    """Mark a future that ends with a transaction: if the function that returned it is to return first, waiting for it
    would last forever."""
    _after_commit.add(future)
    return future


def call_back(
    call: Callable[[Any], object], given: object, failed: Callable[[BaseException], None], tasks: set[asyncio.Task[Any]]
) -> None:
    """Call a callback on the event loop; what it returns goes on as one of `tasks`, which are to be kept."""
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
