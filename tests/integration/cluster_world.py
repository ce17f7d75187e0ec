"""Shell. Real clusters for tests: processes, files, raw connections, clients."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import sqlite3
import time
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from zlib import crc32

import pytest

import qmq
from qmq.codec import batch_encoder, join_batch
from qmq.deploy import control
from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import HOST
from qmq.deploy.processes import module_command
from qmq.log import RealDisk
from qmq.log.segments import log_name, segment_bases
from qmq.remoting import commands
from qmq.remoting.commands import Command, Pull
from qmq.remoting.packet import ONE_WAY, packet_header, read_packet
from tests.integration.tools_world import run
from tests.support.http import ask
from tests.support.ports import run_of_ports
from tests.support.waiting import WAIT_S, until
from tests.support.zygote import launch

SEGMENT_BYTES = 256 * 1024
"""Each segment is preallocated."""
COPY_SETTINGS = {"segment_bytes": SEGMENT_BYTES, "slave_wait_ms": 1000, "disk_free_limit": 0}
SETTINGS = COPY_SETTINGS | {"lease_ms": 10_000}
"""Longer than a process pauses: no consumer's lease ends, and no acked message is delivered again."""


class ObservedCluster(Cluster):
    """Cluster with clients, and with readings of its processes, logs and states."""

    @property
    def hostnames(self):
        """Names of all brokers and delay servers."""
        return [plan.hostname for plan in self.plan.brokers]

    def pair(self, group="g1"):
        """Return the plans of the present master and slave."""
        return self.broker(group, "master"), self.broker(group, "slave")

    @staticmethod
    def place(plan):
        """Return the parameters of actions that name a broker's place."""
        place = {"hostname": plan.hostname, "ip": HOST, "servePort": plan.serve_port, "syncPort": plan.sync_port}
        return {"brokerGroup": plan.group} | place

    def slaves(self, group="g1"):
        """Return the plans of the present slaves."""
        master = self.broker(group, "master")
        return [plan for plan in self.plan.brokers if plan.group == group and plan != master]

    def begin_as(self, module, *names):
        """Start stopped brokers by a module of a test that runs the real one with faults."""
        for name in names:
            self.service(name).command = module_command(module, self.settings_file(name))
        self.begin(*names)

    def settings_file(self, name):
        return Path(self.service(name).command[-1])

    def log_of(self, name):
        return self.service(name).log.read_text()

    def row(self, query, *values):
        """Return one row of the metaserver's database."""
        with closing(sqlite3.connect(self.run_dir / "metaserver" / "metaserver.db")) as database:
            return database.execute(query, values).fetchone()

    def tool(self, command, *words, metaserver=None, token=None, **options):
        """Run an operators' command as a script does."""
        return run(command, metaserver or self.metaserver, *words, token=token or self.token, **options)

    # States of brokers.

    def state(self, plan):
        return control.state(self, plan)

    def reasons(self, plan):
        found = self.state(plan)
        return None if found is None else list(found.readonly_reasons)

    def ends(self, group="g1"):
        """Return log end and chain of master and slave; None for one that does not answer."""
        states = [self.state(plan) for plan in self.pair(group)]
        return [(found.log_end, found.chain) if found else None for found in states]

    def are_equal(self, group="g1"):
        """Return whether both copies run and end at the same frame."""
        master, slave = self.ends(group)
        return master is not None and master == slave

    def wait_equal(self, group="g1"):
        until(lambda: self.are_equal(group), f"both copies of {group} are equal")

    def all_are_equal(self):
        """Whether all copies of a cluster of one group have the same end and chain."""
        states = [self.state(plan) for plan in self.plan.brokers]
        return all(states) and len({(copy.log_end, copy.chain) for copy in states}) == 1

    def read_copies(self, group="g1"):
        """Return the logs of master and slave, as they are on the disks."""
        return [control.read_copy(self.data(plan)) for plan in self.pair(group)]

    def are_whole(self, group="g1"):
        """Whether each frame of both logs can be read, and is the same."""
        mine, other = self.read_copies(group)
        return mine.frames == other.frames

    def segments(self, plan):
        """Return the base offsets of the segments on a broker's disk."""
        return segment_bases(RealDisk(self.data(plan)))

    def slaves_in_sync(self, group="g1"):
        """Return how many slaves of a group are in sync; 0 without a master."""
        master = self.state(self.broker(group, "master"))
        return len(master.in_step) if master else 0

    def wait_in_sync(self, group="g1"):
        """Wait for both slaves of three copies."""
        until(lambda: self.slaves_in_sync(group) == 2, f"both slaves of {group} are in sync")

    def metrics(self, plan):
        """Scrape a broker: {"name{labels}": value}."""
        return control.metrics(f"http://127.0.0.1:{plan.metrics_port}", self.token)

    def connections(self):
        """Return the page of the connections of g1's master."""
        port = self.broker("g1", "master").metrics_port
        return ask(f"http://127.0.0.1:{port}/connections", token=self.token).json()

    def open_messages(self, subject, group="g1"):
        """Return the number of a subject's messages that its groups have not acked; None without an answer."""
        try:
            found = self.metrics(self.broker(group, "master"))
        except OSError:
            return None
        open_gauges = ("qmq_broker_lag_messages{", "qmq_broker_unacked_messages{")
        counts = [value for name, value in found.items() if name.startswith(open_gauges) and f'"{subject}"' in name]
        return sum(counts) if counts else None

    # Clients.

    @property
    def client(self):
        """Words that each client needs."""
        return {"metaserver": self.metaserver, "token": self.token, "app": "test"}

    def producer(self, **options):
        """Return a producer that waits for an outcome longer than a busy machine takes to restart a broker."""
        options = {"timeout_s": 2 * WAIT_S} | options
        return qmq.Producer(**self.client | options)

    def consumer(self, **options):
        return qmq.Consumer(**self.client | {"drain_s": 5.0} | options)

    def send_all(self, subject, count, *, size=100, name="m"):
        """Send messages with ids `name-0…`; return their receipts, all stored."""

        async def send():
            async with self.producer() as sender:
                messages = [qmq.Message(subject, {"x": "x" * size}, id=f"{name}-{at}") for at in range(count)]
                return list(await sender.send_many(messages))

        receipts = asyncio.run(send())
        assert all(receipt.is_stored for receipt in receipts), [r for r in receipts if not r.is_stored][:3]
        return receipts

    def consume_all(self, subject, group, count, *, timeout_s=WAIT_S, consumer_id=None, **options):
        """Pull and ack `count` messages from the earliest on; return their first (sequence, id) pairs in order.

        Messages delivered again after a short lease count once.
        """

        async def consume():
            got = {}
            client = self.consumer(consumer_id=consumer_id)
            async with client.pull(subject, group=group, start="earliest", **options) as puller:
                async with asyncio.timeout(timeout_s):
                    while len(got) < count:
                        messages = await puller.pull(500, timeout=1.0)
                        got |= {(message.broker_group, message.sequence): message.id for message in messages}
                        await puller.ack(messages)
                    await puller.flush()
            return [(sequence, id) for (_, sequence), id in got.items()]

        return asyncio.run(consume())


@contextmanager
def running(
    run_dir, *, groups=("g1",), delay_groups=(), copies=2, restart_s=0.1, metaserver=None, program="", **broker
):
    """Run a cluster with small segments, on ports of this test process.

    `program`: module of a test that runs the brokers with faults.
    """
    first = run_of_ports()
    with ObservedCluster(
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
        if program:
            cluster.end(*cluster.hostnames)
            cluster.begin_as(program, *cluster.hostnames)
            cluster.wait_writable()
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


def shared_cluster(**settings):
    """Return a fixture: one cluster for all tests of a module."""

    @pytest.fixture(scope="module")
    def cluster(tmp_path_factory):
        with running(tmp_path_factory.mktemp("cluster"), **settings) as started:
            yield started

    return cluster


def zero_from(data: Path, offset: int) -> bytes:
    """Zero a log from an offset to the end of its segment, as after a lying flush; return the bytes before."""
    base = max(base for base in segment_bases(RealDisk(data)) if base <= offset)
    with (data / log_name(base)).open("r+b") as file:
        file.seek(offset - base)
        lost = file.read()
        file.seek(offset - base)
        file.write(bytes(len(lost)))
    return lost


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
        async with self._cluster.producer() as sender:
            while not self._is_over:
                began = time.monotonic()
                self.receipts.append(await sender.send(qmq.Message("probe", {"n": len(self.receipts)})))
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                await asyncio.sleep(0.005)


def count_lines(text, pattern):
    return len(re.findall(pattern, text))
