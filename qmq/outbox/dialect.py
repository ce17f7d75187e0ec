"""Core. What differs between MariaDB, PostgreSQL and SQLite in the statements of a drain: time, and locked rows.

All times are by the database's clock; watchdogs on other machines, and applications, need not have the same.
"""

from __future__ import annotations

from typing import NamedTuple

from qmq.outbox.table import Flavor


class Dialect(NamedTuple):
    """Fragments of SQL.

    `moment`: now plus {0} milliseconds, less than zero: before. `since`: the same from :told, a moment before.
    `age`: milliseconds since the column {0}. `created_age`: the same for `create_time`, which MariaDB keeps in the
    server's time zone, for a session in UTC.
    """

    moment: str
    since: str
    age: str
    created_age: str
    lock: str


_PASSING_BY = " FOR UPDATE SKIP LOCKED"
_MARIADB_US = "TIMESTAMPDIFF(MICROSECOND, {0}, %s) DIV 1000"
_MARIADB_LOCAL = "CONVERT_TZ(CURRENT_TIMESTAMP(6), '+00:00', @@GLOBAL.time_zone)"

_MARIADB = Dialect(
    "(CURRENT_TIMESTAMP(6) + INTERVAL {0} * 1000 MICROSECOND)",
    "(CAST(:told AS DATETIME(6)) + INTERVAL {0} * 1000 MICROSECOND)",
    _MARIADB_US % "CURRENT_TIMESTAMP(6)",
    _MARIADB_US % f"COALESCE({_MARIADB_LOCAL}, CURRENT_TIMESTAMP(6))",
    _PASSING_BY,
)
DIALECTS = {
    Flavor.MARIADB: _MARIADB,
    Flavor.MYSQL: _MARIADB,
    Flavor.POSTGRESQL: Dialect(
        "(now() + {0} * interval '1 millisecond')",
        "(CAST(:told AS timestamptz) + {0} * interval '1 millisecond')",
        "CAST(EXTRACT(EPOCH FROM now() - {0}) * 1000 AS bigint)",
        "CAST(EXTRACT(EPOCH FROM now() - {0}) * 1000 AS bigint)",
        _PASSING_BY,
    ),
    # A transaction that writes has the whole file; nobody else locks a row of it.
    Flavor.SQLITE: Dialect(
        "strftime('%Y-%m-%d %H:%M:%f', 'now', (({0}) / 1000.0) || ' seconds')",
        "strftime('%Y-%m-%d %H:%M:%f', :told, (({0}) / 1000.0) || ' seconds')",
        "CAST((julianday('now') - julianday({0})) * 86400000 AS INTEGER)",
        "CAST((julianday('now') - julianday({0})) * 86400000 AS INTEGER)",
        "",
    ),
}
