"""Shell. Keeps Python's collector of circles from stopping a server's loop.

By itself it comes when there are so many more objects than before, whatever it has to look at then. Where an old object
goes for each new one, as in a broker under steady load, it does not come for seconds; then half a million young objects
are looked at in one piece: 40-110 ms, measured at 1,000 messages a second. And a full collection stops a metaserver
with 100,000 subjects for 0.9 s, each time there is a quarter more.

So it comes by the clock, while there is little to look at, less often to a process that has nothing to do; and once in
an hour to everything. What waits for that hour
must be small: a connection that ended leaves eight objects in a circle, and gives its buffers back before.
"""

from __future__ import annotations

import asyncio
import gc
import time

from qmq.ticking import until_next_second

YOUNG_S = 0.1
MIDDLE_EVERY = 4
"""So many collections of what is new, then one of what they left."""
FULL_S = 3600.0
IDLE_TURNS = 10
"""After so many collections in a row that found next to nothing, it comes once a second, until one finds more."""
QUICK_S = 0.0003
"""What a collection takes that finds next to nothing. A steady load that begins meanwhile makes the first one a few ms
long: a second of objects instead of a tenth."""


async def collect_by_the_clock() -> None:
    """Take over the collector of this process, until cancelled."""
    gc.disable()
    full_s, idle, turn = time.monotonic() + FULL_S, 0, 0
    try:
        while True:
            await asyncio.sleep(YOUNG_S if idle < IDLE_TURNS else _pause_s())
            began_s, turn = time.thread_time(), turn + 1
            gc.collect(0 if turn % MIDDLE_EVERY else 1)
            idle = idle + 1 if time.thread_time() - began_s < QUICK_S else 0
            if time.monotonic() >= full_s:
                gc.collect()
                full_s = time.monotonic() + FULL_S
    finally:
        gc.enable()


def _pause_s() -> float:
    return until_next_second(asyncio.get_running_loop().time())
