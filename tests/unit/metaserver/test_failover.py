"""Shell. Failover step by step on a real database: queries, promises, the stored row, and failures of each."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest

from qmq.errors import OperatorError, OutcomeUnknown
from qmq.metaserver.model import BrokerKey
from qmq.metaserver.roles.failover import Failovers, FailoverState, Promises, begin_term_at_start
from qmq.metaserver.roles.promotion import Refusal
from qmq.metaserver.storage.changes import StaleTerm
from qmq.metaserver.storage.database import DatabaseAway
from qmq.proto import qmq_pb2 as pb
from qmq.replication.identity import Point
from qmq.types import Epoch, Role
from tests.support.waiting import until_async
from tests.unit.metaserver.actions_world import place
from tests.unit.metaserver.rpc_world import Aborted, Aborting, service_of


@pytest.fixture(autouse=True)
def _new_master_reports_at_once(monkeypatch):
    monkeypatch.setattr("qmq.metaserver.roles.failover._is_at_work", lambda registry, group: True)


async def lose_master(world):
    """Make a group with an ended master and a complete slave."""
    await world.running_copies()
    world.beat("g1-a", incarnation="disk of g1-a", in_step=("disk of g1-b",))
    world.beat("g1-b", incarnation="disk of g1-b", in_sync=True, flushed_end=4096)
    world.stop("g1-a")
    return failovers_of(world)


def failovers_of(world):
    return Failovers(world.registry, world.brokers, replace(world.settings, failover=True))


def row(world):
    group = world.registry.directory.groups["g1"]
    return group.term, group.master.hostname, {slave.hostname for slave in group.slaves}


@pytest.mark.parametrize(
    ("setting", "of_the_group", "new_master"),
    [
        (True, "default", "g1-b"),
        (True, "off", "g1-a"),
        (False, "default", "g1-a"),
        (False, "on", "g1-b"),
    ],
)
async def test_group_failover_overrides_setting(world, setting, of_the_group, new_master):
    failovers = await lose_master(world)
    failovers._settings = replace(world.settings, failover=setting)
    await world.done("SetFailover", brokerGroup="g1", failover=of_the_group)
    (group,) = await world.done("ListBrokerGroups")
    assert group["failover"] == of_the_group
    failovers._look()
    assert bool(failovers._attempts) == (new_master == "g1-b")
    tried = [attempts.task for attempts in failovers._attempts.values()]
    for task in tried:
        task.cancel()
    await asyncio.gather(*tried, return_exceptions=True)
    await failovers.fail_over("g1")
    assert row(world)[1] == new_master


async def test_enabled_failover_acts_at_once(world):
    failovers = await lose_master(world)
    failovers._settings = world.settings
    running = asyncio.create_task(failovers.run())
    await asyncio.sleep(0)
    assert failovers._pause_s() is None and row(world)[1] == "g1-a"
    await world.done("SetFailover", brokerGroup="g1", failover="on")
    await until_async(lambda: row(world)[1] == "g1-b")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_switched_off_failover_ends_with_its_attempt(world):
    failovers = await lose_master(world)
    failovers._look()
    (attempts,) = failovers._attempts.values()
    failovers._settings = replace(world.settings, failover=False)
    failovers._look()
    assert attempts.life.state is FailoverState.OUTDATED
    await asyncio.gather(attempts.task)
    assert not failovers._attempts and row(world)[1] == "g1-a"


async def test_removed_group_is_reset(world):
    failovers = await lose_master(world)
    await world.running_copies("g2")
    world.stop("g1-b")
    failovers._look()
    await asyncio.gather(*(attempts.task for attempts in failovers._attempts.values()))
    assert world.registry.no_failover.keys() == failovers._attempts.keys() == {"g1"}
    for name in ("g1-b", "g1-a"):
        await world.done("RemoveBroker", hostname=name, servePort=20881, force="true")
    failovers._look()
    assert not world.registry.no_failover and not failovers._attempts


async def test_no_promotion_without_readable_points(world, monkeypatch):
    """The database may return before the slaves have answered, in time for the compare-and-set."""
    failovers = await lose_master(world)
    await world.database.write(lambda r: r.store_points({("g1", "disk of g1-a"): Point(Epoch(2, 1), 5000, 7)}))
    read = world.database.read

    async def fails_once(work, **options):
        if "load_points" in work.__code__.co_names:
            monkeypatch.setattr(world.database, "read", read)
            raise DatabaseAway("in between")
        return await read(work, **options)

    monkeypatch.setattr(world.database, "read", fails_once)
    with suppress(DatabaseAway):
        await failovers.fail_over("g1")
    assert row(world) == (2, "g1-a", {"g1-b"}) and not world.brokers.held
    await failovers.fail_over("g1")
    assert world.registry.no_failover["g1"][0] == Refusal.BEHIND


async def test_connected_slave_is_not_promoted(world):
    failovers = await lose_master(world)
    world.brokers.is_connected = True
    await failovers.fail_over("g1")
    assert row(world) == (2, "g1-a", {"g1-b"})
    assert world.registry.no_failover["g1"][0] == Refusal.HEARS_ITS_MASTER


async def test_refused_failover_backs_off(world, monkeypatch):
    failovers = await lose_master(world)
    now_s, tried_s = 0.0, []

    async def fail_over(name):
        tried_s.append(now_s)

    monkeypatch.setattr(failovers, "fail_over", fail_over)
    monkeypatch.setattr("qmq.metaserver.roles.failover.time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr("qmq.metaserver.roles.failover.RETRY_WAITS_S", (0.125, 0.25, 0.5, 1.0))
    while now_s < 3:
        failovers._look()
        await asyncio.gather(*(attempts.task for attempts in failovers._attempts.values()))
        now_s += 0.125
    assert tried_s == [0, 0.125, 0.375, 0.875, 1.875, 2.875]


async def test_doctor_shows_why_restarted_slave_stays(world):
    failovers = await lose_master(world)
    world.beat("g1-b", incarnation="disk of g1-b", in_sync=False, flushed_end=4096)
    await failovers.fail_over("g1")
    assert row(world)[0] == 2 and not world.brokers.held
    checks = (await world.done("Doctor"))["checks"]
    (found,) = [check["found"] for check in checks if check["name"] == "group g1"]
    assert "not been in sync since its process began" in found


async def test_paused_metaserver_finds_the_failover_done(world, monkeypatch):
    failovers = await lose_master(world)
    other = await world.another()
    begun, going_on, held = asyncio.Event(), asyncio.Event(), other.brokers.prepare_failover
    other.brokers.states = world.brokers.states
    monkeypatch.setattr(other.registry, "is_gone", lambda broker, silence_ms: "it was paused, and has not looked")
    monkeypatch.setattr(other.registry, "last_state", world.registry.last_state)

    async def paused(broker, **words):
        begun.set()
        await going_on.wait()
        return await held(broker, **words)

    monkeypatch.setattr(other.brokers, "prepare_failover", paused)
    late = asyncio.create_task(failovers_of(other).fail_over("g1"))
    await begun.wait()
    await failovers.fail_over("g1")
    going_on.set()
    with pytest.raises(StaleTerm):
        await late
    assert row(world) == (3, "g1-b", {"g1-a"})
    assert [entry.action for entry in await world.audit()].count("Failover") == 1


@pytest.mark.parametrize(("stored", "is_away"), [(True, False), (False, False), (True, True)])
async def test_unanswered_failover_commit_is_looked_up(world, monkeypatch, stored, is_away):
    failovers = await lose_master(world)
    change = world.registry.change

    async def unanswered(changes, audit):
        if stored:
            await change(changes, audit)
        raise OutcomeUnknown("the connection broke in the commit")

    monkeypatch.setattr(world.registry, "change", unanswered)
    if is_away:
        monkeypatch.setattr(world.registry, "settle", AsyncMock(side_effect=DatabaseAway("it was stopped")))
    if stored and not is_away:
        await failovers.fail_over("g1")
    else:
        with pytest.raises(OutcomeUnknown):
            await failovers.fail_over("g1")
    assert row(world)[0] == (3 if stored else 2)


async def test_silent_master_is_detected_by_timeout(cluster):
    master, now_ms = cluster.registry.directory.groups["g1"].master, cluster.registry.now_ms()
    cluster.registry.now_ms = lambda: now_ms
    cluster.beat("g1-a")  # its heartbeat is fresh, however long the other broker took to start
    assert cluster.registry.is_gone(master, 2000) == ""
    cluster.registry.now_ms = lambda: now_ms + 1900
    assert cluster.registry.is_gone(master, 2000) == ""
    cluster.registry.now_ms = lambda: now_ms + 2500
    assert cluster.registry.is_gone(master, 2000).startswith("it is silent for")


async def test_slave_heartbeats_do_not_shorten_the_pause(world, monkeypatch):
    monkeypatch.setattr("qmq.metaserver.roles.failover.until_next_second", lambda now_s: 1.0)
    await world.running_copies()
    failovers = failovers_of(world)
    now_ms = world.registry.now_ms()
    world.registry.now_ms = lambda: now_ms
    world.beat("g1-b")
    world.registry.now_ms = lambda: now_ms + 1950
    world.beat("g1-a")
    assert failovers._pause_s() == 1.0


# Three copies.


async def lose_master_of_two_slaves(world):
    await world.running_copies()
    await world.done("AddBroker", **place("g1", 1, "g1-c"))
    await world.start("g1-c")
    slaves = {"g1-b": 4096, "g1-c": 5000}
    world.beat("g1-a", incarnation="disk of g1-a", in_step=tuple(f"disk of {name}" for name in slaves))
    for name, end in slaves.items():
        world.beat(name, incarnation=f"disk of {name}", in_sync=True, flushed_end=end, last_term=2, last_boot=1)
    world.stop("g1-a")
    return failovers_of(world)


@pytest.fixture
async def three(world):
    """A metaserver with a group of three copies, after the end of its master."""
    await lose_master_of_two_slaves(world)
    return world


async def test_promise_without_promotion_renews_the_term(three, monkeypatch):
    await three.start("g1-a")
    before, master, slaves = row(three)
    three.beat("g1-b", incarnation="disk of g1-b", promised_term=before + 3)
    now_s = time.monotonic()
    monkeypatch.setattr("qmq.metaserver.roles.failover.time", SimpleNamespace(monotonic=lambda: now_s))
    promises = Promises(three.registry, three.brokers)
    await promises.look()
    now_s += 2.9
    await promises.look()
    assert row(three)[0] == before, "its promotion may follow"
    now_s += 0.1
    await promises.look()
    assert row(three) == (before + 3, master, slaves)
    await promises.look()
    assert row(three)[0] == before + 3


async def look_twice(world, monkeypatch):
    monkeypatch.setattr("qmq.metaserver.roles.failover.PROMISE_S", 0.0)
    promises = Promises(world.registry, world.brokers)
    await promises.look()
    await promises.look()


@pytest.mark.parametrize("is_shown_up", [False, True])
async def test_promise_waits_for_missing_master(three, monkeypatch, is_shown_up):
    """A paused metaserver marks no master down, so the master is queried."""
    if is_shown_up:
        await three.start("g1-a")
    before = row(three)
    three.beat("g1-b", incarnation="disk of g1-b", promised_term=before[0] + 1)
    three.brokers.states.pop(BrokerKey("g1-a", 20881), None)
    await look_twice(three, monkeypatch)
    assert row(three) == before


async def test_starting_master_of_several_gets_new_term(three):
    directory = three.registry.directory
    before, *rest = row(three)
    a, b = (directory.find(BrokerKey(name, 20881)) for name in ("g1-a", "g1-b"))
    await begin_term_at_start(three.registry, b)
    assert row(three)[0] == before, "a slave follows whoever is the master"
    await begin_term_at_start(three.registry, a)
    await begin_term_at_start(three.registry, a)
    assert list(row(three)) == [before + 2, *rest]
    assert [row.action for row in await three.audit()][:2] == ["NewTerm", "NewTerm"]


async def test_master_of_old_row_does_not_begin(three):
    """A term above it would have the old row's master, while another one serves in the newest term."""
    before = row(three)
    three.beat("g1-b", incarnation="disk of g1-b", role=Role.MASTER, term=before[0] + 5)
    with pytest.raises(OperatorError, match="is the master of an old row"):
        await begin_term_at_start(three.registry, three.registry.directory.find(BrokerKey("g1-a", 20881)))
    assert row(three) == before


async def test_recent_slave_reads_the_row_again(world):
    """Another metaserver promoted it, and it restarted before this metaserver read the row."""
    failovers = await lose_master_of_two_slaves(world)
    other = await world.another()
    await failovers.fail_over("g1")
    term, master, _ = row(world)
    assert row(other)[:2] == (term - 1, "g1-a") and master == "g1-c"
    await begin_term_at_start(other.registry, other.registry.directory.find(BrokerKey("g1-c", 20881)))
    assert row(other)[:2] == (term + 1, "g1-c")


async def test_master_of_several_needs_database_to_begin(three, monkeypatch):
    await three.running_copies("g2")
    brokers = [three.registry.directory.find(BrokerKey(name, 20881)) for name in ("g1-a", "g1-b", "g2-a")]

    async def away():
        raise DatabaseAway("it does not answer")

    monkeypatch.setattr(three.registry.mirror, "catch_up", away)
    for broker in brokers[:2]:
        with pytest.raises(DatabaseAway):
            await begin_term_at_start(three.registry, broker)
    await begin_term_at_start(three.registry, brokers[2])


@pytest.mark.parametrize("name, begins, informs", [("g1-a", True, False), ("g1-a", False, True), ("g1-b", True, True)])
async def test_master_of_several_needs_points_to_begin(three, monkeypatch, name, begins, informs):
    """The database may fail after the change of the row."""
    service, reported = service_of(three, monkeypatch, name)
    read, context = three.database.read, Aborting()

    async def fails(work, **options):
        if "load_points" in work.__code__.co_names:
            raise DatabaseAway("behind the change of the row")
        return await read(work, **options)

    monkeypatch.setattr(three.database, "read", fails)
    registering = service.Register(pb.BrokerIdentity(broker_group="g1", begins=begins, **reported), context)
    if informs:
        assert (await registering).term
        return
    with pytest.raises(Aborted, match="behind the change of the row"):
        await registering
    assert context.code == grpc.StatusCode.UNAVAILABLE


async def test_registration_skips_hanging_database(three, monkeypatch):
    """A broker of two copies begins from memory; one of three gets an error at once."""
    await three.running_copies("g2")
    of_three, of_two = (three.registry.directory.find(BrokerKey(name, 20881)) for name in ("g1-a", "g2-a"))
    hangs, goes_on = threading.Event(), threading.Event()

    def no_answer():
        hangs.set()
        goes_on.wait()
        raise OSError("the network is gone")

    monkeypatch.setattr(three.database, "_ask_versions", no_answer)
    three.database._mark_away("no answer in time")
    poll = asyncio.create_task(three.registry.mirror.catch_up())
    try:
        await asyncio.to_thread(hangs.wait)
        await asyncio.wait_for(begin_term_at_start(three.registry, of_two), 10)
        with pytest.raises(DatabaseAway, match="does not answer"):
            await asyncio.wait_for(begin_term_at_start(three.registry, of_three), 10)
    finally:
        goes_on.set()
    with pytest.raises(DatabaseAway, match="network is gone"):
        await poll


async def test_older_version_does_not_promise(world):
    failovers = await lose_master_of_two_slaves(world)
    world.brokers.promise_nothing = {"g1-b"}
    before = row(world)
    await failovers.fail_over("g1")
    assert row(world) == before and "g1-b" in world.brokers.held
    assert world.registry.no_failover["g1"][0] == Refusal.SLAVE_DOWN


async def test_retries_promise_the_same_term(world, monkeypatch):
    failovers = await lose_master_of_two_slaves(world)
    before, change = row(world)[0], world.registry.change

    async def away(changes, audit):
        raise DatabaseAway("it does not answer")

    monkeypatch.setattr(world.registry, "change", away)
    for _ in range(3):
        with pytest.raises(DatabaseAway):
            await failovers.fail_over("g1")
        for name in ("g1-b", "g1-c"):
            reported = world.brokers.states[BrokerKey(name, 20881)]
            assert reported.promised_term == before + 1
            world.registry.beat(BrokerKey(name, 20881), world.sessions[name], reported)
    assert world.registry.terms.floor("g1") == before + 1, "no other row gets this term"
    monkeypatch.setattr(world.registry, "change", change)
    await failovers.fail_over("g1")
    assert row(world)[0] == before + 1


async def test_promise_ends_after_shrink_to_two_copies(cluster, monkeypatch):
    before = row(cluster)
    cluster.beat("g1-b", incarnation="disk of g1-b", promised_term=before[0] + 3)
    await look_twice(cluster, monkeypatch)
    assert row(cluster) == (before[0] + 3, *before[1:])


async def test_broker_of_other_group_changes_no_row(three, monkeypatch):
    before = row(three)
    service, reported = service_of(three, monkeypatch, "g1-a")
    key = BrokerKey("g1-a", 20881)
    with pytest.raises(OperatorError, match="belongs to g1, and its data directory to g2"):
        await service._register(pb.BrokerIdentity(broker_group="g2", begins=True, **reported), key)
    assert row(three) == before
    await service._register(pb.BrokerIdentity(broker_group="g1", begins=True, **reported), key)
    assert row(three) == (before[0] + 1, *before[1:])


# Operators' failovers.


async def test_operator_fails_over_a_disabled_group(three):
    before = row(three)
    plan = await three.done("Failover", brokerGroup="g1", dryRun="true")
    assert (plan["after"]["master"]["hostname"], plan["after"]["term"]) == ("g1-c", before[0] + 1)
    assert row(three) == before and not three.brokers.held, "a plan requests no promise"
    done = await three.done("Failover", brokerGroup="g1")
    assert (done["master"]["hostname"], done["logEnd"], done["term"]) == ("g1-c", 5000, before[0] + 1)
    assert row(three) == (before[0] + 1, "g1-c", {"g1-a", "g1-b"})
    newest = (await three.audit())[0]
    assert (newest.who, newest.action, newest.parameters["slaveEnd"]) == ("anna", "Failover", 5000)
    assert "g1-c:20881, the master of g1, is up; SwapRoles" in await three.refused("Failover", brokerGroup="g1")


async def test_master_gone_allows_restarted_slaves(three):
    term = row(three)[0]
    for name, end in (("g1-b", 4096), ("g1-c", 5000)):
        three.beat(name, incarnation=f"disk of {name}", flushed_end=end, last_term=term, last_boot=1)
    refused = await three.refused("Failover", brokerGroup="g1")
    assert "since its process began" in refused and "Failover --brokerGroup=g1 --masterGone=true" in refused
    assert row(three)[0] == term and not three.brokers.held
    await three.done("Failover", brokerGroup="g1", masterGone="true")
    assert row(three) == (term + 1, "g1-c", {"g1-a", "g1-b"})


async def test_refusal_quotes_the_copy(three, monkeypatch):
    """The operator's --masterGone queries it although it restarted: only the slave can detect a cut log."""
    words = "this copy of g1 was not in sync since its process began, or is incomplete"

    async def not_whole(broker, **asked):
        raise OperatorError(f"{broker.key} refused: {words}")

    monkeypatch.setattr(three.brokers, "prepare_failover", not_whole)
    refused = await three.refused("Failover", brokerGroup="g1", masterGone="true")
    assert words in refused and "If a copy is incomplete: qmq RecoverGroup" in refused


async def test_order_without_eligible_slave_is_refused(three):
    assert "there is no broker group g9" in await three.refused("Failover", brokerGroup="g9")
    three.stop("g1-b")
    refused = await three.refused("Failover", brokerGroup="g1", masterGone="true")
    assert "2 of its 2 slaves" in refused and "RecoverGroup --brokerGroup=g1" in refused
    assert not three.brokers.held


async def test_registration_does_not_refuse_an_order(three, monkeypatch):
    """The row is compared as a whole, and the metaserver writes heartbeats' news into it."""
    change, stale = three.registry.change, [True, True]

    async def changed_meanwhile(changes, audit):
        if stale:
            stale.pop()
            raise StaleTerm("g1")
        await change(changes, audit)

    monkeypatch.setattr(three.registry, "change", changed_meanwhile)
    before = row(three)[0]
    await three.done("Failover", brokerGroup="g1")
    assert row(three)[:2] == (before + 1, "g1-c") and not stale
