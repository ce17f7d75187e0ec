"""Shell. Filters, and blocking handlers in threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import qmq
from qmq.client.handler import FilteredHandler
from qmq.remoting.commands import Command
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import LocalBroker, cluster, consumer_of, fill, handling

Handle = Callable[[qmq.ReceivedMessage], Awaitable[object]]
BlockingHandle = Callable[[qmq.ReceivedMessage], object]


async def listen_and_wait(handler: Any, count: int, done: Callable[[], object], **options: Any) -> LocalBroker:
    """Handle `count` messages until `done` and all are settled; return the broker."""
    async with handling(handler, count, **({"retry_delay": 1_000} | options)) as broker:
        await until_async(done)
        await until_async(lambda: not broker.unacked())
    return broker


async def test_filters_wrap_the_handler_the_first_one_outermost():
    seen: list[str] = []

    def named(name: str) -> Any:
        async def around(message: qmq.ReceivedMessage, handle: Handle) -> object:
            seen.append(f"before {name}")
            result = await handle(message)
            seen.append(f"after {name} {result}")
            return result

        return around

    async def handler(message: qmq.ReceivedMessage) -> str:
        seen.append("handler")
        return "done"

    await listen_and_wait(handler, 1, lambda: len(seen) == 5, filters=[named("outer"), named("inner")])
    assert seen == ["before outer", "before inner", "handler", "after inner done", "after outer done"]


async def test_skipped_message_is_acked():
    handled: list[object] = []

    async def only_even(message: qmq.ReceivedMessage, handle: Handle) -> None:
        if message.get_int("n", 0) % 2 == 0:
            await handle(message)

    async def handler(message: qmq.ReceivedMessage) -> None:
        handled.append(message["n"])

    broker = await listen_and_wait(handler, 4, lambda: len(handled) == 2, filters=[only_even])
    assert (handled, broker.nacks) == (["0", "2"], [])


async def test_raising_filter_decides_the_outcome():
    async def translating(message: qmq.ReceivedMessage, handle: Handle) -> None:
        if message["n"] == "0":
            raise ValueError("the filter's")
        try:
            await handle(message)
        except KeyError:
            raise qmq.DeadLetter("translated") from None

    dead: list[object] = []

    async def handler(message: qmq.ReceivedMessage) -> None:
        dead.append(message["n"])
        raise KeyError("the handler's")

    broker = await listen_and_wait(handler, 2, lambda: dead, filters=[translating])
    assert dead == ["1"]
    assert [nack.reason for nack in broker.nacks] == ['ValueError("the filter\'s")', "translated"]
    assert broker.dead["a", "g"] == [(1, "translated")]


async def test_blocking_handlers_run_in_threads():
    threads: set[str] = set()
    together = threading.Barrier(4)

    def handler(message: qmq.ReceivedMessage) -> None:
        threads.add(threading.current_thread().name + str(threading.get_ident()))
        together.wait(timeout=20)

    await listen_and_wait(handler, 8, lambda: len(threads) == 4, concurrency=4)
    assert all(name.startswith("qmq-a-g") for name in threads)


async def test_filters_run_around_or_in_the_thread():
    where: dict[str, bool] = {}
    context = contextvars.ContextVar("context", default="nothing")
    loop_thread: list[int] = []

    async def outer(message: qmq.ReceivedMessage, handle: Handle) -> None:
        loop_thread.append(threading.get_ident())
        token = context.set("from the filter")
        await handle(message)
        context.reset(token)

    def inner(message: qmq.ReceivedMessage, handle: BlockingHandle) -> None:
        where["inner"] = threading.get_ident() == loop_thread[0]
        handle(message)

    def handler(message: qmq.ReceivedMessage) -> None:
        where["handler"] = threading.get_ident() == loop_thread[0]
        where[context.get()] = True

    await listen_and_wait(handler, 1, lambda: len(where) == 3, filters=[outer, inner])
    assert where == {"inner": False, "handler": False, "from the filter": True}


async def test_endless_blocking_handler_does_not_block_exit():
    release, began = threading.Event(), threading.Event()

    def handler(message: qmq.ReceivedMessage) -> None:
        began.set()
        release.wait(120)

    async with cluster("g1") as (metaserver, [broker]):
        fill(broker, range(3))
        consumer = consumer_of(metaserver, drain_s=0.1)
        consumer.listen("a", group="g", start="earliest")(handler)
        async with consuming(consumer):
            await until_async(began.is_set)
        assert broker.times["a", "g"] == {0: 1, 1: 0, 2: 0}
        assert [nack.reason for nack in broker.nacks if nack.reason] == ["the consumer left"]
        await until_async(lambda: sorted(broker.returned["a", "g"]) == [0, 1, 2])
    release.set()


class Filter:
    """Filter with state."""

    async def __call__(self, message: qmq.ReceivedMessage, handle: Handle) -> None:
        await handle(message)


async def coroutine_filter(message: qmq.ReceivedMessage, handle: Handle) -> None: ...


def plain_filter(message: qmq.ReceivedMessage, handle: BlockingHandle) -> None: ...


async def coroutine_handler(message: qmq.ReceivedMessage) -> None: ...


def plain_handler(message: qmq.ReceivedMessage) -> None: ...


@pytest.mark.parametrize(
    ("handler", "filters"),
    [
        pytest.param(coroutine_handler, [plain_filter], id="no thread would run it"),
        pytest.param(plain_handler, [plain_filter, coroutine_filter], id="out of the thread and in again"),
        pytest.param(plain_handler, ["name"], id="no function"),
        pytest.param(None, [], id="no handler"),
    ],
)
def test_mismatched_filters_are_refused(handler, filters):
    with pytest.raises(qmq.InvalidRequest):
        FilteredHandler(handler, filters)


def test_filter_may_be_an_object():
    assert not FilteredHandler(coroutine_handler, [Filter()]).is_blocking
    assert inspect.iscoroutinefunction(Filter().__call__)


@pytest.mark.parametrize("batch", [None, 2], ids=["single", "in lists"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_exit_in_a_handler_ends_run_in_order(error, batch, metaserver, broker):
    async def handler(given: Any) -> None:
        raise error

    fill(broker, range(3))
    consumer = consumer_of(metaserver, drain_s=1_000)
    consumer.listen("a", group="g", start="earliest", batch=batch, retry_delay=0.0)(handler)
    try:
        await consumer.run()  # not in a task, which would end the test's loop
    except (SystemExit, KeyboardInterrupt) as raised:
        assert raised is error
    assert {nack.reason for nack in broker.nacks} >= {repr(error)}
    await until_async(lambda: sorted(broker.returned["a", "g"]) == [0, 1, 2])
    assert broker.times["a", "g"][0] == 1


async def test_run_again_forgets_the_exit(consumer, broker):
    raised = [SystemExit(3)]

    async def handler(message: qmq.ReceivedMessage) -> None:
        if raised:
            raise raised.pop()
        consumer.stop()

    fill(broker, range(1))
    consumer.listen("a", group="g", start="earliest", retry_delay=0.0)(handler)
    with pytest.raises(SystemExit):
        await consumer.run()
    await consumer.run()
    assert not broker.unacked()


async def test_failed_program_does_not_wait_for_a_cancelled_consumer(metaserver, broker):
    """Regression: asyncio.run cancels the connections with the consumer, which waited 20 s for their answers.

    The servers are on another loop, which ends them in order: gRPC reports a server that its loop left behind as an
    error of the next loop.
    """
    handled: list[object] = []
    tasks: list[asyncio.Task[None]] = []

    async def handler(message: qmq.ReceivedMessage) -> None:
        handled.append(message["n"])

    async def program() -> None:
        consumer = consumer_of(metaserver, drain_s=60)
        consumer.listen("a", group="g", start="earliest")(handler)
        tasks.append(asyncio.create_task(consumer.run()))
        await until_async(lambda: len(handled) == 100)
        raise ValueError("the program failed")

    fill(broker, range(100))
    broker.holds.add(Command.ACK)
    began = time.monotonic()
    with pytest.raises(ValueError, match="the program failed"):
        await asyncio.to_thread(asyncio.run, program())
    assert tasks[0].done() and time.monotonic() - began < 60


@pytest.mark.parametrize("batch", [None, 2], ids=["single", "in lists"])
async def test_coroutine_handler_is_cancelled_at_its_timeout(batch):
    """On a busy machine the timeout may end it before its first line."""
    begun: list[bool] = []
    cancelled: list[bool] = []

    async def handler(given: Any) -> None:
        begun.append(True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with handling(handler, 1, timeout=0.3, retries_max=1, batch=batch) as broker:
        await until_async(lambda: broker.dead["a", "g"])
    reason = "delivered once; TimeoutError('the handler ran longer than its timeout, 0.3 s')"
    assert broker.dead["a", "g"] == [(0, reason)] and cancelled == begun


async def test_handlers_own_timeout_error_is_kept():
    seen: list[int] = []

    async def handler(message: qmq.ReceivedMessage) -> None:
        seen.append(message.times)
        raise TimeoutError("the bank's")

    broker = await listen_and_wait(handler, 1, lambda: seen, timeout=60, retries_max=1)
    assert broker.dead["a", "g"] == [(0, 'delivered once; TimeoutError("the bank\'s")')]


async def test_hung_threads_are_replaced_and_counted(consumer, broker):
    release, began = threading.Event(), list[object]()

    def handler(message: qmq.ReceivedMessage) -> None:
        began.append(message["n"])
        release.wait(120)

    fill(broker, range(8))
    consumer.listen("a", group="g", start="earliest", concurrency=2, timeout=0.5, retries_max=1)(handler)
    listener = consumer.listeners["a", "g"]
    async with consuming(consumer):
        await until_async(lambda: listener.hung_threads >= 2)
        release.set()
        await until_async(lambda: len(began) == 8 and not broker.unacked())
        await until_async(lambda: listener.hung_threads == 0)
        assert 2 <= len(broker.dead["a", "g"]) <= 3, "no call begins while as many hang as may run"


@pytest.mark.parametrize("timeout", [0, -1, "3", float("nan")])
def test_impossible_handler_timeout_is_refused(timeout):
    consumer = qmq.Consumer(metaserver="localhost", app="test", token="t")
    with pytest.raises(qmq.InvalidRequest, match="^timeout is seconds, more than 0"):
        consumer.listen("a", group="g", timeout=timeout)
