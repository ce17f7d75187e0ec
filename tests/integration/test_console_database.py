"""Shell. A real database server that ends during a change made in the console."""

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
    """Return the numbers of stored marks and of their rows in the trail."""
    marks = (await console.database.read(lambda repository: repository.load())).marks
    return len(marks), sum(row.action == WORDS["action"] for row in await console.audit())


def ends_before_the_audit_row(console, server):
    """The change is written, its audit row is not."""
    kill = once(server.kill)

    def look(_connection, _cursor, statement, *_):
        if statement.startswith("INSERT INTO audit"):
            kill()

    event.listen(console.database._engine, "before_cursor_execute", look)


def ends_in_the_commit(console, server):
    kill, written = once(server.kill), []

    def look(_connection, _cursor, statement, *_):
        if statement.startswith("INSERT INTO audit"):
            written.append(statement)

    event.listen(console.database._engine, "after_cursor_execute", look)
    event.listen(console.database._engine, "commit", lambda _: written and kill())


def once(act):
    left = [act]
    return lambda: left.pop()() if left else None


def is_stopped_before(console, server):
    server.stop()


@pytest.mark.parametrize("breaks", [is_stopped_before, ends_before_the_audit_row, ends_in_the_commit])
async def test_change_is_atomic_and_safely_repeated(console, database_server, breaks):
    confirm = await planned(console)
    breaks(console, database_server)
    answer = await console.send("/change", **confirm)
    text = text_of(answer.text)
    if breaks is ends_in_the_commit:
        assert "Unknown: " in text and "Check before you repeat it" in text, text
    else:
        assert "Nothing was changed: the database does not answer" in text, text
    assert "Done." not in text and "Traceback" not in text and "sqlalchemy" not in text.lower()
    assert "accepts produces" in await console.read(), "pages are served from memory"

    database_server.ensure()
    await is_back(console)
    assert await marks_stored(console) == (0, 0)
    assert "Done." in (await console.send("/change", **confirm)).text
    assert await marks_stored(console) == (1, 1) and console.registry.directory.is_marked("g1", "*")
    assert "Done." in (await console.send("/change", **confirm)).text, "nothing would change"
    assert (await marks_stored(console))[0] == 1
