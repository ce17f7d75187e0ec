"""Shell. Listeners against brokers in memory, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import qmq
from tests.unit.client.consuming import cancelled, consumer_of, fill
from tests.unit.client.fakes import cluster
from tests.unit.client.test_producer import run, until


def test_a_message_whose_handler_raises_is_handed_over_again_and_nothing_else_waits_for_it():
    async def test() -> None:
        async with cluster("g1") as (metaserver, [broker]):
            fill(broker, range(20))
            consumer, handled, failures = consumer_of(metaserver, consumer_id="c1"), [], []

            @consumer.listen("a", group="g", start="earliest", retry_delay=0.01)
            async def handle(message: qmq.ReceivedMessage) -> None:
                number = int(message["n"])
                if number == 5 and message.times < 3:
                    failures.append(message.times)
                    raise ValueError("not now")
                handled.append(number)

            task = asyncio.create_task(consumer.run())
            progress = lambda: broker.subscribers["a", "g", "c1"]
            await until(lambda: len(handled) == 20 and not progress().pulled)
            assert failures == [1, 2]
            assert handled == [*range(5), *range(6, 20), 5]
            assert [nack.reason for nack in broker.nacks] == ["ValueError('not now')"] * 2
            await cancelled(task)

    run(test())


def test_as_many_handlers_run_at_the_same_time_as_asked():
    async def test() -> None:
        async with cluster("g1") as (metaserver, [broker]):
            fill(broker, range(30))
            consumer, running, most, gate = consumer_of(metaserver), 0, 0, asyncio.Event()

            @consumer.listen("a", group="g", start="earliest", concurrency=8)
            async def handle(message: qmq.ReceivedMessage) -> None:
                nonlocal running, most
                running += 1
                most = max(most, running)
                if running == 8:
                    gate.set()
                await gate.wait()
                running -= 1

            task = asyncio.create_task(consumer.run())
            await gate.wait()
            await cancelled(task)
            assert most == 8

    run(test())


@pytest.mark.parametrize("how", ["cancelled", "SIGTERM"])
def test_the_end_lets_handlers_finish_acks_them_and_gives_the_rest_back(how):
    async def test() -> None:
        async with cluster("g1") as (metaserver, [broker]):
            fill(broker, range(50))
            consumer, started, gate = consumer_of(metaserver, consumer_id="c1"), [], asyncio.Event()

            @consumer.listen("a", group="g", start="earliest", concurrency=2)
            async def handle(message: qmq.ReceivedMessage) -> None:
                started.append(int(message["n"]))
                await gate.wait()

            task = asyncio.create_task(consumer.run())
            await until(lambda: len(started) == 2)
            if how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done(), "handlers still run"
            gate.set()
            if how == "SIGTERM":
                await task
            else:
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert started == [0, 1]
            assert sorted(broker.returned["a", "g"]) == list(range(2, 50)), "given back at once"
            assert broker.times["a", "g"] == {n: int(n < 2) for n in range(50)}, "they do not count as handed over"

    run(test())


def test_a_handler_that_never_ends_is_cancelled_and_its_message_given_back():
    async def test() -> None:
        async with cluster("g1") as (metaserver, [broker]):
            fill(broker, range(1))
            consumer, started = consumer_of(metaserver, drain_s=0.1), asyncio.Event()

            @consumer.listen("a", group="g", start="earliest")
            async def handle(message: qmq.ReceivedMessage) -> None:
                started.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(consumer.run())
            await started.wait()
            await cancelled(task)
            assert broker.returned["a", "g"] == [0]

    run(test())
