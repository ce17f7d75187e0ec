"""Shell. Order keys and tags on real brokers: retries, swaps, killed masters and consumers that come and go."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from tests.integration.cluster_world import consumer, producer, running

WAIT_S = 60.0
KEYS, EACH = 20, 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), lease_ms=60_000, tail_bytes=16 * 1024) as cluster:
        yield cluster


async def send(cluster, messages):
    async with producer(cluster) as sender:
        assert (await sender.send_many(messages)).all_stored


async def test_tags_select_in_closed_and_new_segments(cluster):
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
