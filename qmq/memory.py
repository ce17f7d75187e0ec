"""Shell. Memory of a server: Python's cycle collector, which must not stop its loop, and measurements.

By default the collector runs when the number of objects has grown enough, however many it must visit. Under steady load
a broker frees one object for each new one, so the collector does not run for seconds. Then it visits half a million
young objects at once: 40-110 ms, measured at 1,000 messages a second. A full collection stops a metaserver with 100,000
subjects for 0.9 s, after each growth by a quarter.

So it runs by the clock, while there is little to visit, more rarely in an idle process; and once an hour over
everything. Most garbage that waits for that hour is small: a closed connection leaves eight objects in a cycle and
frees its buffers before. Large garbage shows as growing memory. So a full collection also runs when memory has grown by
a quarter, and by `GROWTH_BYTES`.

An error of a database driver is large: its traceback holds the driver's variables, and MariaDB's driver has a TLS
context of 0.8 MB for each attempt to connect. `without_frames` frees them at once.
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

from qmq.descriptors import opening
from qmq.ticking import SECOND_S, until_next_second

YOUNG_S = 0.1
MIDDLE_EVERY = 4
"""Number of collections of young objects per collection of the older generation."""
FULL_S = 3600.0
GROWTH_BYTES = 64 << 20
LOOK_EVERY = 10
"""Number of collections between two measurements of memory."""
IDLE_PASSES = 10
"""Number of collections in a row that find next to nothing, after which collections are rare until one finds more."""
FEW = 2000
"""Number of new objects below which an idle process needs no collection."""
QUICK_S = 0.0003
"""Duration of a collection that finds next to nothing. The first one of a steady load takes a few ms more: it covers a
second of objects instead of a tenth.
"""

T = TypeVar("T")


def without_frames(work: Callable[[], T]) -> T:
    """Run `work` and return its result. If it raises, the error's traceback keeps the lines and drops the variables."""
    try:
        return work()
    except BaseException as error:
        cause: BaseException | None = error
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:  # an error may be raised again from its own consequence
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        raise


async def collect_by_the_clock(rest_s: float = SECOND_S) -> None:
    """Run the collector of this process, until cancelled.

    Args:
        rest_s: whole seconds between two collections of an idle process.
    """
    gc.disable()
    idle, passes = 0, 0
    full_s, full_bytes = _full_is_due()
    try:
        while True:
            await asyncio.sleep(YOUNG_S if idle < IDLE_PASSES else _pause_s(rest_s))
            began_s, passes = time.thread_time(), passes + 1
            if idle < IDLE_PASSES or gc.get_count()[0] >= FEW:
                gc.collect(0 if passes % MIDDLE_EVERY else 1)
            idle = idle + 1 if time.thread_time() - began_s < QUICK_S else 0
            if time.monotonic() >= full_s or (passes % LOOK_EVERY == 0 and memory_bytes() > full_bytes):
                gc.collect()
                full_s, full_bytes = _full_is_due()
    finally:
        gc.enable()


def _full_is_due() -> tuple[float, int]:
    """Return the time and the memory size of the next full collection."""
    return time.monotonic() + FULL_S, memory_bytes() * 5 // 4 + GROWTH_BYTES


def memory_bytes() -> int:
    """Return the memory of this process, without pages shared with files; 0 if it is unknown."""
    try:
        return used_bytes()
    except OSError:
        return 0


def _pause_s(rest_s: float) -> float:
    return until_next_second(asyncio.get_running_loop().time(), rest_s)


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def ram_bytes() -> int:
    """Return the memory available to this process: the machine's, or its container's limit."""
    ram = PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError), open(name) as file:  # "max" is no limit
            ram = min(ram, int(file.read()))
    return ram


def used_bytes() -> int:
    """Return the memory of this process alone, without mapped files, which the system may drop. Takes 20 µs."""
    _, resident, shared, *_ = os.pread(_statm(os.getpid()), 200, 0).split()
    return (int(resident) - int(shared)) * PAGE_BYTES


@cache
def _statm(pid: int) -> int:
    """Return a descriptor of the process's memory file. Opened once, because it is read each second, and anew by each
    forked process, because it shows the process that opened it.
    """
    return opening(lambda: os.open(f"/proc/{pid}/statm", os.O_RDONLY))


def release() -> None:
    """Return free memory to the system: the allocator keeps pages between blocks in use.

    Blocks no other thread of Python; takes milliseconds. Does nothing where the C library lacks the call.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
