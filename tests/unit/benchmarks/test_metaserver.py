"""Core. The metaserver's benchmark restores a backup of today's tables."""

from __future__ import annotations

from benchmarks.metaserver import _groups
from qmq.metaserver.storage.tables import metadata


def test_its_rows_have_the_columns_of_the_tables():
    for name, rows in _groups(2).items():
        columns = set(metadata.tables[name].columns.keys()) - {"id"}  # the database numbers them
        assert all(set(row) == columns for row in rows), name
