"""Shell. Limits of a real broker: producers wait or get the reason, consumers continue, and it ends by itself."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from threading import Thread

import pytest

import qmq
from qmq.deploy.processes import suspend
from qmq.errors import ErrorCode
from qmq.memory import ram_bytes
from qmq.remoting import commands
from qmq.remoting.commands import Command, Pull
from tests.integration.cluster_world import WAIT_S, Wire, produce_body, running, subscribe, until

MIB = 1 << 20
LIMIT_BYTES = 100 * MIB
"""Above the memory of an idle broker, below that with the stalled consumers."""


def connections(cluster, state):
    return cluster.metrics(cluster.broker("g1", "master"))[
        f'qmq_broker_client_connections{{broker_group="g1",state="{state}"}}'
    ]


@pytest.fixture
def cluster(tmp_path):
    with running(
        tmp_path,
        segment_bytes=64 * MIB,
        window_bytes=MIB,
        memory_limit=LIMIT_BYTES / ram_bytes(),
        slave_lag_ms_max=60_000,
        tail_bytes=0,  # nor do they share the tail
    ) as cluster:
        yield cluster


def test_producer_over_its_window_is_throttled(cluster):
    cluster.send_all("s", 1)
    slave = cluster.service(cluster.broker("g1", "slave").hostname)
    with Wire(cluster.broker("g1", "master").serve_port, token=cluster.token) as wire:
        suspend(slave.pid)
        bodies = [produce_body("s", {"x": "x" * 30_000}, {"x": "y" * 30_000}) for _ in range(400)]
        sending = Thread(target=lambda: [wire.request(Command.PRODUCE, body) for body in bodies])
        sending.start()
        until(lambda: connections(cluster, "flow") == 1, "the window is full")
        slave.signal(signal.SIGCONT)
        codes = [wire.answer().code for _ in range(400)]
        sending.join()
        until(lambda: connections(cluster, "running") == 1, "it is read again")
    assert set(codes) == {0}, "no answer is a refusal"


class Stalled:
    """Consumers that pull much and read nothing: 12 MB each of the broker's memory.

    Each has its own subject, as several pulls of the same frames share their bytes.
    """

    def __init__(self, cluster):
        self._open = ExitStack()
        subjects = [f"big{number}" for number in range(12)]
        for subject in subjects:
            cluster.send_all(subject, 400, size=30_000)
        for subject in subjects:
            port = cluster.broker("g1", "master").serve_port
            wire = self._open.enter_context(Wire(port, token=cluster.token, receive_bytes=1 << 16))
            subscription = subscribe(wire, subject, "stalled")
            for _ in range(8):
                wire.request(Command.PULL, commands.encode_pull(Pull(subscription, 10_000, 8 * MIB, 60_000)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._open.close()


def test_memory_limit_stops_producers_only(cluster):
    cluster.send_all("s", 1200, size=10_000)
    master = cluster.broker("g1", "master")

    async def send():
        async with cluster.producer(timeout_s=4 * WAIT_S) as sender:
            assert (await sender.send(qmq.Message("s", {"n": "1"}))).is_stored
            with await asyncio.to_thread(Stalled, cluster):
                until(lambda: cluster.reasons(master) == ["memory"], "memory is over its limit")
                late = asyncio.create_task(sender.send(qmq.Message("s", {"n": "2"})))
                await asyncio.to_thread(until, lambda: connections(cluster, "blocked") == 1, "the producer is blocked")
                (blocked,) = [row for row in cluster.connections() if row["state"] == "blocked"]
                assert blocked["app"] == "test" and blocked["produces"] and not blocked["consumes"]
                there = await asyncio.to_thread(cluster.consume_all, "s", "g", 1201)
                assert len(there) == 1201 and connections(cluster, "blocked") == 1 and not late.done()
                with Wire(master.serve_port, token=cluster.token) as wire:
                    answer = wire.ask(Command.PRODUCE, produce_body("s", {"n": "3"}))
                    assert answer.code == ErrorCode.READ_ONLY and b"memory_limit" in bytes(answer.body)
            return await late

    assert asyncio.run(send()).is_stored
    until(lambda: cluster.reasons(master) == [] and connections(cluster, "blocked") == 0, "it has ended by itself")


def test_full_disk_refuses_producers_and_serves_consumers(cluster):
    cluster.send_all("s", 500)
    names = cluster.hostnames
    cluster.end(*names)
    for name in names:
        config = cluster.settings_file(name)
        config.write_text(config.read_text().replace("disk_free_limit = 0", f"disk_free_limit = {1 << 60}"))
    cluster.begin(*names)
    master = cluster.broker("g1", "master")
    until(lambda: cluster.reasons(master) == ["disk"], "the disk is full")
    with Wire(master.serve_port, token=cluster.token) as wire:
        answer = wire.ask(Command.PRODUCE, produce_body("s", {"n": "1"}))
        assert answer.code == ErrorCode.READ_ONLY and b"disk is nearly full" in bytes(answer.body)
    assert len(cluster.consume_all("s", "g", 500)) == 500


READONLY = {
    "memory_limit": test_memory_limit_stops_producers_only,
    "disk_free_limit": test_full_disk_refuses_producers_and_serves_consumers,
}
"""Setting -> test that exceeds it; tests/unit/test_limits_driven.py requires each limit in such a table."""
