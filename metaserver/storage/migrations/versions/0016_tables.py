"""Shell. Oldest version that has a way to later ones: `migrate` creates its tables, and later files change them."""

from __future__ import annotations

revision = "0016"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change nothing: an empty database gets the newest tables at once."""
