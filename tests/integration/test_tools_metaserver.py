"""Shell. Commands and their output against a real metaserver, with brokers that keep no log."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.metaserver_world import TOKEN
from tests.integration.tools_world import DONE, UNKNOWN, run


async def tool(world, command, *words, token=TOKEN, **options):
    return await asyncio.to_thread(run, command, world.url, *words, token=token, **options)


async def change(world, command, *words, **options):
    """Make a change; its answer must be of this version; return the output."""
    ended = await tool(world, command, "--yes", *words, **options)
    assert ended.returncode == DONE and "another version" not in ended.stderr, (command, ended.stderr)
    return ended.stdout


def broker(role, hostname, port=20881):
    words = {"brokerGroup": "g1", "role": role, "hostname": hostname, "ip": "127.0.0.1"}
    return words | {"servePort": port, "syncPort": port + 1}


def cells(text):
    """Return the rows of a table, without its head."""
    return [line.split() for line in text.splitlines()[1:]]


async def test_operator_runs_the_life_of_a_group(world):
    await change(world, "AddBroker", **broker(0, "a"))
    added = await change(world, "AddBroker", **broker(1, "b"))
    assert added == "b:20881 is now the SLAVE of g1\n"
    master, slave = await world.broker("a"), await world.broker("b")
    await world.until(lambda: world.writable("g1"))

    brokers = (await tool(world, "ListBrokers")).stdout
    assert [row[:3] for row in cells(brokers)] == [["g1", "MASTER", "a"], ["g1", "SLAVE", "b"]]
    status = (await tool(world, "ReplicaStatus", brokerGroup="g1")).stdout
    assert "g1  term 2  writable\nlogs are equal" in status and f"{77:016x}" in status
    swapped = await change(world, "SwapRoles", brokerGroup="g1")
    assert "g1: term 3, master b:20881, slave a:20881" in swapped
    assert (await master.until_term(3)).role == 1

    await master.stop()
    await world.until(lambda: is_down(world, "a"))
    assert await change(world, "ReplaceBroker", **broker(1, "c")) == "a:20881 was the SLAVE of g1 and is replaced\n"
    assert (await slave.until_term(4)).role == 0
    assert await change(world, "RemoveBroker", hostname="c", servePort=20881) == "c:20881 is removed from g1\n"


async def test_marks_drains_and_tags_are_shown(world):
    await world.copies("g1")
    await world.copies("g2")
    await change(world, "AddNewSubject", subject="order.changed", tag="fast")
    marked = await change(world, "MarkReadonly", "--wait=5", brokerGroup="g1", subject="order.changed")
    assert marked.splitlines()[1] == "no client holds the old route"
    assert cells((await tool(world, "ListReadonly")).stdout)[0][:3] == ["g1", "order.changed", "marked"]
    assert "order.changed" in (await tool(world, "ListBrokerGroups")).stdout
    assert await change(world, "UnMarkReadonly", brokerGroup="g1", subject="order.changed") == "the mark is removed\n"
    assert "draining" in await change(world, "DrainGroup", brokerGroup="g1")
    assert cells((await tool(world, "ListBrokerGroups")).stdout)[0][2] == "draining"
    assert "again" in await change(world, "UndrainGroup", brokerGroup="g1")
    assert "g1 has the tag fast" in await change(world, "SetGroupTag", brokerGroup="g1", tag="fast")
    assert "no tag now" in await change(world, "SetGroupTag", brokerGroup="g1")


async def test_subjects_get_and_lose_routes(world):
    for group in ("g1", "g2", "g3"):
        await world.copies(group)
    assert await change(world, "AddNewSubject", subject="order.new", tag="fast") == (
        "order.new is known with the tag fast\n"
    )
    async with world.watch("order.changed") as watch:
        await watch.until(lambda routes: "order.changed" in routes)
    for group in await served(world) - {"g1", "g2"}:
        without = await change(world, "RemoveSubjectBrokerGroup", "--force", subject="*", brokerGroup=group)
        assert without == "1 route is changed\n"
    added = await change(world, "AddSubjectBrokerGroup", subject="order.changed", brokerGroup="g3")
    assert added.startswith("order.changed is served by ") and "g3" in added
    await change(world, "RemoveSubjectBrokerGroup", "--force", subject="order.changed", brokerGroup="g3")
    extended = await change(
        world, "ExtendSubjectRoute", relatedSubject="*", relatedBrokerGroup="g1", newBrokerGroup="g3"
    )
    assert extended == "1 route is changed\n" and await served(world) == {"g1", "g2", "g3"}
    assert (await tool(world, "QuerySubjectRoute", subject="order.changed")).stdout.count("yes") >= 6
    assert "is forgotten" in await change(world, "RemoveSubject", "--force", subject="order.changed")


async def served(world):
    """Return the broker groups of the only subject."""
    (row,) = cells((await tool(world, "ListSubjectRoutes", prefix="order.")).stdout)
    return set(row[1].split(","))


async def test_status_lists_brokers_that_are_down(world):
    _, slave = await world.copies()
    await slave.stop()
    status = await tool(world, "ReplicaStatus")
    assert status.returncode == DONE
    assert "not every copy answered" in status.stdout and "did not answer" in status.stdout


@pytest.mark.metaserver(swap_finish_ms=1500)
async def test_swap_with_a_lost_report_ends_with_4(world):
    _, slave = await world.copies()
    slave.report_new_terms = False
    ended = await tool(world, "SwapRoles", "--yes", brokerGroup="g1")
    assert ended.returncode == UNKNOWN and "did not report in time" in ended.stderr
    assert "tools.sh ReplicaStatus --metaserver=" in ended.stderr


async def is_down(world, hostname):
    rows = json.loads((await tool(world, "ListBrokers", "--json")).stdout)["data"]
    return not any(row["up"] for row in rows if row["hostname"] == hostname)
