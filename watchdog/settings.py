"""Core. Settings of a watchdog (QMQ_WATCHDOG_ in the environment), and the databases registered with the metaserver."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from qmq.access import Token
from qmq.control_plane import metaserver_urls
from qmq.errors import CallError, InvalidName, InvalidRequest
from qmq.logs import FORMATS, LEVELS
from qmq.outbox.drain_plan import Limits
from qmq.outbox.table import DEFAULT_TABLE, table_name
from qmq.settings import InvalidSettings, advertising_complaints, setting
from qmq.sql_drivers import Tls
from qmq.subjects import check_name
from qmq.types import Endpoint, Host

MARIADB, POSTGRESQL, SQLITE = "mariadb", "postgresql", "sqlite"
KINDS = {"mmm": MARIADB, "mysql": MARIADB, "mariadb": MARIADB, "postgresql": POSTGRESQL, "sqlite": SQLITE}
"""`type` of AddDb -> kind of database; `mmm` is QMQ's name of MySQL."""
QMQ_DATABASE = "qmq_produce"
"""Database of QMQ's table, if the registration names none."""


class UnusableSource(CallError):
    """A registered database cannot be scanned; correct it with RemoveDb and AddDb."""


@dataclass(frozen=True, slots=True)
class Source:
    """A registered database, identified by `url` (type://host:port/database). Equal ones are scanned alike.

    `rate`: rows a second. `age_ms`: age from which the watchdog may send a row; before, its application does.
    """

    url: str
    user: str = ""
    password: str = ""
    table: str = DEFAULT_TABLE
    rate: int = 10_000
    age_ms: int = 60_000
    tls: Tls = Tls()

    def __post_init__(self) -> None:
        table_name(self.table)

    def __repr__(self) -> str:
        return f"Source({self.url!r}, table={self.table!r})"  # safe to log

    @property
    def kind(self) -> str:
        """MARIADB, POSTGRESQL or SQLITE; raises UnusableSource."""
        scheme = self.url.partition("://")[0]
        if scheme not in KINDS:
            raise UnusableSource(f"{self.url}: type {scheme!r} is none of {', '.join(KINDS)}")
        return KINDS[scheme]

    @property
    def place(self) -> tuple[str, int, str]:
        """Host, port and database; for SQLite, the database is a file's path."""
        parts = urlsplit(self.url)
        database = parts.path[1:] if self.kind == SQLITE else parts.path.strip("/")
        return parts.hostname or "", parts.port or 0, database or QMQ_DATABASE


@dataclass(frozen=True)
class WatchdogSettings:
    """Settings of a watchdog at its start. AddDb sets the databases and their rates."""

    metaserver: str = setting(why="HTTP address of the metaservers, or several with commas")
    token: Token = setting(
        secret=True, why="key of the installation: the metaserver gives passwords of databases only to its holders"
    )
    room: str = setting("default", why="namespace: the watchdog scans the databases registered with this room")
    host: Host = setting("127.0.0.1", why="address to listen on; 0.0.0.0 or :: for all")
    http_port: int = setting(8090, least=0, most=65535, why="/metrics, /health, requests of tools.sh; 0: a free port")
    advertised_ip: Host = setting(
        "", why="host name or IP address that metaservers and Prometheus connect to; default: host"
    )
    advertised_http_port: int = setting(
        0, least=0, most=65535, why="port that they connect to if it differs, as behind NAT; 0: http_port"
    )
    log_level: str = setting("INFO", one_of=LEVELS, why="lowest level of written log lines")
    log_format: str = setting("text", one_of=FORMATS, why="one line an event, as text or as JSON")

    lease_ms: int = setting(
        5000,
        unit="ms",
        least=500,
        most=300_000,
        why="time from a dead leader's last beat to its replacement; QMQ's default",
    )
    beat_ms: int = setting(1000, unit="ms", least=50, most=60_000, why="interval of checks of the lease")
    refresh_ms: int = setting(5000, unit="ms", least=100, most=600_000, why="delay of AddDb and RemoveDb")
    scan_ms: int = setting(
        1000, unit="ms", least=10, most=600_000, why="pause between two passes; an empty pass costs one index read"
    )
    stats_ms: int = setting(
        15_000, unit="ms", least=100, most=3_600_000, why="interval of counting rows, up to a bound, for the metrics"
    )
    stop_ms: int = setting(5000, unit="ms", least=0, most=60_000, why="maximum wait for answers of brokers at a stop")
    page_rows: int = setting(
        500,
        least=1,
        most=5000,
        why="rows of a transaction; 1,000 would double the burst in the database, for a sixth less CPU a row",
    )
    claims_max: int = setting(8, least=1, most=32, why="unanswered batches of one database")
    errors_max: int = setting(
        1000, least=1, most=2_000_000_000, why="failures after which a row is parked; QMQ's default"
    )
    release_ms: int = setting(
        1000, unit="ms", least=1, why="back-off of a row after its first failure; doubled each time"
    )
    release_ms_max: int = setting(600_000, unit="ms", least=1, most=86_400_000, why="maximum back-off")
    unknown_s_max: int = setting(
        86_400,
        unit="s",
        least=60,
        why="time after which a batch with unknown outcome is sent as a new one",
    )

    def __post_init__(self) -> None:
        complaints: list[str] = []
        if self.beat_ms * 3 > self.lease_ms:
            complaints.append("beat_ms: a lease must outlast three beats, or one late beat ends it")
        complaints += advertising_complaints(self.host, self.advertised_ip)
        try:
            check_name("room", self.room)
            metaserver_urls(self.metaserver)
        except (InvalidName, InvalidRequest) as error:
            complaints.append(str(error))
        if complaints:
            raise InvalidSettings(complaints)

    def advertised(self, http_port: int) -> str:
        """Return the address that others connect to. `http_port`: the port it listens on."""
        return str(Endpoint(self.advertised_ip or self.host, self.advertised_http_port or http_port))

    def limits(self, rate: int) -> Limits:
        """Return the bounds of one drain."""
        return Limits(
            rate=rate,
            page_rows=self.page_rows,
            claims_max=self.claims_max,
            errors_max=self.errors_max,
            release_ms=self.release_ms,
            release_ms_max=self.release_ms_max,
            rest_ms=self.scan_ms,
            unknown_ms_max=self.unknown_s_max * 1000,
        )
