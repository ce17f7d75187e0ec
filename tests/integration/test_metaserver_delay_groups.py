"""Shell. Groups of delay servers at the metaserver: their parts, the routes of delayed messages, marks and swaps."""

from __future__ import annotations

import grpc
import pytest

from qmq.types import GroupKind, Role
from tests.integration.metaserver_world import TOKEN
from tests.support.promises import Tries

DELAY = GroupKind.DELAY


async def test_operators_see_delay_roles_of_delay_servers(world):
    master, slave = await world.delay_copies()
    assert (master.assignment.role, slave.assignment.role) == (Role.MASTER, Role.SLAVE)
    shown = {row["hostname"]: row["role"] for row in await world.done("ListBrokers", brokerGroup="d1")}
    assert shown == {"d1-a": "DELAY_MASTER", "d1-b": "DELAY_SLAVE"}
    assert (await world.group("d1"))["kind"] == "DELAY"


async def test_unknown_delay_server_or_other_program_is_refused(world):
    with pytest.raises(grpc.aio.AioRpcError, match="--role=5 .master. or 6 .slave."):
        await world.broker("d1-a", kind=2)
    await world.add("d1", 5, "d1-a")
    with pytest.raises(grpc.aio.AioRpcError, match="a broker runs there"):
        await world.broker("d1-a", kind=1)


async def test_unknown_kind_of_groups_is_refused(world):
    async with world.watch("s", kind=7) as watch:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.next()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    answer = await world.http.get("/meta/routes?subject=s&kind=BACKUP", headers={"X-Api-Token": TOKEN})
    assert answer.status_code == 400


async def test_delayed_messages_go_to_all_delay_groups(world):
    await world.copies("g1")
    await world.delay_copies("d1")
    await world.delay_copies("d2")
    async with world.watch("order.changed", "%RETRY%s%g", kind=DELAY) as delayed, world.watch("other") as normal:
        await delayed.next()
        assert delayed.writable("order.changed") == delayed.writable("%RETRY%s%g") == {"d1": True, "d2": True}
        await normal.next()
        assert normal.writable("other") == {"g1": True}
        assert list(world.server.registry.routes) == ["other"]


async def test_new_delay_group_is_pushed_at_once(world):
    await world.copies("g1")
    async with world.watch("s", kind=DELAY) as watch:
        await watch.next()
        assert "AddBroker with roles 5 and 6" in watch.routes["s"].refused
        await world.delay_copies()
        await watch.until(lambda routes: not routes["s"].refused and watch.writable("s") == {"d1": True})


async def test_delay_mark_arrives_within_a_second(world):
    master, _ = await world.delay_copies()
    await world.copies("g1")
    async with world.watch("s", "t", kind=DELAY) as watch, world.watch("s") as normal:
        await watch.next()
        await normal.next()

        async def mark():
            await world.done("MarkReadonlyBrokerGroup", subject="s", brokerGroup="d1")
            await watch.until(lambda routes: watch.writable("s") == {"d1": False})

        for number in (tries := Tries(1.0, "a mark is known")):
            if number:
                await world.done("UnMarkReadonlyBrokerGroup", subject="s", brokerGroup="d1")
                await watch.until(lambda routes: watch.writable("s") == {"d1": True})
            await tries.time_async(mark)
        assert watch.writable("t") == {"d1": True}, "the mark is of another subject"
        await world.done("MarkReadonlyBrokerGroup", brokerGroup="d1")
        await watch.until(lambda routes: watch.writable("t") == {"d1": False})
        await master.until_assigned(lambda assignment: set(assignment.readonly_subjects) == {"*", "s"})
        await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="d1")
        await watch.until(lambda routes: watch.writable("t") == {"d1": True})
        assert normal.writable("s") == {"g1": True} and len(normal.versions) == 1
