"""Shell. Three delay servers of one group: operators swap, recover and fill them like brokers."""

from __future__ import annotations

import asyncio
import shutil

import qmq
from qmq.types import Role
from tests.integration.cluster_world import begin, data_of, end, producer, reasons, running, slaves_in_sync, state
from tests.support.waiting import until

COUNT = 20


async def send_delayed(cluster, name):
    async with producer(cluster) as sender:
        messages = [sender.send(qmq.Message("s", {"n": str(at)}, id=f"{name}-{at}"), delay=3600) for at in range(COUNT)]
        assert all(receipt.is_stored for receipt in await asyncio.gather(*messages))


def pending(cluster):
    (group,) = cluster.manage("DelayStats", brokerGroup="d1")["groups"]
    return group["pendingMessages"]


def all_in_sync(cluster):
    until(lambda: slaves_in_sync(cluster, "d1") == 2, "both slaves are in sync")


def fail_over(cluster, **words):
    """Fail over to another master, and wait until the group accepts delayed messages."""
    before = cluster.broker("d1", "master")
    cluster.manage("Failover", brokerGroup="d1", **words)
    cluster.wait_writable("d1")
    assert cluster.broker("d1", "master") != before


def test_delay_group_of_three_is_swapped_and_recovered(tmp_path):
    with running(tmp_path / "cluster", groups=(), delay_groups=("d1",), copies=3) as cluster:
        all_in_sync(cluster)
        cluster.manage("SetCopies", brokerGroup="d1", minCopies=3)
        cluster.manage("SetCopies", brokerGroup="d1", minCopies=2)
        asyncio.run(send_delayed(cluster, "first"))
        cluster.swap_roles("d1", to="d1-b")
        assert cluster.broker("d1", "master").hostname == "d1-b"
        all_in_sync(cluster)

        end(cluster, "d1-b")
        fail_over(cluster)
        asyncio.run(send_delayed(cluster, "without it"))
        begin(cluster, "d1-b")
        all_in_sync(cluster)
        assert pending(cluster) == 2 * COUNT

        lost = cluster.broker("d1", "master")
        others = [plan.hostname for plan in cluster.plan.brokers if plan != lost]
        end(cluster, lost.hostname, *others)
        shutil.rmtree(data_of(cluster, lost))
        begin(cluster, *others)
        slaves = [plan for plan in cluster.plan.brokers if plan != lost]
        until(lambda: all((found := state(cluster, plan)) and found.term for plan in slaves), "two are back")
        fail_over(cluster, masterGone="true")
        assert pending(cluster) == 2 * COUNT

        cluster.manage("RemoveBroker", hostname=lost.hostname, servePort=lost.serve_port)
        place = {"hostname": lost.hostname, "servePort": lost.serve_port, "syncPort": lost.sync_port}
        cluster.manage("AddBroker", brokerGroup="d1", role=int(Role.DELAY_SLAVE), ip="127.0.0.1", **place)
        cluster.manage("SetCopies", brokerGroup="d1", syncMode="manual")
        begin(cluster, lost.hostname)
        until(lambda: reasons(cluster, lost) == ["unfilled"], "an empty one waits until it may be filled")
        asyncio.run(send_delayed(cluster, "while it waits"))
        cluster.manage("SyncReplica", brokerGroup="d1", host=lost.hostname)
        all_in_sync(cluster)
        assert pending(cluster) == 3 * COUNT


def test_three_of_four_copies_acknowledge(tmp_path):
    """Otherwise two copies could acknowledge against the other two."""
    with running(tmp_path / "cluster", copies=4) as cluster:
        (status,) = cluster.manage("ReplicaStatus", brokerGroup="g1")
        assert (len(status["replicas"]), status["minCopies"]) == (4, 3)
