"""Shell. Main loop of a broker or delay server: reads its settings, recovers its log, serves until it is stopped.

The process starts on a full disk, too, so that consumers continue:

    data/reserve   file of `RESERVE_BYTES` that reserves space

A start writes the new epoch, and consumers write their progress. Without space for that, the reserve is deleted. It is
made again when there is space for it above the limit. Without space and reserve the process waits, because restarts
would not help.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import TypeVar

from qmq.descriptors import copy_ports, limit, report, spares
from qmq.log import MessageLog, RealDisk
from qmq.log.disk import one_process
from qmq.memory import collect_by_the_clock
from qmq.process_main import run_process
from qmq.replication.identity import IdentityFile
from qmq.replication.settings import CopySettings

log = logging.getLogger(__name__)

RESERVE = "reserve"
RESERVE_BYTES = 8 << 20
DISK_FLOOR_BYTES = 32 << 20
"""Free space below which the group is readonly, even if `disk_free_limit` is less: a disk writes this much in a tenth
of a second.
"""
NEEDED_BYTES = 2 << 20
"""Space for the epoch, the snapshot of a small installation, and a torn tail. A start that needs more is rare, and ends
the process as any full disk does.
"""
LOOK_S = 1.0

S = TypeVar("S", bound=CopySettings)


Tasks = list[Coroutine[None, None, None]]
"""Tasks of a process; none of them ends by itself."""

Build = Callable[[S, MessageLog, RealDisk, IdentityFile], Tasks]
"""Function that makes a process's tasks; called on the loop, once the log is recovered."""


def run(name: str, settings_type: type[S], prefix: str, description: str, build: Build[S]) -> int:
    """Run until SIGTERM or SIGINT; return the exit status of `run_process`."""
    with ExitStack() as held:  # the lock is held until the loop's threads have ended

        async def serve_directory(settings: S, stop: asyncio.Event) -> bool:
            spares.hold()
            report(copy_ports(limit(), settings.connections_max), settings.connections_max)
            settings.data.mkdir(parents=True, exist_ok=True)
            await serve(settings, build, held.enter_context(one_process(settings.data, name)), stop)
            return False

        return run_process(name, description, settings_type, prefix, serve_directory)


async def serve(settings: S, build: Build[S], instance: str, stop: asyncio.Event) -> None:
    """Recover the log and run the process's tasks until `stop`."""
    disk = RealDisk(settings.data, cached_bytes=settings.cached_bytes)
    await wait_for_room(disk)
    began = time.monotonic()
    message_log = MessageLog(disk, segment_bytes=settings.segment_bytes, tail_bytes=settings.tail_bytes)
    log.info(
        "log recovered start=%d end=%d segments=%d torn=%d seconds=%.2f",
        message_log.start,
        message_log.end,
        len(message_log.bases),
        message_log.torn_bytes,
        time.monotonic() - began,
    )
    identity = IdentityFile(disk, new_incarnation=secrets.token_hex(8), instance=instance)
    parts = build(settings, message_log, disk, identity)
    gc.collect()
    gc.freeze()  # imported modules stay for good; each collection that visits them costs 30 ms
    tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(task) for task in parts]
    tasks += [asyncio.ensure_future(_wait(stop)), asyncio.ensure_future(collect_by_the_clock())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    identity.points.save()
    log.info("stopped end=%d", message_log.end)


async def wait_for_room(disk: RealDisk) -> None:
    """Wait until a process can start on this disk."""
    while disk.free_bytes() < NEEDED_BYTES and disk.sweep():
        pass
    if disk.free_bytes() < NEEDED_BYTES and disk.has(RESERVE):
        disk.truncate(RESERVE, 0)  # now, because the disk frees a removed large file later, in pieces
        disk.remove(RESERVE)
        log.error("disk full: the reserve of %d bytes is released; the group is readonly, make room", RESERVE_BYTES)
    if disk.free_bytes() < NEEDED_BYTES:
        log.critical("disk full: %d bytes are needed to start; waiting for room", NEEDED_BYTES)
    while disk.free_bytes() < NEEDED_BYTES:
        await asyncio.sleep(LOOK_S)


def keep_reserve(disk: RealDisk, limit_bytes: int) -> None:
    """Make the reserve, if there is room for it beside `limit_bytes`."""
    if disk.size(RESERVE) < RESERVE_BYTES and disk.free_bytes() >= limit_bytes + 2 * RESERVE_BYTES:
        disk.create(RESERVE, RESERVE_BYTES)


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
