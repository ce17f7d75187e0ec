"""Shell. Brokers are replaced, swapped and removed. test_rules.py checks the rules."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, patch

import pytest

from qmq.errors import OutcomeUnknown
from qmq.metaserver.actions import Status
from qmq.metaserver.model import BrokerKey, PartedTail, ReplicaState
from qmq.metaserver.observability.collectors import StateMetrics
from qmq.metaserver.storage.database import DatabaseAway
from qmq.replication.identity import Point
from qmq.types import Epoch, Role
from tests.unit.metaserver.actions_world import place


def parts(world, group="g1"):
    known = world.registry.directory.groups[group]
    return known.master and known.master.hostname, known.slave and known.slave.hostname


async def test_two_replacements_swap_stopped_brokers(cluster):
    """Weakness 22: QMQ's own metaserver refuses the first of the two calls that its document describes."""
    cluster.stop("g1-b")
    cluster.stop("g1-a")
    first = await cluster.done("ReplaceBroker", **place("g1", 0, "g1-b"))
    second = await cluster.done("ReplaceBroker", **place("g1", 1, "g1-a"))
    assert (first["hostname"], second["hostname"]) == ("g1-a", "g1-b")
    assert parts(cluster) == ("g1-b", "g1-a") and cluster.registry.directory.groups["g1"].term == 4


async def test_replacement_by_itself_moves_the_addresses(cluster):
    cluster.stop("g1-b")
    before = await cluster.done("ReplaceBroker", **place("g1", 1, "g1-b") | {"ip": "10.0.0.2"})
    assert before["ip"] == "10.0.0.1" and cluster.registry.directory.groups["g1"].slave.ip == "10.0.0.2"
    assert cluster.registry.directory.groups["g1"].term == 2, "roles are unchanged"


async def test_presumed_broker_is_not_replaced(cluster):
    """A metaserver that has just started presumes that registered brokers run."""
    restarted = await cluster.another()
    restarted.brokers.states = cluster.brokers.states
    restarted.liveness.serve(restarted.registry.directory.brokers(), now_ms=restarted.registry.now_ms())
    assert "is running" in await restarted.refused("ReplaceBroker", **place("g1", 1, "g1-c"))


async def test_one_call_swaps_stopped_brokers(cluster):
    """Weakness 22: between QMQ's calls the group has one broker and no spare."""
    assert "is running" in await cluster.refused("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true")
    cluster.stop("g1-b")
    cluster.stop("g1-a")
    before = await cluster.done("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true")
    assert (before["hostname"], before["role"]) == ("g1-a", "MASTER") and parts(cluster) == ("g1-b", "g1-a")
    group = cluster.registry.directory.groups["g1"]
    assert (group.term, group.half_swapped, group.slave.complete) == (3, False, False)
    assert group.master.incarnation == "disk of g1-b" and group.slave.incarnation == "disk of g1-a"
    again = await cluster.done("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true")
    assert again["hostname"] == "g1-b" and cluster.registry.directory.groups["g1"].term == 3
    await cluster.done("ReplaceBroker", **place("g1", 1, "g1-b"), swap="true", acceptLoss="true")
    assert parts(cluster) == ("g1-a", "g1-b")


async def test_incomplete_slave_is_promoted_with_accepted_loss_only(world):
    await world.copies("g1")
    await world.start("g1-a")
    await world.start("g1-b")
    world.stop("g1-a")
    world.stop("g1-b")
    for extra in ({}, {"swap": "true"}):
        text = await world.refused("ReplaceBroker", **place("g1", 0, "g1-b"), **extra)
        assert "would lose them" in text and "acceptLoss" in text
    words = {**place("g1", 0, "g1-b"), "acceptLoss": "true"}
    [lost] = (await world.done("ReplaceBroker", **words, dryRun="true"))["objections"]
    assert lost.startswith("lost for good: messages that g1 acknowledged at any time and its remaining copy lacks")
    await world.done("ReplaceBroker", **words)
    assert (
        parts(world) == ("g1-b", None)
        and "messages that g1 acknowledged" in (await world.audit())[0].after["acceptedLoss"]
    )


async def test_stopped_slave_can_be_removed(cluster):
    """Weakness 8: QMQ cannot remove a broker."""
    words = {"hostname": "g1-b", "servePort": 20881}
    assert "is running" in await cluster.refused("RemoveBroker", **words)
    cluster.stop("g1-b")
    removed = await cluster.done("RemoveBroker", **words)
    assert removed["hostname"] == "g1-b" and parts(cluster) == ("g1-a", None)
    assert "is no broker" in await cluster.refused("RemoveBroker", **words)


@pytest.mark.parametrize(
    "reasons, why",
    [
        pytest.param(None, "does not run", id="stopped"),
        pytest.param(("rolled_back",), "was rolled back", id="rolled back"),
        pytest.param(("corrupt", "slave_down"), "is damaged", id="damaged"),
    ],
)
async def test_last_copy_goes_by_force_only(cluster, reasons, why):
    """Without the master, or with a master that lacks frames, only this slave may have them."""
    cluster.stop("g1-b")
    if reasons:
        cluster.beat("g1-a", writable=False, readonly_reasons=reasons, incarnation="disk of g1-a")
    else:
        cluster.stop("g1-a")
    replaced, removed = place("g1", 1, "g1-c"), {"hostname": "g1-b", "servePort": 20881}
    for text in (await cluster.refused("ReplaceBroker", **replaced), await cluster.refused("RemoveBroker", **removed)):
        assert "g1-a:20881" in text and why in text and "may be the last copy" in text
    assert "--force=true" in text and parts(cluster) == ("g1-a", "g1-b")
    [objection] = (await cluster.done("RemoveBroker", **removed, force="true", dryRun="true"))["objections"]
    assert "may be the last copy" in objection
    await cluster.done("ReplaceBroker", **replaced, acceptLoss="true")
    assert parts(cluster) == ("g1-a", "g1-c")


async def test_damaged_slave_replaces_no_master_by_itself(cluster):
    cluster.beat("g1-b", readonly_reasons=("corrupt",))
    cluster.stop("g1-a")
    cluster.stop("g1-b")
    words = place("g1", 0, "g1-b") | {"swap": "true"}
    assert "the log of g1-b:20881 is damaged" in await cluster.refused("ReplaceBroker", **words)
    assert (await cluster.done("ReplaceBroker", **words, acceptLoss="true", dryRun="true"))["wouldChange"]


async def test_removing_the_last_broker_removes_its_group(world):
    """Weakness 8: QMQ cannot remove a group, and its routes keep it."""
    await world.routed_copies("s1", groups=("g1", "g2"))
    await world.routed("s2", groups=("g2",))
    await world.done("RemoveBroker", hostname="g2-b", servePort=20881)
    text = await world.refused("RemoveBroker", hostname="g2-a", servePort=20881)
    assert "2 subjects use g2 (s1, s2)" in text and parts(world, "g2") == ("g2-a", None)
    await world.done("RemoveBroker", hostname="g2-a", servePort=20881, force="true")
    assert "g2" not in world.registry.directory.groups
    assert world.groups_of("s1") == ("g1",) and "s2" not in world.registry.routes
    await world.done("AddBroker", **place("g2", 0, "new"))
    assert world.registry.directory.groups["g2"].term == 5, "no term has two masters"


@pytest.mark.parametrize("outcome", ["stored", "not stored", "unknown"])
async def test_swap_with_unanswered_commit_is_looked_up(cluster, monkeypatch, outcome):
    change = cluster.registry.change

    async def unanswered(changes, audit):
        if outcome == "stored":
            await change(changes, audit)
            cluster.beat("g1-b")
        if outcome == "unknown":
            monkeypatch.setattr(cluster.registry, "settle", AsyncMock(side_effect=DatabaseAway("it was stopped")))
        raise OutcomeUnknown("the connection broke")

    monkeypatch.setattr(cluster.registry, "change", unanswered)
    answer = await cluster.run("SwapRoles", brokerGroup="g1")
    status, words = {
        "stored": (Status.DONE, ""),
        "not stored": (Status.REFUSED, "This swap changed nothing"),
        "unknown": (Status.UNKNOWN, "ListBrokers shows it"),
    }[outcome]
    assert answer.status == status and words in answer.message, answer
    assert cluster.registry.directory.groups["g1"].term == (3 if outcome == "stored" else 2)
    assert cluster.brokers.cancelled == (["g1-a"] if outcome == "not stored" else [])


async def test_swap_needs_the_promise_of_the_master(cluster):
    await cluster.done("AddBroker", **place("g1", 1, "g1-c"))
    for name in ("g1-a", "g1-b"):
        cluster.beat(name)
    cluster.brokers.promise_nothing = {"g1-a"}
    text = await cluster.refused("SwapRoles", brokerGroup="g1", to="g1-b")
    assert "runs an older version, which promises nothing: update it first" in text and "are as before" in text
    assert cluster.registry.directory.groups["g1"].master.hostname == "g1-a" and cluster.brokers.cancelled == ["g1-a"]


async def test_delay_master_needs_a_correct_clock(world):
    for role, name in ((5, "d1-a"), (6, "d1-b"), (6, "d1-c")):
        await world.done("AddBroker", **place("d1", role, name))
        await world.start(name, complete=role == 6)
    for name in ("d1-a", "d1-b", "d1-c"):
        world.beat(name)
    world.beat("d1-b", clock_off_s=-3600)
    text = await world.refused("SwapRoles", brokerGroup="d1", to="d1-b")
    assert "the clock of d1-b:20881 is 3,600 s behind" in text
    world.beat("d1-c", clock_off_s=2)
    assert "the clock of d1-" in await world.refused("SwapRoles", brokerGroup="d1")
    world.beat("d1-c", log_end=100)
    shown = await world.done("SwapRoles", brokerGroup="d1", dryRun="true")
    assert shown["after"]["master"]["hostname"] == "d1-c", "a correct clock counts more than a longer log"


async def test_swap_queries_the_clock_of_a_delay_slave(world):
    for role, name in ((5, "d1-a"), (6, "d1-b")):
        await world.done("AddBroker", **place("d1", role, name))
        await world.start(name, complete=role == 6)
    for name in ("d1-a", "d1-b"):
        world.beat(name)
    key = BrokerKey("d1-b", 20881)
    world.brokers.states[key] = replace(world.brokers.states[key], clock_off_s=3600)
    text = await world.refused("SwapRoles", brokerGroup="d1")
    assert "the clock of d1-b:20881 is 3,600 s ahead of" in text and "are as before" in text
    assert world.registry.directory.groups["d1"].master.hostname == "d1-a"


async def test_normal_master_needs_no_clock(cluster):
    cluster.beat("g1-b", clock_off_s=3600)
    assert (await cluster.done("SwapRoles", brokerGroup="g1", dryRun="true"))["wouldChange"]


async def test_refused_swap_of_three_names_the_remedy(cluster):
    await cluster.done("AddBroker", **place("g1", 1, "g1-c"))
    cluster.beat("g1-a")
    assert "name another slave with --to" in await cluster.refused("SwapRoles", brokerGroup="g1", to="g1-c")
    cluster.stop("g1-a")
    assert "Failover --brokerGroup=g1" in await cluster.refused("SwapRoles", brokerGroup="g1", to="g1-b")


async def test_dry_run_of_a_swap_shows_the_refusal(cluster):
    shown = await cluster.done("SwapRoles", brokerGroup="g1", dryRun="true")
    assert shown["wouldChange"] and shown["after"]["master"]["hostname"] == "g1-b"
    cluster.stop("g1-b")
    answer = await cluster.run("SwapRoles", brokerGroup="g1", dryRun="true")
    assert answer.status == Status.REFUSED and "g1-b:20881 (SLAVE of g1) is down" in answer.message
    assert "no broker group" in await cluster.refused("SwapRoles", brokerGroup="g9")


async def test_lists_show_the_state_of_brokers(cluster):
    """Weakness 14: QMQ's metaserver does not see whether a slave is up."""
    await cluster.copies("g2")
    cluster.stop("g1-b")
    up = {broker["hostname"]: broker["up"] for broker in await cluster.done("ListBrokers")}
    assert up == {"g1-a": True, "g1-b": False, "g2-a": False, "g2-b": False}
    assert [broker["hostname"] for broker in await cluster.done("ListBrokers", brokerGroup="g2")] == ["g2-a", "g2-b"]
    g1, g2 = await cluster.done("ListBrokerGroups")
    assert (g1["brokerState"], g1["term"], g2["brokerState"]) == ("RW", 2, "NRW")


async def test_slave_of_another_metaserver_shows_no_false_lag(cluster):
    """A row has no offsets: a slave in sync appeared to lack the whole log."""
    key = BrokerKey("g1-b", 20881)
    await cluster.database.write(lambda repository: repository.store_sightings(cluster.liveness.news()))
    _, rows = await cluster.database.read(lambda repository: repository.load_sightings())
    moved = [replace(row, session="s2", metaserver="m2") for row in rows if row.key == key]
    cluster.registry.leave(key, cluster.sessions["g1-b"])
    cluster.liveness.take_rows(moved, now_ms=cluster.registry.now_ms())

    async def listed():
        [group] = await cluster.done("ListBrokerGroups")
        return {copy["hostname"]: (copy["up"], copy["logEnd"], copy["lagBytes"]) for copy in group["copies"]}

    assert await listed() == {"g1-a": (True, 4096, 0), "g1-b": (True, 4096, 0)}
    cluster.brokers.silent.add("g1")
    assert await listed() == {"g1-a": (True, 4096, 0), "g1-b": (True, None, None)}
    [status] = await cluster.done("ReplicaStatus")
    assert [replica["logEnd"] for replica in status["replicas"]] == [4096, None]


async def test_copies_are_compared_at_one_moment(cluster):
    """Beside the master's new end, the slave's heartbeat of a second ago seemed 5 KB behind."""
    master, slave = BrokerKey("g1-a", 20881), BrokerKey("g1-b", 20881)
    for key in (master, slave):
        cluster.brokers.states[key] = replace(cluster.brokers.states[key], log_end=9000)
    cluster.liveness._sightings[master].state = replace(cluster.liveness.last_state(master), has_offsets=False)
    [group] = await cluster.done("ListBrokerGroups")
    assert [(copy["logEnd"], copy["lagBytes"]) for copy in group["copies"]] == [(9000, 0), (9000, 0)]


async def test_status_compares_copies(cluster):
    key = BrokerKey("g1-b", 20881)
    for end, chain, is_equal in ((4096, 77, True), (1000, 77, None), (4096, 78, False)):
        cluster.brokers.states[key] = replace(cluster.brokers.states[key], log_end=end, chain=chain)
        [status] = await cluster.done("ReplicaStatus", brokerGroup="g1")
        assert status["equal"] is is_equal and status["lagBytes"] == 4096 - end
    cluster.beat("g1-b", parted=PartedTail(400, (("s.a", 30, 31), ("s.b", 7, 7))))
    [status] = await cluster.done("ReplicaStatus")
    parted = {"offset": 400, "messages": 3, "subjects": {"s.a": [30, 31], "s.b": [7, 7]}}
    assert [replica["parted"] for replica in status["replicas"]] == [None, parted], "RecoverGroup lists them"


async def test_status_without_a_master_has_no_lag(world):
    for end, hostname in ((7, "g1-b"), (0, "g1-c")):
        await world.done("AddBroker", **place("g1", "1", hostname))
        await world.start(hostname)
        world.brokers.states[BrokerKey(hostname, 20881)] = ReplicaState(Role.SLAVE, 1, log_end=end)
    [status] = await world.done("ReplicaStatus")
    assert status["lagBytes"] is None and all(replica["reachable"] for replica in status["replicas"])


async def test_status_shows_the_acknowledged_point(world):
    """Points of copies that are gone count, too: RecoverGroup shows losses by them."""

    async def acknowledged():
        [status] = await world.done("ReplicaStatus")
        return status["acknowledged"]

    await world.running_copies("g1")
    assert await acknowledged() == 0
    world.beat("g1-a", incarnation="disk a", point=Point(Epoch(2, 1), 900, 7))
    world.stop("g1-a")
    world.beat("g1-b", incarnation="disk b", point=Point(Epoch(2, 1), 800, 6))
    assert await acknowledged() == 900
    with patch.object(world.database, "read", side_effect=DatabaseAway("it was stopped")):
        assert await acknowledged() is None, "unknown without the database"


async def test_accepted_loss_is_reported_until_acknowledged(world):
    async def shown_loss():
        checks = (await world.done("Doctor"))["checks"]
        (shown,) = [group["lostTerm"] for group in await world.done("ListBrokerGroups")]
        read = StateMetrics(world.registry, world.database, SimpleNamespace(clients=list)).read()
        metric = next(metric for metric in read if metric.name == "qmq_metaserver_loss_accepted")
        found = [check["remedy"] for check in checks if check["name"] == "loss of g1"]
        return found, shown, [(sample.labels["broker_group"], sample.value) for sample in metric.samples]

    await world.running_copies()
    assert await shown_loss() == ([], 0, [])
    world.stop("g1-a")
    world.stop("g1-b")
    await world.done("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true", acceptLoss="true")
    ((remedy,), term, samples) = await shown_loss()
    assert "AcknowledgeLoss --brokerGroup=g1" in remedy and samples == [("g1", 1.0)]
    assert term == world.registry.directory.groups["g1"].term
    await world.done("SetCopies", brokerGroup="g1", minCopies=2)
    await world.start("g1-b")
    assert (await shown_loss())[1] == term, "changes of the group do not clear it"
    assert (await world.done("AcknowledgeLoss", brokerGroup="g1"))["lostTerm"] == term
    assert await shown_loss() == ([], 0, [])
    actions = [(row.action, row.before) for row in await world.audit()]
    assert actions[0] == ("AcknowledgeLoss", {"lostTerm": term})
    assert (await world.done("AcknowledgeLoss", brokerGroup="g1"))["lostTerm"] == 0, "nothing is left to acknowledge"
    assert "no broker group g9" in await world.refused("AcknowledgeLoss", brokerGroup="g9")


async def test_briefly_absent_slave_stays_complete(cluster):
    """The slave may confirm again before its absence is stored; a restarted master must wait for it."""
    await cluster.done("AddBroker", **place("g1", 1, "g1-c"))
    await cluster.start("g1-c", complete=True)
    registry, slave, marked = cluster.registry, BrokerKey("g1-c", 20881), []
    alone = ReplicaState(Role.MASTER, registry.directory.groups["g1"].term, writable=True)
    for now_ms in (0, 9_999, 10_000):
        registry.reports.note_completeness(
            registry.directory.groups["g1"], BrokerKey("g1-a", 20881), alone, now_ms=now_ms
        )
        marked.append(slave in registry.reports.completeness)
    assert marked == [False, False, True]
