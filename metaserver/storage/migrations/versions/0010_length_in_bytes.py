"""Shell. How many bytes of a subject may wait for a consumer group."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operator_limits", sa.Column("bytes_max", sa.BigInteger, nullable=False, server_default="0"))
