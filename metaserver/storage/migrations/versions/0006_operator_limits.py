"""Shell. Limits that operators set of subjects and consumer groups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0006"
down_revision = "0005"
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
        "operator_limits",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("subject_info", name(), nullable=False),
        sa.Column("consumer_group", name(), nullable=False),
        sa.Column("expires_after_s", sa.BigInteger, nullable=False),
        sa.Column("expired_die", sa.Boolean, nullable=False),
        sa.Column("per_second", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("subject_info", "consumer_group", name="uniq_limits"),
        **OPTIONS,
    )
