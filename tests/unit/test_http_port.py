"""Shell. The bound on unfinished requests of every HTTP port, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qmq import http_port
from qmq.errors import AccessError, NotServed
from qmq.http_port import HttpPort, bind_address, listen, shown_token
from qmq.rights import Caller, TokenRole
from qmq.server.http import CopyHttp
from qmq.types import Endpoint

HALF_OPEN = 300
WAIT_S = 30


@asynccontextmanager
async def port_of(app, host="127.0.0.1", **options):
    listener = listen(host, 0)
    running = asyncio.create_task(HttpPort(app, listener, **options).run())
    try:
        yield listener.getsockname()[1]
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def get(port, path="/", host="127.0.0.1", **headers):
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as client:
        return await client.get(f"http://{Endpoint(host, port)}{path}", headers=headers)


async def opened(port, begun=b"GET / HT"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    return reader, writer


async def ok(request):
    return PlainTextResponse("ok")


async def peer(request):
    return PlainTextResponse(request.client.host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_are_not_delayed(host):
    with listen(host, 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_any_ipv6_address_takes_ipv4_too():
    """The caller has its IPv4 address, which is compared with `trusted_proxies`."""
    async with port_of(Starlette(routes=[Route("/", peer)]), "::", trusted_proxies=["127.0.0.1"]) as port:
        forwarded = {"x-forwarded-for": "fd00::9"}
        shown = [(await get(port, host=host, **forwarded)).text for host in ("127.0.0.1", "::1")]
    assert shown == ["fd00::9", "::1"], "only the first is a trusted proxy"


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("::", "::"), ("10.0.0.1", "10.0.0.1")])
async def test_name_to_listen_on_is_looked_up(host, address):
    assert await bind_address(host) == address


async def test_each_answer_has_a_date():
    """Doctor compares the machines' clocks by this header."""

    async with port_of(Starlette(routes=[Route("/", ok)])) as port:
        for path in ("/", "/nothing"):
            date = parsedate_to_datetime((await get(port, path)).headers["date"])
            assert abs(date.timestamp() - time.time()) < 60


def test_half_open_connections_block_no_request(caplog):
    """300 sockets without a whole request turned the watchdog's metrics into permanent 503 answers."""

    async def test():
        async with port_of(Starlette(routes=[Route("/", ok)]), connections_max=50) as port:
            half = [await opened(port) for _ in range(HALF_OPEN)]
            for _ in range(3):
                assert (await get(port)).status_code == 200
            ended = [await asyncio.wait_for(reader.read(), WAIT_S) for reader, _ in half[: HALF_OPEN - 60]]
            assert ended == [b""] * len(ended), "the oldest made room"
            for _, writer in half:
                writer.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(test())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_connection_without_a_whole_head_is_closed(monkeypatch):
    monkeypatch.setattr(http_port, "HEAD_S", 0.3)

    async with port_of(Starlette(routes=[Route("/", ok)])) as port:
        for begun in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nX: "):
            reader, writer = await opened(port, begun)
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()


async def test_slow_request_head_is_ended(monkeypatch):
    """A further byte does not extend the deadline."""
    monkeypatch.setattr(http_port, "HEAD_S", 0.5)

    async with port_of(Starlette(routes=[Route("/", ok)])) as port:
        reader, writer = await opened(port, b"GET / HTTP/1.1\r\nX: ")
        ended, served = asyncio.create_task(reader.read()), 0
        async with asyncio.timeout(WAIT_S):
            while not ended.done():
                writer.write(b"x")
                assert (await get(port)).text == "ok"
                served += 1
        with suppress(ConnectionResetError):
            assert await ended == b""
        assert served > 1
        writer.close()


async def test_request_being_answered_is_not_ended():
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request):
        begun.set()
        await go_on.wait()
        return PlainTextResponse("done")

    async with port_of(Starlette(routes=[Route("/", slow)]), connections_max=1) as port:
        asking = asyncio.create_task(get(port))
        await begun.wait()
        reader, writer = await opened(port)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        go_on.set()
        assert (await asking).text == "done"


class Access:
    async def check(self, token):
        if token == "away":
            raise NotServed("no metaserver answers")
        if token not in ("viewer", "client"):
            raise AccessError("the API token is not valid")
        return Caller("x", TokenRole(token))


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/metrics", {"X-Api-Token": "viewer"}, 200),
        ("/metrics", {"Authorization": "Bearer viewer"}, 200),
        ("/metrics", {"Authorization": "Basic viewer"}, 401),
        ("/metrics", {}, 401),
        ("/metrics", {"Authorization": "Bearer client"}, 403),
        ("/metrics", {"Authorization": "Bearer away"}, 503),
        ("/connections", {"Authorization": "Bearer viewer"}, 200),
        ("/states", {"Authorization": "Bearer viewer"}, 200),
        ("/states", {}, 401),
        ("/health/live", {}, 200),
        ("/health/ready", {}, 503),
        ("/else", {}, 404),
    ],
)
async def test_rights_on_the_http_port(path, headers, status):
    http = CopyHttp(CollectorRegistry(), Access(), list, lambda: {"ready": False}, list)
    async with port_of(http.app()) as port:
        assert (await get(port, path, **headers)).status_code == status


def test_token_is_read_from_either_header():
    assert shown_token({"x-api-token": "a", "authorization": "Bearer b"}) == "a"
    assert shown_token({"authorization": "bearer  b "}) == "b"
    assert shown_token({"authorization": "Basic b"}) == shown_token({}) == ""
