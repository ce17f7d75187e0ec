"""Shell. The outbox's table in an application's own migrations.

def upgrade() -> None:
    create_outbox(op)

def downgrade() -> None:
    drop_outbox(op)
"""

from __future__ import annotations

from typing import Any, Protocol

from qmq.outbox.schema import create_statements, upgrade_statements
from qmq.outbox.table import DEFAULT_TABLE, table_name


class Operations(Protocol):
    """What is used of `alembic.op`."""

    def execute(self, sqltext: str) -> None: ...

    def get_context(self) -> Any: ...


def create_outbox(op: Operations, table: str = DEFAULT_TABLE) -> None:
    """Make the table, named `table` or schema.table; `op` is Alembic's. Also offline, when Alembic writes SQL."""
    _execute(op, create_statements(op.get_context().dialect.name, table))


def upgrade_outbox(op: Operations, table: str = DEFAULT_TABLE) -> None:
    """Make QMQ's own table one that our watchdog can use, too."""
    _execute(op, upgrade_statements(op.get_context().dialect.name, table))


def drop_outbox(op: Operations, table: str = DEFAULT_TABLE) -> None:
    """Drop the table, with the messages in it that were not sent."""
    _execute(op, [f"DROP TABLE {table_name(table)}"])


def _execute(op: Operations, statements: list[str]) -> None:
    for statement in statements:
        op.execute(statement)
