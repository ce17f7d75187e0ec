"""Shell. Order keys and tags on real brokers: retries, swaps, killed masters and consumers that come and go."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from random import Random

import pytest

import qmq
from tests.integration.cluster_world import begin, consumer, end, producer, running

WAIT_S = 60.0
KEYS, EACH = 20, 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), lease_ms=60_000, tail_bytes=16 * 1024) as cluster:
        yield cluster


async def send(cluster, messages):
    async with producer(cluster) as sender:
        assert (await sender.send_many(messages)).all_stored


class Handled:
    """What handlers of all consumers of a group did with each key, as it happened."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.under_way: set[str] = set()
        self.tries: dict[str, list[int]] = defaultdict(list)
        self.done: dict[str, list[int]] = defaultdict(list)
        self.together = 0
        self.at_a_time: list[str] = []
        """Keys of which a message came while another one was in its handler."""

    @property
    def count(self) -> int:
        return sum(len(set(done)) for done in self.done.values())

    async def handle(self, message: qmq.Message) -> None:
        key, n = message.order_key, int(message["n"])
        if key in self.under_way:
            self.at_a_time.append(f"{key} {n}")
        self.under_way.add(key)
        self.together = max(self.together, len(self.under_way))
        try:
            self.tries[key].append(n)
            await asyncio.sleep(self.rng.random() * 0.005)
            if self.rng.random() < 0.1:
                raise qmq.RetryLater(self.rng.choice([0, 0.05]))
            self.done[key].append(n)
        finally:
            self.under_way.discard(key)


async def consume(cluster, subject, handled, harm=None):
    """Let three consumers, one of which leaves and comes back, handle everything while `harm` is done."""
    clients, running = [], []
    for number in range(3):
        client = consumer(cluster, consumer_id=f"c{number}")
        client.listen(subject, group="g", start="earliest", concurrency=10)(handled.handle)
        clients.append(client)
        running.append(asyncio.create_task(client.run()))
    try:
        async with asyncio.timeout(WAIT_S):
            while handled.count < KEYS * EACH // 4:
                await asyncio.sleep(0.01)
            clients[0].stop()
            await running[0]
            if harm is not None:
                await asyncio.to_thread(harm, cluster)
            while handled.count < KEYS * EACH:
                await asyncio.sleep(0.01)
    finally:
        for client, task in zip(clients, running, strict=True):
            client.stop()
            await task


def swap(cluster):
    cluster.swap_roles("g1")


def kill_the_master(cluster):
    master = cluster.broker("g1", "master")
    end(cluster, master.hostname)
    begin(cluster, master.hostname)
    cluster.wait_writable()


@pytest.mark.parametrize("harm", [None, swap, kill_the_master], ids=lambda harm: harm.__name__ if harm else "retries")
async def test_messages_of_a_key_are_handled_one_by_one_in_order(cluster, harm):
    subject = f"ordered.{harm.__name__ if harm else 'retries'}"
    handled = Handled(Random(1))

    await send(
        cluster,
        [qmq.Message(subject, {"n": n}, order_key=f"k{key}") for n in range(EACH) for key in range(KEYS)],
    )
    await consume(cluster, subject, handled, harm)
    for key in (f"k{number}" for number in range(KEYS)):
        assert list(dict.fromkeys(handled.done[key])) == list(range(EACH)), "each came, in order"
        assert handled.tries[key] == sorted(handled.tries[key]), "none came before what stands before it was done"
    assert handled.at_a_time == []
    assert handled.together > 3, "and keys do not wait for each other"


async def test_tags_choose_among_batches_in_closed_segments_and_new_ones(cluster):
    async def take(count, **terms):
        found = []
        async with consumer(cluster).pull("tagged", start="earliest", **terms) as puller:
            async with asyncio.timeout(WAIT_S):
                while len(found) < count:
                    messages = await puller.pull(100, timeout=1.0)
                    await puller.ack(messages)
                    found += [int(message["n"]) for message in messages]
                assert not await puller.pull(100, timeout=0.3)
        return found

    count = 3_000
    await send(
        cluster,
        [
            qmq.Message("tagged", {"n": n, "x": "y" * 200}, tags=[f"t{n % 100}", "even" if n % 2 == 0 else "odd"])
            for n in range(count)
        ],
    )
    rare = [n for n in range(count) if n % 100 == 7]
    assert await take(len(rare), group="rare", tags=["t7"]) == rare
    some = [n for n in range(count) if n % 100 in (7, 8)]
    assert await take(len(some), group="some", tags=["t7", "t8"]) == some
    assert await take(len(rare), group="both", tags=["t7", "odd"], tag_mode="all") == rare
    assert await take(0, group="none", tags=["t7", "even"], tag_mode="all") == []
