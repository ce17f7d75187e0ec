"""Shell. A real database server that dies in the midst of a change which somebody makes from the console."""

from __future__ import annotations

import asyncio
import re

import pytest
from sqlalchemy import event

from qmq.metaserver.storage.database import DatabaseAway
from tests.unit.metaserver.console_world import ConsoleWorld, text_of

WORDS = {"action": "MarkReadonlyBrokerGroup", "brokerGroup": "g1", "subject": "*"}


@pytest.fixture
async def console(database_server):
    url = database_server.create_database()
    console = ConsoleWorld(url)
    await console.open()
    await console.running_copies("g1")
    await console.routed("s1", "s2")
    await console.log_in("operator")
    yield console
    database_server.ensure()
    console.close()
    database_server.drop_database(url)


async def planned(console):
    """Fill the form in and look at the plan; return the form that confirms it."""
    words = WORDS | {"csrf": await console.csrf()}
    shown = (await console.send("/change", step="plan", **words)).text
    return words | {"step": "confirm", "plan": re.search(r'name="plan" value="([^"]+)"', shown)[1]}


async def is_back(console):
    while True:
        try:
            return await console.registry.mirror.catch_up()
        except DatabaseAway:
            await asyncio.sleep(0.05)


async def marks_stored(console):
    """Whether the mark is in the database itself, and how many rows of the trail say so."""
    marks = (await console.database.read(lambda repository: repository.load())).marks
    return len(marks), sum(row.action == WORDS["action"] for row in await console.audit())


def dies_before_its_row_of_the_trail(console, server):
    """The change is written, and what would say in the audit trail who made it is not."""
    kill = once(server.kill)

    def look(_connection, _cursor, statement, *_):
        if statement.startswith("INSERT INTO audit"):
            kill()

    event.listen(console.database._engine, "before_cursor_execute", look)


def dies_as_it_commits(console, server):
    kill, written = once(server.kill), []

    def look(_connection, _cursor, statement, *_):
        if statement.startswith("INSERT INTO audit"):
            written.append(statement)

    event.listen(console.database._engine, "after_cursor_execute", look)
    event.listen(console.database._engine, "commit", lambda _: written and kill())


def once(act):
    left = [act]
    return lambda: left.pop()() if left else None


def was_gone_already(console, server):
    server.stop()


@pytest.mark.parametrize("breaks", [was_gone_already, dies_before_its_row_of_the_trail, dies_as_it_commits])
async def test_change_is_atomic_and_safely_repeated(console, database_server, breaks):
    confirm = await planned(console)
    breaks(console, database_server)
    answer = await console.send("/change", **confirm)
    text = text_of(answer.text)
    if breaks is dies_as_it_commits:
        assert "Unknown: " in text and "Check before you repeat it" in text, text
    else:
        assert "Nothing was changed: the database does not answer" in text, text
    assert "Done." not in text and "Traceback" not in text and "sqlalchemy" not in text.lower()
    assert "takes messages" in await console.read(), "pages go on from memory"

    database_server.ensure()
    await is_back(console)
    assert await marks_stored(console) == (0, 0)
    assert "Done." in (await console.send("/change", **confirm)).text
    assert await marks_stored(console) == (1, 1) and console.registry.directory.is_marked("g1", "*")
    assert "Done." in (await console.send("/change", **confirm)).text, "nothing is left to be changed"
    assert (await marks_stored(console))[0] == 1
