"""Shell. Whether a group fails over by itself, for groups in which that is not as the metaservers' setting says."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("broker_group", sa.Column("failover", sa.String(8), nullable=False, server_default="default"))
