"""Shell. fsync fails: the process ends as fenced, and only messages on both disks were acknowledged (I15)."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq.deploy.chaos.records import REFUSED
from qmq.deploy.control import read_copy
from tests.integration.broker_with_triggers import DISK_FAILS
from tests.integration.cluster_world import running, until

FENCED = 70


@pytest.fixture
def cluster(tmp_path):
    """A cluster with brokers on disks that tests can fail."""
    with running(tmp_path, program="tests.integration.broker_with_triggers") as cluster:
        yield cluster


def fail_disk(cluster, broker):
    """Fail all fsyncs from now on, until the file is removed."""
    cluster.service(broker.hostname).is_held = True
    cluster.settings_file(broker.hostname).with_name(DISK_FAILS).touch()


def repair_disk(cluster, broker):
    cluster.settings_file(broker.hostname).with_name(DISK_FAILS).unlink()
    cluster.begin(broker.hostname)


async def send_while_the_disk_fails(cluster, broker):
    """Send single messages in parallel while the disk fails; return the receipts."""
    receipts = []

    async def send_some(sender, name):
        for n in range(200):
            receipts.append(await sender.send(qmq.Message("s", {"n": str(n)}, id=f"{name}-{n}")))
            if not receipts[-1].is_stored:
                return

    async with cluster.producer(timeout_s=4.0, answer_timeout_s=1.0) as sender:
        async with asyncio.TaskGroup() as tasks:
            for name in range(4):
                tasks.create_task(send_some(sender, name))
            while len(receipts) < 40:
                await asyncio.sleep(0.001)
            fail_disk(cluster, broker)
    return receipts


@pytest.mark.parametrize("role", ["master", "slave"])
def test_failed_fsync_ends_the_broker_and_acknowledges_nothing(cluster, role):
    broker = cluster.broker("g1", role)
    before = cluster.send_all("s", 50)
    sent = asyncio.run(send_while_the_disk_fails(cluster, broker))
    service = cluster.service(broker.hostname)
    assert until(lambda: service.exit_status, "the broker ends") == FENCED
    assert "process ends as fenced: DiskFailed" in cluster.log_of(broker.hostname)
    assert not all(receipt.is_stored for receipt in sent), "the disk failed too late"
    if role == "slave":
        master = cluster.broker("g1", "master")
        until(lambda: cluster.reasons(master) == ["slave_down"], "the master hears of it")
    repair_disk(cluster, broker)
    cluster.wait_writable()
    after = cluster.send_all("s", 10, name="after")
    cluster.wait_equal()
    there = cluster.consume_all("s", "g", len([receipt for receipt in [*before, *sent, *after] if receipt.is_stored]))
    stored = {(receipt.sequence, receipt.message_id) for receipt in [*before, *sent, *after] if receipt.is_stored}
    folders = [cluster.data(cluster.broker("g1", copy)) for copy in ("master", "slave")]
    cluster.stop()
    mine, other = map(read_copy, folders)
    assert mine.frames == other.frames and len(there) >= len(stored)
    log = [(sequence, id) for _, sequence, id in mine.messages]
    assert stored <= set(log) and len(log) == len({id for _, id in log})
    assert not {id for _, id in log} & {receipt.message_id for receipt in sent if receipt.outcome == REFUSED}
