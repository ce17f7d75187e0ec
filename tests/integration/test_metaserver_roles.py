"""Shell. Operators' changes of roles on a running metaserver: swaps, races, refusals; W16."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.exc import OperationalError

from qmq.metaserver.model import AuditRow, Broker
from qmq.metaserver.roles.rules import replace_broker
from qmq.metaserver.storage.changes import SetRoles
from qmq.metaserver.storage.errors import CommitUnknown
from qmq.metaserver.storage.repository import Repository
from qmq.types import Role
from tests.integration.metaserver_world import World, place
from tests.support.waiting import until_async


async def test_swap_exchanges_roles_under_a_new_term(world):
    master, slave = await world.copies()
    swapped = await world.done("SwapRoles", brokerGroup="g1")
    assert (swapped["term"], swapped["logEnd"], swapped["chain"]) == (3, 4096, f"{77:016x}")
    assert swapped["master"]["hostname"] == "g1-b" and swapped["slave"]["hostname"] == "g1-a"
    assert swapped["writable"] is True
    assert (await master.until_term(3)).role == 1 and (await slave.until_term(3)).role == 0
    assert master.calls == ["PrepareSwap"] and slave.calls == ["ReplicaStatus"]
    await world.until(lambda: world.took_parts("g1"))
    back = await world.done("SwapRoles", brokerGroup="g1")
    assert back["term"] == 4 and back["master"]["hostname"] == "g1-a"


async def test_swap_is_refused_when_the_master_cannot_prepare(world):
    master, _ = await world.copies()
    master.prepare_error = "the slave is 8 bytes behind"
    assert "8 bytes behind" in await world.refused("SwapRoles", brokerGroup="g1")
    assert master.calls == ["PrepareSwap", "CancelSwap"] and (await world.group("g1"))["term"] == 2


@pytest.mark.metaserver(swap_finish_ms=1500)
async def test_swap_without_a_report_has_an_unknown_outcome(world):
    _, slave = await world.copies()
    slave.report_new_terms = False
    answer = await world.post("SwapRoles", brokerGroup="g1")
    assert answer["status"] == -2 and "term 3" in answer["message"]
    assert (await world.group("g1"))["term"] == 3


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
async def test_swap_with_an_unanswered_commit_is_resolved(world, monkeypatch, stored):
    master, _ = await world.copies()
    change = Repository.change

    def lose_answer(repository, changes, audit=None, order=None):
        monkeypatch.setattr(Repository, "change", change)
        if stored:
            change(repository, changes, audit, order)
        raise CommitUnknown("connection lost")

    monkeypatch.setattr(Repository, "change", lose_answer)
    answer = await world.post("SwapRoles", brokerGroup="g1")
    assert answer["status"] == (0 if stored else -1), answer
    assert (await world.group("g1"))["term"] == (3 if stored else 2)
    assert master.calls == (["PrepareSwap"] if stored else ["PrepareSwap", "CancelSwap"])


async def test_swap_during_a_database_outage_is_unknown(world, monkeypatch):
    await world.copies()

    def away(*_, **__):
        raise OperationalError("SELECT", {}, OSError("connection lost"))

    def lose_answer(repository, changes, audit=None, order=None):
        monkeypatch.setattr(Repository, "audit_trail", away)
        monkeypatch.setattr(Repository, "versions", away)
        raise CommitUnknown("connection lost")

    monkeypatch.setattr(Repository, "change", lose_answer)
    answer = await world.post("SwapRoles", brokerGroup="g1")
    monkeypatch.undo()
    assert answer["status"] == -2 and "ListBrokers" in answer["message"]


async def test_swap_loses_against_a_concurrent_change(world):
    """Two metaservers share the database: what decides is the compare-and-set, not a lock in one process."""
    master, slave = await world.copies()
    other = await World(world.settings.database.removeprefix("sqlite:///")).start()
    try:

        async def change_elsewhere():
            third = Broker("g1", Role.SLAVE, "g1-c", "127.0.0.1", 20881, 20882)
            known = other.server.registry.directory
            change, _ = replace_broker(known, third, lambda member: member.role == Role.MASTER)
            await other.server.registry.change([SetRoles(change)], AuditRow("otto", "", "ReplaceBroker"))

        def knows_all():  # that the slave is complete is stored some time after the group takes messages
            known = other.server.registry.directory
            return known == world.server.registry.directory and known.groups["g1"].slave.complete

        await until_async(knows_all)
        slave.before_status = change_elsewhere
        assert "changed" in await world.refused("SwapRoles", brokerGroup="g1")
    finally:
        await other.stop()
    assert master.calls == ["PrepareSwap", "CancelSwap"]
    group = await world.group("g1")
    assert group["term"] == 3
    assert (await master.until_term(3)).role == 0


async def test_concurrent_replacements_get_a_term_each(world):
    await world.add("g1", 0, "a")
    await world.add("g1", 1, "b")
    other = await World(world.settings.database.removeprefix("sqlite:///")).start()
    try:
        calls = [
            (world, other)[number % 2].post("ReplaceBroker", **place("g1", 1, f"c{number}")) for number in range(10)
        ]
        answers = await asyncio.gather(*calls)
    finally:
        await other.stop()
    done = [answer for answer in answers if answer["status"] == 0]
    assert (await world.group("g1"))["term"] == 2 + len(done)
    assert all("another change of g1" in answer["message"] for answer in answers if answer["status"])


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


@pytest.mark.metaserver(heartbeat_timeout_ms=300000)
async def test_returning_broker_is_not_replaced(world):
    await world.copies()
    await world.stop()
    await world.start()
    assert "is running" in await world.refused("ReplaceBroker", **place("g1", 1, "g1-c"))


async def test_w16_no_term_ever_has_two_masters(world):
    """Roles come from a table in QMQ too, but there two brokers could hold the mastership by an operator's error."""
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
        await world.until(lambda: world.took_parts("g1"))
        [slave] = [broker for broker in brokers if broker.assignment.role == 1]
        actions = two_swaps(world, slave)
        actions += [world.post("ReplaceBroker", **place("g1", role, name)) for role, name in ((0, "g1-b"), (1, "g1-a"))]
        await asyncio.gather(*actions)
        check()
    for broker in brokers:
        terms = [assignment.term for assignment in broker.assignments]
        assert terms == sorted(terms), "a term never goes back"
    assert sorted(masters) == [2, 3, 4, 5]


def two_swaps(world, slave):
    """Ask twice at the same time: whichever comes first goes on once the other one has its answer."""
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
