"""Shell. Memory, keepalive and writes of a connection, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import threading
import tracemalloc
import warnings
from types import SimpleNamespace

import pytest
import uvloop

from qmq.descriptors import close_server
from qmq.errors import NotServed
from qmq.remoting.commands import Command
from qmq.remoting.connection import Connection, connect, notice_dead_peers
from qmq.remoting.packet import MAGIC
from qmq.types import Endpoint
from tests.support.waiting import WAIT_S

COUNT = 40
PACKET_BYTES = 1 << 20
TCP = socket.IPPROTO_TCP
OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    *((TCP, getattr(socket, f"TCP_{name}")) for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")),
]


class Owner:
    """Owner in a reference cycle with its connection, like a broker's acceptor."""

    def __init__(self, made):
        self.connection = Connection(self, PACKET_BYTES)
        made.append(self)
        self.is_lost = False

    def packet_received(self, connection, packet):
        raise AssertionError("no packet was whole")

    def connection_lost(self, connection, reason):
        self.is_lost = True

    def writable_again(self, connection):
        pass


class Guest(Owner):
    """Accepts every token."""

    def packet_received(self, connection, packet):
        connection.answer(packet, b"{}")


def test_ended_connection_frees_its_buffer():
    """A health check that connects each second would cost a gigabyte per hour between two full collections."""

    async def run():
        loop, made = asyncio.get_running_loop(), []
        server = await loop.create_server(lambda: Owner(made).connection, "127.0.0.1", 0)
        place = server.sockets[0].getsockname()
        writers = [(await asyncio.open_connection(*place))[1] for _ in range(COUNT)]
        begin = struct.pack(">ihI", PACKET_BYTES - 4, 18, MAGIC) + bytes(
            100_000
        )  # the begin of a packet with its own buffer
        for writer in writers:
            writer.write(begin)
            await writer.drain()
        while tracemalloc.get_traced_memory()[0] < COUNT * PACKET_BYTES:
            await asyncio.sleep(0.01)
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        while len(made) < COUNT or not all(owner.is_lost for owner in made):
            await asyncio.sleep(0.01)
        server.close()
        await server.wait_closed()
        return made

    gc.disable()
    tracemalloc.start()
    try:
        made = asyncio.run(asyncio.wait_for(run(), 60))
        assert tracemalloc.get_traced_memory()[0] < COUNT * 100_000, f"{len(made)} owners keep buffers"
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_ends_detect_a_dead_peer(make_loop):
    """The accepted end inherits the options of its listening socket, on both loops that brokers use."""

    async def run():
        made, options = [], []
        server = await asyncio.get_running_loop().create_server(lambda: Guest(made).connection, "127.0.0.1", 0)
        for sock in server.sockets:
            notice_dead_peers(sock)
        endpoint = Endpoint(*server.sockets[0].getsockname())
        connection, _ = await connect(
            endpoint, handler=made, token="t", app="a", packet_bytes_max=PACKET_BYTES, timeout_s=30
        )
        for end in (connection, made[0].connection):
            with socket.socket(fileno=os.dup(end._transport.get_extra_info("socket").fileno())) as own:
                options.append([own.getsockopt(*option) for option in OPTIONS])
            end.close()
        server.close()
        await server.wait_closed()
        return options

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(asyncio.wait_for(run(), 60)) == [[1, 5, 2, 5, 15_000]] * 2


def test_empty_packet_parts_are_not_written():
    """From Python 3.12 on, asyncio never finishes an empty part at the end, and would write for ever."""
    written = []
    connection = Connection(Owner([]), PACKET_BYTES)
    connection._transport = SimpleNamespace(writelines=lambda parts: written.extend(parts))
    connection.push(Command.HEARTBEAT, b"", b"x" * 5000, memoryview(b""), b"")
    assert [len(part) for part in written] == [24, 5000]


class Names:
    """Name server of this process: `addresses` by name. A name without any has no answer until `answer`."""

    def __init__(self, monkeypatch, **addresses):
        self.asked, self._addresses, self._answered = [], addresses, threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def answer(self, **addresses):
        self._addresses |= addresses
        self._answered.set()

    def _look_up(self, name, *_, **__):
        self.asked.append(name)
        if name not in self._addresses:
            self._answered.wait(WAIT_S)
        if not self._addresses[name]:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self._addresses[name]]


async def connect_to(host, port, timeout_s=WAIT_S):
    return await connect(
        Endpoint(host, port), handler=Owner([]), token="t", app="a", packet_bytes_max=PACKET_BYTES, timeout_s=timeout_s
    )


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_second_address_of_a_name_is_tried(make_loop, monkeypatch):
    Names(monkeypatch, mq1=["127.0.0.9", "127.0.0.1"], gone=[])

    async def run():
        server = await asyncio.get_running_loop().create_server(lambda: Guest([]).connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection, _ = await connect_to("mq1", port)
        connection.close()
        with pytest.raises(NotServed, match=f"gone:{port}: Name or service not known"):
            await connect_to("gone", port)
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())


def test_silent_name_server_takes_one_thread_per_name(monkeypatch):
    """Asyncio's own look-ups use up the loop's threads, and the loop waits for them at its end."""
    names = Names(monkeypatch)

    async def run():
        for host in 20 * ["mq1"]:
            with pytest.raises(NotServed):
                await connect_to(host, 1, timeout_s=0.01)
        asked = list(names.asked)
        names.answer(mq1=["127.0.0.1"])
        return asked

    assert asyncio.run(run()) == ["mq1"]


@pytest.mark.parametrize("turns", range(6))
def test_closed_server_leaves_no_accepted_transport_open(turns):
    """Of one that is accepted in the turn of `close`, Python 3.11 warns later, in another test."""

    async def run():
        made = []
        server = await asyncio.get_running_loop().create_server(lambda: Guest(made).connection, "127.0.0.1", 0)
        client.connect(server.sockets[0].getsockname())
        for _ in range(turns):
            await asyncio.sleep(0)
        await close_server(server)
        for guest in made:
            guest.connection.abort("the test ends")
        await asyncio.sleep(0)

    with socket.socket() as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
