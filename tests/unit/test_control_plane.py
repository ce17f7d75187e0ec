"""Shell. Answers at the metaserver's address, and options of gRPC."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc.aio
import pytest

from qmq.client import route_watch
from qmq.control_plane import (
    CHANNEL_OPTIONS,
    EXPERIMENTS,
    HANDSHAKE_MS,
    IDLE_MS,
    META_CHANNEL_OPTIONS,
    NO_PROBE,
    OLDER_ENGINE,
    SERVER_OPTIONS,
    app_name,
    find_metaserver,
    metaserver_urls,
)
from qmq.errors import InvalidRequest
from qmq.metaserver.main import RPC_OPTIONS


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("[fd00::2]:8080", "http://[fd00::2]:8080"),
        ("http://[::1]:8080/", "http://[::1]:8080"),
        ("mq1.example:8080", "http://mq1.example:8080"),
    ],
)
def test_metaserver_is_a_name_or_ipv6(text, url):
    assert metaserver_urls(text) == url


@pytest.mark.parametrize("text", ["::1", "fd00::2:8080", "http://[::1", "[mq1]:80", "mq1:http", "mq1:70000", "mq1:0"])
def test_bad_metaserver_is_refused_with_remedy(text):
    with pytest.raises(InvalidRequest, match=r"such as http://mq1:8080 or http://\[fd00::2\]:8080"):
        metaserver_urls(text)


@pytest.mark.parametrize(
    "given", ["http://mq1:8080, mq2:8080/", ["mq1:8080", "http://mq2:8080"], ("mq1:8080,mq2:8080",)]
)
def test_several_metaservers_are_a_list_or_commas(given):
    assert metaserver_urls(given) == "http://mq1:8080,http://mq2:8080"


@pytest.mark.parametrize("given", ["mq1,", ",", [], ["mq1", None], {"mq1"}, 8080, ["mq1", "a b"]])
def test_bad_list_of_metaservers_is_refused(given):
    with pytest.raises(InvalidRequest, match=r"metaserver= is .* or several separated by commas"):
        metaserver_urls(given)


def test_environment_names_metaservers_and_app(monkeypatch):
    monkeypatch.setenv("QMQ_METASERVER", "mq1:8080,mq2:8080")
    monkeypatch.setenv("QMQ_APP", "shop")
    assert (metaserver_urls(), app_name()) == ("http://mq1:8080,http://mq2:8080", "shop")


def test_missing_variable_is_named(monkeypatch):
    monkeypatch.delenv("QMQ_METASERVER", raising=False)
    monkeypatch.setenv("QMQ_APP", "")
    with pytest.raises(InvalidRequest, match="set QMQ_METASERVER to its HTTP address"):
        metaserver_urls()
    with pytest.raises(InvalidRequest, match="set QMQ_APP, or give app="):
        app_name()
    monkeypatch.setenv("QMQ_METASERVER", "mq1:x")
    with pytest.raises(InvalidRequest, match="^QMQ_METASERVER is"):
        metaserver_urls()


def test_next_metaserver_answers_for_a_dead_one():
    for _ in range(5):  # the order is random
        with closed_port() as dead, answering(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nmq1:99") as url:
            assert find_metaserver(f"{dead},{url}") == "mq1:99"


def test_error_names_each_metaserver_without_answer():
    with closed_port() as one, closed_port() as other, pytest.raises(OSError) as raised:
        find_metaserver(f"{one},{other}")
    assert one in str(raised.value) and other in str(raised.value)


@contextmanager
def closed_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield url


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """Answer the next connection with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(data)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", id="a gRPC port"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", id="broken chunks"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", id="no address"),
    ],
)
def test_answer_of_another_server_is_refused(data):
    """Any other error would end the broker, or the client's watch."""
    with answering(data) as url, pytest.raises(ValueError):
        find_metaserver(url)
    with answering(data) as url, pytest.raises(ValueError):
        route_watch.poll(url, ["a"], {}, token="t", app="a", client_id="c", produces=True, timeout_s=3)


def test_silent_metaserver_is_an_os_error():
    with answering(b"") as url, pytest.raises(OSError):
        find_metaserver(url)


def test_refused_connection_keeps_the_systems_text():
    with closed_port() as url, pytest.raises(ConnectionRefusedError, match=r"^\[Errno 111\] Connection refused$"):
        find_metaserver(url)


@asynccontextmanager
async def grpc_port(**changed: int) -> AsyncIterator[int]:
    """Serve no method, with our options except these."""
    options = dict(SERVER_OPTIONS)
    assert changed.keys() <= options.keys()
    server = grpc.aio.server(options=list((options | changed).items()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


PREFACE, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(3) + b"\x04" + bytes(5)


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        pytest.param(b"", HANDSHAKE_MS, id="nothing"),
        pytest.param(PREFACE, HANDSHAKE_MS, id="half of a handshake"),
        pytest.param(PREFACE + SETTINGS, IDLE_MS, id="a handshake and no call"),
    ],
)
async def test_idle_grpc_connection_is_closed(sent, limit):
    assert dict(SERVER_OPTIONS)[HANDSHAKE_MS] <= 10_000 and dict(SERVER_OPTIONS)[IDLE_MS] <= 60_000

    async with grpc_port(**{limit: 50}) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            async with asyncio.timeout(15.0):
                await reader.read()  # until it is closed
        finally:
            writer.close()


async def test_idle_channel_reconnects_with_the_next_call():
    async with (
        grpc_port(**{IDLE_MS: 50}) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel,
        asyncio.timeout(15.0),
    ):
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as answered:
                await channel.unary_unary("/qmq.Broker/None")(b"")
            assert answered.value.code() == grpc.StatusCode.UNIMPLEMENTED, "it is the server who answers"
            while (state := channel.get_state()) is not grpc.ChannelConnectivity.IDLE:
                await channel.wait_for_state_change(state)


PING = 6


async def pings_of(options: list[tuple[str, int]]) -> int:
    """Send ten messages over a channel with these options; return the PING frames of both ends."""
    pings, ended, ends = 0, asyncio.Event(), list[asyncio.StreamWriter]()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, skip: int) -> None:
        nonlocal pings
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            writer.write(await reader.readexactly(skip))
            while True:
                head = await reader.readexactly(9)
                pings += head[3] == PING
                writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))

    async def echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    handler = grpc.method_handlers_generic_handler("t", {"Echo": grpc.stream_stream_rpc_method_handler(echo)})
    server = grpc.aio.server(options=[*SERVER_OPTIONS, NO_PROBE], handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        ends.extend((writer, back))
        await asyncio.gather(pass_on(reader, back, 24), pass_on(there, writer, 0))
        ended.set()

    relay = await asyncio.start_server(between, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}", options=options) as channel:
        call = channel.stream_stream("/t/Echo")()
        for _ in range(10):
            await call.write(b"a heartbeat")
            assert await call.read() == b"a heartbeat"
        call.cancel()
    relay.close()
    for end in ends:
        end.close()
    await ended.wait()
    await server.stop(None)
    return pings


def test_heartbeats_cause_no_pings():
    """Each PING wakes both ends; without the option there are several."""
    assert asyncio.run(pings_of(META_CHANNEL_OPTIONS)) == 0 < asyncio.run(pings_of(CHANNEL_OPTIONS))
    assert NO_PROBE in RPC_OPTIONS


AT_IMPORT = """
import os, runpy, sys
class Look:
    def find_spec(self, name, *_):
        if name == "grpc._cython":
            print(os.environ.get("GRPC_EXPERIMENTS"))
sys.meta_path.insert(0, Look())
sys.argv[1:] = ["--help"]
runpy.run_module(MODULE, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("broker", ""), ("broker", "event_engine_client"), ("delayserver", ""), ("metaserver", ""), ("watchdog", "")],
)
def test_grpc_engine_is_chosen_before_the_import(name, theirs):
    """gRPC reads the environment once, at its import; a later choice has no effect."""
    environ = {key: value for key, value in os.environ.items() if key != EXPERIMENTS}
    environ |= {EXPERIMENTS: theirs} if theirs else {}
    text = AT_IMPORT.replace("MODULE", repr(f"qmq.{name}"))
    done = subprocess.run([sys.executable, "-c", text], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == (theirs or OLDER_ENGINE)
    assert "xperiment" not in done.stderr, "this gRPC knows it"
