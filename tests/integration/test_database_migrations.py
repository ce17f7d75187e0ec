"""Shell. Each kind of database, from empty, from the version before, and from what must not be used."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, select, text

from qmq.metaserver.model import ReadonlyMark
from qmq.metaserver.storage import migrate as migrations
from qmq.metaserver.storage.changes import SetRoute
from qmq.metaserver.storage.engine import connect, open_database
from qmq.metaserver.storage.errors import DatabaseUnusable
from qmq.metaserver.storage.repository import Repository
from qmq.metaserver.storage.tables import meta_version, metadata, subject_route
from qmq.types import Role

NEWEST = "0016"


@pytest.fixture
def empty(database_url):
    """A connection to the empty database, without any migration."""
    engine = connect(database_url)
    yield engine
    engine.dispose()


def run(engine, *statements):
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def tables(engine):
    return set(inspect(engine).get_table_names())


def migrate_to(engine, revision):
    config = Config()
    config.set_main_option("script_location", "metaserver/storage/migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def version(engine):
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def test_migrations_make_the_tables_from_an_empty_database(database_url):
    """Weakness 10: QMQ's script does not fit its code, and no version is written down."""
    engine = open_database(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert tables(engine) == {*metadata.tables, "alembic_version"}
    migrations.migrate(engine)  # a second start finds nothing to do
    assert version(engine) == NEWEST
    engine.dispose()


def test_between_two_statements_a_migration_may_take_longer_than_a_change(database_url, monkeypatch):
    """A machine that is busy stands still for some seconds; nobody's failover waits for a metaserver that starts."""
    upgrade = command.upgrade

    def late(config, revision):
        time.sleep(2.5)  # by the server's clock
        upgrade(config, revision)

    monkeypatch.setattr("qmq.metaserver.storage.engine.NEXT_STATEMENT_S", 1)
    monkeypatch.setattr(command, "upgrade", late)
    engine = open_database(database_url)
    assert version(engine) == NEWEST
    engine.dispose()


def test_every_name_is_compared_byte_by_byte(database_url):
    engine = open_database(database_url)
    if engine.dialect.name in ("mysql", "mariadb"):
        with engine.connect() as connection:
            others = "collation_name <> 'utf8mb4_bin' AND table_name <> 'alembic_version'"
            columns = (
                f"table_name, column_name FROM information_schema.columns WHERE table_schema = DATABASE() AND {others}"
            )
            rows = connection.execute(text(f"SELECT {columns}"))
            assert list(rows) == []
            tables = connection.execute(
                text("SELECT DISTINCT engine FROM information_schema.tables WHERE table_schema = DATABASE()")
            )
            assert list(tables.scalars()) == ["InnoDB"]
    with engine.begin() as connection:
        for number, name in enumerate(("Foo", "foo", "fóo", "ｆoo")):
            connection.execute(meta_version.insert().values(name=name, version=number))
        names = select(meta_version.c.version).where(meta_version.c.name == "foo")
        assert connection.execute(names).scalars().all() == [1]
    engine.dispose()


def test_rows_of_the_version_before_are_kept(empty, database_url):
    migrate_to(empty, "0001")
    stamps = "create_time, update_time) VALUES"
    broker = "group_name, role, hostname, ip, serve_port, sync_port, control_port, metrics_port, incarnation, complete"
    no = "0" if empty.dialect.name != "postgresql" else "false"
    run(
        empty,
        f"INSERT INTO broker_group (group_name, kind, term, half_swapped, {stamps} ('g1', 1, 7, {no}, 1, 2)",
        f"INSERT INTO broker ({broker}, {stamps} ('g1', 0, 'a', '10.0.0.1', 1, 2, 3, 4, 'disk', {no}, 1, 2)",
        f"INSERT INTO subject_route (subject_info, broker_group_json, version, {stamps} ('s', '[\"g1\"]', 3, 1, 2)",
        "INSERT INTO readonly_broker_group_setting (subject, broker_group, create_time) VALUES ('*', 'g1', 1)",
        "INSERT INTO readonly_broker_group_setting (subject, broker_group, create_time) VALUES ('*', 'nowhere', 1)",
    )
    engine = open_database(database_url)
    repository = Repository(engine)
    directory, (_, [route]) = repository.load(), repository.load_routes()
    group = directory.groups["g1"]
    assert (group.term, group.master.hostname, group.master.role, group.slave) == (7, "a", Role.MASTER, None)
    assert (group.kind, group.tag, group.draining, group.full) == (1, "", False, False)
    assert (route.subject, route.groups, route.version) == ("s", ("g1",), 3)
    assert directory.marks == {ReadonlyMark("*", "g1")}
    repository.change([SetRoute("s", ("g1",), 3)])
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_database_of_a_newer_version_is_refused(empty, database_url):
    open_database(database_url).dispose()
    run(empty, "UPDATE alembic_version SET version_num = '0999'")
    with pytest.raises(DatabaseUnusable, match=f"0999, this program knows versions up to {NEWEST}: a newer qmq"):
        open_database(database_url)
    assert version(empty) == "0999"


def test_database_of_another_program_is_refused(empty, database_url):
    run(empty, "CREATE TABLE broker (id INTEGER)")
    with pytest.raises(DatabaseUnusable, match="a table broker, but no version .* a database of its own"):
        open_database(database_url)
    assert tables(empty) == {"broker"}


def test_tables_of_other_names_are_no_hindrance(empty, database_url):
    run(empty, "CREATE TABLE somebody_elses (id INTEGER)")
    open_database(database_url).dispose()
    assert "broker" in tables(empty)


def test_migration_that_fails_half_way_is_undone_or_refused_at_the_next_start(empty, database_url):
    migrate_to(empty, "0001")
    run(empty, "CREATE TABLE broker_sighting (occupied INTEGER)")  # in the way of the next migration
    with pytest.raises(Exception, match="broker_sighting"):
        open_database(database_url)
    if empty.dialect.name in ("sqlite", "postgresql"):
        assert "meta_version" not in tables(empty), "nothing of it is left"
        run(empty, "DROP TABLE broker_sighting")
        open_database(database_url).dispose()
        assert version(empty) == NEWEST
        return
    for _ in range(2):
        with pytest.raises(DatabaseUnusable, match=f"from 0001 to {NEWEST} stopped half way.* Restore the copy"):
            open_database(database_url)
    run(empty, f"UPDATE alembic_version SET version_num = '{NEWEST}'")  # as if only the last step had been missing
    open_database(database_url).dispose()
    assert "unfinished_migration" not in tables(empty)


def start(url):
    engine = open_database(url)
    routes = Repository(engine).load_routes()
    engine.dispose()
    return routes


def test_metaservers_that_start_at_once_migrate_once(empty, database_url):
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(start, [database_url] * 8)) == [(1, [])] * 8
    with empty.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM meta_version")).scalar() == 4
        assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar() == 1


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        pytest.param("nonsense", "is no URL", id="no url"),
        pytest.param("oracle://host/name", "names oracle; qmq uses sqlite", id="another database"),
        pytest.param("nosuch://host/name", "names nosuch; qmq uses sqlite", id="no database"),
    ],
)
def test_setting_that_names_no_database_is_explained(url, complaint):
    with pytest.raises(DatabaseUnusable, match=complaint):
        open_database(url)


def test_plain_urls_get_the_driver_that_the_extras_install():
    assert connect("mariadb://u:secret@h/db").driver == connect("mysql://u@h/db").driver == "pymysql"
    assert connect("postgresql://u@h/db").driver == "psycopg"


def test_postgresql_that_cannot_store_every_name_is_refused(postgresql):
    postgresql.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(DatabaseUnusable, match="encoding LATIN1"):
        open_database(postgresql.url("latin"))


def test_sqlite_keeps_a_term_over_a_power_failure(tmp_path):
    engine = open_database(f"sqlite:///{tmp_path / 'metaserver.db'}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    engine.dispose()


def test_route_column_holds_more_than_64_kib_everywhere(database_url):
    engine = open_database(database_url)
    with engine.begin() as connection:
        values = {"subject_info": "s", "version": 1, "changed": 1, "create_time": 1, "update_time": 1}
        connection.execute(subject_route.insert().values(broker_group_json="x" * 100_000, **values))
        assert len(connection.execute(select(subject_route.c.broker_group_json)).scalar_one()) == 100_000
    engine.dispose()
