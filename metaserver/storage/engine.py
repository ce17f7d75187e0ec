"""Shell. Opens the metaserver's database (SQLite, MariaDB or PostgreSQL) and brings its tables to the newest version.

    alembic_version     action
    missing, no tables  create the newest tables
    known, older        run the migrations after it
    newest              none
    anything else       refuse

One metaserver migrates; others that start meanwhile wait. SQLite and PostgreSQL roll back a migration that fails.
MariaDB cannot roll back changes of tables. There the table `unfinished_migration` exists from before the first change
until after the last, and a metaserver that finds it refuses to start.

The three databases differ here and in `storage.sql`; all other SQL is the same for each.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    MetaData,
    RootTransaction,
    String,
    Table,
    create_engine,
    event,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from qmq.metaserver.storage.changes import DatabaseUnusable
from qmq.metaserver.storage.tables import meta_version, metadata
from qmq.sql_drivers import TLS_WORDS, Tls, Waits, set_waits

CONNECT_S = 5
"""A reachable database answers at once."""

LOCK_S = 10
"""Longest wait for another transaction's locks; ours take milliseconds, a restore a few seconds."""

ANSWER_S = 30
"""Longest statement; loading 100,000 routes takes a second."""

NEXT_STATEMENT_S = 2
"""Longest pause of a metaserver within a transaction, which holds locks; then the server ends it. Less than
`database_timeout_ms`, so that another metaserver's failover still succeeds.
"""

IDLE_S = 60
"""Longest idle time of a connection."""

POOL_CONNECTIONS = 8
"""Changes wait for each other anyway; all other calls are short."""

SWITCH_PAUSE_S = 0.02

_DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
_KNOWN = "sqlite:///FILE, mariadb://USER:PASSWORD@HOST/NAME or postgresql://USER:PASSWORD@HOST/NAME"
_EXTRAS = {"postgresql": "postgresql", "mysql": "mariadb", "mariadb": "mariadb"}


def open_database(url: str) -> Engine:
    """Connect to `url` and bring its tables to the newest version; the database may be empty.

    Raises:
        DatabaseUnusable: this database must not be used; the text holds the reason and the remedy.
        SQLAlchemyError: it does not answer, or failed.
    """
    engine = connect(url)
    try:
        _check_encoding(engine)
        migrate(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def connect(url: str) -> Engine:
    """Make the engine of `url` without connecting. Raises DatabaseUnusable."""
    parsed = _parse(url)
    backend = parsed.get_backend_name()
    try:
        if backend == "sqlite":
            engine = create_engine(parsed, connect_args={"timeout": LOCK_S}, pool_use_lifo=True)
            event.listen(engine, "connect", _prepare_sqlite)
            return engine
        waits = Waits(CONNECT_S, LOCK_S, ANSWER_S, NEXT_STATEMENT_S, IDLE_S)
        tls, is_postgresql = Tls.of(parsed.query), backend == "postgresql"
        return create_engine(
            parsed.difference_update_query(TLS_WORDS),
            isolation_level="READ COMMITTED",  # after waiting for another change, the next statement sees it
            connect_args=waits.postgresql() | tls.words() if is_postgresql else waits.mariadb() | tls.mariadb(),
            execution_options=waits.in_transaction() if is_postgresql else {},
            pool_size=POOL_CONNECTIONS,
            max_overflow=0,
            pool_timeout=CONNECT_S,
            pool_recycle=IDLE_S * 3 // 4,  # before the server ends it
        )
    except ValueError as error:
        raise DatabaseUnusable(f"the setting `database`: {error}") from None
    except ModuleNotFoundError as error:
        extra = _EXTRAS[backend]
        raise DatabaseUnusable(f"{error}; for this database install qmq with its driver: qmq[server,{extra}]") from None


def name_of(url: str) -> str:
    """Return `url` without its password and its TLS, which are no part of the database. Raises DatabaseUnusable."""
    return _url(url).difference_update_query(TLS_WORDS).render_as_string(hide_password=True)


def _url(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError):  # its text may quote the password
        raise DatabaseUnusable(f"the setting `database` is no URL; qmq uses {_KNOWN}") from None


def _parse(url: str) -> URL:
    parsed = _url(url)
    try:
        backend = parsed.get_backend_name()
    except NoSuchModuleError as error:
        raise DatabaseUnusable(f"the setting `database`: {error}; qmq uses {_KNOWN}") from None
    if backend not in _DRIVERS:
        raise DatabaseUnusable(f"the setting `database` names {backend}; qmq uses {_KNOWN}")
    return parsed if "+" in parsed.drivername else parsed.set(drivername=_DRIVERS[backend])


def _check_encoding(engine: Engine) -> None:
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
        if encoding != "UTF8":
            raise DatabaseUnusable(
                f"the database has the encoding {encoding}, and could not store every name; create one with UTF8"
            )


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins no transaction; `sql.begin` does
    _switch_to_wal(connection)  # readers do not wait for the writer
    # FULL, as an assigned term must survive a power failure.
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _switch_to_wal(connection: Any) -> None:
    """Switch a file to WAL. Of two connections that do so in a new file, SQLite refuses one at once, without its
    timeout: each would wait for the other.
    """
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            sleep(SWITCH_PAUSE_S)


WAIT_S = 20
"""Longest wait for another metaserver's migration, and longest pause between two of its statements. Alembic compiles
scripts in between, which takes longer than NEXT_STATEMENT_S allows.
"""

FIRST_VERSIONS = [
    {"name": "directory", "version": 1},
    {"name": "routes", "version": 1},
    {"name": "sightings", "version": 1},
    {"name": "beside_groups", "version": 0},
]
"""Rows of `meta_version` in a new database."""

_LOCK_NUMBER = zlib.crc32(b"qmq migration")

_unfinished = Table("unfinished_migration", MetaData(), Column("begun_at", String(32)), Column("leads_to", String(32)))


def begin(connection: Connection, *, reading: bool = False) -> RootTransaction:
    """Begin a transaction that may write, or one that reads several tables as of one moment.

    A call, not a listener of the engine: SQLAlchemy's statements are a tenth slower with one, measured.
    """
    transaction = connection.begin()
    if connection.dialect.name == "sqlite":
        # A read before the first write would fail after another transaction's write: take the lock now.
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
    elif reading:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    set_waits(connection)
    return transaction


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
            connection.commit()  # alembic compiles its scripts next, longer than a transaction may pause
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
        version_text = (
            f"The database has version {', '.join(versions)}, this program supports versions {known[-1]} to {newest}. "
        )
        raise DatabaseUnusable(
            version_text + "No migration leads from the database's version: use an empty database."
            if present and present < known[-1]
            else version_text
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
        span = f"from {row.begun_at} to {row.leads_to}" if row else "of this database"
        raise DatabaseUnusable(
            f"a migration {span} stopped half way, and this kind of database cannot undo it. Restore the copy that was "
            "made before (if the database was empty, drop it and create it again), then start again"
        )
    _unfinished.drop(connection)  # only this step was missing


def _can_undo(connection: Connection) -> bool:
    return connection.dialect.name in ("sqlite", "postgresql")


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Open one transaction that excludes other metaservers' migrations; commit it at the end."""
    if not _can_undo(connection):
        with _alone_on_mariadb(connection):
            yield
        return
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA busy_timeout={WAIT_S * 1000}")
        connection.rollback()
    with begin(connection):  # on SQLite this waits for every other writer
        if connection.dialect.name == "postgresql":
            for bound in ("lock_timeout", "idle_in_transaction_session_timeout"):
                connection.execute(text(f"SET LOCAL {bound} = {WAIT_S * 1000}"))
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK_NUMBER})"))
        yield
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA busy_timeout={LOCK_S * 1000}")


@contextmanager
def _alone_on_mariadb(connection: Connection) -> Iterator[None]:
    # Each change of a table commits, so a transaction's lock would not last; this one belongs to the connection.
    lock = f"{_LOCK_NUMBER}-{zlib.crc32((connection.engine.url.database or '').encode())}"
    if connection.execute(text("SELECT GET_LOCK(:name, :wait)"), {"name": lock, "wait": WAIT_S}).scalar() != 1:
        raise DatabaseUnusable(f"another metaserver has been migrating this database for {WAIT_S} s; start again later")
    try:
        yield
        connection.commit()
        connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": lock})
        connection.commit()
    except BaseException:
        connection.invalidate()  # ends the connection and its lock
        raise
