"""Shell. Open streams end when their token is revoked; others continue."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from qmq.metaserver.rpc import access
from qmq.proto import qmq_pb2 as pb
from tests.integration.metaserver_world import METADATA, WAIT_S


async def test_streams_of_a_revoked_token_end(world, monkeypatch):
    """An open stream would keep its client's routes, or its broker's heartbeats, for ever."""
    monkeypatch.setattr(access, "REVIEW_S", 0.02)
    await world.add("g1", 0, "a", 20001)
    tokens = {}
    for role in ("client", "broker"):
        tokens[role] = await world.done("AddToken", name=role, role=role)
    of_client = [("x-api-token", tokens["client"]["token"])]
    of_broker = [("x-api-token", tokens["broker"]["token"])]
    watches = [world.rpc.WatchRoutes(metadata=metadata) for metadata in (of_client, METADATA)]
    for watch in watches:
        await watch.write(pb.RouteRequest(subjects=["a"]))
        await watch.read()
    identity = pb.BrokerIdentity(
        broker_group="g1", hostname="a", ip="127.0.0.1", serve_port=20001, sync_port=20002, incarnation="x"
    )
    await world.rpc.Register(identity, metadata=of_broker)
    beats = world.rpc.Heartbeat(metadata=of_broker)
    await beats.write(pb.BrokerState(hostname="a", serve_port=20001, incarnation="x"))
    assert (await beats.read()).broker_group == "g1"
    for token in tokens.values():
        await world.done("RevokeToken", id=token["id"])
    for stream in (watches[0], beats):
        with pytest.raises(grpc.aio.AioRpcError, match="was revoked"):
            async with asyncio.timeout(WAIT_S):
                while await stream.read() is not grpc.aio.EOF:
                    pass
        assert await stream.code() == grpc.StatusCode.UNAUTHENTICATED
    await watches[1].write(pb.RouteRequest(subjects=["b"]))
    assert await watches[1].read()
    async with asyncio.timeout(WAIT_S):
        while len(world.server.hubs.clients()) > 1:
            await asyncio.sleep(0.01)
    watches[1].cancel()
