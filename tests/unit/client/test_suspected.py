"""Shell. Suspected messages are announced and handled alone; unbegun messages go back at once."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq.errors import InvalidAck
from qmq.remoting.commands import Command
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import LocalMetaserver, cancelled, consumer_of, fill, handled_by, ns


@pytest.mark.parametrize("suspected", [{0}, {3, 4, 5}, set(range(10)), {9}])
async def test_suspected_message_is_announced_and_alone(suspected, consumer, broker):
    broker.suspected = suspected
    fill(broker, range(10), apart=True)
    running, done, most = set(), [], 0

    @consumer.listen("a", group="g", start="earliest", concurrency=4)
    async def handle(message: qmq.ReceivedMessage) -> None:
        nonlocal most
        running.add(number := int(message["n"]))
        for _ in range(5):
            await asyncio.sleep(0)
            assert len(running) == 1 or not running & suspected
            most = max(most, len(running))
        assert number not in suspected or broker.begun[-1] == number
        running.remove(number)
        done.append(number)

    async with consuming(consumer):
        await until_async(lambda: len(done) == 10)
    assert sorted(done) == list(range(10)) and not broker.nacks
    assert sorted(broker.begun) == sorted(suspected), "of others nothing is said"
    assert most > 1 or len(suspected) == 10


async def test_acks_precede_a_suspected_message(consumer, broker):
    """A process that dies with one must not lose acks of its neighbours, or they would become dead letters too."""
    broker.suspected = set(range(5))
    fill(broker, range(5), apart=True)
    acked = []

    @consumer.listen("a", group="g", start="earliest")
    async def handle(message: qmq.ReceivedMessage) -> None:
        acked.append(sum(end - begin for ranges in broker.acks for begin, end in ranges))

    async with consuming(consumer):
        await until_async(lambda: len(acked) == 5)
    assert acked == list(range(5))


async def test_slow_acks_precede_a_suspected_message(consumer, broker):
    """Regression: beside a slow disk, acks beyond those in flight waited, and their messages died with a neighbour."""
    broker.suspected = set(range(8))
    broker.holds.add(Command.ACK)
    fill(broker, range(8), apart=True)
    sent = []

    @consumer.listen("a", group="g", start="earliest")
    async def handle(message: qmq.ReceivedMessage) -> None:
        sent.append(len(broker.held))

    async with consuming(consumer):
        await until_async(lambda: len(sent) == 8)
        broker.release()
    assert sent == list(range(8))


async def test_puller_gets_suspected_messages_singly(metaserver, broker):
    broker.suspected = {2, 3}
    fill(broker, range(6), apart=True)
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        got = []
        while sum(map(len, got)) < 6:
            got.append(ns(await puller.pull(10, timeout=5)))
            assert broker.begun == [number for part in got for number in part if number in (2, 3)]
    assert [2] in got and [3] in got and [number for part in got for number in part] == list(range(6))


async def test_drain_end_stops_waiting_suspected_message(metaserver, broker):
    broker.suspected = {1}
    fill(broker, range(2), apart=True)
    consumer = consumer_of(metaserver, drain_s=0.05)
    began = handled_by(consumer, asyncio.Event(), concurrency=2)
    task = asyncio.create_task(consumer.run())
    await until_async(lambda: began.messages and not consumer._connections._subscriptions[0]._parcels)
    await cancelled(task)
    assert began.numbers == [0] and broker.begun == []
    assert broker.times["a", "g"] == {0: 1, 1: 0}, "the one that never began does not count"


def slow_and_fast(metaserver: LocalMetaserver, *, concurrency: int):
    """Return two consumers of a group, the first one's messages with the event that ends its calls, and those of the
    second.
    """
    first, second, gate = consumer_of(metaserver), consumer_of(metaserver), asyncio.Event()
    return first, second, handled_by(first, gate, concurrency=concurrency), gate, handled_by(second)


@pytest.mark.parametrize("suspected", [{0}, {1}], ids=["for the one that is alone", "to be alone"])
async def test_draining_returns_waiting_suspected_messages(suspected, metaserver, broker):
    """Regression: it began with that message when its turn came, during the drain."""
    broker.suspected = suspected
    fill(broker, range(2), apart=True)
    first, second, began, gate, done = slow_and_fast(metaserver, concurrency=2)
    task = asyncio.create_task(first.run())
    await until_async(lambda: began.messages and not first._connections._subscriptions[0]._parcels)
    first.stop()
    async with consuming(second):
        await until_async(lambda: done.messages)
        assert not task.done(), "its handler still runs"
        gate.set()
        await task
    assert began.numbers == [0] and done.numbers == [1] and done.messages[0].times == 1


@pytest.mark.parametrize("suspected", [{0}, {1}], ids=["for the one that is alone", "to be alone"])
@pytest.mark.parametrize("batch", [None, 2], ids=["single", "in lists"])
async def test_dropped_suspected_message_is_not_begun(suspected, batch, consumer, broker):
    broker.suspected = suspected
    fill(broker, range(2), apart=True)
    began, gate = [], asyncio.Event()

    @consumer.listen("a", group="g", start="earliest", concurrency=2, batch=batch)
    async def handle(given: qmq.ReceivedMessage | list[qmq.ReceivedMessage]) -> None:
        for message in given if isinstance(given, list) else [given]:
            began.append((int(message["n"]), message.is_dropped))
            if len(began) == 1:
                await gate.wait()

    async with consuming(consumer):
        await until_async(lambda: began and not consumer._connections._subscriptions[0]._parcels)
        session = consumer._connections._subscriptions[0]._sessions["g1", "a"]
        session._reset(InvalidAck("not yours"))  # as in an answer to any request
        gate.set()
        await until_async(lambda: len(began) >= 3 and not broker.unacked())
    assert began[0] == (0, False) and sorted(began[1:]) == [(0, False), (1, False)]


@pytest.mark.parametrize("begins", [True, False], ids=["broker", "older broker"])
async def test_draining_returns_unbegun_messages(begins, metaserver, broker):
    """Regression: it held that message until its last handler had ended, for up to 20 s."""
    broker.is_old = not begins
    fill(broker, range(20))
    first, second, began, gate, done = slow_and_fast(metaserver, concurrency=1)
    first_task = asyncio.create_task(first.run())
    await until_async(lambda: began.messages)
    first.stop()
    async with consuming(second):
        if begins:
            await until_async(lambda: len(done.messages) == 19)
            assert not first_task.done(), "its handler still runs"
        gate.set()
        await first_task
        await until_async(lambda: len(done.messages) == 19)
    assert sorted(done.numbers) == [*range(1, 20)] and began.numbers == [0]
    assert {message.times for message in done.messages} == {1}
    assert all(not nack.entries for nack in broker.nacks) or begins
