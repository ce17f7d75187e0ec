"""Shell. Backlogs in closed segments, out of memory: whole, in order, also after a restart, and by tags (W6)."""

from __future__ import annotations

import asyncio

import qmq
from tests.integration.cluster_world import shared_cluster
from tests.support.waiting import WAIT_S

cluster = shared_cluster(lease_ms=60_000, tail_bytes=16 * 1024)


def test_cold_backlog_comes_whole_and_in_order(cluster):
    count = 6000
    cluster.send_all("cold", count, size=300)
    master = cluster.broker("g1", "master")
    assert cluster.state(master).log_end > 6 * 256 * 1024
    expected = [(n, f"m-{n}") for n in range(count)]
    assert cluster.consume_all("cold", "first", count) == expected
    cluster.end(master.hostname)
    cluster.begin(master.hostname)
    cluster.wait_writable()
    assert cluster.consume_all("cold", "second", count) == expected


async def test_tags_select_in_closed_and_new_segments(cluster):
    async def take(count, **terms):
        found = []
        async with cluster.consumer().pull("tagged", start="earliest", **terms) as puller:
            async with asyncio.timeout(WAIT_S):
                while len(found) < count:
                    messages = await puller.pull(100, timeout=1.0)
                    await puller.ack(messages)
                    found += [int(message["n"]) for message in messages]
                assert not await puller.pull(100, timeout=0.3)
        return found

    count = 3_000
    messages = [
        qmq.Message("tagged", {"n": n, "x": "y" * 200}, tags=[f"t{n % 100}", "even" if n % 2 == 0 else "odd"])
        for n in range(count)
    ]
    async with cluster.producer() as sender:
        assert (await sender.send_many(messages)).all_stored
    rare = [n for n in range(count) if n % 100 == 7]
    assert await take(len(rare), group="rare", tags=["t7"]) == rare
    some = [n for n in range(count) if n % 100 in (7, 8)]
    assert await take(len(some), group="some", tags=["t7", "t8"]) == some
    assert await take(len(rare), group="both", tags=["t7", "odd"], tag_mode="all") == rare
    assert await take(0, group="none", tags=["t7", "even"], tag_mode="all") == []
