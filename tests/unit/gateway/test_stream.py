"""Shell. Server-sent events and clients that leave, over real sockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest

from qmq.errors import AccessError
from qmq.gateway.main import cut_off_stalled
from qmq.http_port import HttpPort, listen
from tests.support.waiting import until_async
from tests.unit.gateway.gateway_world import BILLING, WAIT_S, gateway

STREAM = f"{BILLING}/stream?start=earliest"


@asynccontextmanager
async def served(**settings):
    """A gateway on a port."""
    async with gateway(**settings) as world:
        listener = listen("127.0.0.1", 0)
        cut_off_stalled(listener, world.settings.stall_s)
        running = asyncio.create_task(HttpPort(world.app, listener).run())
        world.port = listener.getsockname()[1]
        try:
            yield world
        finally:
            await world.clients.close()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@asynccontextmanager
async def request(world, line):
    """Send a request; yield its reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1 << 20)
    writer.write(f"{line} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer shop\r\n\r\n".encode())
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def next_event(reader, name="message"):
    """Return the data of the next event."""
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(f"event: {name}\n".encode())
        return json.loads((await reader.readuntil(b"\n\n")).removeprefix(b"data: "))


@pytest.fixture
async def world():
    async with served(keep_alive_s=1) as running:
        yield running


async def test_stream_delivers_messages_as_events(world):
    async with request(world, f"GET {STREAM}") as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and b"content-type: text/event-stream" in head
        for number in range(3):
            await world.send({"properties": {"n": str(number)}})
            message = await next_event(reader)
            assert message["properties"] == {"n": str(number)}
            assert await world.decide("ack", message) == (200, ["stored"])
    await world.broker.wait_until_consumed("order", "billing")


async def test_stream_pauses_at_undecided_messages(world):
    await world.send(*({"properties": {"n": str(number)}} for number in range(3)))
    async with request(world, f"GET {STREAM}&unacked_max=2") as (reader, _):
        first, _ = await next_event(reader), await next_event(reader)
        (session,) = world.clients.sessions
        assert len(session.deliveries) == 2
        await reader.readuntil(b": keep-alive")
        assert len(session.deliveries) == 2
        await world.decide("ack", first)
        assert (await next_event(reader))["properties"] == {"n": "2"}


async def test_silent_stream_sends_comments(world):
    async with request(world, f"GET {STREAM}") as (reader, _), asyncio.timeout(WAIT_S):
        for _ in range(3):
            await reader.readuntil(b": keep-alive\n\n")


async def test_stream_of_a_lost_session_ends_with_its_error(world, monkeypatch):
    async with request(world, f"GET {STREAM}") as (reader, _):
        await reader.readuntil(b": keep-alive")
        (session,) = world.clients.sessions

        async def fail(*_, **__):
            raise AccessError("the token was revoked")

        monkeypatch.setattr(session._puller, "pull", fail)
        error = (await next_event(reader, "error"))["error"]
        assert error["code"] == "UNAUTHORIZED"
        await until_async(lambda: (world.tick(), not world.clients.sessions)[1], "the session ended")


async def test_client_that_leaves_a_pull_loses_nothing(world):
    async with request(world, f"POST {BILLING}/pull?start=earliest&wait_s=60"):
        await world.broker.wait_until_subscribed("order", "billing")
        (session,) = world.clients.sessions
    await until_async(lambda: not session._users, "the pull ended")
    await world.send({"properties": {"n": "1"}})
    (message,) = await world.pull()
    assert message["attempt"] == 1


async def test_stalled_reader_loses_its_messages_and_connection():
    async with served(stall_s=1, keep_alive_s=1, unacked_max=500) as world:
        await world.send(*({"properties": {"text": "x" * 30_000}} for _ in range(250)))
        async with request(world, f"GET {STREAM}&unacked_max=500&lease_s=1") as (reader, writer):
            await next_event(reader)
            writer.transport.pause_reading()
            (session,) = world.clients.sessions
            await until_async(lambda: not session._users, "the stream ended")
        assert len(session.deliveries) < 250


async def test_stopping_gateway_ends_streams_and_pulls(world):
    async with (
        request(world, f"GET {STREAM}") as (reader, _),
        request(world, f"POST {BILLING}/pull?client=b&start=earliest&wait_s=60") as (pulling, _),
    ):
        await reader.readuntil(b": keep-alive")
        await until_async(lambda: len(world.clients.sessions) == 2, "both sessions are open")
        await world.clients.close()
        assert (await next_event(reader, "error"))["error"]["code"] == "NOT_SERVED"
        assert b"503" in await pulling.readuntil(b"\r\n")
