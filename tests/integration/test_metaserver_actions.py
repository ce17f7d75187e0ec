"""Shell. Actions on running metaservers: clients of all of them count, and races of role changes leave one master."""

from __future__ import annotations

import asyncio

from qmq.proto import qmq_pb2 as pb
from tests.integration.metaserver_world import place


async def until_both_are_listed(*worlds):
    for world in worlds:
        await world.until(lambda world=world: _sees(world, len(worlds)))


async def _sees(world, count):
    return len([row for row in await world.done("ListMetaservers") if row["up"]]) == count


async def confirm(watch, subject):
    """Confirm the used version, as a client does after an update."""
    held = {subject: watch.routes[subject].version}
    await watch.call.write(pb.RouteRequest(app="test", client_id="c1", produces=True, held=held))


async def test_mark_waits_for_clients_of_every_metaserver(world):
    """Weakness 20: operators cannot see whether clients follow a readonly mark."""
    await world.copies("g1")
    await world.copies("g2")
    other = await world.another()
    await until_both_are_listed(world, other)
    async with other.watch("s") as watch:
        await watch.until(lambda routes: "s" in routes and any(group.writable for group in routes["s"].groups))
        await confirm(watch, "s")
        group = next(group.broker_group for group in watch.routes["s"].groups if group.writable)
        marked = await world.done("MarkReadonlyBrokerGroup", brokerGroup=group, details="true")
        assert (marked["producers"], marked["watchers"], marked["allKnow"]) == (1, 1, False)
        waiting = asyncio.create_task(
            world.done("MarkReadonlyBrokerGroup", brokerGroup=group, waitMs=20_000, details="true")
        )
        await watch.until(lambda routes: not watch.writable("s")[group])
        assert not waiting.done(), "the client has the new route, and has not confirmed it"
        await confirm(watch, "s")
        known = await waiting
        assert known["allKnow"] and known["producers"] == 0 and known["metaserversUnasked"] == []


async def test_clients_of_every_metaserver_are_listed(world):
    """Weakness 37: QMQ has no list of connected clients. Here each metaserver lists the clients of all."""
    await world.copies("g1")
    other = await world.another()
    await until_both_are_listed(world, other)
    async with other.watch("s") as watch:
        await watch.next()
        listed = await world.done("Clients")
        assert [(client["app"], client["clientId"], client["subjects"]) for client in listed["clients"]] == [
            ("test", "c1", ["s"])
        ]
        assert listed["unasked"] == [] and (await world.done("Clients", here="true"))["clients"] == []


async def test_w16_no_term_ever_has_two_masters(world):
    """In QMQ two brokers can be master of one group by an operator's error."""
    master, slave = await world.copies()
    brokers = [master, slave]
    masters = {}

    def check():
        for broker in brokers:
            for assignment in broker.assignments:
                if assignment.HasField("master"):
                    acting = assignment.master.control_port
                    assert masters.setdefault(assignment.term, acting) == acting
                    assert (assignment.role == 0) == (acting == broker.control_port)

    for _ in range(3):
        await world.until(lambda: world.has_new_parts("g1"))
        [slave] = [broker for broker in brokers if broker.assignment.role == 1]
        actions = two_swaps(world, slave)
        actions += [world.post("ReplaceBroker", **place("g1", role, name)) for role, name in ((0, "g1-b"), (1, "g1-a"))]
        await asyncio.gather(*actions)
        check()
    for broker in brokers:
        terms = [assignment.term for assignment in broker.assignments]
        assert terms == sorted(terms), "terms never decrease"
    assert sorted(masters) == [2, 3, 4, 5]


def two_swaps(world, slave):
    """Request two swaps at once; the first continues when the second has its answer."""
    answered = asyncio.Event()

    async def swap():
        try:
            return await world.post("SwapRoles", brokerGroup="g1")
        finally:
            answered.set()

    slave.before_status = answered.wait
    return [swap(), swap()]
