"""Shell. The metaserver's orders reach the core, wake its timers, and end the process on a disk failure."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from qmq.descriptors import Ports
from qmq.errors import DiskFailed
from qmq.proto import qmq_pb2 as pb
from qmq.server import control
from qmq.server.control import CopyControl
from qmq.server.service import Service
from tests.support.ports import free_ports
from tests.support.waiting import WAIT_S

ORDERS = [
    pytest.param("PrepareSwap", pb.PrepareSwapRequest(term=1, timeout_ms=1_000), id="swap"),
    pytest.param("CancelSwap", pb.Nothing(), id="no swap"),
    pytest.param("PrepareFailover", pb.PrepareFailoverRequest(term=1), id="failover"),
]


class World:
    """A service with a core that calls `call`."""

    def __init__(self, call):
        self.stirs, self.ended = 0, []
        self.node = SimpleNamespace(
            changes=SimpleNamespace(prepare_swap=call, cancel_swap=call, prepare_failover=call),
            master=SimpleNamespace(is_drained_to=lambda target: True),
        )
        self.fail = self.ended.append
        self._run_guarded = partial(Service._run_guarded, self)
        self.guarded = partial(Service.guarded, self)

    def _stir(self):
        self.stirs += 1

    def master_packet_age_ms(self):
        return None

    def carry_out(self, monkeypatch, name, order):
        monkeypatch.setattr(control, "state_message", lambda service, settings: pb.BrokerState())

        async def run():
            served = CopyControl(self, SimpleNamespace(read_log_bytes_per_s=1_024, catch_up_bytes_per_s=1_024), None)
            await getattr(served, name)(order, None)

        asyncio.run(run())


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_order_wakes_the_broker(monkeypatch, name, order):
    """Otherwise the group would report an old writable state for up to a second."""
    calls = []
    world = World(lambda *args, **fields: calls.append(args))
    world.carry_out(monkeypatch, name, order)
    assert calls and world.stirs


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_disk_failure_during_an_order_ends_the_process(monkeypatch, name, order):
    """I15. An unstored promise must not be answered, nor any later order."""

    def fails(*args, **fields):
        raise DiskFailed("no space left")

    world = World(fails)
    world.carry_out(monkeypatch, name, order)
    assert [str(error) for error in world.ended] == ["no space left"]


HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


async def let_in(port):
    """Begin HTTP/2; return the connection if the server answers with its settings."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return None
    with suppress(OSError):
        writer.write(HTTP2_BEGIN)
        if await reader.read(9):
            return writer
    writer.close()
    return None


async def until_let_in(port):
    async with asyncio.timeout(WAIT_S):
        while (writer := await let_in(port)) is None:
            await asyncio.sleep(0)  # the server is about to listen, or to see that another connection ended
    return writer


async def test_control_port_bounds_its_connections():
    """Foreign connections must not use up the file descriptors of a process that writes a log."""
    (port,) = free_ports(1)
    settings = SimpleNamespace(
        listen_on="127.0.0.1", control_port=port, read_log_bytes_per_s=1_024, catch_up_bytes_per_s=1_024
    )

    serving = asyncio.create_task(CopyControl(SimpleNamespace(bounds=Ports(0, control=2)), settings, None).serve())
    first, second = await until_let_in(port), await let_in(port)
    assert second is not None
    assert await let_in(port) is None
    first.close()
    third = await until_let_in(port)
    for writer in (second, third):
        writer.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
