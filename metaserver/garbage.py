"""Shell. Keeps Python's collector of circles from stopping the loop.

Almost everything here lives long: routes, groups, watches. A full collection looks at all of it and stops the process
meanwhile, 0.9 s with 100,000 subjects on a busy machine, and by itself it comes each time there is a quarter more. So
it comes once in an hour instead, and young objects, of which few are looked at, are collected as ever.
"""

from __future__ import annotations

import asyncio
import gc

YOUNG, MIDDLE = 2_000, 10
"""So many new objects start a collection of the young ones (1 ms); so many of these, one of those that stayed."""
NEVER = 1 << 30
FULL_S = 3600.0


async def collect_rarely() -> None:
    """Take over the collector of this process, until cancelled."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        while True:
            await asyncio.sleep(FULL_S)
            gc.collect()
    finally:
        gc.set_threshold(*before)
