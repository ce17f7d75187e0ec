"""Shell. Brokers and the metaserver over real sockets: registration, heartbeats, assignments, restarts."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest import mock

import grpc
import pytest

from qmq.metaserver.model import BrokerKey
from qmq.metaserver.roles import failover
from qmq.proto import qmq_pb2 as pb
from tests.integration.metaserver_world import METADATA, FakeBroker
from tests.integration.watchdog_world import KEY
from tests.support.waiting import until_async


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_unknown_broker_is_refused_with_the_command(world):
    error = await refusal(world.broker("stranger", 3001))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "qmq AddBroker" in error.details() and "--hostname=stranger" in error.details()
    assert "--servePort=3001" in error.details()


async def test_second_process_claiming_a_live_broker_is_refused(world):
    master, _ = await world.copies()
    for hostname in ("g1-a", "g1-b"):
        error = await refusal(world.broker(hostname, incarnation="another disk"))
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        assert "Stop it first" in error.details()
    assert await world.writable("g1") and master.gone is None


async def test_stream_ends_when_a_copy_gets_the_part(world):
    """The copy may register at another metaserver. No process gets a term that another one got while it registered."""
    master, slave = await world.copies()
    registry = world.server.registry

    async def is_missing():
        return not registry.state(registry.directory.groups["g1"].master).in_step

    async def give_away(*_):
        row = registry.directory.find(BrokerKey("g1-b", 20881))
        copied = replace(row, instance=f"{row.instance} copy")
        await registry.database.write(lambda repository: repository.store_registration(copied))
        await registry.mirror.catch_up()

    await give_away()
    gone = await slave.until_gone()
    assert gone.code() == grpc.StatusCode.FAILED_PRECONDITION and "register again" in gone.details()
    await slave.stop()
    master.in_sync_with = ""
    await world.until(is_missing)
    with mock.patch.object(failover, "begin_term_at_start", give_away):
        error = await refusal(world.rpc.Register(slave.identity(begins=True), metadata=METADATA))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION and "register again" in error.details()


async def test_emptied_master_is_refused_and_emptied_slave_accepted(world):
    master, slave = await world.copies()
    await master.stop()
    await slave.stop()
    error = await refusal(world.broker("g1-a", incarnation="empty"))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "qmq RecoverGroup --brokerGroup=g1" in error.details()
    await world.broker("g1-b", incarnation="empty")


async def test_broker_with_wrong_group_or_words_is_refused(world):
    await world.add("g1", 0, "a")
    broker = FakeBroker(world, "a", 20881)
    broker.control_port = 5
    wrong_group = await refusal(world.rpc.Register(broker.identity(broker_group="g2"), metadata=METADATA))
    assert "belongs to g1" in wrong_group.details()
    for changes in ({"ip": "no where"}, {"incarnation": ""}, {"sync_port": 70000}, {"hostname": "a/b"}):
        error = await refusal(world.rpc.Register(broker.identity(**changes), metadata=METADATA))
        assert error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)


async def test_heartbeat_without_registration_is_refused(world):
    await world.add("g1", 0, "a")
    call = world.rpc.Heartbeat(metadata=METADATA)
    await call.write(pb.BrokerState(hostname="a", serve_port=20881, incarnation="x"))
    error = await refusal(call.read())
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION and "Register" in error.details()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"incarnation": "x" * 300}, id="another directory"),
        pytest.param({"acknowledged": pb.AcknowledgedPoint(term=2, boot=1, end=1 << 63)}, id="point beyond the column"),
    ],
)
async def test_wrong_report_ends_its_own_stream_only(world, changed):
    """Points of all groups are stored in one write."""
    master, _ = await world.copies()
    other, _ = await world.copies("g2")
    state = master.state()
    master.state = lambda: pb.BrokerState.FromString(
        state.SerializeToString() + pb.BrokerState(**changed).SerializeToString()
    )
    master.say()
    error = await master.until_gone()
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT

    point = pb.AcknowledgedPoint(term=2, boot=1, end=4096, chain=77)
    others = other.state
    other.state = lambda: pb.BrokerState.FromString(
        others().SerializeToString() + pb.BrokerState(acknowledged=point).SerializeToString()
    )
    other.say()
    await until_async(lambda: ("g2", other.incarnation) in world.server.registry.reports._stored_points)


async def test_new_stream_replaces_the_old_stream(world):
    master, _ = await world.copies()
    again = await world.broker("g1-a")
    assert (await master.until_gone()).code() == grpc.StatusCode.ABORTED
    await world.until(lambda: world.writable("g1"))
    assert again.gone is None


async def test_readonly_mark_is_pushed_to_both_brokers(world):
    master, slave = await world.copies()
    await world.post("AddNewSubject", subject="order.changed", tag="pay")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="order.changed")
    for broker in (master, slave):
        await broker.until_assigned(lambda assignment: list(assignment.readonly_subjects) == ["*", "order.changed"])
    await world.done("UnMarkReadonlyBrokerGroup", brokerGroup="g1")
    await master.until_assigned(lambda assignment: list(assignment.readonly_subjects) == ["order.changed"])


@pytest.mark.metaserver(heartbeat_timeout_ms=5000)
async def test_heartbeat_replies_carry_the_clock(world):
    master, slave = await world.copies()
    assigned = len(master.assignments)
    await master.until(lambda: len(master.clocks_ms) >= 2)
    assert len(master.assignments) == assigned


@pytest.mark.metaserver(password_keys=[KEY])
async def test_watchdog_databases_are_reread_only_after_changes(world):
    reads, database = [], world.server._database
    read = database.read

    async def counted(work, **words):
        if "_read_sources" in work.__qualname__:  # the survey reads, too
            reads.append(work)
        return await read(work, **words)

    async def sources():
        database.read = counted
        try:
            answer = await world.rpc.ListSources(pb.SourcesQuestion(room="default"), metadata=METADATA)
        finally:
            database.read = read
        return [source.user for source in answer.sources]

    assert await sources() == [] and len(reads) == 1
    assert await sources() == [] and len(reads) == 1
    await world.done("AddDb", type="mysql", host="127.0.0.1", port=1, username="u", password="p", database="d")
    assert await sources() == ["u"] and len(reads) == 2


async def test_wiped_slave_is_incomplete_despite_its_master(world):
    master, slave = await world.copies()
    registry = world.server.registry

    async def complete(expected):
        return registry.directory.groups["g1"].slave.complete is expected

    await world.until(lambda: complete(True))
    await slave.stop()
    master.in_sync_with = slave.incarnation  # and the master stays writable
    wiped = await world.broker("g1-b", incarnation="wiped disk")
    assert await complete(False)
    master.say()
    for _ in range(20):
        await registry.mirror.catch_up()
        assert await complete(False)
    master.in_sync_with = wiped.incarnation
    await world.until(lambda: complete(True))


@pytest.mark.metaserver(database_timeout_ms=500)
async def test_heartbeats_go_on_while_the_database_hangs(world):
    """Weakness 15: SQL on the threads that serve heartbeats."""
    master, _ = await world.copies()
    registry = world.server.registry
    release = threading.Event()
    repository = registry.database.repository
    repository.versions = repository.beat = lambda *_: release.wait()
    try:
        await until_async(lambda: not registry.database.is_up)
        master.reasons = ["disk"]
        master.say()
        await until_async(lambda: not registry.is_writable(registry.directory.groups["g1"]))
        assert not registry.database.is_up, "the database still hangs"
    finally:
        release.set()
        del repository.versions, repository.beat
