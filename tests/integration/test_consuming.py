"""Shell. Consumers against a real cluster, as processes that SIGTERM ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Timer

import qmq
from tests.integration.cluster_world import shared_cluster
from tests.support.waiting import until_async

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0


cluster = shared_cluster(groups=("g1", "g2"), lease_ms=5000)


async def send(cluster, subject, count, **options):
    """Store messages; `options` maps an argument of Message to a function of its number."""
    async with cluster.producer() as sender:
        receipts = await sender.send_many(
            qmq.Message(subject, {"n": str(n)}, id=f"m-{n}", **{name: of(n) for name, of in options.items()})
            for n in range(count)
        )
    assert receipts.all_stored


@asynccontextmanager
async def listening(client):
    task = asyncio.create_task(client.run())
    try:
        yield
    finally:
        client.stop()
        await task


@contextmanager
def consumer_process(cluster, script, subject):
    with subprocess.Popen(
        [sys.executable, "-c", script, cluster.metaserver, subject],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env=os.environ | {"QMQ_TOKEN": cluster.token},
        text=True,
    ) as process:
        late = Timer(WAIT_S, process.kill)  # ends a wait for a line that does not come
        late.start()
        try:
            yield process
        finally:
            late.cancel()
            process.kill()


def lines_until(process, condition):
    """Read lines of a process until `condition` is met."""
    lines = []
    while not condition(lines):
        line = process.stdout.readline()
        assert line, "the process ended"
        lines.append(tuple(line.split()))
    return lines


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


def test_rolling_restarts_lose_and_repeat_nothing(cluster):
    asyncio.run(send(cluster, "drain", 1_000))
    lines = []
    for _ in range(4):
        with consumer_process(cluster, DRAINING, "drain") as process:
            lines += lines_until(process, lambda lines: len(lines) >= 150)
            process.send_signal(signal.SIGTERM)
            lines += [tuple(line.split()) for line in process.stdout.read().splitlines()]
            assert process.wait(WAIT_S) == 0

    async def rest():
        client, ended = cluster.consumer(), []

        @client.listen("drain", group="g")
        async def handle(message):
            ended.append(("ended", message["n"], str(message.times)))

        async with listening(client):
            done = sum(line[0] == "ended" for line in lines)
            await until_async(lambda: done + len(ended) >= 1_000)
            await asyncio.sleep(0.5)  # a repetition would come now
        return ended

    lines += asyncio.run(rest())
    ended = Counter(n for event, n, _ in lines if event == "ended")
    assert ended == Counter(str(n) for n in range(1_000))
    failed = {n for event, n, _ in lines if event == "failed"}
    assert {n for event, n, times in lines if event == "ended" and times == "2"} == failed
