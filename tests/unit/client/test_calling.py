"""Shell. Application functions: a call runs to its end, or is an error."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from multiprocessing.pool import ThreadPool
from types import coroutine
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

import qmq
import qmq.blocking
from qmq.client.handler import FilteredHandler, HandlerThread, check_callable, finished
from qmq.errors import InvalidRequest
from qmq.idempotence import Idempotence, MemoryKeys
from qmq.idempotence.transaction import BlockingSqlTransaction, SqlTransaction
from qmq.otel import TracedProducer
from qmq.outbox.dbapi import Database
from qmq.outbox.schema import create_statements
from tests.support.waiting import until_async
from tests.unit.client.test_handling import listen_and_wait
from tests.unit.client.test_wrong_calls import consumer, producer
from tests.unit.client.world import cluster, producer_of

effects: list[str] = []
processes: ThreadPool
"""Pool with the results of multiprocessing, without its processes."""


@pytest.fixture(autouse=True)
def _no_effects():
    effects.clear()


@pytest.fixture(autouse=True, scope="module")
def _processes():
    global processes
    with ThreadPool(1) as processes:
        yield


# Functions that are rejected before a call.


def generator(*given: Any) -> Generator[None]:
    yield


async def async_generator(*given: Any) -> Any:
    yield


async def coroutine_function(*given: Any) -> None: ...


class Job:
    def __init__(self, *given: Any) -> None: ...

    def __call__(self, *given: Any) -> Generator[None]:
        yield

    async def handle(self, *given: Any) -> Any:
        yield

    @staticmethod
    def static(*given: Any) -> Generator[None]:
        yield


NEVER_RUN = {
    "generator": generator,
    "async generator": async_generator,
    "nested partial": partial(partial(generator, 1), 2),
    "partial of an object": partial(Job(), 1),
    "object": Job(),
    "bound method": Job().handle,
    "static method": Job.static,
    "class": Job,
    "partial of a class": partial(Job, 1),
    "no function": "name",
}
blocking = {"metaserver": "http://127.0.0.1:9", "app": "test", "token": "t"}
PLAIN_ONLY: dict[str, Callable[[Any], object]] = {
    "on_master_changed": lambda one: consumer().on_master_changed(one),
    "blocking on_master_changed": lambda one: qmq.blocking.Consumer(**blocking).on_master_changed(one),
    "blocking handler": lambda one: qmq.blocking.Consumer(**blocking).listen("a", group="g")(one),
    "key": lambda one: Idempotence(MemoryKeys(), key=one),
    "key of a transaction": lambda one: SqlTransaction(Mock(), key=one),
    "key of a blocking transaction": lambda one: BlockingSqlTransaction(Mock(), key=one),
    "connect": Database,
}
PLACES = PLAIN_ONLY | {
    "handler": lambda one: consumer().listen("a", group="g")(one),
    "batch handler": lambda one: consumer().listen("a", group="g", batch=2)(one),
    "filter": lambda one: consumer().listen("a", group="g", filters=[one])(lambda message: None),
    "blocking filter": lambda one: qmq.blocking.Consumer(**blocking).listen("a", group="g", filters=[one])(print),
    "on_done": lambda one: producer().send_nowait(qmq.Message("a"), one),
    "traced on_done": lambda one: TracedProducer(producer()).send_nowait(qmq.Message("a"), one),
}


@pytest.mark.parametrize("place", PLACES)
def test_function_without_running_body_is_rejected(place):
    for kind, one in NEVER_RUN.items():
        with pytest.raises(InvalidRequest, match=r"contains yield|is the class Job.*method|is a function, not 'name'"):
            pytest.fail(f"{place} took {kind}: {PLACES[place](one)}")


@pytest.mark.parametrize("place", PLAIN_ONLY)
def test_coroutine_function_is_rejected_as_plain(place):
    for one in (coroutine_function, partial(coroutine_function, 1), AsyncMock()):
        with pytest.raises(InvalidRequest, match="is a plain function"):
            PLACES[place](one)


def test_callable_kinds_are_recognised():
    @coroutine
    def old_style(given: object) -> Generator[None]:
        yield

    class Async:
        async def __call__(self, given: object) -> None: ...

    kinds = (coroutine_function, Async(), partial(Async()), Async().__call__, AsyncMock(), print, [].append, old_style)
    assert [check_callable("a handler", kind) for kind in kinds] == [True] * 5 + [False] * 3
    assert not check_callable("a handler", wraps(generator)(lambda given: list(generator(given))))


# Results that are rejected.


async def work(name: str) -> str:
    await asyncio.sleep(0)
    effects.append(name)
    return "done"


class Awaitable:
    def __await__(self) -> Any:
        return work("object").__await__()


@coroutine
def old_style() -> Any:
    return (yield from work("old style").__await__())


@contextmanager
def context() -> Any:
    yield


def slow(name: str) -> str:
    time.sleep(0.02)  # longer than a call that does not wait for it
    effects.append(name)
    return "done"


async def of_later() -> Any:
    return work("nested")


def failing() -> None:
    raise ValueError("the work failed")


RUN: dict[str, Callable[[ThreadPoolExecutor], Any]] = {
    "coroutine": lambda pool: work("coroutine"),
    "coroutine of a coroutine": lambda pool: of_later(),
    "object": lambda pool: Awaitable(),
    "old style": lambda pool: old_style(),
    "future of a pool": lambda pool: pool.submit(slow, "pool"),
    "future that holds a coroutine": lambda pool: pool.submit(work, "two"),
    "result of multiprocessing": lambda pool: processes.apply_async(slow, ("processes",)),
    "several": lambda pool: [work("first of several"), pool.submit(slow, "last of several")],
}
FAILS: dict[str, tuple[Callable[[ThreadPoolExecutor], Any], str]] = {
    "generator": (lambda pool: generator(), "which does not run. Iterate"),
    "async generator": (lambda pool: async_generator(), "which does not run. Iterate"),
    "map": (lambda pool: map(print, [1]), "which does not run. Iterate"),
    "context manager": (lambda pool: context(), "which does not run. Call it"),
    "partial": (lambda pool: partial(print), "which does not run. Call it"),
    "class": (lambda pool: Job, "which does not run. Call it"),
    "object to call": (lambda pool: Job(), "which does not run. Call it"),
    "several": (lambda pool: (None, generator()), "which does not run. Iterate"),
    "future": (lambda pool: pool.submit(failing), "the work failed"),
    "cancelled future": (lambda pool: cancelled(), "^$"),
}


def cancelled() -> Future[None]:
    future: Future[None] = Future()
    future.cancel()
    return future


def returning(make: Callable[[], Any]) -> dict[str, tuple[Any, list[Any]]]:
    """Handler and filters, one of which returns the result of `make`; the others have no effect."""

    async def handler(message: Any) -> Any:
        return make()

    async def around(message: Any, handle: Any) -> Any:
        return make()

    async def passing(message: Any, handle: Any) -> None:
        await handle(message)
        effects.append("after")

    def passing_in_thread(message: Any, handle: Any) -> None:
        handle(message)
        effects.append("after")

    async def nothing(message: Any) -> None: ...

    return {
        "coroutine handler": (handler, []),
        "handler": (lambda message: make(), []),
        "coroutine handler behind a filter": (handler, [passing]),
        "handler behind a filter": (lambda message: make(), [passing]),
        "handler behind a filter in its thread": (lambda message: make(), [passing_in_thread]),
        "filter": (nothing, [around]),
        "filter around a thread": (print, [around]),
        "filter in the thread": (print, [lambda message, handle: make()]),
    }


async def called(handler: Any, filters: list[Any]) -> Any:
    handling = FilteredHandler(handler, filters)
    thread = HandlerThread("test") if handling.is_blocking else None
    try:
        return await finished(await handling.route(thread)(None))
    finally:
        if thread is not None:
            thread.close()


@pytest.mark.parametrize("place", returning(print))
async def test_returned_work_ends_before_the_call(place):
    with ThreadPoolExecutor(1) as pool:
        for kind, make in RUN.items():
            effects.clear()
            await called(*returning(partial(make, pool))[place])
            first = 2 if kind == "several" else 1
            behind = ["after"] if "behind" in place else []
            assert (effects[first:], len(effects[:first])) == (behind, first), (kind, effects)


@pytest.mark.parametrize("place", returning(print))
async def test_failed_or_idle_work_is_an_error(place):
    with ThreadPoolExecutor(1) as pool:
        for kind, (make, reason) in FAILS.items():
            print(kind)
            with pytest.raises((InvalidRequest, ValueError, asyncio.CancelledError, CancelledError), match=reason):
                await called(*returning(partial(make, pool))[place])
    assert not effects


async def test_filter_without_await_fails_the_message():
    async def forgets(message: Any, handle: Any) -> None:
        handle(message)

    async def leaves_it_running(message: Any, handle: Any) -> None:
        tasks.append(asyncio.ensure_future(handle(message)))
        await asyncio.sleep(0)

    async def forever(message: Any) -> None:
        await asyncio.Event().wait()

    tasks: list[asyncio.Task[Any]] = []
    for one in (forgets, leaves_it_running):
        with pytest.raises(InvalidRequest, match=r"write await handle\(message\)"):
            await called(forever, [one])
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("is_plain", [False, True])
async def test_listener_acks_after_returned_work(is_plain, batch):
    """Coroutine handler and threaded handler, with single messages and lists."""

    async def fails_later(number: int) -> None:
        await asyncio.sleep(0)
        effects.append(f"began {number}")
        if number == 1:
            raise ValueError("failed later")

    def plain(given: Any) -> Any:
        number = (given[0] if batch else given).get_int("n")
        return generator() if number == 2 else fails_later(number)

    async def handler(given: Any) -> Any:
        return plain(given)

    broker = await listen_and_wait(plain if is_plain else handler, 3, lambda: len(effects) == 2, batch=batch)
    assert broker.nacks[0].reason == "ValueError('failed later')"
    assert "which does not run. Iterate" in broker.nacks[1].reason and len(broker.nacks) == 2


async def noted(*given: Any) -> None:
    await asyncio.sleep(0)
    effects.append("ended")


CALLBACKS = {
    "coroutine function": noted,
    "plain function": lambda receipt: noted(),
    "compiled function": Mock(return_value=Awaitable()),
    "function that starts a thread": lambda receipt: processes.apply_async(slow, ("thread",)),
}


@pytest.mark.parametrize("kind", CALLBACKS)
def test_flush_and_close_wait_for_callbacks(kind):
    async def test(ends: Callable[[qmq.Producer], Any], wrap: Callable[[qmq.Producer], Any]) -> None:
        effects.clear()
        async with cluster("g1") as (metaserver, _), producer_of(metaserver) as one:
            wrap(one).send_nowait(qmq.Message("a"), CALLBACKS[kind])
            await ends(one)
            assert len(effects) == 1

    asyncio.run(test(qmq.Producer.flush, lambda one: one))
    asyncio.run(test(qmq.Producer.close, TracedProducer))


def test_blocking_callbacks_have_ended_behind_flush():
    with qmq.testing.BlockingBroker() as broker:
        with qmq.blocking.Producer(metaserver=broker.metaserver, app="test") as one:
            for callback in CALLBACKS.values():
                one.send_nowait(qmq.Message("a"), callback)
            one.flush()
            assert len(effects) == len(CALLBACKS)


def test_callback_errors_are_reported(caplog):
    async def fails(receipt: qmq.Receipt) -> None:
        raise ValueError("failed later")

    async def test() -> None:
        async with cluster("g1") as (metaserver, _), producer_of(metaserver) as one:
            one.send_nowait(qmq.Message("a"), fails)
            one.send_nowait(qmq.Message("a"), lambda receipt: generator())

    asyncio.run(test())
    assert "failed later" in caplog.text and "which does not run" in caplog.text


async def test_master_changed_coroutines_run(caplog):
    async def fails() -> None:
        raise ValueError("failed later")

    async with qmq.testing.Broker() as broker:
        one = qmq.Consumer(metaserver=broker.metaserver, app="test")
        one.on_master_changed(lambda event: noted())
        one.on_master_changed(lambda event: fails())
        async with one.pull("a", group="g"):
            await broker.wait_until_subscribed("a", "g")
            broker.swap_roles()
            await until_async(lambda: effects and "failed later" in caplog.text)


async def test_transaction_receipt_may_be_returned(tmp_path, producer):
    """Waiting for it in the handler would deadlock: the commit follows the handler."""
    for statement in create_statements("sqlite"):
        sqlite3.connect(tmp_path / "db").execute(statement)
    with Database(lambda: sqlite3.connect(tmp_path / "db")).transaction() as transaction:
        later = await producer.send(qmq.Message("a"), session=transaction)
        assert await finished(later) is later and not later.done()
    assert (await later).is_stored
