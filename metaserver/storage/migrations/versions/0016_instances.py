"""Shell. At which place the data directory of a broker is that has its part: a copy of it is at another one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("broker", sa.Column("instance", sa.String(100), nullable=False, server_default=""))
