"""Shell. A master is killed under load: its slave becomes the master by itself, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import re

import qmq
from tests.integration.cluster_world import are_equal, begin, consume_all, end, log_of, producer, running, state
from tests.support.waiting import until, until_async

BACKLOG = 500


async def kill_under_load(cluster, master, slave):
    """Send all the time; kill the master for good, consume, let it begin again; return the ids that were stored."""
    stored, is_over = [], asyncio.Event()

    async def send(sender, name):
        at = 0
        while not is_over.is_set():
            at += 1
            receipt = await sender.send(qmq.Message("s", {"n": at}, id=f"{name}-{at}"))
            assert receipt.is_stored
            stored.append(receipt.message_id)

    async with producer(cluster) as sender, asyncio.TaskGroup() as tasks:
        for name in "abcd":
            tasks.create_task(send(sender, name))
        await until_async(lambda: len(stored) >= BACKLOG, "a backlog")
        await asyncio.to_thread(end, cluster, master.hostname)
        await until_async(lambda: cluster.broker("g1", "master").hostname == slave.hostname, "the slave is the master")
        before = len(stored)
        got = await asyncio.to_thread(consume_all, cluster, "s", "alone", BACKLOG - 50)
        assert len({id for _, id in got}) == len(got)
        assert len(stored) == before, "one copy alone acknowledges nothing"
        await asyncio.to_thread(begin, cluster, master.hostname)
        await until_async(lambda: len(stored) > before + 100, "with the old master as its slave, it goes on by itself")
        is_over.set()
    return stored


def test_the_slave_of_a_killed_master_goes_on_and_nothing_acknowledged_is_lost(tmp_path):
    with running(tmp_path / "cluster", slave_wait_ms=60_000, metaserver={"failover": True}) as cluster:
        master, slave = cluster.broker("g1", "master"), cluster.broker("g1", "slave")
        stored = asyncio.run(kill_under_load(cluster, master, slave))
        assert len(stored) == len(set(stored))
        got = {id for _, id in consume_all(cluster, "s", "g", len(stored))}
        assert set(stored) <= got
        until(lambda: are_equal(cluster), "equal copies")
        (row,) = [row for row in cluster.manage("AuditTrail")["rows"] if row["action"] == "Failover"]
        before, after = row["before"], row["after"]
        assert [after["master"]["hostname"], after["slave"]["hostname"]] == [slave.hostname, master.hostname]
        assert state(cluster, slave).term == after["term"] == before["term"] + 1 and state(cluster, master).in_sync
        assert row["parameters"]["acknowledged"][2] <= row["parameters"]["slaveEnd"]
        assert re.search(
            rf"failover broker_group=g1 from={master.hostname}.*duration_ms=\d+", log_of(cluster, "metaserver")
        )
