"""Shell. Brokers are added, replaced, swapped and removed. test_roles checks the rules."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

from qmq.metaserver.actions import Status
from qmq.metaserver.model import BrokerKey, ReplicaState
from qmq.metaserver.observability.collectors import StateMetrics
from qmq.metaserver.roles import swap
from qmq.metaserver.storage.database import DatabaseAway
from qmq.replication.points import Point
from qmq.types import Epoch, Role
from tests.unit.metaserver.actions_world import left, place


def parts(world, group="g1"):
    known = world.registry.directory.groups[group]
    return known.master and known.master.hostname, known.slave and known.slave.hostname


async def test_replace_answers_with_the_broker_before(world):
    await world.copies("g1")
    before = await world.done("ReplaceBroker", **place("g1", 1, "g1-c"))
    assert (before["hostname"], before["role"]) == ("g1-b", "SLAVE") and parts(world) == ("g1-a", "g1-c")


async def test_qmqs_documented_swap_of_two_calls_works(world):
    """Weakness 22: QMQ's own metaserver refuses the first of the two calls that its document describes."""
    await world.running_copies("g1")
    world.stop("g1-b")
    world.stop("g1-a")
    first = await world.done("ReplaceBroker", **place("g1", 0, "g1-b"))
    second = await world.done("ReplaceBroker", **place("g1", 1, "g1-a"))
    assert (first["hostname"], second["hostname"]) == ("g1-a", "g1-b")
    assert parts(world) == ("g1-b", "g1-a") and world.registry.directory.groups["g1"].term == 4


async def test_a_swap_of_two_stopped_brokers_is_one_call(world):
    """Weakness 22: between QMQ's calls the group has one broker and no spare."""
    await world.running_copies("g1")
    world.stop("g1-b")
    world.stop("g1-a")
    before = await world.done("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true")
    assert (before["hostname"], before["role"]) == ("g1-a", "MASTER") and parts(world) == ("g1-b", "g1-a")
    group = world.registry.directory.groups["g1"]
    assert (group.term, group.half_swapped, group.slave.complete) == (3, False, False)
    assert group.master.incarnation == "disk of g1-b" and group.slave.incarnation == "disk of g1-a"
    again = await world.done("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true")
    assert again["hostname"] == "g1-b" and world.registry.directory.groups["g1"].term == 3
    await world.done("ReplaceBroker", **place("g1", 1, "g1-b"), swap="true", acceptLoss="true")
    assert parts(world) == ("g1-a", "g1-b")


async def test_a_swap_of_brokers_that_run_is_refused(world):
    await world.running_copies("g1")
    words = place("g1", 0, "g1-b")
    assert "is running" in await world.refused("ReplaceBroker", **words, swap="true")
    world.stop("g1-b")
    assert "g1-a:20881 (MASTER of g1) is running" in await world.refused("ReplaceBroker", **words, swap="true")
    assert parts(world) == ("g1-a", "g1-b")


async def test_a_swap_with_a_third_broker_is_none(world):
    await world.copies("g1")
    assert "is none of them" in await world.refused("ReplaceBroker", **place("g1", 0, "g1-c"), swap="true")


async def test_an_incomplete_slave_becomes_the_master_only_when_the_loss_is_accepted(world):
    await world.copies("g1")
    await world.start("g1-a")
    await world.start("g1-b")
    world.stop("g1-a")
    world.stop("g1-b")
    for extra in ({}, {"swap": "true"}):
        text = await world.refused("ReplaceBroker", **place("g1", 0, "g1-b"), **extra)
        assert "would lose the rest" in text and "acceptLoss" in text
    words = {**place("g1", 0, "g1-b"), "acceptLoss": "true"}
    [lost] = (await world.done("ReplaceBroker", **words, dryRun="true"))["objections"]
    assert lost.startswith("lost for good: what g1 acknowledged at any time, and the copy that goes on does not have")
    await world.done("ReplaceBroker", **words)
    assert parts(world) == ("g1-b", None) and "what g1 acknowledged" in (await world.audit())[0].after["acceptedLoss"]


async def test_a_slave_is_removed_once_it_is_stopped(world):
    """Weakness 8: QMQ cannot remove a broker."""
    await world.running_copies("g1")
    words = {"hostname": "g1-b", "servePort": 20881}
    assert "is running" in await world.refused("RemoveBroker", **words)
    world.stop("g1-b")
    removed = await world.done("RemoveBroker", **words)
    assert removed["hostname"] == "g1-b" and parts(world) == ("g1-a", None)
    assert "is no broker" in await world.refused("RemoveBroker", **words)


async def test_the_last_copy_is_neither_replaced_nor_removed_without_a_word(world):
    await world.running_copies("g1")
    world.stop("g1-b")
    world.stop("g1-a")
    text = await world.refused("ReplaceBroker", **place("g1", 1, "g1-c"))
    assert "the master of g1, does not run" in text and "--acceptLoss=true" in text
    words = {"hostname": "g1-b", "servePort": 20881}
    assert "may be the last copy" in (text := await world.refused("RemoveBroker", **words)) and "--force=true" in text
    assert parts(world) == ("g1-a", "g1-b")
    await world.done("ReplaceBroker", **place("g1", 1, "g1-c"), acceptLoss="true")
    assert parts(world) == ("g1-a", "g1-c") and (await world.audit())[0].action == "ReplaceBroker"


async def test_the_slave_of_a_master_that_was_rolled_back_is_neither_replaced_nor_removed_without_a_word(world):
    """The master runs, and lacks frames that only this slave has."""
    await world.running_copies("g1")
    world.beat("g1-a", writable=False, readonly_reasons=("rolled_back",), incarnation="disk of g1-a")
    world.stop("g1-b")
    words = {"hostname": "g1-b", "servePort": 20881}
    assert "g1-a:20881 was rolled back" in await world.refused("ReplaceBroker", **place("g1", 1, "g1-c"))
    text = await world.refused("RemoveBroker", **words)
    assert "g1-a:20881 was rolled back" in text and "--force=true" in text and parts(world) == ("g1-a", "g1-b")
    [objection] = (await world.done("RemoveBroker", **words, force="true", dryRun="true"))["objections"]
    assert "may be the last copy" in objection
    await world.done("RemoveBroker", **words, force="true")
    assert parts(world) == ("g1-a", None)


async def test_the_slave_of_a_master_whose_log_is_damaged_is_neither_replaced_nor_removed_without_a_word(world):
    """The range comes from the slave, if from anywhere."""
    await world.running_copies("g1")
    world.stop("g1-b")
    words = {"hostname": "g1-b", "servePort": 20881}
    world.beat("g1-a", writable=False, readonly_reasons=("corrupt", "slave_down"), incarnation="disk of g1-a")
    for text in (
        await world.refused("ReplaceBroker", **place("g1", 1, "g1-c")),
        await world.refused("RemoveBroker", **words),
    ):
        assert "log of g1-a:20881 is damaged" in text and "may be the last copy" in text
    world.beat("g1-a", writable=False, readonly_reasons=("slave_down",), incarnation="disk of g1-a")
    await world.done("RemoveBroker", **words)  # it was repaired, or given up
    assert parts(world) == ("g1-a", None)


async def test_a_master_is_not_removed_before_its_slave(world):
    await world.copies("g1")
    assert "Swap them first" in await world.refused("RemoveBroker", hostname="g1-a", servePort=20881)


async def test_the_last_broker_takes_its_group_with_it(world):
    """Weakness 8: QMQ cannot remove a group, and its routes keep it."""
    await world.copies("g1")
    await world.copies("g2")
    await world.routed("s1", groups=("g1", "g2"))
    await world.routed("s2", groups=("g2",))
    await world.done("RemoveBroker", hostname="g2-b", servePort=20881)
    text = await world.refused("RemoveBroker", hostname="g2-a", servePort=20881)
    assert "2 subjects use g2 (s1, s2)" in text and parts(world, "g2") == ("g2-a", None)
    await world.done("RemoveBroker", hostname="g2-a", servePort=20881, force="true")
    assert "g2" not in world.registry.directory.groups
    assert world.groups_of("s1") == ("g1",) and "s2" not in world.registry.routes
    await world.done("AddBroker", **place("g2", 0, "new"))
    assert world.registry.directory.groups["g2"].term == 5, "terms go on, so that no term has two masters"


async def test_roles_are_swapped_with_a_row_of_the_trail(world):
    await world.running_copies("g1")

    change = world.registry.change

    async def change_and_tell(changes, audit):
        await change(changes, audit)
        world.beat("g1-b")
        world.beat("g1-a")

    world.registry.change = change_and_tell
    swapped = await world.done("SwapRoles", brokerGroup="g1")
    assert (swapped["master"]["hostname"], swapped["slave"]["hostname"]) == ("g1-b", "g1-a")
    assert swapped["logEnd"] == 4096 and swapped["chain"] == f"{77:016x}" and swapped["writable"]
    newest = (await world.audit())[0]
    assert (newest.action, newest.before["term"], newest.after["term"]) == ("SwapRoles", 2, 3)


async def test_a_slave_that_lost_its_disk_during_the_swap_does_not_become_the_master(world):
    """Its registration raises no term: the swap would give the group an empty log."""
    await world.running_copies("g1")
    change = world.registry.change

    async def emptied(changes, audit):
        world.registry.change = change
        slave = world.registry.directory.groups["g1"].slave
        await world.database.write(
            lambda repository: repository.store_registration(replace(slave, incarnation="empty", complete=False), slave)
        )
        await change(changes, audit)

    world.registry.change = emptied
    text = await world.refused("SwapRoles", brokerGroup="g1")
    assert "another data directory meanwhile" in text and "changed nothing" in text
    assert parts(world) == ("g1-a", "g1-b") and world.brokers.cancelled == ["g1-a"]


async def test_swap_refuses_logs_that_differ(world):
    await world.running_copies("g1")
    status = world.brokers.replica_status
    for times, difference in enumerate(({"chain": 78}, {"log_end": 4000}), start=1):

        async def differs(broker, difference=difference):
            state = await status(broker)
            return replace(state, **difference) if broker.hostname == "g1-b" else state

        world.brokers.replica_status = differs
        assert "the logs differ" in await world.refused("SwapRoles", brokerGroup="g1")
        assert parts(world) == ("g1-a", "g1-b") and world.brokers.cancelled == ["g1-a"] * times


async def test_a_swap_is_off_once_the_master_takes_messages_again(world):
    """The pause begins with the order, so it includes the slave's time to catch up."""
    await world.running_copies("g1")
    prepare, clock = world.brokers.prepare_swap, SimpleNamespace(now_s=1_000.0)

    async def slow(*words, **more):
        clock.now_s += world.settings.swap_hold_ms / 1000 + 0.1
        return await prepare(*words, **more)

    world.brokers.prepare_swap = slow
    with patch.object(swap, "time", SimpleNamespace(monotonic=lambda: clock.now_s)):
        assert "it took too long" in await world.refused("SwapRoles", brokerGroup="g1")
    assert parts(world) == ("g1-a", "g1-b") and world.brokers.cancelled == ["g1-a"]


async def test_a_master_of_several_slaves_that_promises_nothing_stays_the_master(world):
    await world.running_copies("g1")
    await world.done("AddBroker", **place("g1", 1, "g1-c"))
    for name in ("g1-a", "g1-b"):
        world.beat(name)
    world.brokers.promise_nothing = {"g1-a"}
    text = await world.refused("SwapRoles", brokerGroup="g1", to="g1-b")
    assert "runs an older version, which promises nothing: update it first" in text and "are as before" in text
    assert world.registry.directory.groups["g1"].master.hostname == "g1-a" and world.brokers.cancelled == ["g1-a"]


async def test_nobody_is_made_delay_master_while_its_clock_is_wrong(world):
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
    assert shown["after"]["master"]["hostname"] == "d1-c", "the clock counts more than what it lacks now"


async def test_a_clock_that_another_metaserver_hears_of_is_asked_for(world):
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


async def test_messages_that_are_due_at_once_need_no_clock(world):
    await world.running_copies("g1")
    world.beat("g1-b", clock_off_s=3600)
    assert (await world.done("SwapRoles", brokerGroup="g1", dryRun="true"))["wouldChange"]


async def test_what_to_do_about_a_broker_of_three_that_is_down_is_what_works(world):
    await world.running_copies("g1")
    await world.done("AddBroker", **place("g1", 1, "g1-c"))
    world.beat("g1-a")
    assert "name another slave with --to" in await world.refused("SwapRoles", brokerGroup="g1", to="g1-c")
    world.stop("g1-a")
    assert "Failover --brokerGroup=g1" in await world.refused("SwapRoles", brokerGroup="g1", to="g1-b")


async def test_a_swap_that_is_not_possible_now_says_why_in_its_dry_run(world):
    await world.running_copies("g1")
    shown = await world.done("SwapRoles", brokerGroup="g1", dryRun="true")
    assert shown["wouldChange"] and shown["after"]["master"]["hostname"] == "g1-b"
    world.stop("g1-b")
    answer = await world.run("SwapRoles", brokerGroup="g1", dryRun="true")
    assert answer.status == Status.REFUSED and "g1-b:20881 (SLAVE of g1) is down" in answer.message
    assert "no broker group" in await world.refused("SwapRoles", brokerGroup="g9")


async def test_brokers_and_groups_are_listed_with_their_state(world):
    """Weakness 14: QMQ's metaserver does not see whether a slave is up."""
    await world.running_copies("g1")
    await world.copies("g2")
    world.stop("g1-b")
    up = {broker["hostname"]: broker["up"] for broker in await world.done("ListBrokers")}
    assert up == {"g1-a": True, "g1-b": False, "g2-a": False, "g2-b": False}
    assert [broker["hostname"] for broker in await world.done("ListBrokers", brokerGroup="g2")] == ["g2-a", "g2-b"]
    g1, g2 = await world.done("ListBrokerGroups")
    assert (g1["brokerState"], g1["term"], g2["brokerState"]) == ("RW", 2, "NRW")


async def test_copies_are_compared(world):
    await world.running_copies("g1")
    [status] = await world.done("ReplicaStatus", brokerGroup="g1")
    assert status["equal"] and status["lagBytes"] == 0
    world.beat("g1-b", log_end=1000)
    [status] = await world.done("ReplicaStatus")
    assert status["equal"] is None and status["lagBytes"] == 3096
    key = BrokerKey("g1-b", 20881)
    world.brokers.states[key] = replace(world.brokers.states[key], log_end=4096, chain=78)
    assert (await world.done("ReplicaStatus"))[0]["equal"] is False


async def test_status_says_up_to_where_anything_is_remembered_to_be_acknowledged(world):
    """Also for copies that are gone: RecoverGroup shows the losses."""
    await world.running_copies("g1")
    [status] = await world.done("ReplicaStatus", brokerGroup="g1")
    assert status["acknowledged"] == 0
    world.beat("g1-a", incarnation="disk a", point=Point(Epoch(2, 1), 900, 7))
    world.stop("g1-a")
    world.beat("g1-b", incarnation="disk b", point=Point(Epoch(2, 1), 800, 6))
    [status] = await world.done("ReplicaStatus", brokerGroup="g1")
    assert status["acknowledged"] == 900


async def test_status_says_that_nobody_can_say_now_what_is_remembered(world):
    await world.running_copies("g1")
    world.beat("g1-a", incarnation="disk a", point=Point(Epoch(2, 1), 900, 7))
    with patch.object(world.database, "read", side_effect=DatabaseAway("it was stopped")):
        [status] = await world.done("ReplicaStatus", brokerGroup="g1")
    assert status["acknowledged"] is None


async def test_leftovers_do_not_hinder_a_replacement_of_addresses(world):
    await world.running_copies("g1")
    world.brokers.progress["g1"] = [left("s1", "shop", 2)]
    world.stop("g1-b")
    words = place("g1", 1, "g1-b") | {"ip": "10.0.0.2"}
    assert (await world.done("ReplaceBroker", **words))["ip"] == "10.0.0.1"
    assert world.registry.directory.groups["g1"].slave.ip == "10.0.0.2"


async def test_an_accepted_loss_is_told_of_until_it_is_acknowledged(world):
    async def told():
        checks = (await world.done("Doctor"))["checks"]
        (shown,) = [group["lostTerm"] for group in await world.done("ListBrokerGroups")]
        read = StateMetrics(world.registry, world.database, SimpleNamespace(clients=list)).read()
        metric = next(metric for metric in read if metric.name == "qmq_metaserver_loss_accepted")
        found = [check["remedy"] for check in checks if check["name"] == "loss of g1"]
        return found, shown, [(sample.labels["broker_group"], sample.value) for sample in metric.samples]

    await world.running_copies()
    assert await told() == ([], 0, [])
    world.stop("g1-a")
    world.stop("g1-b")
    await world.done("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true", acceptLoss="true")
    ((remedy,), term, samples) = await told()
    assert "AcknowledgeLoss --brokerGroup=g1" in remedy and samples == [("g1", 1.0)]
    assert term == world.registry.directory.groups["g1"].term
    await world.done("SetCopies", brokerGroup="g1", minCopies=2)
    await world.start("g1-b")
    assert (await told())[1] == term, "what happens to the group does not end it"
    assert (await world.done("AcknowledgeLoss", brokerGroup="g1"))["lostTerm"] == term
    assert await told() == ([], 0, [])
    actions = [(row.action, row.before) for row in await world.audit()]
    assert actions[0] == ("AcknowledgeLoss", {"lostTerm": term})
    assert (await world.done("AcknowledgeLoss", brokerGroup="g1"))["lostTerm"] == 0, "there is nothing more"
    assert "no broker group g9" in await world.refused("AcknowledgeLoss", brokerGroup="g9")


async def test_slave_that_is_away_for_moments_counts_as_in_sync_at_the_last_report(world):
    """It may confirm again before that is stored; a master that restarts then must wait for it."""
    await world.running_copies("g1")
    await world.done("AddBroker", **place("g1", 1, "g1-c"))
    await world.start("g1-c", complete=True)
    registry, slave, marked = world.registry, BrokerKey("g1-c", 20881), []
    alone = ReplicaState(Role.MASTER, registry.directory.groups["g1"].term, writable=True)
    for now_ms in (0, 9_999, 10_000):
        registry.reports.note_completeness(
            registry.directory.groups["g1"], BrokerKey("g1-a", 20881), alone, now_ms=now_ms
        )
        marked.append(slave in registry.reports.completeness)
    assert marked == [False, False, True]
