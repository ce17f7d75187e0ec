"""Shell. Operators' actions on each of the three databases: races, `*`, removal, backup, the trail."""

from __future__ import annotations

import asyncio
import json

from qmq.metaserver.storage import engine
from tests.unit.metaserver.actions_world import World, place

SUBJECTS = 3000
"""More than one statement takes, and more JSON than 64 KiB."""
PATIENCE_S = 120


async def test_actions_are_the_same_on_every_database(database_url, monkeypatch):
    """Weakness 6: on each database, changes are whole, races have one winner, and each change has its row."""
    # A machine that runs all tests may stand still for longer than a metaserver ever should.
    for limit in ("ANSWER_S", "NEXT_STATEMENT_S", "LOCK_S"):
        monkeypatch.setattr(engine, limit, PATIENCE_S)
    world, other = (World(database_url, timeout_ms=PATIENCE_S * 1000) for _ in range(2))
    await world.open()
    await other.open()
    try:
        await race(world, other)
        await keep_kinds(world, other)
        await change_many(world)
        await remove_and_restore(world)
    finally:
        world.database.close()
        other.database.close()


async def race(world, other):
    answers = await asyncio.gather(
        *(one.run("AddBroker", **place("g1", 0, f"h{number}")) for number, one in enumerate([world, other] * 3))
    )
    assert sorted(answer.status for answer in answers) == [-1] * 5 + [0], answers
    assert [row.action for row in await world.audit()] == ["AddBroker"]
    assert (await other.done("ListBrokers")) == (await world.done("ListBrokers"))


async def keep_kinds(world, other):
    """A group of delay servers is one for both metaservers, and after its name was used again."""
    await world.done("AddBroker", **place("d1", 5, "d1-a"))
    assert "stays one" in await other.refused("AddBroker", **place("d1", 1, "d1-b"))
    await other.done("AddBroker", **place("d1", 6, "d1-b"))
    rows = await world.done("ListBrokers", brokerGroup="d1")
    assert [row["role"] for row in rows] == ["DELAY_MASTER", "DELAY_SLAVE"]
    for name in ("d1-b", "d1-a"):
        await world.done("RemoveBroker", hostname=name, servePort=20881)
    await world.done("AddBroker", **place("d1", 0, "d1-a"))
    assert [row["role"] for row in await other.done("ListBrokers", brokerGroup="d1")] == ["MASTER"]
    await world.done("RemoveBroker", hostname="d1-a", servePort=20881)


async def change_many(world):
    for group in ("g2", "G2"):
        await world.done("AddBroker", **place(group, 0, f"{group}-a"))
    await world.routed(*(f"s{number}" for number in range(SUBJECTS)), groups=("g1",))
    words = {"relatedSubject": "*", "relatedBrokerGroup": "g1", "newBrokerGroup": "g2"}
    assert (await world.done("ExtendSubjectRoute", **words))["changed"] == SUBJECTS
    assert (await world.done("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g1"))["changed"] == SUBJECTS
    assert {route.groups for route in world.registry.routes.values()} == {("g2",)}
    row = (await world.audit())[0]
    assert len(json.dumps(row.before)) > 1 << 16
    assert row.action == "RemoveSubjectBrokerGroup" and len(row.before) == len(row.after) == SUBJECTS


async def remove_and_restore(world):
    backup = json.dumps(await world.done("Backup"))
    await world.done("RemoveBroker", hostname="g2-a", servePort=20881, force="true")
    assert not world.registry.routes and set(world.registry.directory.groups) == {"g1", "G2"}
    await world.done("Restore", backup=backup, force="true")
    assert len(world.registry.routes) == SUBJECTS and world.registry.directory.groups["g2"].term > 2
    shown = await world.done("AuditTrail", limit=1)
    assert shown["rows"][0]["action"] == "Restore" and shown["rows"][0]["before"]["subject_route"] == SUBJECTS
