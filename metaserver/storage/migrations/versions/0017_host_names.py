"""Shell. Columns of addresses hold host names and IPv6 addresses with a port."""

from __future__ import annotations

from alembic import op
from sqlalchemy import String
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

COLUMNS = {
    ("broker", "ip"): 45,
    ("metaserver", "http_address"): 100,
    ("metaserver", "grpc_address"): 100,
    ("lease", "address"): 100,
}
"""(table, column): the former length."""
CHARS_MAX = 260


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":  # it enforces no length, and would have to copy each table
        return
    for (table, column), before in COLUMNS.items():
        op.alter_column(table, column, type_=_text(CHARS_MAX), existing_type=_text(before), existing_nullable=False)


def _text(chars: int) -> TypeEngine[str]:
    exact = mysql.VARCHAR(chars, charset="utf8mb4", collation="utf8mb4_bin")
    return String(chars).with_variant(exact, "mysql", "mariadb")
