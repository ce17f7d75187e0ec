"""Shell. Three brokers of one group, two of which acknowledge: masters are killed under load, roles are swapped."""

from __future__ import annotations

import asyncio

import qmq
from qmq.deploy.control import read_copy
from tests.integration.cluster_world import running
from tests.support.waiting import until, until_async

FAILOVER = {"failover": True}


def check_copies(cluster):
    """Compare all three copies byte by byte, and return one of them."""
    until(lambda: cluster.all_are_equal(), "equal copies")
    cluster.end(*cluster.hostnames)
    first, *others = [read_copy(cluster.data(plan)) for plan in cluster.plan.brokers]
    assert all(other == first for other in others)
    return first


async def send_until(cluster, is_over, stored):
    async def send(sender, name):
        at = 0
        while not is_over.is_set():
            at += 1
            receipt = await sender.send(qmq.Message("s", {"n": str(at)}, id=f"{name}-{at}"))
            assert receipt.is_stored
            stored.append(receipt.message_id)

    async with cluster.producer() as sender, asyncio.TaskGroup() as tasks:
        for name in "wxyz":
            tasks.create_task(send(sender, name))


async def more(stored, what):
    enough = len(stored) + 300
    await until_async(lambda: len(stored) >= enough, what)


async def kill_under_load(cluster, kills):
    """Kill the master several times, and restart it once the two other copies have acknowledged messages."""
    stored, is_over = [], asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send_until(cluster, is_over, stored))
        for _ in range(kills):
            await more(stored, "messages")
            master = (await asyncio.to_thread(cluster.broker, "g1", "master")).hostname
            await asyncio.to_thread(cluster.end, master)
            await more(stored, "two copies go on by themselves")
            now = await asyncio.to_thread(cluster.broker, "g1", "master")
            assert now.hostname != master
            await asyncio.to_thread(cluster.begin, master)
            await asyncio.to_thread(cluster.wait_in_sync)
        is_over.set()
    return stored


def test_killed_master_of_three_is_replaced_under_load(tmp_path):
    with running(tmp_path / "cluster", copies=3, metaserver=FAILOVER) as cluster:
        cluster.wait_in_sync()
        stored = asyncio.run(kill_under_load(cluster, 3))
        assert len(stored) == len(set(stored))
        assert set(stored) <= {id for _, id in cluster.consume_all("s", "g", len(stored))}
        trail = [row for row in cluster.manage("AuditTrail")["rows"] if row["action"] == "Failover"]
        assert len(trail) == 3 and all(len(row["parameters"]["promised"]) == 2 for row in trail)
        check_copies(cluster)


def test_roles_are_swapped_with_each_slave(tmp_path):
    with running(tmp_path / "cluster", copies=3) as cluster:
        cluster.wait_in_sync()
        for target in [*(plan.hostname for plan in cluster.slaves()), cluster.broker("g1", "master").hostname]:
            cluster.swap_roles("g1", to=target)
            assert cluster.broker("g1", "master").hostname == target
            cluster.wait_in_sync()
        master = cluster.broker("g1", "master")
        term = cluster.state(master).term
        cluster.kill("g1", "master")
        until(lambda: (found := cluster.state(master)) and found.writable and found.term == term + 1, "a new term")
        (row,) = [row for row in cluster.manage("AuditTrail")["rows"] if row["action"] == "NewTerm"][:1]
        assert row["parameters"]["cause"].endswith("has started") and row["after"]["term"] == term + 1


def test_three_of_four_copies_acknowledge(tmp_path):
    """Otherwise two copies could acknowledge against the other two."""
    with running(tmp_path / "cluster", copies=4) as cluster:
        (status,) = cluster.manage("ReplicaStatus", brokerGroup="g1")
        assert (len(status["replicas"]), status["minCopies"]) == (4, 3)
