"""Shell. The statements that make the outbox's table, read from the SQL files beside this module."""

from __future__ import annotations

import re
from importlib.resources import files

from qmq.errors import InvalidRequest
from qmq.outbox.table import DEFAULT_TABLE, table_name

_FILES = {"mysql": "mysql", "mariadb": "mysql", "postgresql": "postgresql", "sqlite": "sqlite"}
_NAME = re.compile(rf"\b{DEFAULT_TABLE}(_due|_claim)?\b")
_COMMENT = re.compile(r" *--.*")


def create_statements(dialect: str, table: str = DEFAULT_TABLE) -> list[str]:
    """Return what makes the table and its indexes.

    Args:
        dialect: "mysql", "mariadb", "postgresql" or "sqlite", as SQLAlchemy names them.
        table: its name, or schema.table.

    Raises:
        InvalidRequest: another dialect, or no name.
    """
    return _statements(_file(dialect), table)


def upgrade_statements(dialect: str, table: str = DEFAULT_TABLE) -> list[str]:
    """Return what makes QMQ's own table one that our watchdog can use, too."""
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
            if in_sqlite:  # there the index has the schema, and the table behind ON has none
                statement = statement.replace("CREATE INDEX ", f"CREATE INDEX {schema}.").replace(
                    f" ON {table}", f" ON {name}"
                )
            statements.append(statement)
    return statements
