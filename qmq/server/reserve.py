"""Shell. Start on a full disk: a reserve lets the process start and consumers continue.

    data/reserve   `RESERVE_BYTES` of held space

A start writes the new epoch, and consumers write their progress. Without space for that the reserve is deleted. It is
made again when there is space for it above the limit. Without space or reserve the process waits: restarts would not
help.
"""

from __future__ import annotations

import asyncio
import logging

from qmq.log.disk import RealDisk

log = logging.getLogger(__name__)

NAME = "reserve"
RESERVE_BYTES = 8 << 20
DISK_FLOOR_BYTES = 32 << 20
"""Below it the group is readonly, even if `disk_free_limit` is less: a disk writes this much in a tenth of a second."""
NEEDED_BYTES = 2 << 20
"""Of epoch, snapshot of a small installation, and a torn tail. More is rare, and ends the process as any full disk."""
LOOK_S = 1.0


async def wait_for_room(disk: RealDisk) -> None:
    """Return when a process can start on this disk."""
    while disk.free_bytes() < NEEDED_BYTES and disk.sweep():
        pass
    if disk.free_bytes() < NEEDED_BYTES and disk.has(NAME):
        disk.truncate(NAME, 0)  # a large file that is removed is freed in pieces, later
        disk.remove(NAME)
        log.error("disk full: the reserve of %d bytes is released; the group is readonly, make room", RESERVE_BYTES)
    if disk.free_bytes() < NEEDED_BYTES:
        log.critical("disk full: %d bytes are needed to start; waiting for room", NEEDED_BYTES)
    while disk.free_bytes() < NEEDED_BYTES:
        await asyncio.sleep(LOOK_S)


def keep_reserve(disk: RealDisk, limit_bytes: int) -> None:
    """Make the reserve, if there is room for it beside `limit_bytes`."""
    if disk.size(NAME) < RESERVE_BYTES and disk.free_bytes() >= limit_bytes + 2 * RESERVE_BYTES:
        disk.create(NAME, RESERVE_BYTES)
