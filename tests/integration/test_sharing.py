"""Shell. Consumers of a group share slow work on real brokers, whatever was prefetched while it was fast."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from tests.integration.cluster_world import consumer, producer, running

WAIT_S = 90.0
FAST = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), lease_ms=60_000) as cluster:
        yield cluster


async def send(cluster, subject, count, **more):
    async with producer(cluster) as sender:
        messages = [qmq.Message(subject, {"n": n}, **{name: of(n) for name, of in more.items()}) for n in range(count)]
        assert (await sender.send_many(messages)).all_stored


async def happens(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def ended(*running):
    for client, task in running:
        client.stop()
        await task


def listening(cluster, subject, handle, **more):
    client = consumer(cluster)
    client.listen(subject, group="g", start="earliest", **more)(handle)
    return client, asyncio.create_task(client.run())


def waiting(client):
    return sum(one.waiting_messages for one in client._connections._subscriptions)


async def test_second_consumer_gets_half_of_the_prefetched(cluster):
    """It had nothing as long as the first one had any of its thousand messages: of 900 of 0.2 s, for three minutes."""
    messages = FAST + 300

    await send(cluster, "turning", messages)
    is_slow, joined, first, second, times = asyncio.Event(), asyncio.Event(), [], [], []

    async def handle_first(message):
        if int(message["n"]) >= FAST:
            is_slow.set()
            await joined.wait()  # however busy the machine is, all of it is slow work
            await asyncio.sleep(0.05)
        first.append(int(message["n"]))
        times.append(message.times)

    async def handle_second(message):
        joined.set()
        await asyncio.sleep(0.05)
        second.append(int(message["n"]))
        times.append(message.times)

    one = listening(cluster, "turning", handle_first)
    await is_slow.wait()
    await happens(lambda: waiting(one[0]) >= 100)
    another = listening(cluster, "turning", handle_second)
    await happens(lambda: len(first) + len(second) == messages)
    await ended(one, another)
    assert sorted(first + second) == list(range(messages)) and set(times) == {1}
    assert 0.3 <= len(second) / (messages - FAST) <= 0.7
