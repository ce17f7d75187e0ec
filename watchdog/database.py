"""Shell. A registered application database: its engine, the drain's statements, and the questions of operators.

The database belongs to the application: few connections, short waits, small locks, bounded reads by an index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, Row, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from qmq.errors import CallError
from qmq.outbox.claims import ReadClaims, ReadPage, Work
from qmq.outbox.row import decode_row
from qmq.outbox.statements import DIALECTS, Statements
from qmq.outbox.table import Flavor, Rows, table_name
from qmq.sql_drivers import Waits, set_waits
from qmq.watchdog.settings import MARIADB, POSTGRESQL, SQLITE, Source, UnusableSource

CONNECT_S = 5
LOCK_S = 3
"""Maximum wait for a lock. Rows locked by others are skipped; other waits are short."""
ANSWER_S = 20
"""Maximum time of one statement; each touches a thousand rows by an index."""
CONNECTIONS = 2
"""One for the drain, one for operators' questions."""
IDLE_S = 60

_DRIVERS = {MARIADB: "mariadb+pymysql", POSTGRESQL: "postgresql+psycopg", SQLITE: "sqlite"}
_EXTRAS = {MARIADB: "mariadb", POSTGRESQL: "postgresql"}


def open_source(source: Source) -> Engine:
    """Make the engine of a registered database, without connecting.

    Raises:
        UnusableSource: its registration cannot work; the text has the reason.
    """
    kind = source.kind
    host, port, database = source.place
    if kind == SQLITE:
        # A wrong path is an error, not a new file.
        path = URL.create("sqlite", database=f"file:{quote(database)}", query={"mode": "rw", "uri": "true"})
        engine = create_engine(path, connect_args={"timeout": LOCK_S})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(_begin_of(connection)))
        return engine
    url = URL.create(_DRIVERS[kind], source.user or None, source.password or None, host, port, database)
    waits = Waits(CONNECT_S, LOCK_S, ANSWER_S, IDLE_S, IDLE_S)
    try:
        # UTC: with the hour that repeats once a year, the scan would continue from a wrong moment.
        session = waits.mariadb("time_zone = '+00:00'") if kind == MARIADB else waits.postgresql()
        arguments = session | (source.tls.mariadb() if kind == MARIADB else source.tls.words())
        if kind == MARIADB and source.password:
            arguments["password"] = source.password.encode()  # PyMySQL accepts only Latin-1 in a str
        engine = create_engine(
            url,
            connect_args=arguments,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=CONNECT_S,
            pool_recycle=IDLE_S * 3 // 4,
            isolation_level="READ COMMITTED",
            execution_options=waits.in_transaction() if kind == POSTGRESQL else {},
            hide_parameters=True,
        )
    except ValueError as error:
        raise UnusableSource(f"{source.url}: {error}") from None
    except ModuleNotFoundError as error:
        raise UnusableSource(
            f"{error}; the watchdog's machine needs the driver: install qmq[server,{_EXTRAS[kind]}]"
        ) from None
    if kind == POSTGRESQL:
        event.listen(engine, "begin", set_waits)
    return engine


READING = "qmq_reading"
"""Execution option of read-only transactions: other ones lock SQLite's file at once."""


def _begin_of(connection: Any) -> str:
    return "BEGIN" if connection.get_execution_options().get(READING) else "BEGIN IMMEDIATE"


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins no transaction; `begin` does
    # An invalid content must not make a whole page unreadable. Contents that cannot be encoded again are parked.
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")


TRIES_MAX = 3
_REPEAT_SQLSTATES = {"40001", "40P01"}
_REPEAT_NUMBERS = {1020, 1213}
"""Deadlocks, and MariaDB's record changed since the read: the transaction may succeed when repeated."""

T = TypeVar("T")


class Outbox:
    """Outbox of one registered database. Made when a drain begins; usable from any thread, one call at a time."""

    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine = engine
        self._age_ms = source.age_ms
        self._reading = engine.execution_options(**{READING: True})
        self._table = table_name(source.table)
        self._flavor = Flavor(source.kind)

    def close(self) -> None:
        self._engine.dispose()

    def do(self, work: Work) -> Any:
        """Carry out a drain's work."""
        engine = self._reading if isinstance(work, ReadPage | ReadClaims) else self._engine
        return _repeat(engine, lambda connection: self.statements(connection).do(work))

    def statements(self, connection: Connection) -> Statements:
        """Return the statements within a connection's transaction."""

        def execute(statement: str, values: Sequence[object]) -> Sequence[Sequence[Any]]:
            result = connection.exec_driver_sql(statement, tuple(values) if values else None)
            return result.all() if result.returns_rows else []

        return Statements(Rows(execute, self._table, self._flavor, connection.dialect.paramstyle), self._age_ms)


def _repeat(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run a transaction; repeat it if the database ended it in favour of another."""
    for attempt in range(1, TRIES_MAX + 1):
        try:
            with engine.begin() as connection:
                return work(connection)
        except DBAPIError as error:
            if attempt == TRIES_MAX or not _may_succeed_repeated(error):
                raise
    raise AssertionError("the last try returns or raises")


def _may_succeed_repeated(error: DBAPIError) -> bool:
    original = error.orig
    numbers = getattr(original, "args", ())[:1]
    return getattr(original, "sqlstate", None) in _REPEAT_SQLSTATES or not _REPEAT_NUMBERS.isdisjoint(numbers)


COUNT_MAX = 100_000
"""Upper bound of counts: counting millions of rows only to report "too many" would be wasted work."""
AGES_MAX = 10_000
AGE_STEPS_S = (60, 600, 3_600, 86_400)
RETRY_ROWS = 1_000
"""Rows per statement."""

_SHOWN = "id, content, status, error, reason, claim"


class Stats(NamedTuple):
    """Row counts, each up to COUNT_MAX. `by_age`: pending rows older than each step, among the AGES_MAX due longest."""

    pending: int
    claimed: int
    parked: int
    oldest_s: float
    by_age: dict[int, int]


class StuckRow(NamedTuple):
    """A waiting or parked row. `created_ms`: by its producer's clock; 0 if unknown."""

    id: int
    state: str
    errors: int
    reason: str
    age_s: float
    subject: str
    message_id: str
    created_ms: int


class Questions:
    """Operators' questions about one outbox; used on any thread, beside a drain."""

    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine = engine
        self._reading = engine.execution_options(**{READING: True})
        self._table = table_name(source.table)
        self._dialect = DIALECTS[Flavor(source.kind)]
        self._age_ms = source.age_ms

    def close(self) -> None:
        self._engine.dispose()

    def stats(self) -> Stats:
        with self._reading.begin() as connection:

            def count(where: str) -> int:
                some = f"SELECT 1 AS one FROM {self._table} WHERE {where} LIMIT {COUNT_MAX}"
                return int(connection.execute(text(f"SELECT COUNT(*) FROM ({some}) AS some_rows")).scalar_one())

            age = self._dialect.created_age.format("create_time")
            oldest = f"SELECT {age} FROM {self._table} WHERE status = 0 ORDER BY update_time, id LIMIT {AGES_MAX}"
            ages_s = [max(0, row[0] or 0) / 1000 for row in connection.execute(text(oldest))]
            by_age = {step: sum(age_s >= step for age_s in ages_s) for step in AGE_STEPS_S}
            return Stats(
                count("status = 0"), count("claim > ''"), count("status < 0"), max(ages_s, default=0.0), by_age
            )

    def stuck(self, *, older_s: int, limit: int) -> list[StuckRow]:
        """Return parked rows, then waiting ones older than `older_s`, among the AGES_MAX due longest."""
        age = self._dialect.created_age.format("create_time")
        parked = f"SELECT id FROM {self._table} WHERE status < 0 ORDER BY status, update_time, id LIMIT {int(limit)}"
        due = f"SELECT id, {age} AS age FROM {self._table} WHERE status = 0 ORDER BY update_time, id LIMIT {AGES_MAX}"
        waiting = f"SELECT id FROM ({due}) AS due WHERE age >= {older_s * 1000} LIMIT {int(limit)}"
        with self._reading.begin() as connection:
            ids = [row[0] for statement in (parked, waiting) for row in connection.execute(text(statement))][:limit]
            if not ids:
                return []
            listed = ", ".join(map(str, ids))
            statement = f"SELECT {_SHOWN}, {age} FROM {self._table} WHERE id IN ({listed})"
            found = {row.id: _stuck(row) for row in connection.execute(text(statement))}
        return [found[id] for id in ids if id in found]

    def retry(self, ids: Sequence[int] | None) -> int:
        """Release parked rows with their errors reset, and end the back-off of waiting ones; return their number.

        None: all rows parked by now. A drain may park some of them again at the same time.
        """
        if ids is not None:
            return sum(self._retry(list(ids[at : at + RETRY_ROWS])) for at in range(0, len(ids), RETRY_ROWS))
        total, now = 0, f"SELECT {self._dialect.moment.format(0)}"
        with self._reading.begin() as connection:
            began = connection.execute(text(now)).scalar_one()
        while part := self._parked(began):
            total += self._retry(part)
        return total

    def _parked(self, before: object) -> list[int]:
        chosen = (
            f"SELECT id FROM {self._table} WHERE status < 0 AND update_time <= :before"
            f" ORDER BY status, update_time, id LIMIT {RETRY_ROWS}"
        )
        with self._reading.begin() as connection:
            return [row[0] for row in connection.execute(text(chosen), {"before": before})]

    def _retry(self, ids: list[int]) -> int:
        due = self._dialect.moment.format(-self._age_ms)
        statement = (
            f"UPDATE {self._table} SET status = 0, error = 0, reason = NULL, claim = NULL, update_time = {due}"
            f" WHERE id IN ({', '.join(str(int(id)) for id in ids)}) AND (status < 0 OR claim IS NULL)"
        )
        with self._engine.begin() as connection:
            return connection.execute(text(statement)).rowcount


def _stuck(row: Row[Any]) -> StuckRow:
    id, content, status, errors, reason, claim, age_ms = tuple(row)
    state = "parked" if status < 0 else "claimed" if claim else "waiting"
    subject = message_id = ""
    created_ms = 0
    try:
        message = decode_row(content)
        subject, message_id = _sendable(message.subject), _sendable(str(message.id))
        created_ms = message.created_ms if 0 < message.created_ms < 1 << 63 else 0
    except (CallError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = reason or str(error)
    shown = _sendable(reason or "")
    return StuckRow(id, state, errors, shown, max(0, age_ms or 0) / 1000, subject, message_id, created_ms)


def _sendable(text: str) -> str:
    """Return a text that UTF-8 can encode: JSON in rows, and SQLite, may hold lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()
