"""Shell. fsync fails: the process ends as fenced, and only messages on both disks were acknowledged (I15)."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq.deploy.chaos.records import REFUSED
from qmq.deploy.control import read_copy
from tests.integration.broker_on_a_failing_disk import TRIGGER
from tests.integration.cluster_world import (
    are_equal,
    begin,
    begin_as,
    consume_all,
    data_of,
    end,
    log_of,
    producer,
    reasons,
    running,
    send_all,
    settings_file,
    until,
)

FENCED = 70


@pytest.fixture
def cluster(tmp_path):
    """A cluster with brokers on disks that tests can fail."""
    with running(tmp_path) as cluster:
        names = [broker.hostname for broker in cluster.plan.brokers]
        end(cluster, *names)
        begin_as(cluster, "tests.integration.broker_on_a_failing_disk", *names)
        cluster.wait_writable()
        yield cluster


def fail_disk(cluster, broker):
    """Fail all fsyncs from now on, until the file is removed."""
    cluster.service(broker.hostname).is_held = True
    settings_file(cluster, broker.hostname).with_name(TRIGGER).touch()


def repair_disk(cluster, broker):
    settings_file(cluster, broker.hostname).with_name(TRIGGER).unlink()
    begin(cluster, broker.hostname)


async def send_while_the_disk_fails(cluster, broker):
    """Send single messages in parallel while the disk fails; return the receipts."""
    receipts = []

    async def send_some(sender, name):
        for n in range(200):
            receipts.append(await sender.send(qmq.Message("s", {"n": str(n)}, id=f"{name}-{n}")))
            if not receipts[-1].is_stored:
                return

    async with producer(cluster, timeout_s=4.0, answer_timeout_s=1.0) as sender:
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
    before = send_all(cluster, "s", 50)
    sent = asyncio.run(send_while_the_disk_fails(cluster, broker))
    service = cluster.service(broker.hostname)
    assert until(lambda: service.exit_status, "the broker ends") == FENCED
    assert "process ends as fenced: DiskFailed" in log_of(cluster, broker.hostname)
    assert not all(receipt.is_stored for receipt in sent), "the disk failed too late"
    if role == "slave":
        master = cluster.broker("g1", "master")
        until(lambda: reasons(cluster, master) == ["slave_down"], "the master hears of it")
    repair_disk(cluster, broker)
    cluster.wait_writable()
    after = send_all(cluster, "s", 10, name="after")
    until(lambda: are_equal(cluster), "equal copies")
    there = consume_all(cluster, "s", "g", len([receipt for receipt in [*before, *sent, *after] if receipt.is_stored]))
    stored = {(receipt.sequence, receipt.message_id) for receipt in [*before, *sent, *after] if receipt.is_stored}
    folders = [data_of(cluster, cluster.broker("g1", copy)) for copy in ("master", "slave")]
    cluster.stop()
    mine, other = map(read_copy, folders)
    assert mine.frames == other.frames and len(there) >= len(stored)
    log = [(sequence, id) for _, sequence, id in mine.messages]
    assert stored <= set(log) and len(log) == len({id for _, id in log})
    assert not {id for _, id in log} & {receipt.message_id for receipt in sent if receipt.outcome == REFUSED}
