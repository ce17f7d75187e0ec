"""Shell. Python's collector of circles, as a metaserver uses it."""

from __future__ import annotations

import asyncio
import gc

from metaserver.garbage import NEVER, collect_rarely


def test_the_collector_never_looks_at_everything_by_itself_while_it_is_taken_over():
    async def run():
        before = gc.get_threshold()
        task = asyncio.create_task(collect_rarely())
        await asyncio.sleep(0)
        assert gc.get_threshold()[2] == NEVER
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert gc.get_threshold() == before

    asyncio.run(run())
