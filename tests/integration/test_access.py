"""Shell. Tokens on real metaservers: printed once, limited, rotated, revoked, required everywhere."""

from __future__ import annotations

import asyncio
import re

import grpc
import httpx
import pytest

from qmq.metaserver.access import RPC_ROLES
from qmq.proto import qmq_pb2 as pb
from qmq.rights import TokenRole, includes
from tests.integration.metaserver_world import TOKEN, WAIT_S, World

ROLES = sorted(set(TokenRole) - {TokenRole.CLUSTER})
SERVICE = pb.DESCRIPTOR.services_by_name["Metaserver"]


def metadata(token):
    return [("x-api-token", token)] if token else []


async def make(world, role, name=None, *, token=TOKEN, **words):
    answer = await world.post("AddToken", token=token, name=name or role, role=role, **words)
    assert answer["status"] == 0, answer
    return answer["data"]


async def call(world, method, token, request=b"", *, timeout=20):
    """Call a method of the service by its name, with bytes; return the status that it ends with."""
    return (await call_with_words(world, method, token, request, timeout=timeout))[0]


async def call_with_words(world, method, token, request, *, timeout=20):
    path = f"/{SERVICE.full_name}/{method}"
    # One request, to the methods that take several too. gRPC ends a stream of requests as CANCELLED if it is refused
    # while it still writes.
    stream = world.channel.unary_stream(path)(request, metadata=metadata(token), timeout=timeout)
    try:
        async for _ in stream:
            return grpc.StatusCode.OK, ""
        return await stream.code(), await stream.details()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


def printed(capsys):
    return re.findall(r"first admin token, shown only now: (\S+)", capsys.readouterr().out)


REQUESTS = {
    "Register": pb.BrokerIdentity(
        hostname="a", ip="127.0.0.1", serve_port=20001, sync_port=2, incarnation="another disk"
    ),
    "Heartbeat": pb.BrokerState(hostname="a", serve_port=20001, incarnation="disk of a"),
    "WatchRoutes": pb.RouteRequest(subjects=["new"], app="x", client_id="y", produces=True),
    "BeginGroups": pb.BeginGroupsRequest(broker_group="g1", groups=[pb.NewGroup(subject="new", group="g")]),
    "CheckToken": pb.TokenQuestion(token=TOKEN),
    "CountOldRoutes": pb.OldRoutesQuestion(broker_group="g1", subject="*"),
    "HoldLease": pb.LeaseRequest(name="watchdog/default", node="x", address="127.0.0.1:1"),
    "ListSources": pb.SourcesQuestion(room="default"),
}
"""Method -> a request that would change or return something."""


async def kept(world):
    """Return stored tables and leases, without columns of the clock and heartbeats."""
    leases = await world.server._database.read(lambda repository: repository.leases())
    return (await world.server._database.read(lambda repository: repository.dump()))["tables"], leases


async def test_every_method_requires_a_token_and_a_role(world):
    """Weakness 27: the port had no authentication at all. A refused call changes nothing."""
    assert REQUESTS.keys() == {method.name for method in SERVICE.methods}, "each method has its question"
    await world.add("g1", 0, "a", 20001)
    tokens = {role: (await make(world, role, f"the {role}"))["token"] for role in ROLES}
    before = await kept(world)
    for name, request in REQUESTS.items():
        for wrong in ("", "wrong", tokens["broker"][:-1] + "x"):
            assert await call(world, name, wrong) == grpc.StatusCode.UNAUTHENTICATED, name
        for role, token in tokens.items():
            if any(includes(role, needed) for needed in RPC_ROLES[name]):
                # An admitted stream may send nothing. A refusal comes at once, if the machine is not busy.
                assert await call(world, name, token, timeout=2) != grpc.StatusCode.PERMISSION_DENIED, (name, role)
                continue
            code, words = await call_with_words(world, name, token, request.SerializeToString())
            assert code == grpc.StatusCode.PERMISSION_DENIED, (name, role)
            assert words.startswith(f"token 'the {role}' has the role {role}; this needs "), words
            assert all(needed in words.partition("needs")[2] for needed in RPC_ROLES[name]), words
    assert await kept(world) == before
    lease = REQUESTS["HoldLease"].SerializeToString()
    assert await call(world, "HoldLease", TOKEN, lease) == grpc.StatusCode.OK and await kept(world) != before
    for unknown in ("Nothing", "ServerReflectionInfo"):
        assert await call(world, unknown, "") == grpc.StatusCode.UNAUTHENTICATED
        assert await call(world, unknown, TOKEN) == grpc.StatusCode.PERMISSION_DENIED


async def test_two_new_metaservers_share_one_printed_admin_token(tmp_path, capsys):
    worlds = [World(tmp_path / "metaserver.db"), World(tmp_path / "metaserver.db")]
    await asyncio.gather(*(world.start() for world in worlds))
    try:
        [token] = printed(capsys)
        for world in worlds:
            await world.until(lambda world=world: accepts(world, token))
            assert (await make(world, "viewer", token=token))["role"] == "viewer"
    finally:
        for world in worlds:
            await world.stop()
    again = await World(tmp_path / "metaserver.db").start()
    await again.stop()
    assert printed(capsys) == [], "printed once, ever"


async def accepts(world, token):
    answer = await world.http.get("/metrics", headers={"X-Api-Token": token})
    return answer.status_code == 200


async def test_tokens_are_rotated_and_revoked_at_all_metaservers(world, tmp_path):
    """Weakness 28: no expiry, no roles, compared by look-up in a file."""
    other = await world.another()
    old, new = await make(world, "viewer", "dashboard"), await make(world, "viewer", "dashboard")
    third = await world.post("AddToken", name="dashboard", role="viewer")
    assert third["status"] == -1 and "two tokens named dashboard" in third["message"]
    for row in (old, new):
        await other.until(lambda row=row: accepts(other, row["token"]))
    await world.done("RevokeToken", id=old["id"])
    assert not await accepts(world, old["token"]) and await accepts(world, new["token"])

    async def is_refused():
        return not await accepts(other, old["token"])

    await other.until(is_refused)
    assert await accepts(other, new["token"])
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for row in (old, new):
        assert row["token"].rpartition("_")[2].encode() not in stored, "only hashes are stored"


async def test_broker_token_is_limited_to_its_groups(world):
    """Weakness 27: any caller could replace a broker."""
    await world.add("g1", 0, "a", 20001)
    await world.add("g2", 0, "b", 20003)
    await world.broker("b", 20003)
    token = (await make(world, "broker", groups="g1"))["token"]
    for hostname, port, code in (("a", 20001, None), ("b", 20003, grpc.StatusCode.PERMISSION_DENIED)):
        identity = pb.BrokerIdentity(
            hostname=hostname,
            ip="127.0.0.1",
            serve_port=port,
            sync_port=port + 1,
            control_port=9,
            metrics_port=9,
            incarnation="disk",
        )
        try:
            answer = await world.rpc.Register(identity, metadata=metadata(token))
            assert code is None and answer.broker_group == "g1"
        except grpc.aio.AioRpcError as error:
            assert error.code() == code and "may not use broker group 'g2'" in error.details()
    state = pb.BrokerState(hostname="b", serve_port=20003, incarnation="disk of b")
    assert await call(world, "Heartbeat", token, state.SerializeToString()) == grpc.StatusCode.PERMISSION_DENIED

    assert (await world.done("ListBrokers", brokerGroup="g2", details="true"))[0]["up"]


async def test_client_token_is_limited_to_its_subjects(world):
    await world.copies()
    token = (await make(world, "client", subjects="produce:order.*,consume:paid"))["token"]
    async with world.watch("order.new", "paid", "other", metadata=metadata(token)) as watch:
        await watch.until(lambda routes: len(routes) == 3 and routes["order.new"].groups)
        assert "may not produce to 'paid'" in watch.routes["paid"].refused
        assert "may not produce to 'other'" in watch.routes["other"].refused
    words = {"subject": ["order.new", "paid"], "produces": "false", "app": "x", "clientId": "y"}
    answer = await world.http.get("/meta/routes", params=words, headers={"X-Api-Token": token})
    refused = {route["subject"]: route.get("refused", "") for route in answer.json()["routes"]}
    assert "may not consume from 'order.new'" in refused["order.new"] and not refused["paid"]
    codes = {route["subject"]: route["refusedCode"] for route in answer.json()["routes"]}
    assert codes == {"order.new": "MISSING_RIGHT", "paid": ""}


@pytest.mark.parametrize("garbage", [b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n" * 50, b"\xff" * 70_000], ids=range(3))
async def test_garbage_ends_its_connection(world, garbage):
    """Weakness 31: garbage did not close a connection."""
    for port in (world.server.grpc_port, world.server.http_port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(garbage)
            async with asyncio.timeout(WAIT_S):
                while await reader.read(65536):
                    pass
        except ConnectionError:
            pass
        finally:
            writer.close()
    assert await accepts(world, TOKEN)


OPERATOR, PROXY = "203.0.113.7", "127.0.0.2"


@pytest.mark.parametrize(
    "trusted, sender, forwarded, peer",
    [
        pytest.param((), "127.0.0.1", OPERATOR, "127.0.0.1", id="no trusted proxy"),
        pytest.param(("127.0.0.1",), "127.0.0.1", OPERATOR, OPERATOR, id="nginx on this machine"),
        pytest.param(("127.0.0.1",), PROXY, OPERATOR, PROXY, id="forged header"),
        pytest.param((PROXY,), PROXY, OPERATOR, OPERATOR, id="nginx on another machine"),
        pytest.param(("127.0.0.2/31",), PROXY, OPERATOR, OPERATOR, id="nginx in a network"),
        pytest.param((PROXY,), PROXY, f"10.9.9.9, {OPERATOR}", OPERATOR, id="header extended by the caller"),
        pytest.param((PROXY,), PROXY, "x" * 1000, "x" * 100, id="long nonsense"),
    ],
)
async def test_audit_trail_has_addresses_behind_trusted_proxies(tmp_path, trusted, sender, forwarded, peer):
    world = await World(tmp_path / "metaserver.db", trusted_proxies=trusted).start()
    try:
        way = httpx.AsyncHTTPTransport(local_address=sender)
        async with httpx.AsyncClient(base_url=world.url, transport=way) as client:
            headers = {"X-Api-Token": TOKEN, "X-Forwarded-For": forwarded}
            words = {"name": "shop", "role": "client"}
            assert (await client.post("/api/v1/AddToken", json=words, headers=headers)).status_code == 200
        rows = (await world.done("AuditTrail", who="cluster", name="AddToken"))["rows"]
        assert [row["peer"] for row in rows] == [peer]
    finally:
        await world.close()
