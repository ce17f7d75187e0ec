"""Shell. Opening each kind of database: empty, unknown versions, other programs, half-way migrations."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from qmq.metaserver.storage import engine as migrations
from qmq.metaserver.storage.engine import connect, open_database
from qmq.metaserver.storage.errors import DatabaseUnusable
from qmq.metaserver.storage.repository import Repository
from qmq.metaserver.storage.tables import meta_version, metadata, subject_route

NEWEST = "0017"
FORMER = (
    ("broker", "ip", 45),
    ("metaserver", "http_address", 100),
    ("metaserver", "grpc_address", 100),
    ("lease", "address", 100),
)
"""Columns of version 0016 that were too short for host names."""


@pytest.fixture
def empty(database_url):
    """Engine of the empty database, without tables."""
    engine = connect(database_url)
    yield engine
    engine.dispose()


def run(engine, *statements):
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def tables(engine):
    return set(inspect(engine).get_table_names())


def version(engine):
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def test_empty_database_gets_all_tables(database_url):
    """Weakness 10: QMQ's script does not fit its code, and stores no version."""
    engine = open_database(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert tables(engine) == {*metadata.tables, "alembic_version"}
    migrations.migrate(engine)  # a second start finds nothing to do
    assert version(engine) == NEWEST
    engine.dispose()


def test_migration_statement_may_outlast_a_change(database_url, monkeypatch):
    """A busy machine pauses for seconds; no failover waits for a starting metaserver."""
    stamp = command.stamp

    def late(config, revision):
        time.sleep(2.5)  # by the server's clock
        stamp(config, revision)

    monkeypatch.setattr("qmq.metaserver.storage.engine.NEXT_STATEMENT_S", 1)
    monkeypatch.setattr(command, "stamp", late)
    engine = open_database(database_url)
    assert version(engine) == NEWEST
    engine.dispose()


def test_columns_of_addresses_grow_to_host_names(empty, database_url):
    open_database(database_url).dispose()
    if empty.dialect.name == "sqlite":
        short = []
    elif empty.dialect.name == "postgresql":
        short = [f"ALTER TABLE {table} ALTER {name} TYPE VARCHAR({chars})" for table, name, chars in FORMER]
    else:
        binary = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
        short = [f"ALTER TABLE {table} MODIFY {name} VARCHAR({chars}) {binary}" for table, name, chars in FORMER]
    run(empty, *short, "UPDATE alembic_version SET version_num = '0016'")
    engine = open_database(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
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


@pytest.mark.parametrize(
    ("stored", "remedy"),
    [("0999", f"0016 to {NEWEST}. A newer qmq"), ("0005", "use an empty database")],
    ids=["newer", "older"],
)
def test_unknown_version_is_refused(empty, database_url, stored, remedy):
    open_database(database_url).dispose()
    run(empty, f"UPDATE alembic_version SET version_num = '{stored}'")
    with pytest.raises(DatabaseUnusable, match=f"version {stored}, this program supports .*{remedy}"):
        open_database(database_url)
    assert version(empty) == stored


def test_database_of_another_program_is_refused(empty, database_url):
    run(empty, "CREATE TABLE broker (id INTEGER)")
    with pytest.raises(DatabaseUnusable, match="a table broker, but no version .* a database of its own"):
        open_database(database_url)
    assert tables(empty) == {"broker"}


def test_unrelated_tables_are_ignored(empty, database_url):
    run(empty, "CREATE TABLE somebody_elses (id INTEGER)")
    open_database(database_url).dispose()
    assert "broker" in tables(empty)


def test_failed_migration_is_undone_or_refused(empty, database_url, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr(migrations, "FIRST_VERSIONS", [{"name": "directory"}])  # fails after the tables were created
        with pytest.raises(SQLAlchemyError):
            open_database(database_url)
    if empty.dialect.name in ("sqlite", "postgresql"):
        assert "meta_version" not in tables(empty), "nothing of it is left"
        open_database(database_url).dispose()
        assert version(empty) == NEWEST
        return
    for _ in range(2):
        with pytest.raises(DatabaseUnusable, match=f"from an empty database to {NEWEST} stopped half way.* Restore"):
            open_database(database_url)
    run(empty, *["DROP TABLE alembic_version"] if "alembic_version" in tables(empty) else [])
    run(
        empty,
        "CREATE TABLE alembic_version (version_num VARCHAR(32))",
        f"INSERT INTO alembic_version VALUES ('{NEWEST}')",
    )
    open_database(database_url).dispose()  # as if only the last step had been missing
    assert "unfinished_migration" not in tables(empty)


def start(url):
    engine = open_database(url)
    routes = Repository(engine).load_routes()
    engine.dispose()
    return routes


def test_concurrent_starts_migrate_once(empty, database_url):
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
def test_invalid_database_setting_is_explained(url, complaint):
    with pytest.raises(DatabaseUnusable, match=complaint):
        open_database(url)


def test_plain_urls_get_the_installed_driver():
    assert connect("mariadb://u:secret@h/db").driver == connect("mysql://u@h/db").driver == "pymysql"
    assert connect("postgresql://u@h/db").driver == "psycopg"


def test_postgresql_without_utf8_is_refused(postgresql):
    postgresql.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(DatabaseUnusable, match="encoding LATIN1"):
        open_database(postgresql.url("latin"))


def test_sqlite_keeps_a_term_over_a_power_failure(tmp_path):
    engine = open_database(f"sqlite:///{tmp_path / 'metaserver.db'}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    engine.dispose()


def test_route_column_holds_more_than_64_kib(database_url):
    engine = open_database(database_url)
    with engine.begin() as connection:
        values = {"subject_info": "s", "version": 1, "changed": 1, "create_time": 1, "update_time": 1}
        connection.execute(subject_route.insert().values(broker_group_json="x" * 100_000, **values))
        assert len(connection.execute(select(subject_route.c.broker_group_json)).scalar_one()) == 100_000
    engine.dispose()
