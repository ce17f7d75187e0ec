"""Shell. Consumers of a group share slow work on real brokers, whatever was prefetched while it was fast."""

from __future__ import annotations

import asyncio
from collections import defaultdict

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


async def test_two_consumers_share_a_hundred_slow_messages(cluster):
    await send(cluster, "slow", 100)
    done = defaultdict(list)

    def handler(name):
        async def handle(message):
            await asyncio.sleep(0.2)
            done[name].append(int(message["n"]))

        return handle

    both = [listening(cluster, "slow", handler(name)) for name in "ab"]
    await happens(lambda: sum(map(len, done.values())) == 100)
    await ended(*both)
    assert sorted(done["a"] + done["b"]) == list(range(100))
    assert 35 <= len(done["a"]) <= 65


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_key_order_survives_returned_messages(cluster, concurrency):
    """Each key has two messages, and the second one of none may come before the first one is done."""
    keys, subject = 400, f"keyed.{concurrency}"

    await send(cluster, subject, 2 * keys, order_key=lambda n: f"k{n % keys}")
    is_slow, joined, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    done, under_way, together = defaultdict(list), set(), []

    async def handle(message):
        key = message.order_key
        if key in under_way:
            together.append(key)
        under_way.add(key)
        await asyncio.sleep(0.01)
        done[key].append(int(message["n"]))
        under_way.discard(key)

    async def handle_first(message):
        if sum(map(len, done.values())) >= FAST:
            is_slow.set()
            await gate.wait()
        else:
            done[message.order_key].append(int(message["n"]))
            return
        await handle(message)

    async def handle_second(message):
        joined.set()
        await handle(message)

    one = listening(cluster, subject, handle_first, concurrency=concurrency)
    await is_slow.wait()
    another = listening(cluster, subject, handle_second, concurrency=concurrency)
    await joined.wait()
    await happens(lambda: sum(map(len, done.values())) >= keys)
    gate.set()
    await happens(lambda: sum(map(len, done.values())) == 2 * keys)
    await ended(one, another)
    assert dict(done) == {f"k{n}": [n, n + keys] for n in range(keys)} and not together


async def test_urgent_messages_pass_a_backlog_of_others(cluster):
    """However long it is: what is urgent waits for the calls that run, and each class has its own."""

    await send(cluster, "normal", 500)
    client, handled, is_there = consumer(cluster), [], asyncio.Event()

    async def handle(message):
        handled.append(message.subject)
        await is_there.wait()

    client.listen("normal", group="g", start="earliest", concurrency=4)(handle)
    client.listen("urgent", group="g", start="earliest", priority=1)(handle)
    task = asyncio.create_task(client.run())
    await happens(lambda: len(handled) == 4)
    await send(cluster, "urgent", 100)
    urgent = client.listeners["urgent", "g"]
    await happens(lambda: urgent._subscription.waiting_messages >= 3)
    is_there.set()
    await happens(lambda: len(handled) == 600)
    await ended((client, task))
    first = handled.index("urgent")
    assert handled[first : first + 4] == ["urgent"] * 4, "as many as were here"
