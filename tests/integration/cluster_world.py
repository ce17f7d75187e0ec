"""Shell. Real clusters for tests: processes, files, raw connections, clients."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sqlite3
import time
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from zlib import crc32

import qmq
from qmq.codec import batch_encoder, join_batch
from qmq.deploy import control
from qmq.deploy.cluster import Cluster
from qmq.deploy.control import state
from qmq.deploy.processes import module_command
from qmq.remoting import commands
from qmq.remoting.commands import Command, Pull
from qmq.remoting.packet import ONE_WAY, packet_header, read_packet
from tests.support.ports import run_of_ports
from tests.support.waiting import WAIT_S, until
from tests.support.zygote import launch

SEGMENT_BYTES = 256 * 1024
"""Each segment is preallocated."""
COPY_SETTINGS = {"segment_bytes": SEGMENT_BYTES, "slave_wait_ms": 1000, "disk_free_limit": 0}
SETTINGS = COPY_SETTINGS | {"lease_ms": 10_000}
"""Longer than a process pauses: no consumer's lease ends, and no acked message is delivered again."""


@contextmanager
def running(run_dir, *, groups=("g1",), delay_groups=(), copies=2, restart_s=0.1, metaserver=None, **broker):
    """Run a cluster with small segments, on ports of this test process."""
    first = run_of_ports()
    with Cluster(
        run_dir,
        groups=groups,
        delay_groups=delay_groups,
        copies=copies,
        broker=SETTINGS | broker,
        delay_server=COPY_SETTINGS,
        metaserver={"database_timeout_ms": 30_000} | (metaserver or {}),
        restart_s=restart_s,
        http_port=first,
        broker_port=first + 2,
        launch=launch,
    ) as cluster:
        yield cluster


@contextmanager
def running_apart(run_dir, groups, *, metaserver=None, **settings):
    """Run a cluster for several stories: each group serves one subject alone, `s.GROUP`."""
    alone = {"groups_per_subject_min": 1, "groups_per_subject_new": 1} | (metaserver or {})
    with running(run_dir, groups=groups, metaserver=alone, **settings) as cluster:
        for group in groups:
            cluster.manage("SetGroupTag", brokerGroup=group, tag=group)
            cluster.manage("AddNewSubject", subject=f"s.{group}", tag=group)
        yield cluster


# Processes.


def end(cluster, *names):
    """Kill processes with SIGKILL; they stay down until `begin`."""
    cluster.end(*names)


def begin(cluster, *names):
    cluster.begin(*names)


def begin_as(cluster, module, *names):
    """Start stopped brokers by a module of a test that runs the real one with faults."""
    for name in names:
        cluster.service(name).command = module_command(module, settings_file(cluster, name))
    begin(cluster, *names)


def settings_file(cluster, name):
    return Path(cluster.service(name).command[-1])


def log_of(cluster, name):
    return cluster.service(name).log.read_text()


def reasons(cluster, plan):
    found = state(cluster, plan)
    return None if found is None else list(found.readonly_reasons)


def ends(cluster, group="g1"):
    """Return log end and chain of master and slave; None for one that does not answer."""
    states = [state(cluster, cluster.broker(group, role)) for role in ("master", "slave")]
    return [(found.log_end, found.chain) if found else None for found in states]


def are_equal(cluster, group="g1"):
    """Return whether both copies run and end at the same frame."""
    master, slave = ends(cluster, group)
    return master is not None and master == slave


def slaves_in_sync(cluster, group="g1"):
    """Return how many slaves of a group are in sync; 0 without a master."""
    master = state(cluster, cluster.broker(group, "master"))
    return len(master.in_step) if master else 0


def all_are_equal(cluster):
    """Whether all copies of a cluster of one group have the same end and chain."""
    states = [state(cluster, plan) for plan in cluster.plan.brokers]
    return all(states) and len({(copy.log_end, copy.chain) for copy in states}) == 1


def metrics(cluster, plan):
    """Scrape a broker: {"name{labels}": value}."""
    return control.metrics(f"http://127.0.0.1:{plan.metrics_port}", cluster.token)


def open_messages(cluster, subject, group="g1"):
    """Return the number of a subject's messages that its consumer groups have not acked; None without an answer."""
    try:
        found = metrics(cluster, cluster.broker(group, "master"))
    except OSError:
        return None
    open_gauges = ("qmq_broker_lag_messages{", "qmq_broker_unacked_messages{")
    counts = [value for name, value in found.items() if name.startswith(open_gauges) and f'"{subject}"' in name]
    return sum(counts) if counts else None


# Files.


def data_of(cluster, plan):
    return cluster.data(plan)


def row(cluster, query, *values):
    """Return one row of the metaserver's database."""
    with closing(sqlite3.connect(cluster.run_dir / "metaserver" / "metaserver.db")) as database:
        return database.execute(query, values).fetchone()


def flip_bit(path: Path, at: int) -> None:
    """Flip one bit of a file, below all running code."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


# Raw connections.


class Wire:
    """TCP connection to a broker that sends any bytes.

    Args:
        receive_bytes: receive buffer of a client that does not read; by default it grows to megabytes.
    """

    def __init__(self, port, *, token=None, receive_bytes=None):
        self.socket = socket.socket()
        self.socket.settimeout(WAIT_S)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)  # must precede connect
        self.socket.connect(("127.0.0.1", port))
        self._opaque = 0
        if token is not None:
            answer = self.ask(Command.AUTHENTICATE, commands.encode_json(token=token, app="test"))
            assert answer.code == 0, bytes(answer.body)
            self.welcome = json.loads(bytes(answer.body))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """Send bytes; errors are ignored, as the broker may close the connection."""
        try:
            self.socket.sendall(data)
        except OSError:
            pass

    def request(self, code, *parts, flag=0):
        self._opaque += 1
        body = b"".join(bytes(part) for part in parts)
        self.send(packet_header(code, self._opaque, flag, code, len(body)) + body)
        return self._opaque

    def answer(self):
        """Return the next packet that is no heartbeat; None if the broker closed the connection."""
        while (head := self._read(4)) is not None:
            if (rest := self._read(int.from_bytes(head, "big"))) is None:
                return None
            packet = read_packet(head + rest)
            if packet.code != Command.BEAT or not packet.flag & ONE_WAY:
                return packet
        return None

    def ask(self, code, *parts):
        opaque = self.request(code, *parts)
        answer = self.answer()
        assert answer is None or answer.opaque == opaque
        return answer

    def is_closed(self):
        """Wait until the broker closes this connection; skip its answers."""
        while self.answer() is not None:
            pass
        return True

    def _read(self, size):
        data = b""
        while len(data) < size:
            try:
                more = self.socket.recv(size - len(data))
            except ConnectionError:
                return None
            if not more:
                return None
            data += more
        return data


def produce_body(subject, *messages, crc=None, name="id"):
    """Return the body of a PRODUCE of a new producer: `messages` are properties, with ids `name-0…`."""
    encode = batch_encoder("any.subject", 0)
    batch_body = join_batch(
        [encode(qmq.Message("any.subject", properties, id=f"{name}-{at}")) for at, properties in enumerate(messages)]
    )
    producer = random.SystemRandom().getrandbits(63)
    crc = crc32(batch_body) if crc is None else crc
    return commands.produce_header(producer, 1, len(messages), crc, subject) + batch_body


def subscribe(wire, subject, group="g", consumer="c1", start="earliest"):
    body = commands.encode_subscribe(subject=subject, group=group, consumer=consumer, start=start)
    answer = wire.ask(Command.SUBSCRIBE, body)
    assert answer.code == 0, bytes(answer.body)
    return commands.decode_json(answer.body)["subscription"]


def pull(wire, subscription, timeout_ms=0):
    answer = wire.ask(Command.PULL, commands.encode_pull(Pull(subscription, 100, 1 << 20, timeout_ms)))
    return list(commands.decode_pulled(answer.body)) if answer.code == 0 else []


# Clients.


def producer(cluster, **options):
    """Return a producer that waits for an outcome longer than a busy machine takes to restart a broker."""
    options = {"timeout_s": 2 * WAIT_S} | options
    return qmq.Producer(metaserver=cluster.metaserver, token=cluster.token, app="test", **options)


def consumer(cluster, **options):
    return qmq.Consumer(metaserver=cluster.metaserver, token=cluster.token, app="test", drain_s=5.0, **options)


def send_all(cluster, subject, count, *, size=100, name="m"):
    """Send messages with ids `name-0…`; return their receipts, all stored."""

    async def send():
        async with producer(cluster) as sender:
            messages = [qmq.Message(subject, {"x": "x" * size}, id=f"{name}-{at}") for at in range(count)]
            return list(await sender.send_many(messages))

    receipts = asyncio.run(send())
    assert all(receipt.is_stored for receipt in receipts), [r for r in receipts if not r.is_stored][:3]
    return receipts


def consume_all(cluster, subject, group, count, *, timeout_s=WAIT_S, consumer_id=None, **options):
    """Pull and ack `count` messages from the earliest on; return their first (sequence, id) pairs in order.

    Messages delivered again after a short lease count once.
    """

    async def consume():
        got = {}
        client = consumer(cluster, consumer_id=consumer_id)
        async with client.pull(subject, group=group, start="earliest", **options) as puller:
            async with asyncio.timeout(timeout_s):
                while len(got) < count:
                    messages = await puller.pull(500, timeout=1.0)
                    got |= {(message.broker_group, message.sequence): message.id for message in messages}
                    await puller.ack(messages)
                await puller.flush()
        return [(sequence, id) for (_, sequence), id in got.items()]

    return asyncio.run(consume())


class Probe:
    """Client that sends all the time on one connection, and must not notice faults of others."""

    def __init__(self, cluster):
        self._cluster = cluster
        self.receipts, self.slowest_s = [], 0.0

    def __enter__(self):
        self._is_over = False
        self._thread = Thread(target=lambda: asyncio.run(self._send()))
        self._thread.start()
        until(lambda: self.receipts, "the probe's first message is stored")
        return self

    def __exit__(self, *_):
        before = len(self.receipts)
        until(lambda: len(self.receipts) > before, "the probe goes on")
        self._is_over = True
        self._thread.join()
        assert all(receipt.is_stored for receipt in self.receipts)

    async def _send(self):
        async with producer(self._cluster) as sender:
            while not self._is_over:
                began = time.monotonic()
                self.receipts.append(await sender.send(qmq.Message("probe", {"n": len(self.receipts)})))
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                await asyncio.sleep(0.005)


def count_lines(text, pattern):
    return len(re.findall(pattern, text))
