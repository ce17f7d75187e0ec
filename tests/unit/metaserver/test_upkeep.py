"""Shell. Background tasks of a metaserver: queries and writes, without pile-ups or losses."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, suppress

import pytest
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.cluster import upkeep as module
from qmq.metaserver.cluster.liveness import Question
from qmq.metaserver.cluster.snapshot import Snapshots
from qmq.metaserver.cluster.upkeep import Upkeep
from qmq.metaserver.model import AuditRow, BrokerKey, MetaserverRow, ReadonlyMark
from qmq.metaserver.storage.changes import RemoveRoute, SetMark, SetRoute, ValueRefused
from qmq.replication.identity import Point
from qmq.types import Epoch

KEY = BrokerKey("g1-a", 20881)


@pytest.fixture
async def world(world):
    await world.copies()
    return world


@pytest.fixture
def upkeep(world):
    own = MetaserverRow("m1", "h", "g", 0, "1")
    return Upkeep(world.registry, world.brokers, Snapshots(None, "sqlite://"), own, poll_ms=1000)


async def test_broker_has_one_query_at_a_time(world, upkeep, monkeypatch):
    """With a thousand dead machines, queries would come faster than they time out."""
    ticks, asked, question = 0, [], Question(KEY, "m2.1", "x")
    ticked, go_on = asyncio.Event(), asyncio.Event()

    def to_ask(*, now_ms):
        nonlocal ticks
        ticks += 1
        if ticks % 10 == 0:
            ticked.set()
        return [question]

    async def ask(question):
        asked.append(question)
        await go_on.wait()

    monkeypatch.setattr(module, "TICK_S", 0)
    monkeypatch.setattr(module, "_pause_s", lambda every_s: 0.0)
    monkeypatch.setattr(world.liveness, "to_ask", to_ask)
    monkeypatch.setattr(upkeep, "ask", ask)
    watching = asyncio.create_task(upkeep._watch_silence())
    await ticked.wait()
    assert asked == [question]
    go_on.set()
    ticked.clear()
    await ticked.wait()
    assert len(asked) > 1, "once it is answered it may be asked again"
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


async def test_report_during_a_write_is_stored(world, upkeep, monkeypatch):
    slave, reported = world.registry.directory.groups["g1"].slave, world.registry.reports.completeness
    write, stored = world.database.write, []

    async def slow(work):
        stored.append(reported[slave.key])
        result = await write(work)
        if len(stored) == 1:
            reported[slave.key] = slave, 2, False
        return result

    monkeypatch.setattr(world.database, "write", slow)
    reported[slave.key] = slave, 2, True
    await upkeep._store_news()
    await upkeep._store_news()
    assert stored == [(slave, 2, True), (slave, 2, False)] and not reported


@pytest.mark.parametrize("again_s", [3600.0, 0.0])
async def test_points_are_stored_and_repeated(world, upkeep, monkeypatch, again_s):
    await world.start("g1-a")
    stored, write, point = asyncio.Queue(), world.database.write, Point(Epoch(1, 1), 100, 7)

    async def seen(work):
        await write(work)
        stored.put_nowait(dict(world.registry.reports.points))

    monkeypatch.setattr(module, "_pause_s", lambda: 0.0)
    monkeypatch.setattr(module, "STORED_AGAIN_S", again_s)
    monkeypatch.setattr(world.database, "write", seen)
    storing = asyncio.create_task(upkeep._store_points())
    for _ in range(10):
        await asyncio.sleep(0)
    world.beat("g1-a", point=point, incarnation="x")
    assert await stored.get() == {("g1", "x"): point}
    world.beat("g1-a", point=point, incarnation="x")
    assert again_s == 0 or not world.registry.reports.points, "the database has it"
    while again_s == 0 and stored.empty():  # the database may have lost it
        await asyncio.sleep(0)
        world.beat("g1-a", point=point, incarnation="x")
    storing.cancel()
    with suppress(asyncio.CancelledError):
        await storing


async def test_dead_letter_route_follows_its_sources(world, upkeep):
    """A broker group that is added to the source's route stores its dead letters, too."""
    await world.copies("g2")
    await world.routed("s", "dead", groups=("g1",))
    await world.done("LimitGroup", subject="s", group="shop", deadLettersTo="dead")
    await world.done("AddSubjectBrokerGroup", subject="s", brokerGroup="g2")
    assert world.groups_of("dead") == ("g1",)
    await upkeep._widen_routes()
    assert world.groups_of("dead") == ("g1", "g2")
    row = (await world.audit())[0]
    assert (row.action, row.parameters, row.result) == ("WidenRoute", {"subject": "dead"}, "done")
    await upkeep._widen_routes()
    assert (await world.audit())[0] == row, "once"


async def test_removed_route_does_not_end_upkeep(world, upkeep, monkeypatch):
    await world.copies("g2")
    await world.routed("s", "dead", "gone", groups=("g1",))
    for group, to in (("shop", "dead"), ("bank", "gone")):
        await world.done("LimitGroup", subject="s", group=group, deadLettersTo=to)
    await world.done("AddSubjectBrokerGroup", subject="s", brokerGroup="g2")
    change = world.registry.change

    async def one_goes(changes, audit):
        other = {"dead": "gone", "gone": "dead"}[changes[0].subject]
        if other in world.registry.routes and world.groups_of(other) == ("g1",):
            await change((RemoveRoute(other, world.registry.routes[other].version),), audit)
        await change(changes, audit)

    monkeypatch.setattr(world.registry, "change", one_goes)
    await upkeep._widen_routes()
    assert sorted(filter(None, map(world.registry.find, ("dead", "gone"))))[0].groups == ("g1", "g2")


async def rounds(world, upkeep, monkeypatch, *, second_s):
    """Follow the database for four rounds; return the calls to it."""
    asked, enough = [], asyncio.Event()

    def counted(name):
        ask = getattr(world.database, name)

        async def call(*arguments, **more):
            asked.append(name)
            if len(asked) == 4:
                enough.set()
            return await ask(*arguments, **more)

        monkeypatch.setattr(world.database, name, call)

    for name in ("write", "read", "probe"):
        counted(name)
    monkeypatch.setattr(module, "until_next_second", lambda now_s, every_s: second_s)
    following = asyncio.create_task(upkeep._follow())
    await enough.wait()
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    return asked[:4]


async def test_lone_metaserver_reads_once_a_second(world, upkeep, monkeypatch):
    """Each transaction costs a tenth of a percent of a core, so the counter and the versions share one."""
    assert await rounds(world, upkeep, monkeypatch, second_s=0.0) == ["write", "read", "read", "read"]


async def test_lone_metaserver_stays_alive_for_itself(world, upkeep, monkeypatch):
    """Otherwise its own row would look like that of a stopped metaserver, and be removed."""
    registry, repository = world.registry, world.database.repository
    await registry.mirror.catch_up(upkeep._show_life)
    repository.change([SetMark(ReadonlyMark("elsewhere", "g1"))])
    await registry.mirror.catch_up(upkeep._show_life)
    assert registry.directory.is_marked("g1", "elsewhere")
    assert [row.beat for row in registry.peers()] == [2]
    assert [row.beat for row in repository.load_metaservers()] == [1], "no other metaserver reads it"
    monkeypatch.setattr(module, "STORED_AGAIN_S", 0.0)
    upkeep._shown_until_s = 0.0
    await registry.mirror.catch_up(upkeep._show_life)
    await registry.mirror.catch_up(upkeep._show_life)
    assert [row.beat for row in repository.load_metaservers()] == [4], "a write shows whether the database accepts one"


async def test_counter_is_stored_once_another_reads_it(world, upkeep):
    repository = world.database.repository

    async def look() -> int:
        await world.registry.mirror.catch_up(upkeep._show_life)
        return next(row.beat for row in repository.load_metaservers() if row.id == "m1")

    assert [await look(), await look()] == [1, 1]
    repository.beat(MetaserverRow("m2", "h", "g", 1, "1"))
    assert [await look(), await look()] == [3, 4]
    assert {row.id for row in world.registry.peers()} == {"m1", "m2"}
    repository.remove_metaserver("m2")
    assert [await look(), await look()] == [5, 5], "alone again"
    repository.remove_metaserver("m1")  # the database was restored from before its first beat
    assert await look() == 7


async def test_metaserver_polls_between_its_beats(world, upkeep, monkeypatch):
    world.database.repository.beat(MetaserverRow("m2", "h", "g", 1, "1"))
    upkeep._poll_s = 0.0
    assert await rounds(world, upkeep, monkeypatch, second_s=1000.0) == ["write", "probe", "probe", "probe"]


async def test_failed_own_row_does_not_stop_reading(world, upkeep, monkeypatch):
    def refuse(row):
        raise ValueRefused("the row")

    monkeypatch.setattr(world.database.repository, "beat", refuse)
    assert await rounds(world, upkeep, monkeypatch, second_s=0.0) == ["write", "probe"] * 2


async def test_stop_removes_row_despite_failed_reports(world, upkeep, monkeypatch):
    await rounds(world, upkeep, monkeypatch, second_s=0.0)
    await world.start("g1-a")
    world.beat("g1-a", point=Point(Epoch(1, 1), 100, 7), incarnation="x")

    def refuse(points):
        raise IntegrityError("INSERT", {}, Exception("another one stored it at this moment"))

    monkeypatch.setattr(world.database.repository, "store_points", refuse)
    await upkeep.stop()
    assert await world.database.read(lambda r: r.load_metaservers()) == []


async def test_points_of_a_removed_group_are_dropped(world, upkeep):
    for name in ("g1-a", "g1-b"):
        await world.start(name)
    world.beat("g1-a", incarnation="disk of g1-a", point=Point(Epoch(2, 1), 4096, 7))
    for name in ("g1-b", "g1-a"):
        world.stop(name)
        await world.done("RemoveBroker", hostname=name, servePort=20881, force="true")
    await world.copies()
    await upkeep._store_points_once()
    assert not (await world.registry.points_of("g1")).by_incarnation


async def test_restored_database_is_read_again(world, upkeep):
    """A fixed bug: equally many changes give equal versions of other rows."""

    def changes(subject):
        return [SetMark(ReadonlyMark(subject, "g1")), SetRoute(subject, ("g1",), 0)]

    audit, path = AuditRow("anna", "", "change"), world.url.removeprefix("sqlite:///")
    other, repository = await world.another(), world.database.repository
    repository.beat(MetaserverRow("m2", "h", "g", 1, "1"))
    with closing(sqlite3.connect(path)) as database, closing(sqlite3.connect(":memory:")) as copy:
        await world.registry.mirror.catch_up(upkeep._show_life)
        database.backup(copy)
        await world.registry.mirror.catch_up(upkeep._show_life)
        await world.registry.change(changes("a"), audit)
        copy.backup(database)
    await other.registry.change(changes("b"), audit)
    await world.registry.mirror.catch_up(upkeep._show_life)
    assert world.registry.directory.marks == {ReadonlyMark("b", "g1")}
    assert [name for name, route in world.registry.routes.items() if route.groups] == ["b"]
    reads = world.registry.mirror._seen
    await world.registry.mirror.catch_up(upkeep._show_life)
    assert world.registry.mirror._seen is reads, "once"
