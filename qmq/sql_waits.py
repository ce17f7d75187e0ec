"""Core. How long a process waits for its database server, in the words of each driver."""

from __future__ import annotations

from typing import Any, NamedTuple


class Waits(NamedTuple):
    """In seconds: for a connection, for a lock, for an answer, for the next statement of a transaction, and for the
    next transaction of a connection."""

    connect: int
    lock: int
    answer: int
    next_statement: int
    idle: int

    def mariadb(self, *session: str) -> dict[str, Any]:
        """Return what pymysql's `connect` takes; `session`: further variables that each session sets."""
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
            # Without strict mode it would cut what is too long, and answer that all went well.
            "init_command": f"SET SESSION {', '.join(variables)} {within}",
        }

    def postgresql(self) -> dict[str, Any]:
        """Return what psycopg's `connect` takes."""
        seconds = {
            "lock_timeout": self.lock,
            "statement_timeout": self.answer,
            "idle_in_transaction_session_timeout": self.next_statement,
        }
        return {
            "connect_timeout": self.connect,
            "options": " ".join(f"-c {name}={value * 1000}" for name, value in seconds.items()),
            # A machine that is gone without a word is noticed after some 15 s.
            "tcp_user_timeout": 15_000,
            "keepalives_idle": 5,
            "keepalives_interval": 5,
            "keepalives_count": 2,
        }
