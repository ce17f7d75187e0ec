"""Shell. Operators' changes of roles on a running metaserver: swaps, races, refusals; W16."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.metaserver_world import place


async def test_swap_exchanges_roles_under_a_new_term(world):
    master, slave = await world.copies()
    swapped = await world.done("SwapRoles", brokerGroup="g1")
    assert (swapped["term"], swapped["logEnd"], swapped["chain"]) == (3, 4096, f"{77:016x}")
    assert swapped["master"]["hostname"] == "g1-b" and swapped["slave"]["hostname"] == "g1-a"
    assert swapped["writable"] is True
    assert (await master.until_term(3)).role == 1 and (await slave.until_term(3)).role == 0
    assert master.calls == ["PrepareSwap"] and slave.calls == ["ReplicaStatus"]
    await world.until(lambda: world.has_new_parts("g1"))
    back = await world.done("SwapRoles", brokerGroup="g1")
    assert back["term"] == 4 and back["master"]["hostname"] == "g1-a"


async def test_swap_is_refused_when_the_master_cannot_prepare(world):
    master, _ = await world.copies()
    master.prepare_error = "the slave is 8 bytes behind"
    assert "8 bytes behind" in await world.refused("SwapRoles", brokerGroup="g1")
    assert master.calls == ["PrepareSwap", "CancelSwap"] and (await world.group("g1"))["term"] == 2


async def test_half_swapped_group_has_a_master_and_no_slave(world):
    master, slave = await world.copies()
    await world.until(lambda: proven_complete(world, "g1-b"))
    for broker in (master, slave):
        await broker.stop()
    await world.until(lambda: down(world, "g1-a", "g1-b"))
    await world.replace("g1", 0, "g1-b")
    new_master = await world.broker("g1-b")
    assert new_master.assignment.role == 0 and not new_master.assignment.slaves
    with pytest.raises(Exception, match="ReplaceBroker.*--brokerGroup=g1 --role=1 --hostname=g1-a"):
        await world.broker("g1-a")
    assert "half swapped" in await world.refused("SwapRoles", brokerGroup="g1")
    await world.replace("g1", 1, "g1-a")
    await new_master.until_assigned(lambda assignment: assignment.term == 4 and assignment.slaves)


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


async def down(world, *hostnames):
    brokers = await world.done("ListBrokers", details="true")
    return not any(broker["up"] for broker in brokers if broker["hostname"] in hostnames)


async def proven_complete(world, hostname):
    brokers = world.server.registry.directory.brokers()
    return any(broker.complete for broker in brokers if broker.hostname == hostname)
