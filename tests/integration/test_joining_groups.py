"""A broker group joins a subject's route: existing consumer groups get all messages stored there (decision 80)."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from tests.integration.cluster_world import WAIT_S, running_apart

MANY = 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_apart(tmp_path_factory.mktemp("joining"), ("g1", "g2")) as cluster:
        yield cluster


class Story:
    """Numbered messages of one subject, their broker groups, and the numbers that its consumers handled."""

    def __init__(self, cluster, name, terms, *, consumer_id=None):
        self.cluster, self.subject, self.terms, self.consumer_id = cluster, name, terms, consumer_id
        self.got, self.sent = set(), {}
        cluster.manage("AddNewSubject", subject=name, tag="g1")

    async def send(self, sender, count):
        receipts = await sender.send_many([qmq.Message(self.subject, {"n": len(self.sent) + n}) for n in range(count)])
        assert receipts.all_stored
        for receipt in receipts:
            self.sent[len(self.sent)] = receipt.broker_group

    def listen(self):
        client = self.cluster.consumer(consumer_id=self.consumer_id)

        @client.listen(self.subject, **self.terms)
        async def handle(message):
            self.got.add(int(message["n"]))

        return client, asyncio.create_task(client.run())

    async def until_got(self, numbers):
        async with asyncio.timeout(WAIT_S):
            while not self.got >= set(numbers):
                await asyncio.sleep(0.05)

    async def until_only_on(self, sender, group, count):
        """Send until the broker group has `count` messages of the newest route."""
        async with asyncio.timeout(WAIT_S):
            while list(self.sent.values()).count(group) < count:
                await self.send(sender, 10)


@pytest.mark.parametrize(
    ("name", "terms", "consumer_id", "runs"),
    [
        ("stopped", {"group": "billing"}, None, False),
        ("ephemeral", {"broadcast": True}, None, True),
    ],
)
async def test_existing_group_gets_messages_of_a_joined_group(cluster, name, terms, consumer_id, runs):
    world = Story(cluster, f"join.{name}", terms, consumer_id=consumer_id)
    async with cluster.producer() as sender:
        await world.send(sender, 1)  # before the consumer group begins
        client, task = world.listen()
        while not world.got:  # the group has begun once it gets a message
            await world.send(sender, 1)
            await asyncio.sleep(0.05)
        first = min(world.got)
        assert first > 0
        if not runs:
            client.stop()
            await task
        await asyncio.to_thread(cluster.manage, "AddSubjectBrokerGroup", subject=world.subject, brokerGroup="g2")
        await world.until_only_on(sender, "g2", MANY)
        if not runs:
            lag = await asyncio.to_thread(cluster.manage, "Lag", subject=world.subject)
            behind = lag["lag"][0]["brokerGroups"]
            assert behind["g2"] >= MANY, "the joined broker group counts before the consumer subscribes there"
            client, task = world.listen()
        await world.until_got(range(first, len(world.sent)))
        client.stop()
        await task
    rows = cluster.row("SELECT count(*) FROM consumer_group WHERE subject = ?", f"join.{name}")
    assert rows == (0 if name == "ephemeral" else 1,)


async def test_latest_group_gets_no_older_messages(cluster):
    world = Story(cluster, "join.latest", {"group": "late"})
    async with cluster.producer() as sender:
        await world.send(sender, 1)
        await asyncio.to_thread(cluster.manage, "AddSubjectBrokerGroup", subject=world.subject, brokerGroup="g2")
        await world.until_only_on(sender, "g2", 20)
        before = len(world.sent)
        workers = [world.listen() for _ in range(3)]
        async with asyncio.timeout(WAIT_S):
            while {world.sent[n] for n in world.got} != {"g1", "g2"}:
                await world.send(sender, 10)
                await asyncio.sleep(0.05)
        assert min(world.got) >= before
        for client, task in workers:
            client.stop()
            await task
