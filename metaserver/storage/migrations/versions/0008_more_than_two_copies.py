"""Shell. Groups with several slaves, and how many copies acknowledge."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("broker_group", sa.Column("min_copies", sa.Integer, nullable=False, server_default="2"))
    op.create_index("broker_by_group", "broker", ["group_name"])  # MariaDB wants one for the foreign key
    with op.batch_alter_table("broker") as broker:
        broker.drop_constraint("uniq_group_role", type_="unique")
