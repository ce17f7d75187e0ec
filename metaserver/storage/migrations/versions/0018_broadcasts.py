"""Shell. Rows of consumer groups hold whether the group is one broadcast consumer; of earlier rows it is unknown."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Boolean, Column, false

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("consumer_group", Column("broadcast", Boolean, nullable=False, server_default=false()))
