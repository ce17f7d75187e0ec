"""Shell. Producer and consumers against real processes that are killed, swapped and made readonly while they work."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

import qmq
from qmq.deploy.copies import read_copy
from tests.integration.cluster_world import (
    WAIT_S,
    are_equal,
    consume_all,
    consumer,
    data_of,
    producer,
    reasons,
    running,
    until,
)

SUBJECT = "order.changed"


@pytest.fixture
def cluster(tmp_path):
    with running(tmp_path, groups=("g1", "g2"), lease_ms=1000) as cluster:  # what is left comes at once
        yield cluster


def numbered(begin, count):
    return [
        qmq.Message(SUBJECT, {"n": number, "text": "x" * 100}, id=f"m-{number}")
        for number in range(begin, begin + count)
    ]


def send_while(cluster, harm, *, chunk=200):
    """Send without a pause while `harm` runs on a thread and a little longer; return all receipts."""

    async def send():
        receipts = []
        async with producer(cluster) as sender:
            while len({receipt.broker_group for receipt in receipts}) < 2:  # connected to both groups
                receipts += await sender.send_many(numbered(len(receipts), chunk))
            harming = asyncio.create_task(asyncio.to_thread(harm))
            after = 5
            while not harming.done() or after:
                after -= harming.done()
                receipts += await sender.send_many(numbered(len(receipts), chunk))
            await harming
        return receipts

    return asyncio.run(send())


def stored_ids(cluster):
    """Read both copies of each group: they are equal; return how often each message id is stored."""
    for group in ("g1", "g2"):
        cluster.wait_writable(group)
        until(lambda group=group: are_equal(cluster, group), f"both copies of {group} are equal")
    hosts = {group: [cluster.broker(group, role) for role in ("master", "slave")] for group in ("g1", "g2")}
    cluster.stop()
    counts: Counter[str] = Counter()
    for brokers in hosts.values():
        master, slave = (read_copy(data_of(cluster, broker)) for broker in brokers)
        assert master.messages == slave.messages
        counts.update(id for _, _, id in master.messages)
    return counts


def kill_a_master(cluster):
    cluster.kill("g1", "master")
    time.sleep(0.2)  # so that batches are sent into its absence
    cluster.wait_writable("g1")


def kill_both_of_a_group(cluster):
    cluster.kill("g1", "slave")
    cluster.kill("g1", "master")
    time.sleep(0.2)
    cluster.wait_writable("g1")


def swap_both_groups(cluster):
    for group in ("g1", "g2"):
        cluster.swap_roles(group)


@pytest.mark.parametrize("harm", [kill_a_master, kill_both_of_a_group, swap_both_groups])
def test_what_is_sent_through_harm_is_stored_exactly_once(cluster, harm):
    receipts = send_while(cluster, lambda: harm(cluster))
    assert Counter(receipt.outcome for receipt in receipts) == {qmq.Outcome.STORED: len(receipts)}
    assert {receipt.broker_group for receipt in receipts} == {"g1", "g2"}
    assert stored_ids(cluster) == {receipt.message_id: 1 for receipt in receipts}


def test_while_one_group_is_readonly_the_other_takes_everything_and_consumers_read_both(cluster):
    async def send(begin, count):
        async with producer(cluster) as sender:
            await asyncio.gather(*(sender.send(message) for message in numbered(begin, 1)))
            return await sender.send_many(numbered(begin + 1, count - 1))

    asyncio.run(send(0, 4000))
    cluster.manage("MarkReadonlyBrokerGroup", brokerGroup="g1")
    until(lambda: reasons(cluster, cluster.broker("g1", "master")) == ["operator"], "g1 is readonly")
    receipts = asyncio.run(send(4000, 1000))
    assert receipts.all_stored and {receipt.broker_group for receipt in receipts} == {"g2"}
    got = consume_all(cluster, SUBJECT, "report", 5000)
    assert sorted(id for _, id in got) == sorted(f"m-{number}" for number in range(5000))


def test_a_listener_handles_everything_while_masters_die_and_change(cluster):
    async def work():
        handled: Counter[str] = Counter()
        receiver = consumer(cluster)

        @receiver.listen(SUBJECT, group="ticket", start="earliest", concurrency=4)
        async def handle(message: qmq.ReceivedMessage) -> None:
            handled[str(message.id)] += 1

        running_ = asyncio.create_task(receiver.run())

        def harm():
            kill_a_master(cluster)
            cluster.swap_roles("g2")

        receipts = await asyncio.to_thread(send_while, cluster, harm)
        sent = {receipt.message_id for receipt in receipts if receipt.is_stored}
        async with asyncio.timeout(2 * WAIT_S):
            while not sent <= handled.keys() or await asyncio.to_thread(lag, cluster):
                await asyncio.sleep(0.02)  # what nobody knows to be stored may be, and is handled too
        running_.cancel()
        await asyncio.gather(running_, return_exceptions=True)
        return sent, handled

    sent, handled = asyncio.run(work())
    assert sent <= handled.keys()
    assert consume_left(cluster) == 0


def lag(cluster):
    """How many messages the listener's group has not acked, as both masters say."""
    return sum(row["messages"] for row in cluster.manage("Lag", subject=SUBJECT, group="ticket")["lag"])


def consume_left(cluster):
    """Count what another consumer of the listener's group still gets: nothing, if every ack was kept."""

    async def pull():
        async with consumer(cluster).pull(SUBJECT, group="ticket") as puller:
            return len(await puller.pull(1000, timeout=1.0))

    return asyncio.run(pull())
