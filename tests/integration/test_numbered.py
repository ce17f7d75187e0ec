"""Shell. Numbered batches against real brokers: repeated over a killed master and over a new process, stored once."""

from __future__ import annotations

import asyncio
from zlib import crc32

import qmq
from qmq.client.batch import Answer, NotStored, NumberedBatch, Stored
from qmq.client.numbered_sender import NumberedSender
from qmq.codec import batch_encoder, join_batch
from tests.integration.cluster_world import begin, consume_all, end, running

SUBJECT = "order.paid"


def batch(number: int, *names: str) -> NumberedBatch:
    encode = batch_encoder(SUBJECT, 0)
    body = join_batch([encode(qmq.Message(SUBJECT, {"n": name}, id=name)) for name in names])
    return NumberedBatch(4711, number, SUBJECT, len(names), crc32(body), 0, [body])


def send(cluster, *batches, harm=lambda: None):
    """Send each batch until its answer says stored, as a new process would; `harm` comes after each attempt."""

    async def sent() -> list[Answer]:
        last = []
        async with NumberedSender(metaserver=cluster.metaserver, token=cluster.token, app="test") as sender:
            sender.watch(SUBJECT)
            for one in batches:
                while True:
                    future = asyncio.get_running_loop().create_future()
                    sender.send("g1", one, future.set_result)
                    await asyncio.to_thread(harm)
                    answer = await future
                    if isinstance(answer, Stored):
                        last.append(answer)
                        break
                    assert not isinstance(answer, NotStored) or answer.error.retryable, answer
                    await asyncio.sleep(0.05)
        return last

    return asyncio.run(asyncio.wait_for(sent(), 60))


def test_a_numbered_batch_is_stored_once_over_a_killed_master_and_another_sender(tmp_path):
    with running(tmp_path) as cluster:
        master = cluster.broker("g1", "master").hostname
        kills = []

        def kill_once():
            if not kills:
                kills.append(end(cluster, master))
                begin(cluster, master)

        first = send(cluster, batch(1, "a", "b"), batch(2, "c"))
        assert [(answer.first_sequence, answer.stored) for answer in first] == [(0, 2), (2, 1)]
        assert send(cluster, batch(2, "c"), batch(1, "a", "b")) == [first[1], first[0]]
        [third] = send(cluster, batch(3, "d"), harm=kill_once)
        assert send(cluster, batch(1, "a", "b"), batch(3, "d")) == [first[0], third]
        assert sorted(consume_all(cluster, SUBJECT, "g", 4)) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
