"""Shell. A master is killed under load: its slave is promoted, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager

from tests.integration.cluster_world import running
from tests.integration.test_three_copies import send_until
from tests.support.waiting import WAIT_S, until, until_async

BACKLOG = 500


@asynccontextmanager
async def read_on(reader):
    """Consumer with a short prefetch; `read(count)` pulls and acks until it has `count` messages in all."""
    got = set()
    async with reader.pull("s", group="alone", start="earliest", prefetch_messages=10) as puller:

        async def read(count):
            async with asyncio.timeout(WAIT_S):
                while len(got) < count:
                    messages = await puller.pull(10, timeout=1.0)
                    got.update(message.sequence for message in messages)
                    await puller.ack(messages)

        yield read


async def kill_under_load(cluster, master, slave):
    """Send all the time; kill the master, consume, restart it; return the ids of stored messages."""
    stored, changes, is_over = [], [], asyncio.Event()
    reader = cluster.consumer()
    reader.on_master_changed(changes.append)

    async with read_on(reader) as read, asyncio.TaskGroup() as tasks:
        tasks.create_task(send_until(cluster, is_over, stored))
        await until_async(lambda: len(stored) >= BACKLOG, "a backlog")
        await read(1)
        await asyncio.to_thread(cluster.end, master.hostname)
        await until_async(lambda: cluster.broker("g1", "master").hostname == slave.hostname, "the slave is the master")
        before = len(stored)
        await read(BACKLOG - 50)
        assert [(change.broker_group, change.term) for change in changes] == [("g1", 3)]
        assert len(stored) == before, "one copy alone acknowledges nothing"
        await asyncio.to_thread(cluster.begin, master.hostname)
        await until_async(lambda: len(stored) > before + 100, "with the old master as its slave, it goes on by itself")
        is_over.set()
    return stored


def test_slave_of_a_killed_master_loses_nothing(tmp_path):
    settings = {"slave_wait_ms": 60_000, "metaserver": {"failover": True}}
    with running(tmp_path / "cluster", delay_groups=("d1",), **settings) as cluster:
        master, slave = cluster.pair()
        stored = asyncio.run(kill_under_load(cluster, master, slave))
        assert len(stored) == len(set(stored))
        got = {id for _, id in cluster.consume_all("s", "g", len(stored))}
        assert set(stored) <= got
        cluster.wait_equal()
        (row,) = [row for row in cluster.manage("AuditTrail")["rows"] if row["action"] == "Failover"]
        before, after = row["before"], row["after"]
        (demoted,) = after["slaves"].values()
        assert [after["master"]["hostname"], demoted["hostname"]] == [slave.hostname, master.hostname]
        assert cluster.state(slave).term == after["term"] == before["term"] + 1 and cluster.state(master).in_sync
        point = row["parameters"]["acknowledged"]  # metaservers get the first point a second after the first message
        assert not point or point[2] <= row["parameters"]["slaveEnd"]
        assert re.search(
            rf"failover broker_group=g1 from={master.hostname}.*duration_ms=\d+", cluster.log_of("metaserver")
        )

        # The same for a delay group.
        master, slave = cluster.broker("d1", "master"), cluster.broker("d1", "slave")
        cluster.end(master.hostname)
        until(lambda: cluster.broker("d1", "master").hostname == slave.hostname, "its slave is the master")
