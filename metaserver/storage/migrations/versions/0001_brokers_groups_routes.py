"""Shell. Brokers, broker groups, routes of subjects, readonly marks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "broker",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("group_name", sa.String(100), nullable=False),
        sa.Column("role", sa.Integer, nullable=False),
        sa.Column("hostname", sa.String(100), nullable=False),
        sa.Column("ip", sa.String(45), nullable=False),
        sa.Column("serve_port", sa.Integer, nullable=False),
        sa.Column("sync_port", sa.Integer, nullable=False),
        sa.Column("control_port", sa.Integer, nullable=False),
        sa.Column("metrics_port", sa.Integer, nullable=False),
        sa.Column("incarnation", sa.String(100), nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("hostname", "serve_port", name="uniq_broker"),
        sa.UniqueConstraint("group_name", "role", name="uniq_group_role"),
    )
    op.create_table(
        "broker_group",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("group_name", sa.String(100), nullable=False),
        sa.Column("kind", sa.Integer, nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("half_swapped", sa.Boolean, nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("group_name", name="uniq_group_name"),
    )
    op.create_table(
        "subject_route",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("subject_info", sa.String(100), nullable=False),
        sa.Column("broker_group_json", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("subject_info", name="uniq_subject"),
    )
    op.create_table(
        "readonly_broker_group_setting",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("subject", sa.String(100), nullable=False),
        sa.Column("broker_group", sa.String(100), nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("subject", "broker_group", name="uniq_subject_group"),
    )


def downgrade() -> None:
    for table in ("readonly_broker_group_setting", "subject_route", "broker_group", "broker"):
        op.drop_table(table)
