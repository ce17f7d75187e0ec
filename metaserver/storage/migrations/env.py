"""Shell. Alembic's entry: runs the migrations on the connection that `storage.engine` opened."""

from __future__ import annotations

from alembic import context

from qmq.metaserver.storage.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
