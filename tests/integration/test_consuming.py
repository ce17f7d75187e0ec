"""Shell. Consumers against a real cluster: retries, dead letters, consumers that die, leave and come back, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Timer
from zlib import crc32

import pytest

import qmq
from qmq.codec import batch_encoder, join_batch
from qmq.remoting import commands
from qmq.remoting.commands import Command
from tests.integration.cluster_world import Wire, consumer, producer, running

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0
LEASE_MS = 5000
"""Whoever stands still for longer is dead to a broker, and what he holds is delivered once more."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), groups=("g1", "g2"), lease_ms=LEASE_MS) as cluster:
        yield cluster


async def send(cluster, subject, count, *, begin=0, **more):
    """Store messages with n from `begin` on; `more` maps what else a message has to a function of n."""
    async with producer(cluster) as sender:
        messages = [
            qmq.Message(subject, {"n": n}, id=f"m-{n}", **{name: of(n) for name, of in more.items()})
            for n in range(begin, begin + count)
        ]
        receipts = await sender.send_many(messages)
    assert receipts.all_stored


@asynccontextmanager
async def listening(client):
    task = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(WAIT_S):
            yield task
    finally:
        client.stop()
        await task


async def happens(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def dead_letters(cluster, subject, group, count):
    """Read what a group gave up."""
    dead = []
    client = consumer(cluster)
    async with client.pull(f"%DEAD_RETRY%{subject}%{group}", group="reader", start="earliest") as puller:
        async with asyncio.timeout(WAIT_S):
            while len(dead) < count:
                messages = await puller.pull(100, timeout=1.0)
                await puller.ack(messages)
                dead += messages
    return dead


async def test_dead_letter_has_its_history(cluster):
    await send(cluster, "dead", 4, tags=lambda n: ["pay"], retries_max=lambda n: 2 if n == 3 else None)
    client, times = consumer(cluster), Counter()

    @client.listen("dead", group="g", start="earliest", retries_max=4, retry_delay=0.05)
    async def handle(message):
        times[message["n"]] += 1
        if message["n"] == "1":
            raise qmq.DeadLetter("no such order")
        if message["n"] in "23":
            raise ValueError("never")

    async with listening(client):
        await happens(lambda: times == {"0": 1, "1": 1, "2": 4, "3": 2})
        dead = {one["n"]: one for one in await dead_letters(cluster, "dead", "g", 3)}
    assert times == {"0": 1, "1": 1, "2": 4, "3": 2}
    assert {n: (one["qmq_times"], one["qmq_deadReason"]) for n, one in dead.items()} == {
        "1": ("1", "no such order"),
        "2": ("4", "delivered 4 times; ValueError('never')"),
        "3": ("2", "delivered 2 times; ValueError('never')"),
    }
    for n, one in dead.items():
        assert (one.id, one.tags, one.broker_group in ("g1", "g2")) == (f"m-{n}", {"pay"}, True)
        assert int(one["qmq_deadSequence"]) >= 0


async def test_undecodable_bytes_become_a_dead_letter(cluster):
    """Properties cannot be added to them; whoever reads the dead letter finds the bytes that were sent."""
    good = batch_encoder("garbage", 1)(qmq.Message("garbage", {"n": 7}, id="bad"))
    bad = good[:-3] + b"\0\x09" + good[-1:]  # the value's length is wrong
    batch = join_batch([bad])
    header = commands.produce_header(random.SystemRandom().getrandbits(63), 1, 1, crc32(batch), "garbage")
    with Wire(cluster.broker("g1", "master").serve_port, token=cluster.token) as wire:
        answer = wire.ask(Command.PRODUCE, header, batch)
        assert commands.decode_produced(answer.body).stored == 1

    await send(cluster, "garbage", 1)
    client, handled = consumer(cluster), []

    @client.listen("garbage", group="g", start="earliest", retries_max=2, retry_delay=0.05)
    async def handle(message):
        handled.append(message["n"])

    async with listening(client):
        (dead,) = await dead_letters(cluster, "garbage", "g", 1)
    assert handled == ["0"]
    assert (dead._data, dead.id) == (bad, "bad")


@contextmanager
def consumer_process(cluster, script, subject):
    with subprocess.Popen(
        [sys.executable, "-c", script, cluster.metaserver, subject],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env=os.environ | {"QMQ_TOKEN": cluster.token},
        text=True,
    ) as process:
        late = Timer(WAIT_S, process.kill)  # a test that waits in vain for a line gets the end
        late.start()
        try:
            yield process
        finally:
            late.cancel()
            process.kill()


def lines_until(process, condition):
    """Read what a process prints until that is enough."""
    lines = []
    while not condition(lines):
        line = process.stdout.readline()
        assert line, "the process ended"
        lines.append(tuple(line.split()))
    return lines


async def test_slow_message_does_not_delay_other_acks(cluster):
    await send(cluster, "slow", 2_000)

    async def dies():
        client, done, slow = consumer(cluster, consumer_id="dies"), [], []

        @client.listen("slow", group="g", start="earliest", concurrency=4, prefetch_messages=160)
        async def handle(message):
            if not slow:
                slow.append(message)
                await asyncio.Event().wait()
            done.append(message["n"])

        task = asyncio.create_task(client.run())
        async with asyncio.timeout(WAIT_S):
            await happens(lambda: len(done) == 1_999)
            await happens(lambda: sum(session.unacked.messages for session in sessions_of(client)) == 1)
        await client._connections.close()  # as a crash
        task.cancel()
        return slow[0]["n"]

    slow = await dies()

    client, handed = consumer(cluster), []

    @client.listen("slow", group="g")
    async def handle(message):
        handed.append((message["n"], message.is_suspected))

    async with listening(client):
        await happens(lambda: handed)
    assert handed == [(slow, True)]


def sessions_of(client):
    return [session for one in client._connections._subscriptions for session in one._sessions.values()]


async def test_at_most_once_never_redelivers(cluster):
    await send(cluster, "once", 500)
    handled = []

    async def handle(message):
        handled.append((message["n"], message.times))
        if int(message["n"]) % 3 == 0:
            raise ValueError("lost, then")

    for part in range(4):
        client = consumer(cluster)
        client.listen("once", group="g", start="earliest", most_once=True, concurrency=20)(handle)
        async with listening(client):
            await happens(lambda: len(handled) >= min(500, 130 * (part + 1)))  # noqa: B023
    await asyncio.sleep(0.2)
    assert Counter(n for n, _ in handled) == Counter(str(n) for n in range(500))
    assert {times for _, times in handled} == {1}


async def test_a_broadcast_reaches_everybody_with_the_tags_asked_for(cluster):
    tags = {0: ["red"], 1: ["red", "blue"], 2: ["blue"], 3: [], 4: ["green", "red", "blue"]}
    got = {name: [] for name in ("any", "all", "every")}
    clients = []
    for name, options in (
        ("any", {"tags": ["red", "green"]}),
        ("all", {"tags": ["red", "blue"], "tag_mode": "all"}),
        ("every", {}),
    ):
        client = consumer(cluster)
        client.listen("cast", broadcast=True, start="earliest", **options)(collector(got[name]))
        clients.append(client)
    await send(cluster, "cast", 500, tags=lambda n: tags[n % 5])
    async with listening(clients[0]), listening(clients[1]), listening(clients[2]):
        await happens(lambda: [len(got[name]) for name in ("any", "all", "every")] == [300, 200, 500])
        await asyncio.sleep(0.3)
    expected = {"any": {0, 1, 4}, "all": {1, 4}, "every": {0, 1, 2, 3, 4}}
    for name, kinds in expected.items():
        assert sorted(int(n) for n in got[name]) == [n for n in range(500) if n % 5 in kinds], name


def collector(got):
    async def handle(message):
        got.append(message["n"])

    return handle


async def test_a_broadcast_retries_within_its_own_consumer(cluster):
    clients, handed = [consumer(cluster) for _ in range(2)], [[], []]
    for client, seen in zip(clients, handed, strict=True):

        @client.listen("castagain", broadcast=True, start="earliest", retry_delay=0.05)
        async def handle(message, seen=seen, fails=client is clients[0]):
            seen.append(message.times)
            if fails and message.times == 1:
                raise ValueError("again")

    await send(cluster, "castagain", 10)
    async with listening(clients[0]), listening(clients[1]):
        await happens(lambda: len(handed[0]) == 20 and len(handed[1]) == 10)
    assert (Counter(handed[0]), Counter(handed[1])) == ({1: 10, 2: 10}, {1: 10})


async def test_offline_consumer_passes_its_messages_on(cluster):
    await send(cluster, "line", 400)
    first, second = consumer(cluster), consumer(cluster, online=False)
    handed = {first.id: [], second.id: []}
    for client in (first, second):

        @client.listen("line", group="g", start="earliest", concurrency=2)
        async def handle(message, seen=handed[client.id]):
            seen.append((int(message["n"]), message.times))
            await asyncio.sleep(0.002)

    async with listening(first), listening(second):
        await happens(lambda: len(handed[first.id]) >= 50)
        first.offline()
        assert not handed[second.id]
        second.online()
        await happens(lambda: sum(map(len, handed.values())) >= 400)
        at_offline = len(handed[first.id])
        assert at_offline < 400
        first.online()
        second.offline()
        await send(cluster, "line", 10, begin=400)
        await happens(lambda: len(handed[first.id]) >= at_offline + 10)
    everything = [*handed[first.id], *handed[second.id]]
    assert sorted(everything) == [(n, 1) for n in range(410)], "once each, and nothing counts as delivered twice"


DRAINING = """
import asyncio, sys, qmq
consumer = qmq.Consumer(metaserver=sys.argv[1], app="test")

@consumer.listen(sys.argv[2], group="g", start="earliest", concurrency=5)
async def handle(message):
    await asyncio.sleep(0.003)
    if int(message["n"]) % 7 == 0 and message.times == 1:
        print("failed", message["n"], message.times, flush=True)
        raise qmq.RetryLater(0.01)
    print("ended", message["n"], message.times, flush=True)

asyncio.run(consumer.run())
"""


def test_sigterm_loses_and_repeats_nothing_that_was_finished(cluster):
    """Rolling restarts: one process after the other is asked to end amid its work."""
    asyncio.run(send(cluster, "drain", 1_000))
    lines = []
    for _ in range(4):
        with consumer_process(cluster, DRAINING, "drain") as process:
            lines += lines_until(process, lambda lines: len(lines) >= 150)
            process.send_signal(signal.SIGTERM)
            lines += [tuple(line.split()) for line in process.stdout.read().splitlines()]
            assert process.wait(WAIT_S) == 0

    async def rest():
        client, ended = consumer(cluster), []

        @client.listen("drain", group="g")
        async def handle(message):
            ended.append(("ended", message["n"], str(message.times)))

        async with listening(client):
            done = sum(line[0] == "ended" for line in lines)
            await happens(lambda: done + len(ended) >= 1_000)
            await asyncio.sleep(0.5)
        return ended

    lines += asyncio.run(rest())
    ended = Counter(n for what, n, _ in lines if what == "ended")
    assert ended == Counter(str(n) for n in range(1_000))
    failed = {n for what, n, _ in lines if what == "failed"}
    assert {n for what, n, times in lines if what == "ended" and times == "2"} == failed
