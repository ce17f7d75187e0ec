"""Shell. In which term an operator accepted a loss that nobody has acknowledged yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("broker_group", sa.Column("lost_term", sa.BigInteger, nullable=False, server_default="0"))
