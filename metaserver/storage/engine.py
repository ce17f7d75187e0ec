"""Shell. Opens the metaserver's database: SQLite, MariaDB or PostgreSQL.

What differs between the three stands here, in `storage.sql` and in `storage.migrate`; all other SQL is the same.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from qmq.metaserver.storage.errors import DatabaseUnusable
from qmq.metaserver.storage.migrate import migrate
from qmq.sql_waits import Waits

CONNECT_S = 5
"""A database that is there answers at once; waiting longer would only hide that it is away."""

LOCK_S = 10
"""How long a transaction waits for another one; each of ours takes milliseconds, a restore a few seconds."""

ANSWER_S = 30
"""How long one statement may take; loading 100,000 routes takes a second."""

NEXT_STATEMENT_S = 2
"""A metaserver that stands still in the middle of a change holds locks: so long, until the server ends that change.
Less than `database_timeout_ms`, so that the failover of another metaserver is not given up for it."""

IDLE_S = 60
"""How long a connection may rest."""

POOL_CONNECTIONS = 8
"""Changes wait for each other anyway; the rest is short reading."""

_DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
_KNOWN = "sqlite:///FILE, mariadb://USER:PASSWORD@HOST/NAME or postgresql://USER:PASSWORD@HOST/NAME"
_EXTRAS = {"postgresql": "postgresql", "mysql": "mariadb", "mariadb": "mariadb"}


def open_database(url: str) -> Engine:
    """Connect to `url` and migrate it to the newest version; the database may be empty.

    Raises:
        DatabaseUnusable: this database must not be used; the text says why and what to do.
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
    """Make the engine of `url` without asking anything of the database yet. Raises DatabaseUnusable."""
    parsed = _parse(url)
    backend = parsed.get_backend_name()
    try:
        if backend == "sqlite":
            engine = create_engine(parsed, connect_args={"timeout": LOCK_S}, pool_use_lifo=True)
            event.listen(engine, "connect", _prepare_sqlite)
            return engine
        waits = Waits(CONNECT_S, LOCK_S, ANSWER_S, NEXT_STATEMENT_S, IDLE_S)
        return create_engine(
            parsed,
            isolation_level="READ COMMITTED",  # a change that waited for another one sees what that one stored
            connect_args=waits.postgresql() if backend == "postgresql" else waits.mariadb(),
            pool_size=POOL_CONNECTIONS,
            max_overflow=0,
            pool_timeout=CONNECT_S,
            pool_recycle=IDLE_S * 3 // 4,  # before the server ends it
        )
    except ModuleNotFoundError as error:
        extra = _EXTRAS[backend]
        raise DatabaseUnusable(f"{error}; for this database install qmq with its driver: qmq[server,{extra}]") from None


def name_of(url: str) -> str:
    """Return `url` without its password. Raises DatabaseUnusable."""
    return _url(url).render_as_string(hide_password=True)


def _url(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError):  # whose texts may hold what was to be the password
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
    connection.isolation_level = None  # the driver begins no transaction of its own; `isolation.begin` does
    # Readers do not wait for the writer; FULL, as a term that was given out must survive a power failure.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
