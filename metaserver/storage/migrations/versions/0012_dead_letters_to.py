"""Shell. To which subject the dead letters of a consumer group go."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operator_limits", sa.Column("dead_letters_to", sa.String(100), nullable=False, server_default=""))
