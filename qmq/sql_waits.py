"""Core. Timeouts of a process for its database server, as settings of each driver."""

from __future__ import annotations

from typing import Any, NamedTuple


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
        """Return arguments of psycopg's `connect`."""
        seconds = {
            "lock_timeout": self.lock,
            "statement_timeout": self.answer,
            "idle_in_transaction_session_timeout": self.next_statement,
        }
        return {
            "connect_timeout": self.connect,
            "options": " ".join(f"-c {name}={value * 1000}" for name, value in seconds.items()),
            # A machine that vanished is noticed after some 15 s.
            "tcp_user_timeout": 15_000,
            "keepalives_idle": 5,
            "keepalives_interval": 5,
            "keepalives_count": 2,
        }
