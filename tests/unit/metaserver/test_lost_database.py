"""Shell. A database that is emptied or replaced under running metaservers and brokers."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy import delete, update

from qmq.errors import NotServed, OperatorError
from qmq.metaserver.cluster import old_database
from qmq.metaserver.cluster.snapshot import Snapshots
from qmq.metaserver.model import AuditRow, Broker, TokenRow
from qmq.metaserver.storage.changes import AddToken
from qmq.metaserver.storage.database import DatabaseSetAside
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.tables import meta_version, metadata
from qmq.types import Role
from tests.unit.metaserver.actions_world import World, place

TOKEN = TokenRow("t1", "shop", "client", "salt", "hash", ("order.*",))
AUDIT = AuditRow("anna", "", "AddToken")


def empty(world):
    """Empty the database, as if it were new."""
    engine = open_database(world.url)
    with engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            if table.name != "meta_version":
                connection.execute(delete(table))
        connection.execute(update(meta_version).values(version=0))
    engine.dispose()


@pytest.fixture
async def world(world):
    """A metaserver with group g1 of two running copies, a token, a route and a mark."""
    await world.running_copies()
    await world.registry.change([AddToken(TOKEN)], AUDIT)
    await world.routed("order.changed")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1", subject="order.changed")
    return world


async def set_aside(world):
    with pytest.raises(DatabaseSetAside, match="no row of g1"):
        await world.registry.mirror.catch_up()


async def lose(world):
    """Empty the database; the metaserver notices."""
    empty(world)
    await set_aside(world)


async def test_emptied_database_changes_nothing_in_memory(world):
    """A fixed bug: brokers refused running clients for minutes although the metaserver had everything in memory."""
    await lose(world)
    registry = world.registry
    assert registry.routes["order.changed"].groups == ("g1",) and [t.id for t in registry.tokens] == ["t1"]
    assert registry.is_writable(registry.directory.groups["g1"])
    await registry.routes_for(["order.changed"])
    with pytest.raises(NotServed, match="no row of g1.*AdoptDatabase"):
        await registry.routes_for(["new.subject"])
    answer = await world.run("AddBroker", **place("g2", 0, "g2-a"))
    assert not answer.done and "no row of g1" in answer.message and "Restore" in answer.message
    await world.start("g1-b")  # registers again, with nothing new to store
    checks = {check["name"]: check for check in (await world.done("Doctor"))["checks"]}
    assert "AdoptDatabase --keep=memory" in checks["database"]["remedy"]
    await set_aside(world)


async def test_database_is_filled_from_memory(world):
    before = world.registry.directory
    await lose(world)
    assert (await world.run("AdoptDatabase", keep="memory", dryRun="true")).done
    await set_aside(world)
    await world.done("AdoptDatabase", keep="memory")
    registry, after = world.registry, world.registry.directory
    assert registry.database.is_up and registry.routes["order.changed"].groups == ("g1",)
    assert [t.id for t in registry.tokens] == ["t1"] and after.marks == before.marks
    old, new = before.groups["g1"], after.groups["g1"]
    assert new.term > old.term and [b.key for b in new.brokers] == [b.key for b in old.brokers]
    assert [b.incarnation for b in new.brokers] == [b.incarnation for b in old.brokers]
    [row] = await world.audit()
    assert row.action == "AdoptDatabase"
    other = await world.another()
    assert other.registry.directory.groups["g1"].master == new.master, "another metaserver serves it, too"
    assert "nothing to decide" in await world.refused("AdoptDatabase", keep="memory")


async def test_operator_may_keep_the_database(world):
    world.beat("g1-a", term=6)
    await lose(world)
    await world.done("AdoptDatabase", keep="database")
    assert world.registry.directory.groups == {} and world.registry.routes == {}
    await world.done("AddBroker", **place("g1", 0, "g1-a"))
    assert world.registry.directory.groups["g1"].term == 7, "above all reported terms"


async def test_backup_is_restored_into_emptied_database(world):
    backup = await world.done("Backup")
    await lose(world)
    await world.done("Restore", backup=json.dumps(backup))
    assert world.registry.database.is_up
    assert world.registry.directory.groups["g1"].term == 2, "the term of its brokers"


async def test_older_backup_gets_a_newer_term(world):
    """A fixed bug: the master still counted the third copy, while a failover used the rule for two."""
    backup = await world.done("Backup")
    await world.done("AddBroker", **place("g1", 1, "g1-c"))
    assert world.registry.directory.groups["g1"].term == 3
    world.beat("g1-a", term=3)
    world.beat("g1-b", term=3)
    await lose(world)
    await world.done("Restore", backup=json.dumps(backup))
    [old] = world.registry.old_rows()
    assert old == "g1" and len(world.registry.directory.groups["g1"].brokers) == 2
    assert world.registry.old_row("g1").change.new_term == 4


async def test_start_compares_database_with_snapshot(world, tmp_path):
    snapshots = Snapshots(tmp_path / "snapshot", world.url)
    await snapshots.save(world.registry)
    empty(world)
    other = World(world.url)
    await other.database.open()
    other.registry.mirror.expect(snapshots.read())
    await set_aside(other)
    snapshots.serve(snapshots.read(), other.registry)
    assert other.registry.routes["order.changed"].groups == ("g1",)
    assert [token.id for token in other.registry.tokens] == ["t1"]
    await set_aside(other)
    await other.done("AdoptDatabase", keep="memory")
    await world.registry.mirror.catch_up()
    assert world.registry.database.is_up, "the decision holds for all metaservers"
    other.database.close()


async def test_registering_brokers_reveal_an_empty_database(world, tmp_path):
    world = await world.another(f"sqlite:///{tmp_path / 'empty.db'}")
    reported = Broker("g9", Role.SLAVE, "g9-a", "10.0.0.1", 20881, 20882, incarnation="disk of g9-a")
    with pytest.raises(OperatorError, match="is no broker here"):
        await world.registry.registration.register(
            Broker("", Role.SLAVE, "new", "10.0.0.1", 1, 2, incarnation="x"), None, term=0
        )
    assert world.registry.database.is_up, "a broker without a role proves nothing"
    with pytest.raises(DatabaseSetAside, match="no row of g9"):
        await world.registry.registration.register(reported, None, term=4)
    assert not (await world.run("AddBroker", **place("g9", 0, "g9-a"))).done
    assert "not in memory either" in await world.refused("AdoptDatabase", keep="memory")
    await world.done("AdoptDatabase", keep="database")
    await world.done("AddBroker", **place("g9", 0, "g9-a"))
    assert world.registry.directory.groups["g9"].term == 5


async def test_waiting_registration_reveals_an_empty_database(world, tmp_path):
    """A fixed bug: AddBroker had read the database when a broker reported, and stored a row; then nothing was lost."""
    world = await world.another(f"sqlite:///{tmp_path / 'empty.db'}")
    reported = Broker("g9", Role.SLAVE, "g9-a", "10.0.0.1", 20881, 20882, incarnation="disk of g9-a")
    adding, registering = await asyncio.gather(
        world.run("AddBroker", **place("g8", 0, "g8-a")),  # it reads first, and the registration waits for that
        world.registry.registration.register(reported, None, term=4),
        return_exceptions=True,
    )
    assert not adding.done and "no row of g9" in adding.message
    assert isinstance(registering, DatabaseSetAside)


async def test_removed_group_is_not_lost(world):
    for hostname in ("g1-b", "g1-a"):
        world.stop(hostname)
        await world.done("RemoveBroker", hostname=hostname, servePort=20881, force="true")
    assert world.registry.directory.groups == {} and world.registry.database.is_up


@pytest.mark.parametrize(
    ("known", "reported", "rows", "lost"),
    [
        pytest.param({"g1"}, {}, {"g1", "g2"}, [], id="all there"),
        pytest.param({"g1", "g2"}, {}, {"g2"}, ["g1"], id="a copy from before a group"),
        pytest.param(set(), {"g3": 4}, {"g2"}, [], id="one stray broker"),
        pytest.param(set(), {"g3": 4}, set(), ["g3"], id="empty, and a broker reports"),
        pytest.param(set(), {}, set(), [], id="new"),
    ],
)
def test_lost_groups_are_found(known, reported, rows, lost):
    assert old_database.find_lost(known, reported, rows) == lost
