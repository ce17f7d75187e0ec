"""Shell. Opens the metaserver's database and brings its tables up to date.

All SQL is portable but for the two listeners below, which make SQLite keep what other databases keep by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event

BUSY_TIMEOUT_S = 5
"""How long SQLite waits for another process's transaction before it gives up."""


def open_database(url: str) -> Engine:
    """Connect to `url` and migrate it to the newest schema; the database may be empty.

    Raises:
        SQLAlchemyError, alembic's CommandError: the database cannot be used.
    """
    if url.startswith("sqlite"):
        engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    else:
        engine = create_engine(url, pool_pre_ping=True, isolation_level="REPEATABLE READ")
    migrate(engine)
    return engine


def migrate(engine: Engine) -> None:
    """Run the migrations that the database lacks."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own; _begin_sqlite does
    # Readers do not wait for the writer; FULL, as a term that was given out must survive a power failure.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Any) -> None:
    # A transaction that reads first and writes later would fail when another one wrote in between: take the lock now.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
