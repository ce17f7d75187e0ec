"""Shell. Memory equals a real SQLite database, also after interrupted readings."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from qmq.errors import OperatorError
from qmq.metaserver.cluster.liveness import PlaceTaken, Question
from qmq.metaserver.model import AuditRow, BrokerKey, ReadonlyMark, ReplicaState
from qmq.metaserver.storage.changes import RemoveRoute, SetMark, SetRoute
from qmq.metaserver.storage.database import DatabaseAway
from qmq.replication.identity import Point
from qmq.types import Epoch, Role

ANOTHER = AuditRow("another metaserver", "", "change")


@pytest.fixture
async def world(world):
    await world.copies()
    return world


async def test_reading_is_published_despite_later_failure(world, monkeypatch):
    """Groups, routes and sightings are read one after the other; the database may fail in between."""
    registry, read = world.registry, world.database.read
    changes = [SetMark(ReadonlyMark("a", "g1")), SetRoute("a", ("g1",), 0)]
    await world.database.write(lambda repository: repository.change(changes, ANOTHER))
    with registry.changes.watch() as wake:
        readings = 0

        async def failing(*args, **options):
            nonlocal readings
            readings += 1
            if readings == 2:
                raise DatabaseAway("in between")
            return await read(*args, **options)

        monkeypatch.setattr(world.database, "read", failing)
        with pytest.raises(DatabaseAway):
            await registry.mirror.catch_up()
        assert registry.directory.marks and wake.is_set()
        wake.clear()
        await registry.mirror.catch_up()
        assert registry.routes["a"].groups == ("g1",) and wake.is_set()


async def test_late_answer_keeps_route_removed(world, monkeypatch):
    await world.start("g1-a")
    write = world.database.write

    async def late(work):
        stored = await write(work)
        (route,) = stored
        await write(lambda repository: repository.change([RemoveRoute("a", route.version)], ANOTHER))
        await world.registry.mirror.catch_up()
        return stored

    monkeypatch.setattr(world.database, "write", late)
    await world.registry.routes_for(["a"])
    assert not world.registry.routes


async def test_change_wakes_concerned_brokers_only(world):
    await world.copies("g2")
    registry, changes = world.registry, world.registry.mirror.directory_changes
    first, second = (registry.directory.groups[name].master.key for name in ("g1", "g2"))
    with changes.watch(first) as woken, changes.watch(second) as left:

        async def run(*args, **words) -> tuple[bool, bool]:
            woken.clear()
            left.clear()
            await world.done(*args, **words)
            return woken.is_set(), left.is_set()

        assert await run("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="*") == (True, False)
        assert await run("UnMarkReadonlyBrokerGroup", brokerGroup="g1", subject="*") == (True, False)
        assert await run("DrainGroup", brokerGroup="g2") == (False, True)
        assert await run("AddNewSubject", subject="s", tag="t") == (False, False)
        offline = {"subject": "s", "consumerGroup": "c", "clientId": "*", "state": "offline"}
        assert await run("OnOffline", **offline) == (True, True)
        assert await run("SetLimits", subject="s", expiresAfterS="60") == (True, True)
        assert await run("RemoveBroker", hostname="g2-b", servePort=20881) == (False, True)


async def test_routes_of_group_list_it(world):
    registry = world.registry
    await registry.change([SetRoute("a", ("g1",), 0), SetRoute("b", ("g1",), 0)], ANOTHER)
    assert registry.routes_of(["g1"]) == registry.routes and registry.routes_of(["g2"]) == {}
    await registry.change([RemoveRoute("a", 1)], ANOTHER)
    assert registry.routes_of(["g1", "g2"]).keys() == {"b"}


async def test_repeated_heartbeat_is_processed_after_changes(world):
    await world.start("g1-a")
    registry, state = world.registry, ReplicaState(1, 1, point=Point(Epoch(1, 1), 100, 7), incarnation="x")
    key, place = BrokerKey("g1-a", 20881), ("g1", "x")

    def beats() -> dict[tuple[str, str], Point]:
        """Return the points to store after a heartbeat, and store them."""
        assert registry.beat(key, world.sessions["g1-a"], state)
        shown = dict(registry.reports.points)
        registry.reports._stored_points |= shown
        registry.reports.points.clear()
        return shown

    assert [beats(), beats()] == [{place: state.point}, {}]
    registry.store_points_again()
    assert [beats(), beats()] == [{place: state.point}, {}]
    registry.reports._stored_points.clear()  # a processed heartbeat is visible by it
    await registry.change([SetMark(ReadonlyMark("a", "g1"))], ANOTHER)
    assert beats() == {place: state.point}


async def test_master_report_outlives_older_slave_report(world):
    """Each comes on its own stream. Without messages the master repeats its report, which was ignored."""
    for name in ("g1-a", "g1-b"):
        await world.start(name)
    registry = world.registry
    group = registry.directory.groups["g1"]
    slave = group.slaves[0]
    await world.database.write(lambda r: r.store_complete(slave, term=group.term, complete=False))
    await registry.mirror.catch_up()
    slave = registry.directory.groups["g1"].slaves[0]
    master = ReplicaState(Role.MASTER, group.term, writable=True, in_step=(slave.incarnation,))
    filled = ReplicaState(Role.SLAVE, group.term, incarnation=slave.incarnation, incomplete=True)

    def beat(name: str, state: ReplicaState) -> bool:
        """Return whether the slave's completeness is to be stored."""
        assert registry.beat(BrokerKey(name, 20881), world.sessions[name], state)
        return registry.reports.completeness.get(slave.key) == (slave, group.term, True)

    assert [beat("g1-a", master), beat("g1-b", filled)] == [True, False]
    assert beat("g1-a", master)


async def test_copied_directory_is_refused_while_original_runs(world):
    """Both were masters of one term, and of three copies each had another slave's confirmations."""
    await world.start("g1-a")
    registry, asked = world.registry, []
    known = registry.directory.groups["g1"].master
    assert known is not None
    moved = replace(known, ip="10.0.0.9")
    with pytest.raises(PlaceTaken, match="from another address"):
        await registry.registration.register(moved, asked.append)
    assert registry.directory.find(known.key) == known and asked == []
    await registry.registration.register(known, asked.append)

    async def is_gone(question: Question) -> None:
        registry.liveness.answered(question, None, now_ms=registry.now_ms())

    registry.leave(known.key, world.sessions["g1-a"])  # another machine; the old one is off
    assert (await registry.registration.register(moved, is_gone)).ip == "10.0.0.9"


async def test_moved_broker_begins_in_a_new_term(world):
    """The earlier process may still run where no metaserver reaches it: its master must not count it."""
    for hostname in ("g1-a", "g1-b"):
        await world.start(hostname)
    registry, asked = world.registry, []
    group = registry.directory.groups["g1"]
    original = replace(group.slaves[0], complete=True)
    copied = replace(original, instance="a copy")
    for _ in range(2):
        with pytest.raises(PlaceTaken, match="one of the two data directories is a copy"):
            await registry.registration.register(copied, asked.append)
    checks = (await world.done("Doctor"))["checks"]
    (shown,) = [check for check in checks if check["found"] == "another process with its name is refused"]
    assert str(original.key) in shown["name"] and "delete its directory" in shown["remedy"]

    async def is_gone(question: Question) -> None:
        asked.append(question)
        registry.liveness.answered(question, None, now_ms=registry.now_ms())

    world.beat("g1-a", in_step=(original.incarnation,))
    registry.leave(original.key, world.sessions["g1-b"])
    with pytest.raises(PlaceTaken, match="connected to the master"):
        await registry.registration.register(copied, is_gone)
    assert registry.directory.groups["g1"] == group
    world.beat("g1-a")
    for _ in range(2):  # the second one is unchanged
        assert (await registry.registration.register(copied, is_gone)).instance == "a copy"
    row = registry.directory.groups["g1"]
    assert (row.term, row.slaves[0].instance, row.master) == (group.term + 1, "a copy", group.master)
    assert registry.registration.refused_lately(original) and not registry.registration.refused_lately(row.slaves[0])
    registry.join(copied.key, copied.incarnation)
    with pytest.raises(PlaceTaken, match="is a copy of the other"):
        await registry.registration.register(original, is_gone)
    assert (
        await registry.registration.register(replace(copied, ip="10.0.0.7"), is_gone)
    ).ip == "10.0.0.7"  # the same process
    assert registry.directory.groups["g1"].term == row.term


async def test_moved_broker_does_not_raise_old_row(world):
    """A newer row, which the database lost, may assign other roles than the new term would."""
    await world.start("g1-a")
    registry = world.registry
    group = registry.directory.groups["g1"]
    world.beat("g1-a", term=group.term + 5)
    world.stop("g1-a")
    await registry.registration.register(replace(group.master, instance="a copy"), asyncio.sleep, term=group.term + 5)
    assert registry.directory.groups["g1"].term == group.term


async def test_copy_from_before_promotion_is_refused(world):
    """Only the original surely has the messages that both copies had acknowledged."""
    for hostname in ("g1-a", "g1-b"):
        await world.start(hostname)
    registry = world.registry
    group = registry.directory.groups["g1"]
    world.stop("g1-a")
    world.stop("g1-b")
    copied = replace(group.master, instance="a copy")
    with pytest.raises(OperatorError, match="Give it that one back"):
        await registry.registration.register(copied, asyncio.sleep, term=group.term - 1)
    slave = replace(group.slaves[0], instance="a copy")
    await registry.registration.register(slave, asyncio.sleep, term=group.term - 1)  # it counts once it has matched
    await registry.registration.register(copied, asyncio.sleep, term=group.term)
    assert registry.directory.groups["g1"].term == group.term + 2
