"""Shell. Creates the tables in an empty database, migrates an older one, and refuses all others.

    alembic_version     action
    missing, no tables  create the newest tables
    known, older        run the migrations after it
    newest              none
    anything else       refuse

One metaserver migrates; others that start meanwhile wait. SQLite and PostgreSQL roll back a migration that fails.
MariaDB cannot roll back changes of tables. There the table `unfinished_migration` exists from before the first change
until after the last, and a metaserver that finds it refuses to start.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, inspect, select, text

from qmq.metaserver.storage.errors import DatabaseUnusable
from qmq.metaserver.storage.sql import begin
from qmq.metaserver.storage.tables import meta_version, metadata

WAIT_S = 20
"""How long to wait while another metaserver migrates; shorter than what one statement may take. So long may pass
between two of its statements, too: what bounds a change of roles is too short for a machine that compiles scripts."""

FIRST_VERSIONS = [
    {"name": "directory", "version": 1},
    {"name": "routes", "version": 1},
    {"name": "sightings", "version": 1},
    {"name": "beside_groups", "version": 0},
]
"""Rows of `meta_version` in a new database."""

_LOCK_NUMBER = zlib.crc32(b"qmq migration")

_unfinished = Table("unfinished_migration", MetaData(), Column("begun_at", String(32)), Column("leads_to", String(32)))


def migrate(engine: Engine) -> None:
    """Create the tables, or run the migrations that the database lacks.

    Raises:
        DatabaseUnusable: the database is not ours, its version is unknown, or a migration stopped half way.
        SQLAlchemyError: a migration failed.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    newest = scripts.get_current_head()
    assert newest is not None, "there are migrations"
    with engine.connect() as connection, _alone(connection):
        present = _check(connection, [script.revision for script in scripts.walk_revisions()], newest)
        if present == newest:
            return
        if _can_undo(connection):
            _upgrade(connection, config, present)
            return
        _unfinished.create(connection)
        connection.execute(_unfinished.insert().values(begun_at=present or "an empty database", leads_to=newest))
        connection.commit()
        _upgrade(connection, config, present)
        connection.commit()
        _unfinished.drop(connection)


def _upgrade(connection: Connection, config: Config, present: str | None) -> None:
    config.attributes["connection"] = connection
    if present is None:
        metadata.create_all(connection)
        connection.execute(meta_version.insert(), FIRST_VERSIONS)
        if not _can_undo(connection):
            connection.commit()  # alembic compiles its scripts next, which may take longer than a transaction may rest
        command.stamp(config, "head")
    else:
        command.upgrade(config, "head")


def _check(connection: Connection, known: list[str], newest: str) -> str | None:
    """Return the version of a database that may be used; None: it is empty."""
    versions = MigrationContext.configure(connection).get_current_heads()
    tables = set(inspect(connection).get_table_names())
    present = versions[0] if versions else None
    if _unfinished.name in tables:
        _check_unfinished(connection, present)
    if len(versions) > 1 or (present and present not in known):
        made = f"The database has version {', '.join(versions)}, this program knows versions {known[-1]} to {newest}. "
        raise DatabaseUnusable(
            made + "No migration leads from the database's version: use an empty database."
            if present and present < known[-1]
            else made
            + "A newer qmq has used the database: start that one, or restore the copy made before the upgrade."
        )
    if present is None and (others := sorted(tables & metadata.tables.keys())):
        raise DatabaseUnusable(
            f"the database has a table {others[0]}, but no version in a table alembic_version: it was not made by this "
            "program. Give the metaserver a database of its own, an empty one"
        )
    return present


def _check_unfinished(connection: Connection, present: str | None) -> None:
    row = connection.execute(select(_unfinished)).first()
    if row is None or row.leads_to != present:
        what = f"from {row.begun_at} to {row.leads_to}" if row else "of this database"
        raise DatabaseUnusable(
            f"a migration {what} stopped half way, and this kind of database cannot undo it. Restore the copy that was "
            "made before (if the database was empty, drop it and create it again), then start again"
        )
    _unfinished.drop(connection)  # only this was left to do


def _can_undo(connection: Connection) -> bool:
    return connection.dialect.name in ("sqlite", "postgresql")


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """One transaction that no other metaserver's migration runs beside; committed at its end."""
    if not _can_undo(connection):
        with _alone_on_mariadb(connection):
            yield
        return
    with begin(connection):  # on SQLite this waits for every other writer
        if connection.dialect.name == "postgresql":
            for bound in ("lock_timeout", "idle_in_transaction_session_timeout"):
                connection.execute(text(f"SET LOCAL {bound} = {WAIT_S * 1000}"))
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK_NUMBER})"))
        yield


@contextmanager
def _alone_on_mariadb(connection: Connection) -> Iterator[None]:
    # Each change of a table commits, so a lock of a transaction would not last; this one belongs to the connection.
    lock = f"{_LOCK_NUMBER}-{zlib.crc32((connection.engine.url.database or '').encode())}"
    if connection.execute(text("SELECT GET_LOCK(:name, :wait)"), {"name": lock, "wait": WAIT_S}).scalar() != 1:
        raise DatabaseUnusable(f"another metaserver has been migrating this database for {WAIT_S} s; start again later")
    try:
        yield
        connection.commit()
        connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": lock})
        connection.commit()
    except BaseException:
        connection.invalidate()  # ends it, and the lock with it
        raise
