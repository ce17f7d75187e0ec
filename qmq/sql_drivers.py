"""Core. Timeouts and TLS of a process's connections to a database server, as settings of each driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode


class Waits(NamedTuple):
    """Timeouts in seconds: for a connection, a lock, an answer, the next statement of a transaction, and the next
    transaction of a connection.
    """

    connect: int
    lock: int
    answer: int
    next_statement: int
    idle: int

    def mariadb(self, *session: str) -> dict[str, Any]:
        """Return arguments of pymysql's `connect`; `session`: further variables of each session."""
        variables = (
            "sql_mode = 'STRICT_ALL_TABLES'",
            f"innodb_lock_wait_timeout = {self.lock}",
            f"wait_timeout = {self.idle}",
            *session,
        )
        within = f"/*M!100300 , idle_transaction_timeout = {self.next_statement} */"  # MySQL has only `wait_timeout`
        return {
            "connect_timeout": self.connect,
            "read_timeout": self.answer,
            "write_timeout": self.answer,
            "charset": "utf8mb4",
            # Without strict mode the server would cut long values and report success.
            "init_command": f"SET SESSION {', '.join(variables)} {within}",
        }

    def postgresql(self) -> dict[str, Any]:
        """Return arguments of psycopg's `connect`; `in_transaction` has the server's timeouts."""
        return {
            "connect_timeout": self.connect,
            # PgBouncer sends the next transaction to another server, which lacks the prepared statement.
            "prepare_threshold": None,
            # A machine that vanished is noticed after some 15 s.
            "tcp_user_timeout": 15_000,
            "keepalives_idle": 5,
            "keepalives_interval": 5,
            "keepalives_count": 2,
        }

    def in_transaction(self) -> dict[str, str]:
        """Return an engine's execution option for PostgreSQL: `set_waits` sets the server's timeouts with it.

        PgBouncer rejects timeouts at the begin of a connection (`options`), and a session's settings reach its other
        clients. So they belong to each transaction.
        """
        seconds = {
            "lock_timeout": self.lock,
            "statement_timeout": self.answer,
            "idle_in_transaction_session_timeout": self.next_statement,
        }
        settings = ", ".join(f"set_config('{name}', '{value}s', true)" for name, value in seconds.items())
        return {IN_TRANSACTION: f"SELECT {settings}"}


IN_TRANSACTION = "qmq_in_transaction"


def set_waits(connection: Any) -> None:
    """Set the timeouts of a SQLAlchemy connection's transaction, which has just begun."""
    if statement := connection.get_execution_options().get(IN_TRANSACTION):
        connection.exec_driver_sql(statement)


TLS_MODES = ("", "disable", "require", "verify-ca", "verify-full")
"""Values of libpq's `sslmode`. Empty for the driver's default; newer drivers then use TLS if the server has it."""
_OFFERED = ("allow", "prefer")
"""Modes of PostgreSQL alone."""
SYSTEM = "system"


class Tls(NamedTuple):
    """TLS of a connection: mode of TLS_MODES, and paths of PEM files. Written as a URL's query, in libpq's words."""

    mode: str = ""
    ca: str = ""
    """Certificate of the authority that signed the server's certificate; SYSTEM for the machine's authorities, with
    PostgreSQL.
    """
    cert: str = ""
    """Certificate of this client, if the server requires one."""
    key: str = ""

    @classmethod
    def of(cls, query: Mapping[str, Any]) -> Tls:
        """Return the TLS of a URL's query; other words are ignored.

        Raises:
            ValueError: the words contradict each other; the text has the remedy.
        """
        given = {name: query.get(word, "") for name, word in _WORDS.items()}
        twice = [_WORDS[name] for name, value in given.items() if not isinstance(value, str)]
        if twice:
            raise ValueError(f"{twice[0]} is given twice; keep one")
        tls = cls(**given)
        tls.check()
        return tls

    def check(self) -> None:
        """Raise ValueError if the parts contradict each other."""
        if self.mode not in TLS_MODES + _OFFERED:
            raise ValueError(f"sslmode {self.mode!r} is none of {', '.join(TLS_MODES[1:])}")
        if self.mode.startswith("verify") and not self.ca:
            raise ValueError(f"sslmode {self.mode} needs the authority's certificate (sslrootcert), a file or `system`")
        if self.ca and not self.mode.startswith("verify"):
            raise ValueError("sslrootcert is checked only with sslmode verify-full or verify-ca; set one")
        if bool(self.cert) != bool(self.key):
            raise ValueError("sslcert and sslkey belong together; give both or none")
        if self.cert and self.mode in ("", "disable"):
            raise ValueError("a client's certificate needs sslmode require, verify-ca or verify-full")

    def words(self) -> dict[str, str]:
        """Return the given parts in libpq's words, as arguments of psycopg's `connect`."""
        return {_WORDS[name]: value for name, value in self._asdict().items() if value}

    def query(self) -> str:
        return urlencode(self.words(), safe="/")

    def mariadb(self) -> dict[str, Any]:
        """Return arguments of pymysql's `connect`.

        Raises:
            ValueError: MariaDB's driver has no such mode.
        """
        if self.mode in _OFFERED:
            raise ValueError(f"MariaDB's driver has no sslmode {self.mode}; it is one of {', '.join(TLS_MODES[1:])}")
        if self.mode in ("", "disable"):
            return {"ssl_disabled": True} if self.mode else {}
        if self.ca == SYSTEM:
            raise ValueError(
                "sslrootcert=system is PostgreSQL's; MariaDB's driver needs a file: /etc/ssl/certs/ca-certificates.crt"
            )
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        checks = {"verify_mode": self.mode.startswith("verify"), "check_hostname": self.mode == "verify-full"}
        return {"ssl": {name: path for name, path in files.items() if path} | checks}


_WORDS = {"mode": "sslmode", "ca": "sslrootcert", "cert": "sslcert", "key": "sslkey"}
TLS_WORDS = tuple(_WORDS.values())
"""Words of a URL's query about TLS."""


def registered(url: str) -> tuple[str, str]:
    """Split the stored URL of a registered database into its name and the query of its TLS.

    The name identifies the database: another registration of it replaces its TLS. A database in a file has no TLS.
    """
    name, _, query = url.partition("?") if not url.startswith("sqlite:") else (url, "", "")
    return name, query


def tls_of(query: str) -> Tls:
    """Return the TLS of a query; raises ValueError as `Tls.of`."""
    return Tls.of(dict(parse_qsl(query)))
