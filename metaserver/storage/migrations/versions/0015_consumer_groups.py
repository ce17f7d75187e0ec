"""Shell. Consumer groups of the cluster, and where each begins on a broker group that joins its subject later."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

SERVERS = ("mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{key}": value
    for dialect in SERVERS
    for key, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def name(chars=100):
    exact = mysql.VARCHAR(chars, charset="utf8mb4", collation="utf8mb4_bin")
    return sa.String(chars).with_variant(exact, *SERVERS)


def upgrade() -> None:
    long_text = sa.Text().with_variant(mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin"), *SERVERS)
    op.create_table(
        "consumer_group",
        sa.Column("subject", name(), primary_key=True),
        sa.Column("group_name", name(), primary_key=True),
        sa.Column("since_ms", sa.BigInteger, nullable=False),
        sa.Column("mark", name(32), nullable=False),
        sa.Column("members_json", long_text, nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        **OPTIONS,
    )
