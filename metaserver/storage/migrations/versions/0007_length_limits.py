"""Shell. How many messages of a subject may wait for a consumer group."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("operator_limits") as table:
        table.add_column(sa.Column("messages_max", sa.BigInteger, nullable=False, server_default="0"))
        table.add_column(sa.Column("drops_oldest", sa.Boolean, nullable=False, server_default=sa.false()))
