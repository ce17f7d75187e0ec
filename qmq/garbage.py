"""Shell. Keeps Python's collector of circles from stopping a server's loop.

By itself it comes when there are so many more objects than before, whatever it has to look at then. Where an old object
goes for each new one, as in a broker under steady load, it does not come for seconds; then half a million young objects
are looked at in one piece: 40-110 ms, measured at 1,000 messages a second. And a full collection stops a metaserver
with 100,000 subjects for 0.9 s, each time there is a quarter more.

So it comes by the clock, while there is little to look at; and once in an hour to everything. What waits for that hour
must be small: a connection that ended leaves eight objects in a circle, and gives its buffers back before.
"""

from __future__ import annotations

import asyncio
import gc

YOUNG_S = 0.1
MIDDLE_EVERY = 4
"""So many collections of what is new, then one of what they left."""
FULL_S = 3600.0


async def collect_by_the_clock() -> None:
    """Take over the collector of this process, until cancelled."""
    gc.disable()
    try:
        while True:
            for turn in range(round(FULL_S / YOUNG_S)):
                await asyncio.sleep(YOUNG_S)
                gc.collect(0 if turn % MIDDLE_EVERY else 1)
            gc.collect()
    finally:
        gc.enable()
