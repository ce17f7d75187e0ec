"""Shell. Calls to the database, without a server."""

from __future__ import annotations

import gc
import weakref

import pytest

from qmq.metaserver.storage.database import Database, DatabaseAway


async def test_outage_leaves_no_unretrieved_errors(tmp_path):
    """A fixed leak: each attempt's error held the previous one during an outage, 5 MB a second."""

    database = Database(f"sqlite:///{tmp_path}/missing/metaserver.db", timeout_ms=60_000)
    kept = weakref.WeakSet()
    for _ in range(20):
        with pytest.raises(DatabaseAway) as raised:
            await database.probe()
        kept.add(raised.value)
    del raised
    gc.collect()
    database.close()
    assert len(kept) <= 1, "the newest error alone"
