"""Shell. Statements that create the outbox's table, from the SQL files beside this module."""

from __future__ import annotations

import re
from importlib.resources import files

from qmq.errors import InvalidRequest
from qmq.outbox.table import DEFAULT_TABLE, table_name

_FILES = {"mysql": "mysql", "mariadb": "mysql", "postgresql": "postgresql", "sqlite": "sqlite"}
_NAME = re.compile(rf"\b{DEFAULT_TABLE}(_due|_claim)?\b")
_COMMENT = re.compile(r" *--.*")


def create_statements(dialect: str, table: str = DEFAULT_TABLE) -> list[str]:
    """Return the statements that create the table and its indexes.

    Args:
        dialect: "mysql", "mariadb", "postgresql" or "sqlite", as SQLAlchemy names them.
        table: its name, or schema.table.

    Raises:
        InvalidRequest: the dialect is unknown, or the name is invalid.
    """
    return _statements(_file(dialect), table)


def upgrade_statements(dialect: str, table: str = DEFAULT_TABLE) -> list[str]:
    """Return the statements that add the columns and indexes that qmq's watchdog needs to QMQ's own table."""
    return _statements(f"{_file(dialect)}_from_qmq", table)


def _file(dialect: str) -> str:
    if dialect not in _FILES:
        raise InvalidRequest(f"there is no outbox on {dialect!r}, but on {', '.join(sorted(_FILES))}")
    return _FILES[dialect]


def _statements(file: str, table: str) -> list[str]:
    text = (files("qmq.outbox") / "sql" / f"{file}.sql").read_text("utf-8")
    schema, _, name = table_name(table).rpartition(".")
    in_sqlite = file.startswith("sqlite") and schema
    statements = []
    for statement in _COMMENT.sub("", text).split(";"):
        if statement := statement.strip():
            statement = _NAME.sub(lambda found: f"{name}{found[1]}" if found[1] else table, statement)
            if in_sqlite:  # SQLite takes the schema from the index's name, not from the table's name after ON
                statement = statement.replace("CREATE INDEX ", f"CREATE INDEX {schema}.").replace(
                    f" ON {table}", f" ON {name}"
                )
            statements.append(statement)
    return statements
