"""Shell. Keeps Python's collector of circles from stopping a server's loop.

By itself it comes when there are so many more objects than before, whatever it has to look at then. Where an old object
goes for each new one, as in a broker under steady load, it does not come for seconds; then half a million young objects
are looked at in one piece: 40-110 ms, measured at 1,000 messages a second. And a full collection stops a metaserver
with 100,000 subjects for 0.9 s, each time there is a quarter more.

So it comes by the clock, while there is little to look at, less often to a process that has nothing to do; and once in
an hour to everything. Most of what waits for that hour is small: a connection that ended leaves eight objects in a
circle, and gives its buffers back before. What is not small shows as memory that grows. So everything is looked at as
well when there is a quarter more memory, and `GROWTH_BYTES`.

An error of a database's driver is not small: its traceback holds the driver's variables, and MariaDB's driver has a TLS
context of 0.8 MB for each attempt to connect. `without_frames` lets go of them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from qmq.ticking import SECOND_S, until_next_second

YOUNG_S = 0.1
MIDDLE_EVERY = 4
"""So many collections of what is new, then one of what they left."""
FULL_S = 3600.0
GROWTH_BYTES = 64 << 20
LOOK_EVERY = 10
"""So many collections, then one look at how much memory there is."""
IDLE_TURNS = 10
"""After so many collections in a row that found next to nothing, it rests in between, until one finds more."""
FEW = 2000
"""Objects that are not worth it to a process that has nothing to do."""
QUICK_S = 0.0003
"""What a collection takes that finds next to nothing. A steady load that begins meanwhile makes the first one a few ms
long: a second of objects instead of a tenth."""

T = TypeVar("T")


def without_frames(work: Callable[[], T]) -> T:
    """Run `work`. The traceback of an error that it raises keeps its lines, but none of the variables."""
    try:
        return work()
    except BaseException as error:
        cause: BaseException | None = error
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:  # an error may be raised again from one that came of it
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        raise


async def collect_by_the_clock(rest_s: float = SECOND_S) -> None:
    """Run the collector of this process, until cancelled.

    Args:
        rest_s: whole seconds between two looks, when there is nothing to do.
    """
    gc.disable()
    idle, turn = 0, 0
    full_s, full_bytes = _full_is_due()
    try:
        while True:
            await asyncio.sleep(YOUNG_S if idle < IDLE_TURNS else _pause_s(rest_s))
            began_s, turn = time.thread_time(), turn + 1
            if idle < IDLE_TURNS or gc.get_count()[0] >= FEW:
                gc.collect(0 if turn % MIDDLE_EVERY else 1)
            idle = idle + 1 if time.thread_time() - began_s < QUICK_S else 0
            if time.monotonic() >= full_s or (turn % LOOK_EVERY == 0 and memory_bytes() > full_bytes):
                gc.collect()
                full_s, full_bytes = _full_is_due()
    finally:
        gc.enable()


def _full_is_due() -> tuple[float, int]:
    """Return when to look at everything again, and with how much memory."""
    return time.monotonic() + FULL_S, memory_bytes() * 5 // 4 + GROWTH_BYTES


def memory_bytes() -> int:
    """Return how much memory this process has for itself, without what it shares with files; 0: nobody can tell."""
    try:
        return used_bytes()
    except OSError:
        return 0


def _pause_s(rest_s: float) -> float:
    return until_next_second(asyncio.get_running_loop().time(), rest_s)


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def ram_bytes() -> int:
    """Return what this process may count on: the machine's memory, or its container's share of it."""
    ram = PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError), open(name) as file:  # "max" is no limit
            ram = min(ram, int(file.read()))
    return ram


def used_bytes() -> int:
    """Return what this process alone has in memory; not the files it maps, which the system may drop. Takes 20 µs."""
    _, resident, shared, *_ = os.pread(_statm(os.getpid()), 200, 0).split()
    return (int(resident) - int(shared)) * PAGE_BYTES


@cache
def _statm(pid: int) -> int:
    """Opened once, as it is read each second; by each process that was forked, as it is the opener's."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY)


def give_back() -> None:
    """Return free memory to the system: the allocator keeps what lies between blocks that are still in use.

    Blocks no other thread of Python; takes milliseconds. Nothing happens where the C library cannot do it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
