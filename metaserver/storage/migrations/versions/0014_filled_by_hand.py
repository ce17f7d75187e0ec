"""Shell. Groups whose slaves are filled when an operator says so, and what was said of each slave's filling."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("broker_group", sa.Column("sync_mode", sa.String(16), nullable=False, server_default="automatic"))
    op.add_column("broker", sa.Column("fill_id", sa.String(120), nullable=False, server_default=""))
    op.add_column("broker", sa.Column("fill_allowed", sa.Boolean, nullable=False, server_default=sa.false()))
