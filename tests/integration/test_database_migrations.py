"""Shell. Opening each kind of database: empty, unknown versions, other programs, half-way migrations."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import sqlite3
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, inspect, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError

from qmq.metaserver.model import AuditRow, ConsumerGroupRow, Offline, ReadonlyMark, TokenRow
from qmq.metaserver.storage import engine as migrations
from qmq.metaserver.storage.changes import AddSubject, AddToken, DatabaseUnusable, SetLimits, SetMark, SetOffline
from qmq.metaserver.storage.engine import connect, open_database
from qmq.metaserver.storage.repository import Repository
from qmq.metaserver.storage.tables import meta_version, metadata, subject_route
from qmq.operator_limits import OperatorLimits
from tests.support.directories import add_group

NEWEST = "0018"
FORMER = (
    ("broker", "ip", 45),
    ("metaserver", "http_address", 100),
    ("metaserver", "grpc_address", 100),
    ("lease", "address", 100),
)
"""Columns of version 0016 that were too short for host names."""

GUIDE = Path(__file__).parents[2] / "docs" / "databases.md"
COPIES = re.compile(r"^\| (SQLite|MariaDB|PostgreSQL) \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


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


def fill(url, *, number=1):
    """Store a row in most tables."""
    engine = open_database(url)
    repository, name = Repository(engine), f"g{number}"
    add_group(repository, name)
    repository.store_routes([(f"s{number}", (name,), 0)])
    repository.store_consumer_groups([ConsumerGroupRow("s1", name, 5, "m", (name,), 7, is_broadcast=True)])
    changes = [SetMark(ReadonlyMark("*", name)), SetOffline(Offline("s", "*", name)), AddSubject(name, "ssd")]
    changes += [AddToken(TokenRow(name, "Ann", "operator", "salt", "hash", ("s",), (), 1000))]
    changes += [SetLimits(OperatorLimits("s", name, per_second=7))]
    repository.change(changes, AuditRow("Ann", "here", "Everything"))
    engine.dispose()


def shrink(engine, to):
    """Give the newest tables the columns of an earlier version. The rows stay."""
    former = []
    if to == "0016" and engine.dialect.name == "postgresql":
        former = [f"ALTER TABLE {table} ALTER {name} TYPE VARCHAR({chars})" for table, name, chars in FORMER]
    elif to == "0016" and engine.dialect.name != "sqlite":
        binary = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
        former = [f"ALTER TABLE {table} MODIFY {name} VARCHAR({chars}) {binary}" for table, name, chars in FORMER]
    former += ["ALTER TABLE consumer_group DROP COLUMN broadcast"]
    run(engine, *former, f"UPDATE alembic_version SET version_num = '{to}'")


def contents(engine):
    """Return the rows of all tables, as sorted texts."""
    found = MetaData()
    found.reflect(engine)
    with engine.connect() as connection:
        return {
            table.name: sorted(str(dict(row)) for row in connection.execute(select(table)).mappings())
            for table in found.sorted_tables
        }


@pytest.mark.parametrize("former", ["0016", "0017"])
def test_former_tables_grow_to_the_newest(empty, database_url, former):
    fill(database_url)
    shrink(empty, former)
    before = contents(empty)
    engine = open_database(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert version(engine) == NEWEST
    assert {name: len(rows) for name, rows in contents(engine).items()} == {n: len(rows) for n, rows in before.items()}
    [row] = Repository(engine).consumer_groups_of("s1")
    assert row == ConsumerGroupRow("s1", "g1", 5, "m", ("g1",), 7, is_broadcast=False)
    engine.dispose()


def test_copy_leads_back_over_a_migration(empty, database_url, tmp_path, monkeypatch):
    """With the commands of docs/databases.md. The old program is one without the last migration."""
    fill(database_url)
    shrink(empty, "0017")
    before = contents(empty)
    copy, put_back = commands(database_url, tmp_path)
    copy()
    fill(database_url, number=2)
    old = tmp_path / "old"
    shutil.copytree(Path(migrations.__file__).parent, old)
    [newest] = old.glob(f"migrations/versions/{NEWEST}_*.py")
    newest.unlink()
    empty.dispose()
    with monkeypatch.context() as patches:
        patches.setattr(migrations, "__file__", str(old / "engine.py"))
        remedy = "version 0018, this program supports versions 0016 to 0017. A newer qmq .* restore the copy"
        with pytest.raises(DatabaseUnusable, match=remedy):
            open_database(database_url)
        put_back()
        open_database(database_url).dispose()
        assert contents(empty) == before
    fill(database_url, number=2)
    after = contents(empty)
    assert version(empty) == NEWEST and len(after["broker_group"]) == 2


def commands(url, folder):
    """Return functions that run the two commands of docs/databases.md for this kind of database."""
    parsed = make_url(url)
    rows = {kind.lower(): shell for kind, *shell in COPIES.findall(GUIDE.read_text())}
    (folder / ".my.cnf").write_text(f"[client]\nhost={parsed.host}\nport={parsed.port}\nuser={parsed.username}\n")
    at = {"HOME": folder, "PGHOST": parsed.host, "PGPORT": parsed.port, "PGUSER": parsed.username}
    environ = os.environ | {name: str(value) for name, value in at.items()}

    def command(shell):
        names = {"metaserver.db": parsed.database} if parsed.host is None else {"qmq": parsed.database}
        for name, own in names.items():
            shell = re.sub(rf"\b{re.escape(name)}\b(?!-)", own, shell)
        return lambda: subprocess.run(["bash", "-ec", shell], cwd=folder, env=environ, check=True, timeout=60)

    return map(command, rows[parsed.get_backend_name()])


def test_every_name_is_compared_byte_by_byte(engine):
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


def test_sqlite_file_in_use_is_switched_to_wal(tmp_path, monkeypatch):
    """Two metaservers that start on a new file: SQLite refuses the second switch at once."""
    other = sqlite3.connect(tmp_path / "metaserver.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        other.execute("COMMIT")

    monkeypatch.setattr(migrations, "sleep", pause)
    engine = open_database(f"sqlite:///{tmp_path / 'metaserver.db'}")
    assert len(pauses) == 1 and version(engine) == NEWEST
    other.close()
    engine.dispose()


def test_sqlite_waits_longer_for_a_migration(tmp_path, monkeypatch):
    """As the servers do: a migration outlasts a change."""
    waits = []
    upgrade = migrations._upgrade

    def look(connection, *rest):
        waits.append(connection.exec_driver_sql("PRAGMA busy_timeout").scalar())
        upgrade(connection, *rest)

    monkeypatch.setattr(migrations, "_upgrade", look)
    engine = open_database(f"sqlite:///{tmp_path / 'metaserver.db'}")
    with engine.connect() as connection:
        waits.append(connection.exec_driver_sql("PRAGMA busy_timeout").scalar())
    assert waits == [migrations.WAIT_S * 1000, migrations.LOCK_S * 1000]
    engine.dispose()


def test_route_column_holds_more_than_64_kib(engine):
    with engine.begin() as connection:
        values = {"subject_info": "s", "version": 1, "changed": 1, "create_time": 1, "update_time": 1}
        connection.execute(subject_route.insert().values(broker_group_json="x" * 100_000, **values))
        assert len(connection.execute(select(subject_route.c.broker_group_json)).scalar_one()) == 100_000
