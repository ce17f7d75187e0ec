"""Shell. Calls to the database, without a server."""

from __future__ import annotations

import asyncio
import gc

import pytest

from qmq.metaserver.storage.database import Database, DatabaseAway


def test_outage_leaves_no_unretrieved_errors(tmp_path):
    """A fixed leak: each attempt's error held the previous one during an outage, 5 MB a second."""

    async def run():
        database = Database(f"sqlite:///{tmp_path}/missing/metaserver.db", timeout_ms=60_000)
        for _ in range(20):
            with pytest.raises(DatabaseAway):
                await database.probe()
        gc.collect()
        kept = [one for one in gc.get_objects() if isinstance(one, DatabaseAway)]
        database.close()
        return len(kept)

    assert asyncio.run(run()) <= 1, "the newest answer alone"
