"""Shell. Who of several watchdogs is active, and what they need to know of a database beside where it is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"
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
        "lease",
        sa.Column("name", name(120), primary_key=True),
        sa.Column("node", name(), nullable=False),
        sa.Column("address", name(), nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        **OPTIONS,
    )
    with op.batch_alter_table("datasource_config") as sources:
        sources.add_column(sa.Column("table_name", name(130), nullable=False, server_default="qmq_msg_queue"))
        sources.add_column(sa.Column("rate", sa.Integer, nullable=False, server_default="10000"))
        sources.add_column(sa.Column("age_s", sa.Integer, nullable=False, server_default="60"))
