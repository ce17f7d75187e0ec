"""Shell. A database from before some swaps: rows are raised to brokers' reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.snapshot import Snapshots
from qmq.metaserver.cluster.upkeep import Upkeep
from qmq.metaserver.model import AuditRow, Broker, BrokerKey, Group, MetaserverRow, ReadonlyMark, ReplicaState
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.changes import RemoveGroup, SetMark, SetRoles
from qmq.proto import qmq_pb2 as pb
from qmq.types import Role
from tests.unit.metaserver.actions_world import place
from tests.unit.metaserver.rpc_world import Aborted, Aborting, service_of

A = Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2, incarnation="disk a")
B = Broker("g1", Role.SLAVE, "b", "10.0.0.2", 1, 2, incarnation="disk b", complete=True)
ROW = Group("g1", 2, A, (B,), 0)
MASTER, SLAVE = Role.MASTER, Role.SLAVE


def reports(**states):
    """`a=(role, term)`; brokers that are left out are down."""
    known = {name: ReplicaState(role, term) for name, (role, term) in states.items()}
    return lambda broker: known.get(broker.hostname)


@pytest.mark.parametrize(
    ("states", "reported", "agreed"),
    [
        pytest.param({"a": (MASTER, 4), "b": (SLAVE, 4)}, 4, ("a", "b"), id="both, roles as in the row"),
        pytest.param({"a": (SLAVE, 5), "b": (MASTER, 5)}, 5, ("b", "a"), id="both, roles exchanged"),
        pytest.param({"a": (MASTER, 4)}, 4, None, id="the slave is down"),
        pytest.param({"a": (MASTER, 4), "b": (SLAVE, 0)}, 4, None, id="the slave has no role yet"),
        pytest.param({"a": (MASTER, 4), "b": (MASTER, 3)}, 4, None, id="masters of two terms"),
        pytest.param({"a": (MASTER, 4), "b": (MASTER, 4)}, 4, None, id="two masters of one term"),
        pytest.param({"a": (SLAVE, 4), "b": (SLAVE, 4)}, 4, None, id="no master"),
        pytest.param({"a": (MASTER, 4), "b": (SLAVE, 4)}, 6, None, id="a third broker reports a newer term"),
    ],
)
def test_old_row_is_raised_to_reported_roles(states, reported, agreed):
    old = old_database.judge(ROW, reported, reports(**states))
    if agreed is None:
        assert old.change is None and "AdoptRoles --brokerGroup=g1 --hostname=" in old.remedy
        return
    change = old.change
    assert (change.term, change.new_term) == (2, reported + 1)
    assert (change.master.hostname, change.slave.hostname) == agreed
    assert (change.master.role, change.slave.role, change.slave.complete) == (MASTER, SLAVE, False)


@pytest.mark.parametrize(
    ("up", "command"),
    [
        pytest.param({"b": 300, "c": 200}, "--hostname=b --servePort=1 --force=true", id="b has more"),
        pytest.param({"b": 300, "c": 400}, "--hostname=c --servePort=1 --force=true", id="c has more"),
        pytest.param({"a": 900, "b": 300, "c": 400}, "--hostname=a --servePort=1 --force=true", id="all report"),
        pytest.param({"b": 300}, "start a:1, c:1", id="one of three may lack what the others have"),
        pytest.param(
            {"b": 300},
            "impossible: qmq AdoptRoles --brokerGroup=g1 --hostname=b --servePort=1 --force=true",
            id="no master",
        ),
    ],
)
async def test_remedy_names_longest_of_three_copies(world, up, command):
    """A power cut, and an older database: a restarted copy waits for a row that is as new as itself."""
    row = Group("g1", 2, A, (B, Broker("g1", Role.SLAVE, "c", "10.0.0.3", 1, 2, incarnation="disk c")), 0)
    states = {name: ReplicaState(SLAVE, 0, flushed_end=end, last_term=4) for name, end in up.items()}
    assert command in old_database.judge(row, 4, lambda broker: states.get(broker.hostname)).remedy


def test_remedy_names_longest_of_two_copies():
    """Both wait for a row as new as themselves. The remedy once was AdoptRoles without --force, which is refused."""
    states = {"a": ReplicaState(SLAVE, 4, flushed_end=200, last_term=4), "b": ReplicaState(SLAVE, 4, flushed_end=300)}
    remedy = old_database.judge(ROW, 4, lambda broker: states[broker.hostname]).remedy
    assert "AdoptRoles --brokerGroup=g1 --hostname=a --servePort=1 --force=true" in remedy
    assert old_database.adopt(ROW, A.key, 4, reports(a=(SLAVE, 4), b=(SLAVE, 4)), floor=9).new_term == 10


def test_current_row_is_unchanged():
    assert old_database.judge(ROW, 2, reports(a=(MASTER, 2), b=(SLAVE, 2))) is None


def test_row_with_fewer_copies_gets_a_newer_term():
    """a still counted c in that term, and b alone was promoted by the rule of two."""
    states = reports(a=(MASTER, 4), b=(SLAVE, 4))
    assert old_database.judge(ROW, 4, states).change.new_term == 5
    assert old_database.judge(ROW, 4, states, floor=7).change.new_term == 8, "above assigned terms, too"


def upkeep_of(world):
    return Upkeep(
        world.registry, world.brokers, Snapshots(None, "sqlite://"), MetaserverRow("m", "h", "g", 0, "1"), poll_ms=1000
    )


async def test_row_from_before_a_swap_is_repaired(cluster):
    cluster.beat("g1-a", term=5, role=SLAVE, writable=False)
    cluster.beat("g1-b", term=5, role=MASTER, writable=True)
    assert "old copy" in await cluster.refused("SwapRoles", brokerGroup="g1")
    [before] = [check for check in (await cluster.done("Doctor"))["checks"] if check["name"] == "group g1"]
    assert not before["ok"] and "term 2, brokers report term 5" in before["found"]
    await upkeep_of(cluster).raise_row("g1")
    group = cluster.registry.directory.groups["g1"]
    assert (group.term, group.master.hostname, group.slave.hostname) == (6, "g1-b", "g1-a")
    assert cluster.registry.old_rows() == []
    cluster.beat("g1-b", role=MASTER, writable=True)
    assert cluster.registry.is_writable(group)
    [row] = await cluster.database.read(lambda repository: repository.audit_trail(action="AdoptRoles"))
    assert (row.who, row.before["term"], row.after["term"]) == ("metaserver", 2, 6)
    await upkeep_of(cluster).raise_row("g1")
    assert cluster.registry.directory.groups["g1"].term == 6, "one new term is enough"


async def test_disagreeing_brokers_need_the_named_command(cluster, caplog):
    cluster.beat("g1-a", term=4)
    cluster.stop("g1-b")
    upkeep = upkeep_of(cluster)
    await upkeep.raise_row("g1")
    await upkeep.raise_row("g1")
    assert cluster.registry.directory.groups["g1"].term == 2
    lines = [r.getMessage() for r in caplog.records if "row of a group is old" in r.getMessage()]
    assert len(lines) == 1 and "start g1-b:20881" in lines[0], "logged once, with the command"
    command = {"brokerGroup": "g1", "hostname": "g1-a", "servePort": 20881}
    assert "down" in await cluster.refused("AdoptRoles", **command | {"hostname": "g1-b"})
    await cluster.done("AdoptRoles", **command)
    group = cluster.registry.directory.groups["g1"]
    assert (group.term, group.master.hostname) == (5, "g1-a"), "above all reported terms"
    cluster.beat("g1-a")
    assert "as new as its brokers" in await cluster.refused("AdoptRoles", **command)


async def test_slave_proves_newer_row_before_its_master_is_heard(cluster):
    """A fixed bug: it reported the older master's term alone, ignored the older row, and its group stood still."""
    cluster.beat("g1-a", term=2, role=SLAVE, known_term=5)
    cluster.beat("g1-b", term=2, role=SLAVE)
    [check] = [check for check in (await cluster.done("Doctor"))["checks"] if check["name"] == "group g1"]
    assert "brokers report term 5" in check["found"] and "slave of term 2 and has stored term 5" in check["found"]
    await cluster.done("AdoptRoles", brokerGroup="g1", hostname="g1-a", servePort=20881, force=True)
    assert cluster.registry.directory.groups["g1"].term == 6


async def test_older_master_is_adopted_with_force_only(cluster):
    cluster.beat("g1-a", term=4)
    cluster.beat("g1-b", term=3, role=MASTER)
    command = {"brokerGroup": "g1", "hostname": "g1-b", "servePort": 20881}
    text = await cluster.refused("AdoptRoles", **command)
    assert "another copy may hold messages that this one lacks" in text
    shown = await cluster.done("AdoptRoles", **command, force=True, dryRun=True)
    assert shown["wouldChange"] and shown["objections"] == [text], "the dry run names the forced objection"
    assert cluster.registry.directory.groups["g1"].term == 2
    await cluster.done("AdoptRoles", **command, force=True)
    group = cluster.registry.directory.groups["g1"]
    assert (group.term, group.master.hostname) == (5, "g1-b")


async def test_new_terms_exceed_all_reported_ones(cluster):
    """A fixed bug: ReplaceBroker raised a row two swaps old to a term that the brokers ignored."""
    cluster.beat("g1-a", term=7)
    cluster.stop("g1-b")
    await cluster.done("ReplaceBroker", **place("g1", 1, "g1-c"))
    assert cluster.registry.directory.groups["g1"].term == 8


async def test_recreated_group_exceeds_brokers_terms(cluster):
    registering = Broker("g9", SLAVE, "g9-a", "10.0.0.1", 20881, 20882, incarnation="disk of g9-a")
    with pytest.raises(Exception, match="is no broker here"):
        await cluster.registry.registration.register(registering, None, term=6)
    await cluster.done("AddBroker", **place("g9", 0, "g9-a"))
    assert cluster.registry.directory.groups["g9"].term == 7
    group = cluster.registry.directory.groups["g9"]
    gone = rules.RoleChange("g9", 7, group, None, above=20)
    await cluster.database.write(lambda r: r.change([SetRoles(gone), RemoveGroup("g9", 21)]))
    await cluster.done("AddBroker", **place("g9", 0, "g9-a"))
    assert cluster.registry.directory.groups["g9"].term == 22, "a removed group keeps its term"


def test_other_data_directory_does_not_agree():
    states = {BrokerKey("a", 1): ReplicaState(MASTER, 4, incarnation="another disk")}

    def own(broker):
        state = states.get(broker.key)
        return state if state and state.incarnation in ("", broker.incarnation) else None

    assert old_database.judge(ROW, 4, own).change is None


@pytest.mark.parametrize(
    ("name", "disk", "registers"),
    [
        ("g1-b", "the disk before", True),
        ("g1-b", "disk of g1-b", False),
        ("g1-a", "", True),
        ("g1-a", "the disk before", False),
    ],
)
async def test_other_disk_than_row_registers_again(cluster, monkeypatch, name, disk, registers):
    """It counted as down, so the row was not raised, and it was not promoted. A master is refused then, and
    continues.
    """
    service, registering = service_of(cluster, monkeypatch, name)
    first = pb.BrokerState(**{word: registering[word] for word in ("hostname", "serve_port", "incarnation")}, term=5)
    context, ended = Aborting(), asyncio.Event()

    async def beats():
        yield first
        await ended.wait()

    stream = service.Heartbeat(beats(), context)
    assert (await anext(stream)).term == 2
    key = BrokerKey(name, 20881)
    before = replace(cluster.registry.directory.find(key), incarnation=disk)
    await cluster.database.write(lambda r: r.store_registration(before))

    async def next_part():
        while not (answer := await anext(stream)).term:
            pass  # the reply holds the clock only
        return answer

    assignment = asyncio.create_task(next_part())
    await cluster.registry.change([SetMark(ReadonlyMark("a", "g1"))], AuditRow("anna", "", "a word to this broker"))
    if registers:
        with pytest.raises(Aborted, match="register again"):
            await assignment
        assert context.code == grpc.StatusCode.FAILED_PRECONDITION
    else:
        assert (await assignment).readonly_subjects == ["a"]
    ended.set()
    await stream.aclose()
