"""Shell. Actions on two metaservers of one database: who still holds an old route, and who is connected, at either."""

from __future__ import annotations

import asyncio

from qmq.proto import qmq_pb2 as pb


async def know_each_other(*worlds):
    for world in worlds:
        await world.until(lambda world=world: _sees(world, len(worlds)))


async def _sees(world, count):
    return len([row for row in await world.done("ListMetaservers") if row["up"]]) == count


async def confirm(watch, subject):
    """Say which route is used, as a client does once it took it over."""
    held = {subject: watch.routes[subject].version}
    await watch.call.write(pb.RouteRequest(app="test", client_id="c1", produces=True, held=held))


async def test_mark_waits_for_clients_of_every_metaserver(world):
    """Weakness 20: an order to keep away from a group is known to be followed, wherever clients are connected."""
    await world.copies("g1")
    await world.copies("g2")
    other = await world.another()
    await know_each_other(world, other)
    async with other.watch("s") as watch:
        await watch.until(lambda routes: "s" in routes and any(group.writable for group in routes["s"].groups))
        await confirm(watch, "s")
        group = next(one.broker_group for one in watch.routes["s"].groups if one.writable)
        marked = await world.done("MarkReadonlyBrokerGroup", brokerGroup=group, details="true")
        assert (marked["producers"], marked["watchers"], marked["allKnow"]) == (1, 1, False)
        waiting = asyncio.create_task(
            world.done("MarkReadonlyBrokerGroup", brokerGroup=group, waitMs=20_000, details="true")
        )
        await watch.until(lambda routes: not watch.writable("s")[group])
        assert not waiting.done(), "it was told, and did not say yet that it follows"
        await confirm(watch, "s")
        known = await waiting
        assert known["allKnow"] and known["producers"] == 0 and known["metaserversUnasked"] == []


async def test_clients_of_every_metaserver_are_listed(world):
    """Weakness 37: who is connected can be asked at any metaserver."""
    await world.copies("g1")
    other = await world.another()
    await know_each_other(world, other)
    async with other.watch("s") as watch:
        await watch.next()
        listed = await world.done("Clients")
        assert [(one["app"], one["clientId"], one["subjects"]) for one in listed["clients"]] == [("test", "c1", ["s"])]
        assert listed["unasked"] == [] and (await world.done("Clients", here="true"))["clients"] == []
