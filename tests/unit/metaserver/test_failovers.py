"""Shell. A failover step by step, on a real database: who is asked, what is stored, and what if that fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from qmq.errors import OutcomeUnknown
from qmq.metaserver.db.errors import StaleTerm
from qmq.metaserver.failover import Refusal
from qmq.metaserver.failovers import Failovers
from tests.unit.metaserver.actions_world import World


async def a_master_is_gone(path):
    """A group whose master has ended; its slave has everything."""
    world = World(path / "database")
    await world.open()
    await world.running_copies()
    world.beat("g1-a", incarnation="disk of g1-a", in_step=("disk of g1-b",))
    world.beat("g1-b", incarnation="disk of g1-b", in_sync=True, flushed_end=4096)
    world.stop("g1-a")
    return world, failovers_of(world)


def failovers_of(world):
    return Failovers(world.registry, world.brokers, replace(world.settings, failover=True))


def row(world):
    group = world.registry.directory.groups["g1"]
    return group.term, group.master.hostname, group.slave.hostname


async def fail_over(world, failovers, monkeypatch):
    """Fail over; the new master is at work as soon as the row says so."""
    monkeypatch.setattr("qmq.metaserver.failovers._is_at_work", lambda registry, group: True)
    await failovers.fail_over("g1")


def test_the_slave_becomes_the_master_and_the_trail_has_the_report(tmp_path, monkeypatch):
    async def test() -> None:
        world, failovers = await a_master_is_gone(tmp_path)
        await fail_over(world, failovers, monkeypatch)
        assert row(world) == (3, "g1-b", "g1-a") and world.brokers.held == ["g1-b"]
        newest = (await world.audit())[0]
        assert (newest.action, newest.parameters["epoch"], newest.parameters["slaveEnd"]) == ("Failover", [2, 0], 4096)
        assert (newest.before["term"], newest.after["term"]) == (2, 3)
        await fail_over(world, failovers, monkeypatch)
        assert row(world)[0] == 3, "the new master is there"

    asyncio.run(test())


def test_a_slave_that_hears_its_master_stays_the_slave(tmp_path, monkeypatch):
    async def test() -> None:
        world, failovers = await a_master_is_gone(tmp_path)
        world.brokers.hears_its_master = True
        await fail_over(world, failovers, monkeypatch)
        assert row(world) == (2, "g1-a", "g1-b")
        assert world.registry.no_failover["g1"][0] == Refusal.HEARS_ITS_MASTER

    asyncio.run(test())


def test_a_slave_that_restarted_meanwhile_stays_the_slave_and_doctor_says_why(tmp_path, monkeypatch):
    async def test() -> None:
        world, failovers = await a_master_is_gone(tmp_path)
        world.beat("g1-b", incarnation="disk of g1-b", in_sync=False, flushed_end=4096)
        await fail_over(world, failovers, monkeypatch)
        assert row(world)[0] == 2 and not world.brokers.held
        checks = (await world.done("Doctor"))["checks"]
        (found,) = [check["found"] for check in checks if check["name"] == "group g1"]
        assert "not been in sync since its process began" in found

    asyncio.run(test())


def test_of_two_metaservers_one_does_it_and_the_paused_one_finds_that_it_is_done(tmp_path, monkeypatch):
    async def test() -> None:
        world, failovers = await a_master_is_gone(tmp_path)
        other = World(tmp_path / "database")
        await other.open()
        going_on, held = asyncio.Event(), other.brokers.prepare_failover
        other.brokers.states = world.brokers.states
        monkeypatch.setattr(other.registry, "is_gone", lambda broker, silence_ms: "it was paused, and has not looked")
        monkeypatch.setattr(other.registry, "last_state", world.registry.last_state)

        async def paused(broker, **words):
            await going_on.wait()
            return await held(broker, **words)

        monkeypatch.setattr(other.brokers, "prepare_failover", paused)
        late = asyncio.create_task(failovers_of(other).fail_over("g1"))
        await fail_over(world, failovers, monkeypatch)
        going_on.set()
        with pytest.raises(StaleTerm):
            await late
        assert row(world) == (3, "g1-b", "g1-a")
        assert [entry.action for entry in await world.audit()].count("Failover") == 1

    asyncio.run(test())


@pytest.mark.parametrize("stored", [True, False])
def test_a_commit_without_an_answer_is_looked_up(tmp_path, monkeypatch, stored):
    async def test() -> None:
        world, failovers = await a_master_is_gone(tmp_path)
        change = world.registry.change

        async def unanswered(changes, audit):
            if stored:
                await change(changes, audit)
            raise OutcomeUnknown("the connection broke in the commit")

        monkeypatch.setattr(world.registry, "change", unanswered)
        if stored:
            await fail_over(world, failovers, monkeypatch)
        else:
            with pytest.raises(OutcomeUnknown):
                await fail_over(world, failovers, monkeypatch)
        assert row(world)[0] == (3 if stored else 2)

    asyncio.run(test())


def test_a_silent_machine_is_noticed_without_a_closed_connection(tmp_path):
    async def test() -> None:
        world = World(tmp_path / "database")
        await world.open()
        await world.running_copies()
        master, now_ms = world.registry.directory.groups["g1"].master, world.registry.now_ms()
        assert world.registry.is_gone(master, 2000) == ""
        world.registry.now_ms = lambda: now_ms + 1900
        assert world.registry.is_gone(master, 2000) == ""
        world.registry.now_ms = lambda: now_ms + 2500
        assert world.registry.is_gone(master, 2000).startswith("it is silent for")

    asyncio.run(test())
