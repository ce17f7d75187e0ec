"""Shell. The link between two copies: heartbeats, clocks, and a middlebox that drops the connection silently."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from zlib import crc32

import pytest

from qmq.broker.answers import Counters
from qmq.broker.main import CLIENT_COMMANDS
from qmq.broker.master import BrokerMaster
from qmq.broker.retention import Retention
from qmq.broker.settings import BrokerSettings
from qmq.codec import encode_message, join_batch
from qmq.log import MessageLog, RealDisk
from qmq.message import Message
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.connection import connect
from qmq.replication.assignment import Address, Assignment
from qmq.replication.identity import IdentityFile
from qmq.server import pulse, service
from qmq.server.service import Service
from qmq.types import Endpoint, Role
from tests.support.cable import Cable, cable_to
from tests.support.ports import free_ports
from tests.support.waiting import until_async

WAIT_S = 30.0


def in_loop(test):
    @functools.wraps(test)
    def run(*args, **fixtures):
        asyncio.run(test(*args, **fixtures))

    return run


@pytest.fixture(autouse=True)
def short_beats(monkeypatch):
    monkeypatch.setattr(pulse, "BEAT_S", 0.1)
    monkeypatch.setattr(pulse, "SILENT_S", 0.5)


def a_broker(folder: Path, name: str, serve_port: int, sync_port: int) -> Service[BrokerMaster]:
    settings = BrokerSettings(
        hostname=name,
        data=folder / name,
        token="t",
        serve_port=serve_port,
        sync_port=sync_port,
        slave_wait_ms=100,
        segment_bytes=1 << 16,
        disk_free_limit=0,
        slave_lag_ms_max=600_000,
    )
    disk = RealDisk(settings.data)
    return Service(
        message_log=MessageLog(disk, segment_bytes=settings.segment_bytes, tail_bytes=1 << 20),
        disk=disk,
        identity=IdentityFile(disk, new_incarnation=name),
        settings=settings,
        commands=CLIENT_COMMANDS,
        promote=lambda promotion: BrokerMaster(promotion, settings, Counters()),
        keeper=Retention(settings),
    )


@contextlib.asynccontextmanager
async def a_group(folder: Path) -> AsyncIterator[tuple[Service[BrokerMaster], Service[BrokerMaster], Cable]]:
    """Two brokers in this process; the slave reaches its master through a cable."""
    ports = free_ports(4)
    a, b = a_broker(folder, "a", *ports[:2]), a_broker(folder, "b", *ports[2:])
    with cable_to(ports[1]) as cable:
        tasks = [asyncio.ensure_future(service.run()) for service in (a, b)]
        try:
            await asyncio.sleep(0)  # lets both begin
            master, slave = (Address("127.0.0.1", at, sync, 1) for at, sync in ((ports[0], cable.port), (ports[2], 1)))
            a.node.assign(Assignment("g1", 1, Role.MASTER, master, (slave,)))
            b.node.assign(Assignment("g1", 1, Role.SLAVE, master, (slave,)))
            await until_async(lambda: a.node.writable or any(task.done() for task in tasks))
            for task in tasks:
                assert not task.done(), task
            yield a, b, cable
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for service in (a, b):
                service.node.role.step_down()
            await until_async(lambda: not a.connections)


class _Client:
    def __init__(self):
        self.lost = asyncio.Event()

    def packet_received(self, connection, packet): ...

    def connection_lost(self, connection, reason):
        self.lost.set()

    def writable_again(self, connection): ...


async def produce(service: Service[BrokerMaster], batch: int, size: int = 1) -> None:
    """Send a batch; return once it is acknowledged."""
    endpoint = Endpoint("127.0.0.1", service._settings.serve_port)
    client = _Client()
    connection, _ = await connect(
        endpoint, handler=client, token="t", app="test", packet_bytes_max=1 << 20, timeout_s=5.0
    )
    body = join_batch([encode_message(Message("s", {"x": "y" * size}, id=f"m{batch}-{size}"), 0)])
    head = commands.produce_header(7, batch, 1, crc32(body), "s")
    try:
        async with asyncio.timeout(WAIT_S):
            await connection.request(Command.PRODUCE, head + body)
    finally:
        connection.close()
        await client.lost.wait()


@in_loop
async def test_silently_dropped_link_is_reopened(tmp_path):
    async with a_group(tmp_path) as (a, b, cable):
        await produce(a, 1)
        cable.forget()
        await produce(a, 2)  # no packet reports that the link is gone
        await until_async(lambda: a.node.writable)
        await produce(a, 3)
        await until_async(lambda: (a.node.log.end, a.node.log.chain) == (b.node.log.end, b.node.log.chain))


@in_loop
async def test_lost_link_is_reopened_in_each_term(tmp_path, monkeypatch):
    """Two copies acknowledge nothing without the link. The second wait would outlast the test."""
    monkeypatch.setattr(service, "RECONNECTS_S", (0.0,) * 100)
    async with a_group(tmp_path) as (a, b, cable):
        monkeypatch.setattr(service, "RECONNECTS_S", (0.0, 10 * WAIT_S))
        port = a._settings.serve_port
        master, slave = Address("127.0.0.1", port, cable.port, 1), Address("127.0.0.1", port + 4, 1, 1)
        for term in (2, 3):
            for broker, role in ((a, Role.MASTER), (b, Role.SLAVE)):
                broker.node.assign(Assignment("g1", term, role, master, (slave,)))
            await until_async(
                lambda term=term: a.node.writable and b.node.slave.has_matched and b.node.slave.term == term
            )
            first = b._master_link
            cable.repair()
            await until_async(lambda first=first: b._master_link is not first and a.node.writable)
            await produce(a, term)


@in_loop
async def test_hole_after_the_login_is_noticed(tmp_path, monkeypatch):
    """The slave received one heartbeat of its master, together with the answer to its login."""
    monkeypatch.setattr(pulse, "BEAT_S", 1.0)
    async with a_group(tmp_path) as (a, _, cable):
        cable.swallow_answers = True
        await until_async(lambda: not a.node.writable)


@in_loop
async def test_full_disk_blocks_no_other_slave(tmp_path):
    """A hanging audit on the slave holds the log; once its disk is full, it releases it, and the group is readonly."""
    async with a_group(tmp_path) as (a, b, _):
        b.log_holders.add("an audit that hangs")
        for batch in range(1, 7):
            await produce(a, batch, size=30_000)
        b.node.log.state.kept.start = b.node.log.bases[1]  # as after an acknowledged retention frame
        b._look_after_log()
        assert b.node.log.start == 0
        b._disk_watch.limit_bytes = 1 << 60
        b._disk_watch.measured(0, 0, 0)
        b._look_after_log()
        assert b.node.log.start > 0
        await until_async(lambda: a.node.readonly_reasons == ["disk"])


@in_loop
async def test_copies_exchange_their_clocks(tmp_path):
    async with a_group(tmp_path) as (a, b, _):
        await until_async(lambda: "slave" in a.node.clocks_ahead_ms() and "master" in b.node.clocks_ahead_ms())
        b.now_ms = lambda: Service.now_ms(b) + 400 * 86_400_000
        a.node.master.slaves.all[0].follower.connected.shipper.link.abort("the next link has the other clock")
        await until_async(lambda: a.node.clocks_ahead_ms().get("slave", 0) < -300 * 86_400_000)
        await until_async(lambda: b.node.clocks_ahead_ms().get("master", 0) > 300 * 86_400_000)
        assert "34,560,0" in a.node.clocks_disagreement()


@in_loop
async def test_quiet_link_stays_open(tmp_path):
    async with a_group(tmp_path) as (a, _, cable):
        link = a.node.master.slaves.all[0].follower.connected.shipper.link
        heard = link.received_bytes
        # Ten heartbeats take longer than the allowed silence.
        await until_async(lambda: link.received_bytes > heard + 32 * 10)
        assert link.is_open and a.node.writable


@in_loop
async def test_slave_without_heartbeats_is_kept_as_older_version(tmp_path, monkeypatch):
    beat, masters_beats = pulse.Pulse._beat, []

    def of_the_master_alone(self):
        if self._node.master is not None:
            masters_beats.append(self)
            beat(self)

    monkeypatch.setattr(pulse.Pulse, "_beat", of_the_master_alone)
    async with a_group(tmp_path) as (a, _, __):
        link = a.node.master.slaves.all[0].follower.connected.shipper.link
        await until_async(lambda: len(masters_beats) > 15)
        assert link.is_open and a.node.writable and "slave" not in a.node.clocks_ahead_ms()


@in_loop
async def test_stalled_loop_is_not_taken_for_silence(tmp_path, monkeypatch):
    async with a_group(tmp_path) as (a, _, __):
        link = a.node.master.slaves.all[0].follower.connected.shipper.link
        acceptor = link._acceptor
        await until_async(lambda: acceptor._pulse._beats_too)
        now_s = acceptor._pulse._loop.time()
        monkeypatch.setattr(acceptor._pulse, "_looked_s", now_s - 60)
        assert not acceptor._pulse._is_silent() and acceptor._pulse._silent_s <= 2 * pulse.BEAT_S + 0.01
