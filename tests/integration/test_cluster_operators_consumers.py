"""Shell. Operators move consumer groups, limit them and switch consumers off while they are connected."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from qmq.control_plane import CHANNEL_OPTIONS
from qmq.deploy.control import manage
from qmq.errors import QmqError
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub
from tests.integration.cluster_world import WAIT_S, Wire, pull, shared_cluster, subscribe, until

COUNT = 30


cluster = shared_cluster(lease_ms=20_000)


def call(cluster, method, request, role="master"):
    """Call a broker's control port as the metaserver does."""
    plan = cluster.broker("g1", role)
    with grpc.insecure_channel(f"127.0.0.1:{plan.control_port}", options=CHANNEL_OPTIONS) as channel:
        metadata = (("x-api-token", cluster.token),)
        return getattr(BrokerStub(channel), method)(request, metadata=metadata, timeout=WAIT_S)


def progress(cluster, subject):
    return list(call(cluster, "Consumers", pb.ConsumersRequest(subject=subject)).groups)


def reset(cluster, subject, to, value=0, *, group="g", dry_run=False):
    request = pb.ResetOffsetRequest(subject=subject, group=group, to=to, value=value, dry_run=dry_run)
    return call(cluster, "ResetOffset", request)


def ids(count, begin=0):
    return [f"m-{at}" for at in range(begin, count)]


@pytest.mark.parametrize("holds", ["everything acked", "a full buffer"])
def test_connected_consumer_continues_at_the_new_position(cluster, subject, holds):
    """The broker refuses its pulls or its next ack; then it drops its messages and is served anew."""
    cluster.send_all(subject, COUNT)
    prefetch = 8 if holds == "a full buffer" else 100

    async def consume():
        client = cluster.consumer(consumer_id="c")
        async with client.pull(subject, group="g", start="earliest", prefetch_messages=prefetch) as puller:
            async with asyncio.timeout(WAIT_S):
                first = await take(puller, COUNT if holds == "everything acked" else 4)
                await puller.flush()
                if holds == "a full buffer":
                    await asyncio.to_thread(until, lambda: progress(cluster, subject)[0].position > 8)
                changed = await asyncio.to_thread(reset, cluster, subject, "sequence", 10)
                again = []
                while not again or again[-1] != COUNT - 1:
                    again += [message.sequence for message in await take(puller, 1)]
                return first, again, changed

    first, again, changed = asyncio.run(consume())
    assert changed.after == 10 and changed.before > 8
    tail = again[again.index(10) :] if holds == "everything acked" else again
    assert set(range(10, COUNT)) <= set(tail)
    if holds == "everything acked":
        assert again == list(range(10, COUNT)) and changed.repeated == COUNT - 10


async def take(puller, count):
    got = []
    while len(got) < count:
        messages = await puller.pull(count - len(got), timeout=1.0)
        got += messages
        await puller.ack(messages)
    return got


def test_abandoned_group_is_removed(cluster, subject):
    """A group that was tried once keeps all messages: nothing else would end it."""
    cluster.send_all(subject, COUNT)
    words = {"subject": subject, "group": "tried"}

    async def consume():
        client = cluster.consumer(consumer_id="c")
        async with client.pull(subject, group="tried", start="earliest") as puller:
            await take(puller, 1)
            with pytest.raises(QmqError, match="has consumers: c"):
                await asyncio.to_thread(manage, cluster.metaserver, cluster.token, "RemoveConsumerGroup", **words)

    asyncio.run(consume())
    assert [group.lag for group in progress(cluster, subject)] == [COUNT - 1]
    removed = manage(cluster.metaserver, cluster.token, "RemoveConsumerGroup", **words)
    assert removed["brokerGroups"]["g1"]["skipped"] == COUNT - 1
    assert progress(cluster, subject) == []
    assert "tried" not in str(manage(cluster.metaserver, cluster.token, "RemoveSubject", subject=subject, dryRun=True))


def test_switched_off_consumer_gets_nothing_after_a_restart(cluster, subject):
    rule = {"subject": subject, "consumerGroup": "g", "clientId": "c"}

    def switch(state):
        manage(cluster.metaserver, cluster.token, "OnOffline", state=state, **rule)

    cluster.send_all(subject, COUNT)
    switch("offline")
    try:
        with pytest.raises(TimeoutError):
            cluster.consume_all(subject, "g", 1, timeout_s=1.5, consumer_id="c")
        assert cluster.consume_all(subject, "other", COUNT, consumer_id="c")
        cluster.end("metaserver", *cluster.hostnames)
        cluster.begin(*cluster.hostnames)
        until(lambda: is_served(cluster), "the broker takes up its old part")
        with Wire(cluster.broker("g1", "master").serve_port, token=cluster.token) as wire:
            assert not pull(wire, subscribe(wire, subject, consumer="c"), timeout_ms=500)
    finally:
        cluster.begin("metaserver")
        until(lambda: answers(cluster), "the metaserver answers")
        switch("online")
    assert [id for _, id in cluster.consume_all(subject, "g", COUNT, consumer_id="c")] == ids(COUNT)


def test_operators_limits_reach_the_brokers(cluster, subject):
    def limit(action, **words):
        manage(cluster.metaserver, cluster.token, action, subject=subject, **words)

    cluster.send_all(subject, COUNT)
    limit("LimitGroup", group="g", perSecond=2)
    until(lambda: "rate" in causes_while_pulling(cluster, subject), "Lag names the rate")
    limit("LimitGroup", group="g", perSecond=0)
    with Wire(cluster.broker("g1", "master").serve_port, token=cluster.token) as wire:
        subscribe(wire, subject, group="never")
    limit("SetLimits", expiresAfterS=1)
    until(lambda: {row.group: row.lag for row in progress(cluster, subject)}["never"] == 0, "what nobody takes expires")
    limit("SetLimits", expiresAfterS=0)
    page = cluster.metrics(cluster.broker("g1", "master"))
    (expired,) = (page[name] for name in page if "expired_messages_total" in name and 'consumer_group="never"' in name)
    assert expired == COUNT


def causes_while_pulling(cluster, subject):
    with pytest.raises(TimeoutError):
        cluster.consume_all(subject, "g", COUNT, timeout_s=1.0)
    (group,) = progress(cluster, subject)
    return group.causes


def is_served(cluster):
    try:
        return call(cluster, "ReplicaStatus", pb.Nothing()).writable
    except grpc.RpcError:
        return False


def answers(cluster):
    try:
        return manage(cluster.metaserver, cluster.token, "ListOffline") is not None
    except QmqError:
        return False
