"""Core. A registered database, as the metaserver tells of it: where it is, which table, how fast it may be drained."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from qmq.errors import CallError
from qmq.outbox.table import DEFAULT_TABLE, table_name

MARIADB, POSTGRESQL, SQLITE = "mariadb", "postgresql", "sqlite"
KINDS = {"mmm": MARIADB, "mysql": MARIADB, "mariadb": MARIADB, "postgresql": POSTGRESQL, "sqlite": SQLITE}
"""The `type` of AddDb -> kind of the database; `mmm` is QMQ's word for MySQL."""
QMQ_DATABASE = "qmq_produce"
"""Where QMQ has its table, if the registration names no database."""


class UnusableSource(CallError):
    """A registered database cannot be scanned as it is registered. RemoveDb and AddDb correct it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A registered database. `url` (type://host:port/database) names it; equal ones are scanned the same way.

    `rate`: rows a second; `age_ms`: a row is the watchdog's once it is that old; before, its application sends it.
    """

    url: str
    user: str = ""
    password: str = ""
    table: str = DEFAULT_TABLE
    rate: int = 10_000
    age_ms: int = 60_000

    def __post_init__(self) -> None:
        table_name(self.table)

    def __repr__(self) -> str:
        return f"Source({self.url!r}, table={self.table!r})"  # which may be logged

    @property
    def kind(self) -> str:
        """MARIADB, POSTGRESQL or SQLITE; raises UnusableSource."""
        scheme = self.url.partition("://")[0]
        if scheme not in KINDS:
            raise UnusableSource(f"{self.url}: type {scheme!r} is none of {', '.join(KINDS)}")
        return KINDS[scheme]

    @property
    def place(self) -> tuple[str, int, str]:
        """Host, port and database; for SQLite, the database is the path of a file."""
        parts = urlsplit(self.url)
        database = parts.path[1:] if self.kind == SQLITE else parts.path.strip("/")
        return parts.hostname or "", parts.port or 0, database or QMQ_DATABASE
