"""Shell. Up to where a copy knows that messages are acknowledged: a disk that was put back is known by it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

OPTIONS = {
    f"{dialect}_{key}": value
    for dialect in ("mysql", "mariadb")
    for key, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def name(chars=100):
    exact = mysql.VARCHAR(chars, charset="utf8mb4", collation="utf8mb4_bin")
    return sa.String(chars).with_variant(exact, "mysql", "mariadb")


def upgrade() -> None:
    op.create_table(
        "acknowledged_point",
        sa.Column("group_name", name(), primary_key=True),
        sa.Column("incarnation", name(), primary_key=True),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("boot", sa.BigInteger, nullable=False),
        sa.Column("log_end", sa.BigInteger, nullable=False),
        sa.Column("chain", name(16), nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        **OPTIONS,
    )
