"""Shell. SetCopies --syncMode, SyncReplica and CancelSync: stored rows, orders to brokers, refusals."""

from __future__ import annotations

import pytest

from qmq.metaserver.model import BrokerKey
from qmq.metaserver.rpc.convert import assignment_for
from qmq.replication.readonly import Reason
from tests.unit.metaserver.actions_world import place


@pytest.fixture
async def world(world):
    """A metaserver with a group of three: g1-a is the master, g1-b counts, g1-c is new and waits to be filled."""
    await world.running_copies("g1")
    await world.done("AddBroker", **place("g1", 1, "g1-c"))
    await world.start("g1-c")
    world.beat("g1-a", in_step=("disk of g1-b",))
    world.beat("g1-b", incarnation="disk of g1-b", fill_id="disk of g1-b/1")
    await_fill(world)
    return world


def await_fill(world, fill_id="disk of g1-c/0", **state):
    reasons = {"readonly_reasons": (Reason.UNFILLED,)} if not state else {}
    world.beat("g1-c", incarnation="disk of g1-c", fill_id=fill_id, incomplete=True, **reasons, **state)


def fill_orders(world, hostname="g1-a"):
    """Return the mode and the fill orders of a broker's assignment."""
    assignment = assignment_for(world.registry.directory, BrokerKey(hostname, 20881))
    return assignment.sync_mode, [(fill.fill_id, fill.allowed) for fill in assignment.fills]


async def test_sync_mode_and_min_copies_are_independent(world):
    term = world.registry.directory.groups["g1"].term
    preview = await world.done("SetCopies", brokerGroup="g1", syncMode="manual", dryRun="true")
    assert (preview["before"]["syncMode"], preview["after"]["syncMode"]) == ("automatic", "manual")
    assert fill_orders(world) == ("automatic", [])
    shown = await world.done("SetCopies", brokerGroup="g1", syncMode="manual")
    assert (shown["syncMode"], shown["minCopies"]) == ("manual", 2) and fill_orders(world) == ("manual", [])
    assert world.registry.directory.groups["g1"].term == term, "acknowledgement is unchanged"
    (group,) = await world.done("ListBrokerGroups")
    assert group["syncMode"] == "manual"
    shown = await world.done("SetCopies", brokerGroup="g1", minCopies=3)
    assert (shown["syncMode"], shown["minCopies"]) == ("manual", 3) and fill_orders(world)[0] == "manual"
    await world.done("SetCopies", brokerGroup="g1", minCopies=2, syncMode="automatic")
    group = world.registry.directory.groups["g1"]
    assert (group.min_copies, group.sync_mode) == (2, "automatic")
    refused = await world.refused("SetCopies", brokerGroup="g1")
    assert "--syncMode" in refused


async def test_fill_order_is_stored_until_the_next(world):
    assert (await world.done("SyncReplica", brokerGroup="g1", host="g1-c"))["filling"] == "allowed"
    assert fill_orders(world) == ("automatic", [("disk of g1-c/0", True)])
    assert (await world.done("CancelSync", brokerGroup="g1", host="g1-c:20881"))["filling"] == "stopped"
    assert fill_orders(world) == ("automatic", [("disk of g1-c/0", False)])
    preview = await world.done("CancelSync", brokerGroup="g1", host="g1-c", dryRun="true")
    assert not preview["wouldChange"], "it is stopped already"
    await world.start("g1-c")  # registers again
    known = world.registry.directory.find(BrokerKey("g1-c", 20881))
    assert await world.registry.registration.register(known, None) == known, "the row is unchanged"
    assert fill_orders(world)[1] == [("disk of g1-c/0", False)]
    await world.done("SetCopies", brokerGroup="g1", minCopies=3)  # a new term rewrites all rows
    assert fill_orders(world)[1] == [("disk of g1-c/0", False)]
    actions = [(row.action, row.after) for row in await world.audit() if row.action in ("SyncReplica", "CancelSync")]
    assert sorted(actions) == [("CancelSync", {"g1-c:20881": "stopped"}), ("SyncReplica", {"g1-c:20881": "allowed"})]


@pytest.mark.parametrize(
    "command, host, why",
    [
        ("SyncReplica", "g1-b", "needs no fill"),
        ("CancelSync", "g1-b", "is in sync"),
        ("SyncReplica", "g1-a", "is no slave of g1; its slaves are g1-b:20881, g1-c:20881"),
        ("CancelSync", "nobody", "is no slave of g1"),
    ],
)
async def test_copy_without_fill_is_refused(world, command, host, why):
    refused = await world.refused(command, brokerGroup="g1", host=host)
    assert why in refused and fill_orders(world) == ("automatic", [])


async def test_counting_copy_is_never_stopped(world):
    await_fill(world, role=1)
    world.beat("g1-a", in_step=("disk of g1-b", "disk of g1-c"))
    refused = await world.refused("CancelSync", brokerGroup="g1", host="g1-c")
    assert "is in sync" in refused
    assert "needs no fill" in await world.refused("SyncReplica", brokerGroup="g1", host="g1-c")


async def test_whole_copy_may_wait_for_a_snapshot(world):
    world.beat("g1-c", incarnation="disk of g1-c", fill_id="disk of g1-c/4", readonly_reasons=(Reason.UNFILLED,))
    await world.done("SyncReplica", brokerGroup="g1", host="g1-c")
    assert fill_orders(world)[1] == [("disk of g1-c/4", True)]


async def test_fill_of_an_absent_slave_is_refused(world):
    world.stop("g1-c")
    refused = await world.refused("SyncReplica", brokerGroup="g1", host="g1-c")
    assert "Start it first" in refused


async def test_doctor_names_the_fill_command(world):
    checks = (await world.done("Doctor"))["checks"]
    [check] = [check for check in checks if "g1-c" in check["name"]]
    assert not check["ok"] and "SyncReplica --brokerGroup=g1 --host=g1-c:20881" in check["remedy"]
    (group,) = await world.done("ListBrokerGroups")
    assert [copy["readonlyReasons"] for copy in group["copies"]] == [[], [], ["unfilled"]]
    world.beat("g1-a", writable=False, readonly_reasons=(Reason.UNFILLED,))  # as of two copies
    wrong = [check["name"] for check in (await world.done("Doctor"))["checks"] if not check["ok"]]
    assert wrong == [check["name"]], "reasons of the master and the group follow from it"
