"""Shell. Operators' actions on each of the three databases: races, `*`, removal, backup, the trail."""

from __future__ import annotations

import asyncio
import json

from tests.unit.metaserver.actions_world import World, place

SUBJECTS = 3000


def test_actions_are_the_same_on_every_database(database_url):
    """Weakness 6: on each database, changes are whole, races have one winner, and each change has its row."""

    async def body():
        world, other = World(database_url), World(database_url)
        await world.open()
        await other.open()
        try:
            await race(world, other)
            await change_many(world)
            await remove_and_restore(world)
        finally:
            world.database.close()
            other.database.close()

    asyncio.run(body())


async def race(world, other):
    answers = await asyncio.gather(
        *(one.run("AddBroker", **place("g1", 0, f"h{number}")) for number, one in enumerate([world, other] * 3))
    )
    assert sorted(answer.status for answer in answers) == [-1] * 5 + [0], answers
    assert [row.action for row in await world.audit()] == ["AddBroker"]
    assert (await other.done("ListBrokers")) == (await world.done("ListBrokers"))


async def change_many(world):
    for group in ("g2", "G2"):
        await world.done("AddBroker", **place(group, 0, f"{group}-a"))
    await world.routed(*(f"s{number}" for number in range(SUBJECTS)), groups=("g1",))
    words = {"relatedSubject": "*", "relatedBrokerGroup": "g1", "newBrokerGroup": "g2"}
    assert (await world.done("ExtendSubjectRoute", **words))["changed"] == SUBJECTS
    assert (await world.done("RemoveSubjectBrokerGroup", subject="*", brokerGroup="g1"))["changed"] == SUBJECTS
    assert {route.groups for route in world.registry.routes.values()} == {("g2",)}
    row = (await world.audit())[0]
    assert row.action == "RemoveSubjectBrokerGroup" and len(row.before) == len(row.after) == SUBJECTS


async def remove_and_restore(world):
    backup = json.dumps(await world.done("Backup"))
    await world.done("RemoveBroker", hostname="g2-a", servePort=20881, force="true")
    assert not world.registry.routes and set(world.registry.directory.groups) == {"g1", "G2"}
    await world.done("Restore", backup=backup, force="true")
    assert len(world.registry.routes) == SUBJECTS and world.registry.directory.groups["g2"].term > 2
    shown = await world.done("AuditTrail", limit=1)
    assert shown["rows"][0]["action"] == "Restore" and shown["rows"][0]["before"]["subject_route"] == SUBJECTS
