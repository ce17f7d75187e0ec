"""Shell. A metaserver restarts on a database that was emptied while brokers and clients ran."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from qmq.proto import qmq_pb2 as pb
from tests.integration.metaserver_world import METADATA, World
from tests.unit.metaserver.test_lost_database import empty


def has_groups(subject):
    return lambda routes: subject in routes and routes[subject].groups


async def test_cluster_goes_on_with_an_empty_database(tmp_path):
    world = await World(tmp_path / "database", snapshot=str(tmp_path / "snapshot")).start()
    try:
        await world.copies()
        token = (await world.done("AddToken", name="shop", role="client"))["token"]
        async with world.watch("order.changed") as watch:
            await watch.until(has_groups("order.changed"))
        await world.stop()
        empty(SimpleNamespace(url=f"sqlite:///{tmp_path / 'database'}"))
        await world.start()
        await world.until(lambda: _is_set_aside(world))
        answer = await world.rpc.CheckToken(pb.TokenQuestion(token=token), metadata=METADATA)
        assert answer.name == "shop", "tokens of running clients are valid"
        async with world.watch("order.changed", metadata=[("x-api-token", token)]) as watch:
            await watch.until(has_groups("order.changed"))
            async with world.watch("new.subject") as new:
                await new.next()
                assert "cannot be stored" in new.routes["new.subject"].refused
        broker = world._brokers[0]
        again = await world.rpc.Register(broker.identity(), metadata=METADATA)
        assert again.term == broker.assignment.term, "its place is in memory, so it gets its part"
        ready = (await world.http.get("/health/ready")).json()
        assert ready["ready"] and not ready["database"] and "no row of g1" in ready["trouble"]
        assert "AdoptDatabase" in (await world.post("DrainGroup", brokerGroup="g1"))["message"]
        await world.done("AdoptDatabase", keep="memory")
        assert (await world.http.get("/health/ready")).json() == {"ready": True, "database": True}
        async with world.watch("new.subject") as new:
            await new.until(has_groups("new.subject"))
    finally:
        for broker in world._brokers:
            await broker.stop()
        await world.stop()


async def _is_set_aside(world):
    return bool((await world.http.get("/health/ready")).json().get("trouble"))


async def test_unknown_broker_and_token_wait_for_the_database(tmp_path):
    world = await World(tmp_path / "database", snapshot="none").start()
    try:
        identity = pb.BrokerIdentity(
            hostname="g1-a",
            broker_group="g1",
            ip="127.0.0.1",
            serve_port=20881,
            sync_port=20882,
            term=4,
            incarnation="disk",
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await world.rpc.Register(identity, metadata=METADATA)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE, "a later request may succeed"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await world.rpc.CheckToken(pb.TokenQuestion(token="token of a client"), metadata=METADATA)
        assert unknown.value.code() == grpc.StatusCode.UNAVAILABLE, "the token may be in the lost database"
    finally:
        await world.stop()
