"""Shell. A real database server that dies in the midst of a change which somebody makes from the console."""

from __future__ import annotations

import asyncio
import re

import pytest
from sqlalchemy import event

from qmq.metaserver.storage.database import DatabaseAway
from tests.unit.metaserver.console_world import ConsoleWorld, text_of

WORDS = {"action": "MarkReadonlyBrokerGroup", "brokerGroup": "g1", "subject": "*"}


async def in_world_on(server, test):
    url = server.create_database()
    world = ConsoleWorld(url)
    await world.open()
    try:
        await world.running_copies("g1")
        await world.routed("s1", "s2")
        await world.log_in("operator")
        await test(world)
    finally:
        server.ensure()
        world.database.close()
        server.drop_database(url)


async def planned(world):
    """Fill the form in and look at the plan; return the form that confirms it."""
    words = WORDS | {"csrf": await world.csrf()}
    shown = (await world.send("/change", step="plan", **words)).text
    return words | {"step": "confirm", "plan": re.search(r'name="plan" value="([^"]+)"', shown)[1]}


async def is_back(world):
    while True:
        try:
            return await world.registry.mirror.catch_up()
        except DatabaseAway:
            await asyncio.sleep(0.05)


async def marks_stored(world):
    """Whether the mark is in the database itself, and how many rows of the trail say so."""
    marks = (await world.database.read(lambda repository: repository.load())).marks
    return len(marks), sum(row.action == WORDS["action"] for row in await world.audit())


def dies_before_its_row_of_the_trail(world, server):
    """The change is written, and what would say in the audit trail who made it is not."""
    kill = once(server.kill)

    def look(_connection, _cursor, statement, *_):
        if statement.startswith("INSERT INTO audit"):
            kill()

    event.listen(world.database._engine, "before_cursor_execute", look)


def dies_as_it_commits(world, server):
    kill, written = once(server.kill), []

    def look(_connection, _cursor, statement, *_):
        if statement.startswith("INSERT INTO audit"):
            written.append(statement)

    event.listen(world.database._engine, "after_cursor_execute", look)
    event.listen(world.database._engine, "commit", lambda _: written and kill())


def once(act):
    left = [act]
    return lambda: left.pop()() if left else None


def was_gone_already(world, server):
    server.stop()


@pytest.mark.parametrize("breaks", [was_gone_already, dies_before_its_row_of_the_trail, dies_as_it_commits])
def test_change_is_atomic_and_safely_repeated(database_server, breaks):
    async def test(world):
        confirm = await planned(world)
        breaks(world, database_server)
        answer = await world.send("/change", **confirm)
        text = text_of(answer.text)
        if breaks is dies_as_it_commits:
            assert "Unknown: " in text and "Check before you repeat it" in text, text
        else:
            assert "Nothing was changed: the database does not answer" in text, text
        assert "Done." not in text and "Traceback" not in text and "sqlalchemy" not in text.lower()
        assert "takes messages" in await world.read(), "pages go on from memory"

        database_server.ensure()
        await is_back(world)
        assert await marks_stored(world) == (0, 0)
        assert "Done." in (await world.send("/change", **confirm)).text
        assert await marks_stored(world) == (1, 1) and world.registry.directory.is_marked("g1", "*")
        assert "Done." in (await world.send("/change", **confirm)).text, "nothing is left to be changed"
        assert (await marks_stored(world))[0] == 1

    asyncio.run(in_world_on(database_server, test))
