"""Shell. A count of the changes after which groups and brokers need not be read again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    versions = sa.table("meta_version", sa.column("name"), sa.column("version"))
    op.execute(sa.insert(versions).values(name="beside_groups", version=0))
