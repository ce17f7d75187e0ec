"""Shell. A broker asks a metaserver for the rights of tokens, over real sockets, and caches the answers."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from qmq.broker.settings import BrokerSettings
from qmq.errors import AccessError, CallError, NotServed
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverServicer, add_MetaserverServicer_to_server
from qmq.remoting.commands import Command, Produced, decode_produced, encode_json, encode_produced
from qmq.remoting.connection import connect
from qmq.rights import TokenRole
from qmq.server import access as module
from qmq.server.acceptor import Acceptor, Port, _Guest
from qmq.server.access import Access
from qmq.server.overload import BATCH_BYTES, MemoryAlarm, Shares
from qmq.types import Durability, Endpoint
from tests.support.http import HttpServer
from tests.support.ports import free_ports

OWN = "the key of the installation"


class FakeMetaserver(MetaserverServicer):
    """Metaserver with some tokens; records its requests, and returns its gRPC address by HTTP."""

    def __init__(self):
        self.answers: dict[str, pb.TokenAnswer] = {}
        self.asked: list[tuple[str, str]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def start(self):
        self._server = grpc.aio.server()
        add_MetaserverServicer_to_server(self, self._server)
        [port] = free_ports(1)  # gRPC delays connections to a port that refused one
        assert self._server.add_insecure_port(f"127.0.0.1:{port}") == port
        await self._server.start()

        self._http = HttpServer(lambda _: ("200 OK", f"127.0.0.1:{port}".encode()))
        await self._http.start()
        self.url = f"http://127.0.0.1:{self._http.port}"

    async def stop(self):
        await self._server.stop(None)
        await self._http.stop()

    async def CheckToken(self, request, context):
        self.asked.append((request.token, dict(context.invocation_metadata())["x-api-token"]))
        await self.may_answer.wait()
        if request.token not in self.answers:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the API token is not valid")
        return self.answers[request.token]


class Guest:
    def __init__(self):
        self.reasons = []
        self.is_out = asyncio.Event()

    def revoke(self, reason):
        self.reasons.append(reason)
        self.is_out.set()


class Silent:
    """Handler of a connection that only sends requests."""

    def packet_received(self, connection, packet):
        pass

    def connection_lost(self, connection, reason):
        pass

    def writable_again(self, connection):
        pass


def a_service():
    """Return the service of an accepted connection."""
    has_lost = asyncio.Event()
    node = SimpleNamespace(group="g1", link_lost=lambda connection: has_lost.set())
    produced = encode_produced(Produced(0, 1, Durability.FSYNC, []))
    return SimpleNamespace(
        node=node,
        acceptors={},
        shares=Shares(),
        guarded=lambda call: call(),
        has_lost=has_lost,
        log_once=lambda peer, error: None,
        now_ms=lambda: 0,
        monotonic_ms=lambda: 0,
        memory_alarm=MemoryAlarm(1 << 30),
        packet_received=lambda *what: asyncio.get_running_loop().call_soon(_Guest.answer, *what, produced),
    )


def a_port(connections_max=10):
    return Port(frozenset({Command.PRODUCE}), 1, connections_max)


class Clock:
    now_ms = 1_000_000


@pytest.fixture
async def metaserver():
    metaserver = FakeMetaserver()
    await metaserver.start()
    yield metaserver
    await metaserver.stop()


@pytest.fixture
async def access(metaserver, monkeypatch):
    monkeypatch.setattr(module, "_now_ms", lambda: Clock.now_ms)
    access = Access(BrokerSettings(hostname="b", data=Path("unused"), token=OWN, metaserver=metaserver.url))
    yield access
    await access._disconnect()


def answer(name="shop", role="client", valid_ms=20_000, **more):
    return pb.TokenAnswer(name=name, role=role, valid_ms=valid_ms, **more)


async def test_own_token_needs_no_request(metaserver, access):
    await metaserver.stop()
    assert (await access.check(OWN)).role == access.own(OWN).role == TokenRole.CLUSTER
    assert access.own(OWN + "x") is None and access.own("") is None and access.own("\udcff") is None
    await metaserver.start()


async def test_metaserver_returns_a_tokens_rights(metaserver, access):
    metaserver.answers["t"] = answer(subjects=["order.*"], groups=["g1"])
    caller = await access.check("t")
    assert (caller.name, caller.role) == ("shop", TokenRole.CLIENT)
    assert (caller.scope.subjects, caller.scope.groups) == (("order.*",), ("g1",))
    assert metaserver.asked == [("t", OWN)]


async def test_connections_with_one_token_share_a_request(metaserver, access):
    metaserver.answers["t"] = answer()
    metaserver.may_answer.clear()
    checks = [asyncio.ensure_future(access.check("t")) for _ in range(50)]
    while not metaserver.asked:
        await asyncio.sleep(0)
    metaserver.may_answer.set()
    assert {caller.name for caller in await asyncio.gather(*checks)} == {"shop"}
    await access.check("t")
    assert len(metaserver.asked) == 1


async def test_failed_check_of_a_departed_connection_is_not_logged(metaserver, access):
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    metaserver.may_answer.clear()
    check = asyncio.ensure_future(access.check("unknown"))
    while not metaserver.asked:
        await asyncio.sleep(0)
    check.cancel()
    await asyncio.wait([check])
    await metaserver.stop()
    while access._asking:
        await asyncio.sleep(0)
    del check  # its frames have the task
    gc.collect()
    assert unseen == []
    await metaserver.start()


async def test_unknown_token_is_cached_for_five_seconds(metaserver, access):
    for _ in range(3):
        with pytest.raises(AccessError, match="not valid"):
            await access.check("nobody's")
    assert len(metaserver.asked) == 1
    metaserver.answers["nobody's"] = answer()
    Clock.now_ms += 5000
    assert (await access.check("nobody's")).name == "shop", "it was created meanwhile"


async def test_known_tokens_survive_a_metaserver_outage(metaserver, access):
    metaserver.answers["t"] = answer()
    await access.check("t")
    await metaserver.stop()
    Clock.now_ms += 24 * 3600 * 1000
    assert (await access.check("t")).name == "shop"
    with pytest.raises(NotServed, match="new here"):
        await access.check("a new one")
    await metaserver.start()


async def test_token_expires_in_an_outage(metaserver, access):
    metaserver.answers["t"] = answer(expires_in_ms=60_000)
    await access.check("t")
    await metaserver.stop()
    Clock.now_ms += 59_999
    assert (await access.check("t")).name == "shop"
    Clock.now_ms += 1
    with pytest.raises(NotServed):
        await access.check("t")
    await metaserver.start()


async def test_revocation_ends_connections_within_a_minute(metaserver, access):
    metaserver.answers |= {"t": answer(), "other": answer("other")}
    revoked, other = Guest(), Guest()
    for token, guest in (("t", revoked), ("other", other)):
        await access.check(token)
        access.entered(token, guest)
    del metaserver.answers["t"]
    await access._review("t")
    assert revoked.reasons == [], "the cached answer is still valid"
    Clock.now_ms += 60_000 - int(module.REVIEW_S * 1000)
    for token in ("t", "other"):
        await access._review(token)
    assert revoked.reasons == ["the API token is not valid"] and other.reasons == []
    access.left("other", other)
    assert not access._guests.get("other")


async def test_review_runs_periodically(metaserver, access):
    module_review_s, module.REVIEW_S = module.REVIEW_S, 0.01
    metaserver.answers["t"] = answer(valid_ms=0)
    guest = Guest()
    await access.check("t")
    access.entered("t", guest)
    task = asyncio.ensure_future(access.run())
    try:
        del metaserver.answers["t"]
        await asyncio.wait_for(guest.is_out.wait(), 60)
    finally:
        module.REVIEW_S = module_review_s
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_closed_channel_fails_all_its_requests(metaserver, access):
    """Closing the channel cancels its other requests; a cancelled review would never run again."""
    metaserver.answers |= {"a": answer("a"), "b": answer("b")}
    metaserver.may_answer.clear()
    first = asyncio.ensure_future(access.check("a"))
    while not metaserver.asked:
        await asyncio.sleep(0)
    second = asyncio.ensure_future(access.check("b"))
    while len(metaserver.asked) < 2:
        await asyncio.sleep(0)
    await access._disconnect()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(result) for result in results] == [NotServed, NotServed]


async def test_second_authenticate_is_refused(metaserver, access):
    """A second token would leave the first one with a connection that never ends."""
    metaserver.answers |= {"a": answer("a"), "b": answer("b")}
    service = a_service()
    acceptor = Acceptor(service, a_port(), access._settings, access)
    server = await asyncio.get_running_loop().create_server(lambda: acceptor.connection, "127.0.0.1", 0)
    async with server:
        endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        mine, _ = await connect(endpoint, handler=Silent(), token="a", app="t", packet_bytes_max=1 << 20, timeout_s=5)
        with pytest.raises(CallError, match="is authenticated already"):
            await mine.request(Command.AUTHENTICATE, encode_json(token="b", app="t"))
        assert (access.connections_of("a"), access.connections_of("b")) == (1, 0)
        mine.close("done")
        await service.has_lost.wait()
    assert (access.connections_of("a"), access.connections_of("b")) == (0, 0)


async def test_sharing_producers_receive_a_batch_size(metaserver, access):
    """Other producers wait while a batch is written to two disks."""
    service = a_service()

    def accepted():
        return Acceptor(service, a_port(), access._settings, access).connection

    server = await asyncio.get_running_loop().create_server(accepted, "127.0.0.1", 0)
    async with server:
        way = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        options = {"handler": Silent(), "token": OWN, "app": "t", "packet_bytes_max": 1 << 20, "timeout_s": 5}
        first, other = [(await connect(way, **options))[0] for _ in range(2)]
        heard = [decode_produced(await asker.request(Command.PRODUCE)).batch_bytes for asker in (first, other, first)]
        first.close("done")
        await service.has_lost.wait()
        heard.append(decode_produced(await other.request(Command.PRODUCE)).batch_bytes)
        other.close("done")
    assert heard == [0, BATCH_BYTES, BATCH_BYTES, 0]


async def test_unauthenticated_connection_does_not_reach_the_core(metaserver, access):
    """The core has no such connection; each call makes it scan all waiting requests."""
    service, port = a_service(), a_port()
    acceptor = Acceptor(service, port, access._settings, access)
    server = await asyncio.get_running_loop().create_server(lambda: acceptor.connection, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        while port.connections:
            await asyncio.sleep(0)
    assert not service.has_lost.is_set() and not port.unauthenticated


def test_oldest_stranger_of_the_port_makes_room():
    port, other = a_port(2), a_port(2)
    assert [port.entered(name) for name in ("a", "b", "c")] == [None, None, "a"]
    del port.unauthenticated["b"]  # it logged in
    assert [port.entered(name) for name in ("d", "e")] == ["c", "d"]
    del port.unauthenticated["e"]
    assert port.entered("f") == "f", "without a stranger the new connection leaves"
    assert other.entered("g") is None, "a crowd on one port leaves the other open"
